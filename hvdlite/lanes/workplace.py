"""Workplaces: the argument of a request's work, with transport, scratch memory, and facts about the lane's ranks.

The work is the same function for arrays on the host and on a GPU. Its argument is a `Workplace`: the lane's
`HostWorkplace`, or the lane's `gpu_side.Side`. A Side's transport sends from the GPU, and its workspace allocates
there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hvdlite.algorithms import Place
from hvdlite.memory.workspace import Workspace
from hvdlite.transports import Transport


class LaneThread(threading.Thread):
    """A lane's thread. No code of the user runs in it, so it may choose a GPU permanently."""


class Workplace(Protocol):
    """The argument of a request's work.

    Attributes:
        transport: Sends and receives between the ranks of the lane.
        place: The facts about these ranks for `choose()`: hosts, shared memory, forced algorithms.
        workspace: Scratch memory and arenas, kept from one request to the next.
        members: The global ranks, in the transport's order.
        equal_counts: Whether all ranks passed the same count with the request under way.
        some_joined: Whether joined ranks take part in the request under way. Joined ranks lend no memory.
        host: The lane's workplace on the host, which may be this one.
    """

    @property
    def transport(self) -> Transport: ...
    @property
    def place(self) -> Place: ...
    @property
    def workspace(self) -> Workspace: ...
    @property
    def members(self) -> Sequence[int]: ...
    @property
    def equal_counts(self) -> bool: ...
    @property
    def some_joined(self) -> bool: ...
    @property
    def host(self) -> HostWorkplace: ...


class GpuWorkplace(Workplace, Protocol):
    """A workplace on a GPU, which the lane's workplace on the host keeps."""

    def close(self) -> None:
        """Wait until the GPU has finished its work, and release peers' memory. Collective."""
        ...


@dataclass
class HostWorkplace:
    """A lane's workplace for arrays on the host. It satisfies `Workplace`."""

    transport: Transport
    place: Place
    members: Sequence[int]
    workspace: Workspace = field(default_factory=Workspace)
    equal_counts: bool = False
    some_joined: bool = False
    gpu: GpuWorkplace | None = None
    """The lane's workplace on a GPU; None before the first request with an array there."""

    @property
    def host(self) -> HostWorkplace:
        return self

    def agree(self, equal_counts: bool, some_joined: bool = False) -> None:
        """Note what the ranks have agreed on for the next request."""
        self.equal_counts, self.some_joined = equal_counts, some_joined

    def add_gpu(self, gpu: GpuWorkplace) -> None:
        """Keep the lane's workplace on a GPU until `close`."""
        self.gpu = gpu

    def close(self) -> None:
        """Release memory and communicator. Collective."""
        if self.gpu is not None:
            self.gpu.close()
        self.workspace.close()
        self.transport.close()
