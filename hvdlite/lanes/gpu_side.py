"""The GPU side of a lane: the workplace for arrays on a GPU.

    caller    issues kernels on its stream | mark |                                           | continues after `ending`
    lane                                     waits, calls the roll, adds on the lane's stream | records `ending`

`on_gpu(lane, request, array)` moves a request to the GPU. The request's work is the same function as on the host. It
gets a `Side`: its transport sends from the GPU, and its workspace allocates on it. No thread waits for a whole device.
Arrays in use are kept until the GPU has passed the end of the work.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType

from hvdlite.arrays import Array, cupy, device_of, module
from hvdlite.errors import HvdliteError
from hvdlite.gpu_streams import Mark, mark, recorded, send_from
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Request, T
from hvdlite.lanes.workplace import HostWorkplace, LaneThread, Workplace
from hvdlite.memory import cuda_ipc
from hvdlite.memory.arena import Arena
from hvdlite.memory.workspace import Workspace
from hvdlite.system.user_warnings import say_once
from hvdlite.transports import Transport
from hvdlite.transports.device import DirectTransport, StagedTransport

GPU_STAGING_BYTES = 64 << 20
"""The bytes of a lane's staging arena on the GPU. Each piece waits for all ranks twice (MEASURED.md, "Details")."""


@dataclass(frozen=True)
class Gpu:
    """The one GPU that a process uses, and its array module."""

    xp: ModuleType
    number: int


def gpu_of(array: Array) -> Gpu:
    """The GPU of an array."""
    return Gpu(module(array), device_of(array))


def gpu_in_use(host: HostWorkplace) -> Gpu:
    """The GPU that the lane works on. If the lane has used none, CuPy's current GPU."""
    if isinstance(host.gpu, Side):
        return host.gpu.gpu
    return Gpu(cupy(), int(cupy().cuda.runtime.getDevice()))


class GpuWorkspace(Workspace):
    """A workspace on the GPU, with arenas by CUDA IPC."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu
        self.openings: dict[str, tuple[cuda_ipc.Openings, Transport]] = {}
        self.callers: Sequence[int] = ()

    def serve(self, callers: Sequence[int]) -> None:
        """Allocate for this caller from now on. callers: its streams, CuPy's first, then the frameworks'."""
        self.callers = callers

    def new(self, like: Array, shape: Sequence[int]) -> Array:
        # The memory comes from the pool of the caller's stream. It returns there when the caller drops the array. Only
        # that stream reuses it, after its earlier work, which may still read it.
        streams = self.callers or (0,)
        with self.gpu.xp.cuda.ExternalStream(streams[-1]):
            array: Array = self.gpu.xp.empty(shape, like.dtype)
        for stream in streams:
            before = recorded(self.gpu.xp, stream)
            self.gpu.xp.cuda.runtime.streamWaitEvent(self.gpu.xp.cuda.get_current_stream().ptr, before.ptr)
        return array

    def staging_bytes(self, hosts: Sequence[Sequence[int]]) -> int:
        return GPU_STAGING_BYTES

    def allocate(
        self, name: str, transport: Transport, nbytes: int, share: bool, hosts: Sequence[Sequence[int]]
    ) -> Arena:
        local = self.levels(transport, hosts).local
        if name in self.openings:
            self.openings[name][0].close(local)  # before any rank releases the arena that this one replaces
        openings = cuda_ipc.Openings(self.gpu.xp)
        self.openings[name] = openings, local
        return cuda_ipc.allocate(openings, self.gpu.number, transport, nbytes, share, local)

    def close(self) -> None:
        for openings, local in self.openings.values():
            openings.close(local)
        super().close()


class Side:
    """A lane's workplace on one GPU, with a stream. Creating one is collective over the lane.

    Args:
        host: The lane's workplace on the host.
        gpu: The GPU.
        takes_pointers: Whether the MPI is CUDA-aware; equal on all ranks.
    """

    def __init__(self, host: HostWorkplace, gpu: Gpu, takes_pointers: bool) -> None:
        self.host, self.gpu, self.members = host, gpu, host.members
        self.place = replace(host.place, forced=host.place.forced_on_gpu)
        self.workspace = GpuWorkspace(gpu)
        with gpu.xp.cuda.Device(gpu.number):
            self.stream = gpu.xp.cuda.Stream(non_blocking=True)
            kind = DirectTransport if takes_pointers else StagedTransport
            self.transport = kind(host.transport, gpu.xp)
        if takes_pointers:
            send_from(gpu.xp, gpu.number)
        self.in_use: deque[tuple[Mark, object]] = deque()

    @property
    def equal_counts(self) -> bool:
        return self.host.equal_counts

    @property
    def some_joined(self) -> bool:
        return self.host.some_joined

    @contextmanager
    def working(self) -> Iterator[Side]:
        """A context in which the calling thread issues work on this GPU, on the lane's stream."""
        with self.gpu.xp.cuda.Device(self.gpu.number), self.stream:
            yield self

    def end(self, used: object) -> Mark:
        """A mark after the work issued so far. Keeps `used` until the GPU has passed it."""
        xp = self.gpu.xp
        ending = Mark(xp, self.gpu.number, [self.stream.ptr], [recorded(xp, self.stream.ptr)])
        self.in_use.append((ending, used))
        while self.in_use and self.in_use[0][0].passed:
            self.in_use.popleft()
        return ending

    def close(self) -> None:
        """Wait for the lane's stream, and release peers' memory. Collective."""
        with self.working():
            self.stream.synchronize()
            self.in_use.clear()
            self.workspace.close()
            self.transport.release()


def on_gpu(lane: Lane, request: Request[T], array: Array) -> None:
    """Move the request's work to the array's GPU, after the work that the calling thread has issued there.

    Args:
        lane: The lane that will run the request.
        request: A request that has not been queued.
        array: An array on the GPU.

    Raises:
        HvdliteError: The lane works on another GPU, or a CUDA graph is being captured.
    """
    work, gpu = request.work, gpu_of(array)
    if lane.host.gpu is not None:
        require_same(lane.host, gpu)
    ready = mark(array)

    def ordered(at: Workplace) -> T:
        side = side_of(at.host, gpu)
        side.workspace.serve(ready.streams)
        result = None
        with side.working():
            try:
                result = work(side)
                return result
            finally:
                request.handle.end_at(side.end((work, result)))  # keeps both until the GPU is done

    request.move(ready, ordered)


def side_of(host: HostWorkplace, gpu: Gpu) -> Side:
    """The lane's side on this GPU. Called by the request's work; collective at the first call."""
    if isinstance(threading.current_thread(), LaneThread):
        gpu.xp.cuda.Device(gpu.number).use()  # permanently, as in Mark.adopt
    if host.gpu is None:
        host.add_gpu(Side(host, gpu, takes_pointers(host)))
    return require_same(host, gpu)


def require_same(host: HostWorkplace, gpu: Gpu) -> Side:
    """The side on this GPU. Raises HvdliteError if the lane works on another GPU."""
    side = host.gpu
    assert isinstance(side, Side)
    if side.gpu.number != gpu.number:
        raise HvdliteError(
            f"a tensor lies on GPU {gpu.number}, but this process communicates from GPU {side.gpu.number}, and can use "
            "only one. Start one process per GPU, and choose the GPU with "
            "torch.cuda.set_device(hvd.local_rank()) [HVD111]"
        )
    return side


def takes_pointers(host: HostWorkplace) -> bool:
    """Whether the lane's transport takes device pointers; equal on all ranks. Collective."""
    from hvdlite.transports.cuda_aware import cuda_aware  # takes long to import

    transport, said = host.transport, host.place.cuda_aware
    if transport.size == 1:
        return True
    asked = transport.rank in [ranks[0] for ranks in host.place.hosts or ((0,),)]  # one rank per host runs the trial
    mine = (cuda_aware(transport.library) if asked else True) if said is None else said
    agreed = all(transport.allgather_object(mine))
    if not agreed and transport.rank == 0 and said is None:
        say_once(
            f"{transport.library} does not take pointers to GPU memory. So data between GPUs that cannot share "
            "memory pass through host memory, which is slower. Use a CUDA-aware MPI (Open MPI built --with-cuda, "
            "or over a UCX with CUDA). If the MPI is CUDA-aware, set HVDLITE_CUDA_AWARE=1 [HVD113]"
        )
    return agreed
