"""What a request's work sees: the transport, the scratch memory and the facts of the place where it runs.

An operation is one function for arrays on the host and on a GPU. The function is given a `Workplace`: the lane's
`HostWorkplace`, or its counterpart on a GPU (`lanes.gpu_side.Side`), whose transport sends from the GPU and whose
workspace allocates on it.
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
    """A lane's own thread: it may choose a GPU for good, since no code of the user's runs in it."""


class Workplace(Protocol):
    """Where the work of a request runs.

    Attributes:
        transport: Sends and receives among the ranks of the lane.
        place: What `choose()` knows about these ranks: hosts, shared memory, forced algorithms.
        workspace: Scratch memory and arenas, kept from one request to the next.
        members: The global ranks, in the transport's order.
        equal_counts: Whether all ranks gave the same count with the request under way.
        some_joined: Whether stand-ins take part for ranks that have joined; these lend no memory.
        host: The lane's workplace on the host: itself, or the one that a GPU's belongs to.
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
    """A workplace on a GPU, which the host's workplace keeps."""

    def close(self) -> None:
        """Wait for the work that the GPU still does, and release peers' memory. Collective."""
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
    """Its counterpart for arrays on a GPU, made by `lanes.gpu_side` when the first of these comes."""

    @property
    def host(self) -> HostWorkplace:
        return self

    def close(self) -> None:
        """Release memory and communicator. Collective."""
        if self.gpu is not None:
            self.gpu.close()
        self.workspace.close()
        self.transport.close()
