"""c10d's operations: for each call, what ranks must agree on, and the work on the group's lane.

torch calls these methods from Python (torch.distributed.all_reduce, ...) and from C++ (DistributedDataParallel, the
functional collectives). Each returns a Work at once. `opts` is one of c10d's options, or None for their defaults. All
tensors of a call are overwritten in place where c10d does so, and may have any layout.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from inspect import currentframe
from itertools import count
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hvdlite.algorithms import allreduce, movement
from hvdlite.algorithms.grouped import allreduce_all
from hvdlite.arrays import Array, split_rows
from hvdlite.errors import HvdliteError, MismatchError
from hvdlite.job import runtime
from hvdlite.job.groups import Group
from hvdlite.lanes.calls import calling
from hvdlite.lanes.gpu_side import on_gpu
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Facts, Signature
from hvdlite.lanes.workplace import Workplace
from hvdlite.ops.reductions import reduce_scatter, whole_at
from hvdlite.torch.distributed import sparse
from hvdlite.torch.distributed.arenas import WISH, Arenas, Moved
from hvdlite.torch.distributed.buffers import Buffer
from hvdlite.torch.distributed.messages import Messages
from hvdlite.torch.distributed.reductions import reduction
from hvdlite.torch.distributed.work import NONE, Work

NAME = "hvdlite"
Tensors = list[torch.Tensor]


class Options(Protocol):
    """c10d's options of a call. Some calls have some of the attributes only."""

    timeout: timedelta
    reduceOp: dist.ReduceOp
    rootRank: int
    rootTensor: int


@dataclass
class Call:
    """One call of an operation.

    Attributes:
        name: torch.distributed's function.
        work: Runs on the lane, when all ranks have made the call.
        results: The tensors of the Work's result.
        changed: The buffers that the operation overwrites.
        read: The buffers that the operation only reads.
        facts: What ranks must agree on, besides the buffers' dtypes and shapes.
        alike: The buffers whose dtypes and shapes must be equal on all ranks. None: all.
        count: As in `Request`.
    """

    name: str
    work: Callable[[Workplace], None]
    results: Sequence[torch.Tensor] = ()
    changed: Sequence[Buffer] = ()
    read: Sequence[Buffer] = ()
    facts: Facts = ()
    alike: Sequence[Buffer] | None = None
    count: int = 0

    @property
    def buffers(self) -> list[Buffer]:
        """All buffers."""
        return [*self.changed, *self.read]

    @property
    def known(self) -> Facts:
        """What ranks must agree on."""
        return (("call", self.name), *_facts(self.buffers if self.alike is None else self.alike), *self.facts)

    def run(self, at: Workplace) -> None:
        """Do the work, and deliver the results. Runs on the lane."""
        self.work(at)
        for buffer in self.changed:
            buffer.put_back()


class Device:
    """What torch asks a process group's backend for one device: what it cannot do."""

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_tensor_alloc = False
    supports_shrinking = False
    options = None

    def name(self) -> str:
        """The backend's name."""
        return NAME


class MpiProcessGroup(dist.ProcessGroup):
    """A process group over a lane. Calls on it may come from any thread; ranks match them by their order."""

    def __init__(self, store: Store, name: str, rank: int, group: Group, timeout: timedelta) -> None:
        """
        Args:
            store: The group's store.
            name: torch's name of the group.
            rank: This process' rank in the group.
            group: The ranks, with their lane. They have the numbers of the MPI job, in the order of the group's ranks.
            timeout: The longest wait of calls that set none.
        """
        super().__init__(rank, group.size)  # type: ignore[call-arg]  # as Python's process groups are made
        self._store, self._title, self._group, self._timeout = store, name, group, timeout
        self._numbers, self._order = count(1), threading.Lock()
        self._messages = Messages(group, self._seconds)
        # DDP's join gives the Work of its one-element all-reduce to C++, which keeps the C++ half only.
        self._notices: deque[Work] = deque(maxlen=16)
        self._arenas = Arenas(group)
        self._closed = False

    # Reductions

    def allreduce(self, tensors: Tensors, opts: Options | None = None) -> Work:
        """Reduce a tensor over all ranks, in place."""
        if tensors and tensors[0].is_sparse:
            return self._sparse(tensors[0], opts)
        if len(tensors) == 1 and (moved := self._arenas.find(tensors[0], currentframe())):
            return self._reduce_moved(tensors[0], moved, opts)
        return self._reduce_all("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Options | None = None) -> Work:
        """Reduce several tensors over all ranks, in place."""
        return self._reduce_all("all_reduce_coalesced", tensors, opts)

    def _reduce_all(self, call: str, tensors: Tensors, opts: Options | None) -> Work:
        buffers = [Buffer(tensor) for tensor in tensors]
        hows = [reduction(_op(opts), self._group.size, tensor) for tensor in tensors]

        def work(at: Workplace) -> None:
            if len(set(hows)) == 1 and len(buffers) > 1:
                allreduce_all(at.transport, at.workspace, at.place, [buffer.array for buffer in buffers], hows[0])
            else:
                for buffer, how in zip(buffers, hows, strict=True):
                    allreduce(at.transport, at.workspace, at.place, buffer.array, how)

        return self._start(Call(call, work, tensors, buffers, facts=(("operation", str(hows[0])),)), opts)

    def _reduce_moved(self, tensor: torch.Tensor, moved: Moved, opts: Options | None) -> Work:
        """As `_reduce_all` of a tensor in shared memory, for this rank. Other ranks may call `_reduce_all`."""
        buffer, how, known = Buffer(tensor), reduction(_op(opts), self._group.size, tensor), moved.shared

        def work(at: Workplace) -> None:
            self._arenas.reduce(at, buffer.array, how, moved, known)

        number = known.number if known else WISH
        facts = (("operation", str(how)),)
        return self._start(Call("all_reduce", work, [tensor], [buffer], facts=facts, count=number), opts)

    def _sparse(self, tensor: torch.Tensor, opts: Options | None) -> Work:
        facts = (("layout", "sparse"), ("dtype", str(tensor.dtype)), ("shape", tuple(tensor.shape)))
        how = reduction(_op(opts), self._group.size, tensor)
        if how.operation != "sum":
            raise ValueError(f"all_reduce of a sparse tensor with {how}: only SUM and AVG are possible")
        facts = (*facts, ("operation", str(how)))
        return self._start(Call("all_reduce", lambda at: sparse.add_up(at, tensor, how), [tensor], facts=facts), opts)

    def reduce(self, tensors: Tensors, opts: Options | None = None) -> Work:
        """Reduce a tensor to one rank, where the result overwrites it."""
        (tensor,), root = tensors, self._root(opts)
        buffer, how = Buffer(tensor), reduction(_op(opts), self._group.size, tensor)

        def work(at: Workplace) -> None:
            found = whole_at(at, buffer.array, root, how)
            if found is not None:
                buffer.array[...] = found

        facts = (("operation", str(how)), ("root rank", root))
        return self._start(Call("reduce", work, [tensor], [buffer], facts=facts), opts)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Options | None = None) -> Work:
        """Reduce a list of tensors over all ranks, and give each rank the result of its place in the list."""
        return self._reduce_scatter("reduce_scatter", outputs, [_many(inputs[0], self._group.size)], opts)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Options | None = None) -> Work:
        """Reduce a tensor over all ranks, and give each rank an equal part of it, in rank order."""
        return self._reduce_scatter("reduce_scatter_tensor", [output], [[given]], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Options | None = None) -> Work:
        """Several `reduce_scatter_single` as one operation."""
        return self._reduce_scatter("reduce_scatter_tensor_coalesced", outputs, [[each] for each in inputs], opts)

    def _reduce_scatter(self, call: str, outputs: Tensors, inputs: list[Tensors], opts: Options | None) -> Work:
        hows = [reduction(_op(opts), self._group.size, output) for output in outputs]
        targets, sources = [Buffer(output) for output in outputs], [[*map(Buffer, each)] for each in inputs]
        parts = [self._parts(call, each, target) for each, target in zip(sources, targets, strict=True)]

        def work(at: Workplace) -> None:
            for pieces, target, how in zip(parts, targets, hows, strict=True):
                reduce_scatter(at, pieces, target.array, how)

        facts = (("operation", str(hows[0])),)
        read = [buffer for each in sources for buffer in each]
        return self._start(Call(call, work, outputs, targets, read, facts), opts)

    # Movements

    def broadcast(self, tensors: Tensors, opts: Options | None = None) -> Work:
        """Overwrite every rank's tensor with the root's."""
        buffers, root = [*map(Buffer, tensors)], self._root(opts)

        def work(at: Workplace) -> None:
            for buffer in buffers:
                movement.broadcast(at.transport, buffer.array, root, at.place.hosts)

        return self._start(Call("broadcast", work, tensors, buffers, facts=(("root rank", root),)), opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Options | None = None) -> Work:
        """Give every rank all ranks' tensors, as a list in rank order."""
        return self._gather_all("all_gather", [_many(each, self._group.size) for each in outputs], inputs, opts)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Options | None = None) -> Work:
        """Several `allgather` as one operation. outputs: for each rank, its tensors."""
        by_input = [list(each) for each in zip(*outputs, strict=True)]
        return self._gather_all("all_gather_coalesced", by_input, inputs, opts)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Options | None = None) -> Work:
        """Give every rank all ranks' tensors, one after another in one tensor."""
        return self._gather_all("all_gather_into_tensor", [[output]], [given], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Options | None = None) -> Work:
        """Several `all_gather_single` as one operation."""
        return self._gather_all("all_gather_into_tensor_coalesced", [[each] for each in outputs], inputs, opts)

    def _gather_all(self, call: str, outputs: list[Tensors], inputs: Tensors, opts: Options | None) -> Work:
        sources, targets = [*map(Buffer, inputs)], [[*map(Buffer, each)] for each in outputs]
        parts = [self._parts(call, each, source) for each, source in zip(targets, sources, strict=True)]

        def work(at: Workplace) -> None:
            for pieces, source in zip(parts, sources, strict=True):
                pieces[at.transport.rank][...] = source.array
                movement.allgather(at.transport, pieces)

        changed = [buffer for each in targets for buffer in each]
        results = [buffer.tensor for buffer in changed]
        return self._start(Call(call, work, results, changed, sources), opts)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Options | None = None) -> Work:
        """Give the root all ranks' tensors, as a list in rank order."""
        (given,), root = inputs, self._root(opts)
        source, at_root = Buffer(given), self._group.rank == root
        targets = [*map(Buffer, _many(outputs[0], self._group.size))] if at_root else []

        def work(at: Workplace) -> None:
            if at_root:
                movement.gather(at.transport, source.array, [target.array for target in targets])
            else:
                at.transport.send(source.array, root)

        for target in targets:
            _require_same("gather", target, source)
        changed = [target.tensor for target in targets]
        facts = (("root rank", root),)
        return self._start(Call("gather", work, changed, targets, [source], facts, alike=[source]), opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Options | None = None) -> Work:
        """Give each rank its tensor of the root's list."""
        (output,), root = outputs, self._root(opts)
        target, at_root = Buffer(output), self._group.rank == root
        sources = [*map(Buffer, _many(inputs[0], self._group.size))] if at_root else []

        def work(at: Workplace) -> None:
            if at_root:
                movement.scatter(at.transport, [source.array for source in sources])
                target.array[...] = sources[root].array
            else:
                at.transport.receive(target.array, root)

        for source in sources:
            _require_same("scatter", source, target)
        facts = (("root rank", root),)
        return self._start(Call("scatter", work, outputs, [target], sources, facts, alike=[target]), opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Options | None = None,
    ) -> Work:
        """Send a tensor's rows to all ranks, and receive all ranks' rows. Splits: rows by rank; empty: equal parts."""
        target, source, size = Buffer(output), Buffer(given), self._group.size
        outgoing = _rows(source, input_splits, size, "input")
        incoming = _rows(target, output_splits, size, "output")
        call = Call("all_to_all_single", self._exchange(incoming, outgoing), [output], [target], [source])
        return self._start(self._uneven(call, incoming, outgoing), opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Options | None = None) -> Work:
        """Send each rank its tensor of a list, and receive a list, one tensor of each rank."""
        size = self._group.size
        targets, sources = [*map(Buffer, _many(outputs, size))], [*map(Buffer, _many(inputs, size))]
        incoming, outgoing = [buffer.array for buffer in targets], [buffer.array for buffer in sources]
        call = Call("all_to_all", self._exchange(incoming, outgoing), outputs, targets, sources)
        return self._start(self._uneven(call, incoming, outgoing), opts)

    def _uneven(self, call: Call, incoming: Sequence[Array], outgoing: Sequence[Array]) -> Call:
        """The call, for parts whose lengths may differ between ranks. Ranks compare them only if they do."""
        lengths = {part.size for part in (*incoming, *outgoing)}
        count = lengths.pop() if len(lengths) == 1 else -1 - self._group.rank  # another number on each rank
        dtype = _single({str(buffer.tensor.dtype) for buffer in call.buffers})
        return replace(call, alike=(), count=count, facts=(("dtype", dtype),))

    def _exchange(self, incoming: Sequence[Array], outgoing: Sequence[Array]) -> Callable[[Workplace], None]:
        """The work of an all-to-all."""
        lengths = [part.size for part in incoming], [part.size for part in outgoing]

        def work(at: Workplace) -> None:
            everyones = [] if at.equal_counts else at.transport.allgather_object(lengths)
            for source, (_, sent) in enumerate(everyones):
                for dest, (expected, _) in enumerate(everyones):
                    if sent[dest] != expected[source]:
                        raise MismatchError(
                            f"all_to_all: rank {source} of the group sends {sent[dest]} elements to rank {dest}, which "
                            f"expects {expected[source]}: input splits of one must be output splits of the other"
                        )
            movement.alltoall(at.transport, outgoing, incoming)

        return work

    def barrier(self, opts: Options | None = None) -> Work:
        """Wait for all ranks."""
        return self._start(Call("barrier", lambda at: None), opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Raise NotImplementedError: `barrier` with a timeout names the missing ranks."""
        raise NotImplementedError(
            "monitored_barrier works with torch's gloo only. Use torch.distributed.barrier: if its process group's "
            "timeout is over, the error names the ranks that are missing"
        )

    # Messages

    def send(self, tensors: Tensors, dest: int, tag: int = 0) -> dist.Work:
        """Send a tensor to a rank of the group."""
        self._require_open("send")
        return self._messages.send(tensors[0], dest, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        """Receive a tensor from a rank of the group."""
        self._require_open("recv")
        return self._messages.receive(tensors[0], source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Receive a tensor from any rank of the group."""
        self._require_open("recv")
        return self._messages.receive(tensors[0], None, tag)

    # The way to the lane

    def _root(self, opts: Options | None) -> int:
        """The root's rank in the group. Raises ValueError if the group has no such rank."""
        root = 0 if opts is None else opts.rootRank
        if not 0 <= root < self._group.size:
            raise ValueError(f"the root {root} is none of the group's ranks 0-{self._group.size - 1}")
        return root

    def _parts(self, call: str, whole: list[Buffer], part: Buffer) -> list[Array]:
        """An array for each rank: of a list of tensors, or the equal parts of one tensor."""
        size = self._group.size
        if len(whole) == size > 1:
            arrays = [buffer.array for buffer in whole]
        else:
            if whole[0].array.size != size * part.array.size:
                raise ValueError(
                    f"{call}: the tensor of all ranks' parts has {whole[0].tensor.numel()} elements, but {size} ranks "
                    f"have {part.tensor.numel()} each: it must have {size * part.tensor.numel()}"
                )
            arrays = split_rows(whole[0].array, [part.array.size] * size)
        mine = arrays[self._group.rank]
        if mine.size != part.array.size or any(buffer.tensor.dtype != part.tensor.dtype for buffer in whole):
            raise ValueError(
                f"{call}: this rank's tensors do not fit: {part.tensor.numel()} elements of {part.tensor.dtype}, but "
                f"{mine.size} of {whole[0].tensor.dtype}"
            )
        return arrays

    def _start(self, call: Call, opts: Options | None) -> Work:
        """Start an operation, with c10d's options. If the caller waits for it next, it runs in the caller's thread."""
        self._require_open(call.name)
        asynchronous, seconds = getattr(opts, "asyncOp", True), self._seconds(opts)
        lane, title = self._group.eager, f"torch.distributed.{call.name} in process group '{self._title}'"
        with self._order, calling(title):
            signature = Signature("torch.distributed", f"call {next(self._numbers)}", call.known)
            request = Request(signature, call.run, count=call.count)
            array = next((buffer.array for buffer in call.buffers if buffer.tensor.is_cuda), None)
            if array is not None:
                on_gpu(lane, request, array)
            if asynchronous:
                handle = lane.submit(request)

        def late(seconds: float) -> str:
            watch = runtime.current().observers.watch
            why = watch.explain(lane, request) if watch else ""
            why = why or f"{title} among the ranks {list(self._group.ranks)}"
            return f"the timeout of {seconds:g} s is over: {why} [HVD502]"

        if not asynchronous:  # outside the lock, since other threads may call meanwhile
            handle = lane.begin(request, seconds)
            if not handle.done and time.monotonic() >= request.queued + seconds:
                raise HvdliteError(late(seconds))
        work = Work(handle, call.results, seconds, late)
        if sum(tensor.numel() for tensor in call.results) == 1:
            self._notices.append(work)
        return work

    def _seconds(self, opts: Options | None = None) -> float:
        """The longest wait for a call."""
        timeout = getattr(opts, "timeout", NONE)
        return (timeout if timeout > NONE else self._timeout).total_seconds()

    def _require_open(self, call: str) -> None:
        if self._closed:
            raise HvdliteError(
                f"torch.distributed.{call}: the process group '{self._title}' was destroyed (destroy_process_group)"
            )

    # What torch asks of a process group

    def shutdown(self) -> None:
        """End the group on this rank. Waits for nobody: the ranks' lane is used again, or ends with the job."""
        if not self._closed:
            self._closed = True
            self._messages.close()
            self._arenas.close()
            self._group.give_back()

    abort = shutdown

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the longest wait of calls that set none."""
        self._timeout = timeout

    def get_group_store(self) -> Store:
        """The group's store."""
        return self._store

    def getBackendName(self) -> str:
        """The backend's name."""
        return NAME

    def getGroupName(self) -> str:
        """torch's name of the group."""
        return self._title

    def setGroupName(self, name: str) -> None:
        """torch's name of the group is this."""
        self._title = name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: torch.device) -> Device:
        return Device()

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._group.eager.queue.calls

    # Names of the same operations in other versions of torch

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single


def _op(opts: Options | None) -> dist.ReduceOp:
    return opts.reduceOp if opts is not None else dist.ReduceOp(dist.ReduceOp.SUM)


def _many(tensors: Tensors, size: int) -> Tensors:
    """Raise ValueError unless there is a tensor for each rank."""
    if len(tensors) != size:
        raise ValueError(f"the list must have a tensor for each of the group's {size} ranks, not {len(tensors)}")
    return tensors


def _facts(buffers: Sequence[Buffer]) -> Facts:
    """What ranks must agree on about tensors that are equal on all ranks."""
    shapes = [tuple(buffer.tensor.shape) for buffer in buffers]
    return (
        ("dtype", _single({str(buffer.tensor.dtype) for buffer in buffers})),
        ("shape", shapes[0] if len(shapes) == 1 else tuple(shapes)),
        ("device", _single({buffer.tensor.device.type for buffer in buffers})),
    )


def _single(names: set[str]) -> str:
    """The only name, or all of them."""
    return ", ".join(sorted(names))


def _require_same(call: str, one: Buffer, other: Buffer) -> None:
    """Raise ValueError unless two tensors have equally many elements of one dtype."""
    if one.array.size != other.array.size or one.tensor.dtype != other.tensor.dtype:
        raise ValueError(
            f"{call}: tensors of {one.tensor.numel()} elements of {one.tensor.dtype} and {other.tensor.numel()} of "
            f"{other.tensor.dtype}: they must be equal"
        )


def _rows(buffer: Buffer, splits: Sequence[int], size: int, which: str) -> list[Array]:
    """The rows of a tensor for each rank."""
    tensor = buffer.tensor
    rows = tensor.shape[0] if tensor.ndim else 1
    if not splits:
        if rows % size:
            raise ValueError(
                f"all_to_all_single: {rows} rows are not divisible among {size} ranks: give {which}_split_sizes"
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise ValueError(
            f"all_to_all_single: {which}_split_sizes={list(splits)} must be {size} numbers that add up to {rows}"
        )
    each = buffer.array.size // rows if rows else 0
    return split_rows(buffer.array, [count * each for count in splits])
