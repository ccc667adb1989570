"""What all collectives share: the reductions' names, the facts that ranks must agree on, and the way to a lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache, update_wrapper
from typing import Generic, ParamSpec, TypeVar

import numpy as np

from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array, DType, bfloat16, dtype_name, is_host
from hvdlite.errors import HvdliteError
from hvdlite.job import runtime
from hvdlite.job.groups import Group
from hvdlite.lanes import calls
from hvdlite.lanes.gpu_side import on_gpu
from hvdlite.lanes.request import Handle, Request, StandIn
from hvdlite.lanes.signature import UNKNOWN, Facts, Signature
from hvdlite.lanes.workplace import Workplace
from hvdlite.system.user_warnings import deprecated

P = ParamSpec("P")
T = TypeVar("T")


class Op(IntEnum):
    """Reduction operations, numbered as Horovod's."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum, Min, Max, Product = Op


def op_of(given: Op | int) -> Op:
    """Return the reduction that is given as an `Op` or by its number.

    Raises:
        ValueError: Anything else, even if it equals a number: torch's ReduceOp.SUM equals 0, and Average is 0 here.
    """
    if type(given) is Op:
        return given
    if not isinstance(given, (int, np.integer)) or isinstance(given, bool) or given not in range(len(Op)):
        raise ValueError(f"op={given!r} is no reduction: give one of {', '.join(f'hvd.{each.name}' for each in Op)}")
    return Op(int(given))


def resolve_op(op: Op | int | None, average: bool | None) -> Op:
    """Return the reduction that `op` or the deprecated `average` asks for; Average if neither is given.

    Raises:
        TypeError: `average` is a text, such as a tensor's name.
        ValueError: Both are given.
    """
    if isinstance(average, str):
        raise TypeError(f"average={average!r} is neither True nor False; give a tensor's name as name={average!r}")
    if op is not None and average is not None:
        raise ValueError("give either op or average (deprecated), not both")
    if average is not None:
        deprecated("average= is deprecated: use op=hvd.Average or op=hvd.Sum")
        return Average if average else Sum
    return Average if op is None else op_of(op)


def reduction(op: Op, size: int, prescale: float = 1.0, postscale: float = 1.0) -> Reduction:
    """Return the arithmetic of a reduction.

    Args:
        op: The reduction.
        size: The number of ranks.
        prescale: Each rank's values are multiplied by it before the reduction.
        postscale: The result is multiplied by it.

    Raises:
        TypeError: A factor is not a number.
    """
    try:
        return known_reduction(op, size, float(prescale), float(postscale))
    except (TypeError, ValueError):
        text = f"prescale_factor={prescale!r}, postscale_factor={postscale!r}: both must be numbers"
        raise TypeError(text) from None


@lru_cache(maxsize=1024)
def known_reduction(op: Op, size: int, before: float, after: float) -> Reduction:
    """`reduction`, for factors that are floats."""
    operation = "sum" if op in (Average, Sum) else Op(op).name.lower()
    return Reduction(operation, before, after, size if op == Average else 1)


def reduction_facts(op: Op, how: Reduction, array: Array) -> Facts:
    """Return what ranks must agree on to reduce this array. Raises TypeError if its dtype has no such reduction."""
    return facts_of_reduction(op, how, array.dtype, array.shape, is_host(array))


@lru_cache(maxsize=1024)
def facts_of_reduction(op: Op, how: Reduction, dtype: DType, shape: tuple[int, ...], host: bool) -> Facts:
    """`reduction_facts` of an array with these properties. Cached, because training repeats the same few calls."""
    facts = facts_of_array(dtype, shape, host, 0)
    if dtype.kind not in "biuf" and dtype != bfloat16 and not (dtype.kind == "c" and op in (Average, Sum)):
        raise TypeError(
            f"{Op(op).name} of {dtype_name(dtype)} is not possible: only of booleans, integers, floats, and Average "
            "and Sum of complex numbers"
        )
    scaling = (("prescale_factor", how.before), ("postscale_factor", how.after))
    return (*facts, ("operation", Op(op).name), *scaling)


def array_facts(array: Array, skip: int = 0) -> Facts:
    """Return an array's dtype, its shape from dimension `skip` on, and whether it is on the host.

    Raises:
        TypeError: The array holds Python objects, or numbers in a foreign byte order.
    """
    return facts_of_array(array.dtype, array.shape, is_host(array), skip)


@lru_cache(maxsize=1024)
def facts_of_array(dtype: DType, shape: tuple[int, ...], host: bool, skip: int) -> Facts:
    """`array_facts` of an array with these properties."""
    if dtype.hasobject:
        raise TypeError(
            "an array of Python objects cannot be sent: use hvd.allgather_object, hvd.broadcast_object, or an array of "
            "numbers"
        )
    if not dtype.isnative:
        raise TypeError(
            f"an array of {dtype.str} is not in this machine's byte order, which ranks need: give "
            "array.astype(array.dtype.newbyteorder('='))"
        )
    what = "shape" if skip == 0 else "shape after the first dimension"
    rest = shape[skip:] if len(shape) >= skip else "no dimension"
    return (("dtype", dtype_name(dtype)), (what, rest), ("device", "host" if host else "device"))


def sparse_facts(op: Op, shape: Sequence[int] | None) -> Facts:
    """Return what ranks must agree on to add up sparse tensors, besides the facts of the parts that are gathered.

    Args:
        op: The reduction.
        shape: The dense shape; None if it is not known.
    """
    whole = UNKNOWN if shape is None else tuple(int(length) for length in shape)
    return (("operation", op.name), ("shape of the dense tensor", whole))


@lru_cache(maxsize=256)
def grouped_facts(facts: tuple[Facts, ...]) -> Facts:
    """Return the facts of several arrays as one operation's facts. A single array's facts keep their names."""
    number = (("number of tensors", len(facts)),)
    if len(facts) == 1:
        return (*number, *facts[0])
    if len({dict(each)["device"] for each in facts}) > 1:
        raise HvdliteError("a grouped operation takes tensors on the host or tensors on a GPU, not both at once")
    return (*number, *((f"{what} of tensor {i}", fact) for i, each in enumerate(facts) for what, fact in each))


@dataclass(slots=True)
class Operation(Generic[T]):
    """A collective with checked arguments: `run` waits for its result, and `start` does not.

    Attributes:
        group: The process set. The operation runs on its eager lane.
        kind: The collective, such as "allreduce".
        name: Ranks' operations are matched by it. None: `request` takes a number.
        facts: What ranks must agree on.
        work: Runs on the lane. Its return value is the result.
        array: The lane waits for the current stream of this array's GPU. None if there is no array.
        stand_in: As in `Request`.
        count: As in `Request`.
    """

    group: Group
    kind: str
    name: str | None
    facts: Facts
    work: Callable[[Workplace], T]
    array: Array | None = None
    stand_in: Callable[[], StandIn] | None = None
    count: int = 0

    def run(self) -> T:
        """Wait for all ranks, and return the result. If the lane is idle, the work runs in the calling thread.

        Raises:
            MismatchError: The ranks' facts differ. Every rank raises it.
            HvdliteError: The calling thread is in the middle of another operation.
        """
        if self.name is None:  # raises before a number is taken
            self.group.eager.require_no_lender(calls.current() or self.kind)
        for mailbox in [*self.group.mailboxes]:
            mailbox.reader.before_waiting()
        return self.group.eager.run(self.request())

    def start(self) -> Handle[T]:
        """Hand the operation to the lane's thread and return at once."""
        for mailbox in [*self.group.mailboxes]:
            mailbox.reader.before_waiting()
        return self.group.eager.submit(self.request())

    def request(self) -> Request[T]:
        """Make the operation's request, which waits for the array's GPU."""
        name = f"{calls.UNNAMED}{next(self.group.unnamed)}" if self.name is None else self.name
        request = Request(Signature(self.kind, name, self.facts), self.work, stand_in=self.stand_in, count=self.count)
        if self.array is not None and not is_host(self.array):
            on_gpu(self.group.eager, request, self.array)
        return request


class Collective(Generic[P, T]):
    """Decorates a function that prepares an operation. A call runs the operation, and `start` returns its handle.

    result = allreduce_(array, Sum)
    handle = allreduce_.start(array, Sum)
    ...
    result = handle.wait()
    """

    def __init__(self, prepare: Callable[P, Operation[T]]) -> None:
        self.prepare = prepare
        update_wrapper(self, prepare)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.prepare(*args, **kwargs).run()

    def start(self, *args: P.args, **kwargs: P.kwargs) -> Handle[T]:
        """Start the operation and return its handle at once."""
        return self.prepare(*args, **kwargs).start()


def root_of(group: Group, kind: str, root_rank: int) -> int:
    """Return the root's place in the group. Raises ValueError if the global rank `root_rank` is no member."""
    if root_rank not in group.ranks:
        raise ValueError(f"{kind}: root_rank={root_rank!r} is not one of the ranks {describe(group)}")
    return group.ranks.index(root_rank)


def describe(group: Group) -> str:
    """Return the group's ranks as a text for messages."""
    whole = group.ranks == tuple(range(runtime.size()))
    return f"0-{group.size - 1}" if whole and group.size > 1 else ", ".join(map(str, group.ranks))


def even_rows(rows: int, size: int) -> list[int]:
    """Return each rank's number of rows when they are divided as evenly as possible; the first ranks get one more."""
    each, more = divmod(rows, size)
    return [each + (place < more) for place in range(size)]
