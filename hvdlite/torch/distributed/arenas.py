"""DDP's buckets in memory that the ranks of a host share, so that they are reduced where they lie.

    the storage of a bucket   [ torch's mapping: an unlinked file in /dev/shm ]      torch moves the storage there,
                              [ a memory file of hvdlite, mapped over it      ]      and C++ and all views follow
    rank 1's mapping of it    [ the same memory file                          ]

A bucket moves when it is reduced for the second time, because DDP makes other buckets after the first step. The move is
local and in the calling thread. The lane only maps the peers' files, so no memory moves under running code. /dev/shm
must hold a bucket for a moment.

Which tensors: whole 1-D storages on the host that C++ code reduces within a backward. Only DDP does that. Tensors that
Python code reduces never move: those of users and of hooks, and those of FSDP. FSDP resizes storages, and a storage
that has moved cannot grow.

Which way a call takes: all ranks must take the same. The roll call compares their counts. 0: the usual way. WISH: map
each other's files first. More: the number of that exchange, which was collective.

`close` makes the memory private again. A storage that ends earlier unmaps its file, and peers' files with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from types import FrameType
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch

from hvdlite.algorithms import allreduce, prepared_in_arena
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array
from hvdlite.job.groups import Group
from hvdlite.lanes.workplace import Workplace
from hvdlite.memory.arena import SharedFile, exchange, typed
from hvdlite.memory.huge_pages import make_private, map_over
from hvdlite.system.user_warnings import say_once
from hvdlite.torch import private_api
from hvdlite.torch.distributed.buffers import flat

LEAST_BYTES = 64 * 1024
"""The shortest tensors that move."""
WISH = 1
"""The count of a call whose tensor has moved, but peers have not mapped the file."""


@dataclass(frozen=True)
class Shared:
    """The files of all ranks of this host, mapped at one exchange.

    Attributes:
        number: The exchange's number, more than WISH. It is equal on all ranks of the group.
        files: The files' bytes in rank order.
        runs: The prepared all-reduces, by dtype and reduction.
    """

    number: int
    files: list[Array]
    runs: dict[tuple[np.dtype, Reduction], Callable[[], None]] = field(default_factory=dict)

    def reduce(self, at: Workplace, array: Array, how: Reduction) -> None:
        """All-reduce the tensors that lie in these files. array: this rank's."""
        kind = array.dtype, how
        if kind not in self.runs:
            buffers = [typed(file, 0, array.size, array.dtype) for file in self.files]
            self.runs[kind] = prepared_in_arena(at.transport, at.workspace, at.place, buffers, how)
        self.runs[kind]()

    def close(self) -> None:
        """Unmap the files."""
        self.files.clear()
        self.runs.clear()


@dataclass
class Moved:
    """A storage that lies in a file.

    Attributes:
        file: The file, whose descriptor is torch's; None once the storage has private memory again.
        shared: The files of all ranks; None if they are not mapped.
    """

    file: SharedFile | None
    shared: Shared | None = None

    def exchange(self, at: Workplace, numbers: Iterator[int]) -> Shared | None:
        """Map the files of all ranks of this host, and the peers this one. Collective; runs on the lane.

        Returns None, on all ranks, if one rank cannot.
        """
        files = exchange(at.transport, at.workspace.levels(at.transport, at.place.hosts).local, self.file)
        if files is not None:
            self.shared = Shared(next(numbers), files)
        return self.shared

    def give_back(self, storage: torch.UntypedStorage) -> None:
        """Give the storage private memory with the same values, and unmap the files.

        torch.multiprocessing can no longer send it: that is an error, because torch still takes it for shared memory.
        Works of past calls, which DDP keeps, keep this object.
        """
        if self.file:
            make_private(storage.data_ptr(), storage.nbytes())
            nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(nothing, self.file.card.descriptor, inheritable=False)
            os.close(nothing)
        if self.shared:
            self.shared.close()
        self.file = None


class Arenas:
    """The storages of one process group that have moved."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.seen: WeakSet[torch.UntypedStorage] = WeakSet()
        self.moved: WeakKeyDictionary[torch.UntypedStorage, Moved] = WeakKeyDictionary()
        self.numbers = count(WISH + 1)
        self.refused = not (group.size > 1 and group.eager.place.in_memory and private_api.CAN_MOVE_STORAGES)

    def find(self, tensor: torch.Tensor, frame: FrameType | None) -> Moved | None:
        """The tensor's storage if it has moved. Moves it if it may.

        Args:
            tensor: The tensor that is to be reduced.
            frame: The frame of the process group's method.
        """
        if tensor.nbytes < LEAST_BYTES or tensor.ndim != 1 or tensor.device.type != "cpu":
            return None
        if frame is None or not private_api.is_autograd(frame.f_back):
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or not tensor.is_contiguous():
            return None
        found = self.moved.get(storage)
        if self.refused:
            return found if found and found.shared else None
        if found or storage.is_shared():
            return found
        if storage in self.seen:
            return self._move(storage)
        self.seen.add(storage)
        return None

    def _move(self, storage: torch.UntypedStorage) -> Moved | None:
        """Move a storage; None, and no more moves on this rank, if there is no room."""
        found = move(storage)
        if found is None:
            self.refused = True
            say_once(
                f"rank {self.group.ranks[self.group.rank]} has no room in shared memory for a bucket of "
                f"{storage.nbytes() >> 10} KiB (df /dev/shm; ulimit -n), so buckets of DistributedDataParallel are "
                "copied, which is slower"
            )
        else:
            self.moved[storage] = found
        return found

    def reduce(self, at: Workplace, array: Array, how: Reduction, moved: Moved, known: Shared | None) -> None:
        """All-reduce a tensor that has moved. Runs on the lane.

        Args:
            at: The workplace.
            array: The tensor's memory.
            how: The reduction.
            moved: The tensor's storage.
            known: What `moved.shared` was when this rank made the call, and told the other ranks its number.
        """
        if not at.equal_counts:
            allreduce(at.transport, at.workspace, at.place, array, how)
            return
        shared = known or moved.exchange(at, self.numbers)
        if shared is None:
            self.refused = True
            allreduce(at.transport, at.workspace, at.place, array, how)
        else:
            shared.reduce(at, array, how)

    def close(self) -> None:
        """Make the memory of all storages private again, unless calls are under way, whose peers write there."""
        self.refused = True
        if not self.group.eager.queue.pending:
            for storage, moved in list(self.moved.items()):
                moved.give_back(storage)
            self.moved.clear()


def move(storage: torch.UntypedStorage) -> Moved | None:
    """Move a storage into a file of shared memory, in place; None if there is no room."""
    nbytes = storage.nbytes()
    file = SharedFile.create(nbytes)
    if file is None:
        return None
    try:
        descriptor = private_api.to_own_mapping(storage)
        file.memory[:nbytes] = memory_of(storage)
        map_over(storage.data_ptr(), nbytes, file.card.descriptor)
        # This frees torch's file. If somebody sends the tensor to another process, torch sends this descriptor.
        os.dup2(file.card.descriptor, descriptor, inheritable=False)
    except (RuntimeError, OSError):
        return None
    finally:
        os.close(file.card.descriptor)
    return Moved(replace(file, card=replace(file.card, descriptor=descriptor)))


def memory_of(storage: torch.UntypedStorage) -> Array:
    """The storage's bytes."""
    return flat(torch.empty(0, dtype=torch.uint8).set_(storage))
