"""torch.distributed's collectives on the backend "hvdlite": every operation, dtype and layout, by all ranks' inputs."""

from __future__ import annotations

import functools
import operator
import pickle
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable

import hvdlite as hvd
from tests.parallel.common import at_sizes, last, require_error
from tests.parallel.distributed_common import (
    COMPLEX,
    DTYPES,
    FLOAT8,
    FLOATS,
    WHOLE,
    everyones,
    grouped,
    require_equal,
    require_mismatch,
    seeded,
)  # fmt: skip

SIZES = (2, 4)
SHAPES = ((), (0,), (5,), (2, 3), (2, 0, 3), (3, 2, 4, 5))
WAYS = (False, True)  # async_op

Call = Callable[..., object]


def done(call: Call, *arguments: object, wait: bool, **options: object) -> None:
    """Call an operation, and wait for its Work if it is asynchronous (for the coalesced ones a future)."""
    work = call(*arguments, async_op=wait, **options)
    if not wait:
        assert work is None, work
        return
    if isinstance(work, torch._C.Future):
        work.wait()
        return
    assert isinstance(work, dist.Work), work
    assert work.wait() is True and work.is_completed() and work.exception() is None


def total(values: list[torch.Tensor]) -> torch.Tensor:
    """The sum of the values."""
    return functools.reduce(operator.add, values)


def reduced(op: dist.ReduceOp.RedOpType, values: list[torch.Tensor]) -> torch.Tensor:
    """All ranks' values, reduced by torch itself in one process."""
    if values[0].dtype == torch.bool:
        every = torch.stack(values)
        if op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.BAND):
            return every.all(0)
        return every.sum(0) % 2 == 1 if op == dist.ReduceOp.BXOR else every.any(0)
    if op == dist.ReduceOp.SUM:
        return total(values)
    if op == dist.ReduceOp.AVG:
        exact = [value.double() if value.dtype in FLOATS else value for value in values]
        return (total(exact) / len(values)).to(values[0].dtype)
    by = {
        dist.ReduceOp.PRODUCT: operator.mul, dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.MAX: torch.maximum,
        dist.ReduceOp.BAND: operator.and_, dist.ReduceOp.BOR: operator.or_, dist.ReduceOp.BXOR: operator.xor,
    }  # fmt: skip
    return functools.reduce(by[op], values)


def operations(dtype: torch.dtype) -> list[dist.ReduceOp.RedOpType]:
    """The reductions that a dtype has."""
    op = dist.ReduceOp
    bits = [op.BAND, op.BOR, op.BXOR] if dtype in (*WHOLE, torch.bool) else []
    return [op.SUM, *([op.AVG] if dtype in (*FLOATS, *COMPLEX) else []), *bits,
            *([op.PRODUCT] if dtype not in COMPLEX else []), *([op.MIN, op.MAX] if dtype not in COMPLEX else [])]  # fmt: skip


# Reductions


@grouped
def check_all_reduce_of_every_dtype_and_operation() -> None:
    for number, dtype in enumerate(DTYPES):
        for op in operations(dtype):
            for shape in SHAPES:
                values = everyones(shape, dtype, number)
                for wait in WAYS:
                    tensor = values[hvd.rank()].clone()
                    done(dist.all_reduce, tensor, op, wait=wait)
                    require_equal(tensor, reduced(op, values), (dtype, op, shape))


@grouped
def check_averages_of_whole_numbers_and_sums_of_bools() -> None:
    """The average of whole numbers is rounded towards zero or the nearest; True + True is True."""
    tensor = torch.tensor([4 * hvd.rank(), -4 * hvd.rank()])
    done(dist.all_reduce, tensor, dist.ReduceOp.AVG, wait=False)
    assert tensor.tolist() == [2 * (hvd.size() - 1), -2 * (hvd.size() - 1)]
    flags = torch.tensor([True, hvd.rank() == 0, False])
    dist.all_reduce(flags)
    assert flags.tolist() == [True, True, False]


@grouped
def check_premultiplied_sums() -> None:
    make = torch.distributed._make_nccl_premul_sum
    for dtype in FLOATS:
        values = everyones((4,), dtype)
        tensor = values[hvd.rank()].clone()
        done(dist.all_reduce, tensor, make(0.5), wait=True)
        require_equal(tensor, (sum(value.double() for value in values) / 2).to(dtype), dtype)
        output = torch.empty(1, dtype=dtype)
        given = torch.arange(hvd.size()).to(dtype)
        done(dist.reduce_scatter_single, output, given, make(2.0), wait=False)
        assert output.item() == 2 * hvd.size() * hvd.rank()


@grouped
def check_reduce() -> None:
    for dtype in DTYPES:
        for root in range(hvd.size()):
            values = everyones((3, 2), dtype, root)
            for op in operations(dtype):
                for wait in WAYS:
                    tensor = values[hvd.rank()].clone()
                    done(dist.reduce, tensor, root, op, wait=wait)
                    if hvd.rank() == root:
                        require_equal(tensor, reduced(op, values), (dtype, op))
                    else:
                        require_equal(tensor, values[hvd.rank()], "other ranks' tensors stay")
    with_group = torch.ones(2)
    dist.reduce(with_group, group_dst=hvd.size() - 1)
    assert (with_group == (hvd.size() if last() else 1)).all()


@grouped
def check_reduce_scatter() -> None:
    p, r = hvd.size(), hvd.rank()
    for dtype in DTYPES:
        for op in operations(dtype):
            for shape in ((), (0,), (3,), (2, 3)):
                lists = [[seeded(rank, shape, dtype, part) for part in range(p)] for rank in range(p)]
                expected = reduced(op, [lists[rank][r] for rank in range(p)])
                for wait in WAYS:
                    output = torch.zeros(shape, dtype=dtype)
                    done(dist.reduce_scatter, output, [part.clone() for part in lists[r]], op, wait=wait)
                    require_equal(output, expected, (dtype, op, shape))
                    if shape:
                        output = torch.zeros(shape, dtype=dtype)
                        done(dist.reduce_scatter_single, output, torch.cat(lists[r]), op, wait=wait)
                        require_equal(output, expected, (dtype, op, shape))
                        output = torch.zeros(shape, dtype=dtype)
                        done(dist.reduce_scatter_tensor, output, torch.stack(lists[r]), op, wait=wait)
                        require_equal(output, expected, (dtype, op, shape))


@grouped
def check_reduce_scatter_into_its_own_input() -> None:
    """As FSDP does: the output is this rank's part of the input."""
    p, r = hvd.size(), hvd.rank()
    inputs = everyones((p, 3), torch.float32)
    given = inputs[r].clone()
    dist.reduce_scatter_single(given[r], given)
    require_equal(given[r], total(inputs)[r])


# Movements


@grouped
def check_broadcast() -> None:
    for dtype in (*DTYPES, *FLOAT8):
        for shape in SHAPES:
            for root in range(hvd.size()):
                for wait in WAYS:
                    tensor = seeded(hvd.rank(), shape, dtype)
                    done(dist.broadcast, tensor, root, wait=wait)
                    require_equal(tensor, seeded(root, shape, dtype), (dtype, shape))


@grouped
def check_all_gather() -> None:
    p, r = hvd.size(), hvd.rank()
    for dtype in (*DTYPES, *FLOAT8):
        for shape in SHAPES:
            values = everyones(shape, dtype)
            for wait in WAYS:
                found = [torch.zeros(shape, dtype=dtype) for _ in range(p)]
                done(dist.all_gather, found, values[r].clone(), wait=wait)
                for one, expected in zip(found, values, strict=True):
                    require_equal(one, expected, (dtype, shape))
                for call in (dist.all_gather_single, dist.all_gather_into_tensor):
                    stacked = torch.zeros((p, *shape), dtype=dtype)
                    done(call, stacked, values[r].clone(), wait=wait)
                    require_equal(stacked, torch.stack([each.float() for each in values]).to(dtype)
                                  if dtype in FLOAT8 else torch.stack(values), (dtype, shape))  # fmt: skip
                    if shape:
                        joined = torch.zeros((p * shape[0], *shape[1:]), dtype=dtype)
                        done(call, joined, values[r].clone(), wait=wait)
                        require_equal(joined.view_as(stacked), stacked, (dtype, shape))


@grouped
def check_all_gather_in_place() -> None:
    """As FSDP does: the input is this rank's part of the output."""
    p, r = hvd.size(), hvd.rank()
    for dtype in (*DTYPES, *FLOAT8):
        for length in (1, 1000):
            values = everyones((length,), dtype)
            for wait in WAYS:
                output = torch.zeros(p * length, dtype=dtype)
                part = output.narrow(0, r * length, length)
                part.copy_(values[r])
                done(dist.all_gather_into_tensor, output, part, wait=wait)
                for rank in range(p):
                    require_equal(output.narrow(0, rank * length, length), values[rank], dtype)


@grouped
def check_gather_and_scatter() -> None:
    p, r = hvd.size(), hvd.rank()
    for dtype in (*DTYPES, *FLOAT8):
        for shape in ((), (0,), (3,), (2, 3)):
            for root in range(p):
                values = everyones(shape, dtype, root)
                for wait in WAYS:
                    found = [torch.zeros(shape, dtype=dtype) for _ in range(p)] if r == root else None
                    done(dist.gather, values[r].clone(), found, root, wait=wait)
                    for one, expected in zip(found or values, values, strict=True):
                        require_equal(one, expected, (dtype, shape))
                    output = torch.zeros(shape, dtype=dtype)
                    done(
                        dist.scatter, output, [each.clone() for each in values] if r == root else None, root, wait=wait
                    )
                    require_equal(output, values[r], (dtype, shape))


@grouped
def check_all_to_all() -> None:
    p, r = hvd.size(), hvd.rank()
    for dtype in (*DTYPES, *FLOAT8):
        for wait in WAYS:
            lists = [[seeded(rank, (2, 3), dtype, dest) for dest in range(p)] for rank in range(p)]
            found = [torch.zeros((2, 3), dtype=dtype) for _ in range(p)]
            done(dist.all_to_all, found, [each.clone() for each in lists[r]], wait=wait)
            for rank, one in enumerate(found):
                require_equal(one, lists[rank][r], dtype)
            uneven = [[seeded(rank, (rank + 2 * dest,), dtype, dest) for dest in range(p)] for rank in range(p)]
            found = [torch.zeros(rank + 2 * r, dtype=dtype) for rank in range(p)]
            done(dist.all_to_all, found, [each.clone() for each in uneven[r]], wait=wait)
            for rank, one in enumerate(found):
                require_equal(one, uneven[rank][r], dtype)


@grouped
def check_all_to_all_single() -> None:
    p, r = hvd.size(), hvd.rank()
    for dtype in DTYPES:
        for wait in WAYS:
            inputs = everyones((2 * p, 3), dtype)
            output = torch.zeros_like(inputs[r])
            done(dist.all_to_all_single, output, inputs[r].clone(), wait=wait)
            require_equal(output, torch.cat([each.chunk(p)[r] for each in inputs]), dtype)
            # rank s sends s + d rows to rank d, and none from the last to the first
            rows = [[0 if (s, d) == (p - 1, 0) else s + d for d in range(p)] for s in range(p)]
            inputs = [seeded(s, (sum(rows[s]), 2), dtype) for s in range(p)]
            incoming = [rows[s][r] for s in range(p)]
            output = torch.zeros((sum(incoming), 2), dtype=dtype)
            done(dist.all_to_all_single, output, inputs[r].clone(), incoming, rows[r], wait=wait)
            require_equal(output, torch.cat([inputs[s].split(rows[s])[r] for s in range(p)]), dtype)


@grouped
def check_all_to_all_single_of_equal_parts_beside_uneven_ones() -> None:
    """One rank has equal parts and the other ranks have not."""
    p, r = hvd.size(), hvd.rank()
    rows = [[1 if s == 0 else 1 + (d > 0) for d in range(p)] for s in range(p)]
    inputs = [seeded(s, (sum(rows[s]),), torch.float32) for s in range(p)]
    incoming = [rows[s][r] for s in range(p)]
    output = torch.zeros(sum(incoming))
    dist.all_to_all_single(output, inputs[r], incoming, rows[r])
    require_equal(output, torch.cat([inputs[s].split(rows[s])[r] for s in range(p)]))


@grouped
def check_barrier() -> None:
    for wait in WAYS:
        done(dist.barrier, wait=wait)
    for size in range(1, hvd.size() + 1):
        with_ids = dist.new_group(range(size))
        if hvd.rank() < size:
            dist.barrier(with_ids)


# Layouts


@grouped
def check_layouts() -> None:
    """Tensors of any strides and offsets; memory beside them stays."""
    shape = (2, 3, 4, 5)

    def strided() -> torch.Tensor:
        return torch.zeros(4, 6, 4, 5)[::2, ::2]

    def behind() -> torch.Tensor:
        return torch.zeros(7 + 120)[7:].view(shape)

    makes: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: torch.zeros(shape), lambda: torch.zeros(shape).to(memory_format=torch.channels_last),
        lambda: torch.zeros(5, 4, 3, 2).permute(3, 2, 1, 0), strided, behind,
        lambda: torch.zeros(shape).to(memory_format=torch.channels_last) if hvd.rank() else torch.zeros(shape),
    )  # fmt: skip
    values = everyones(shape, torch.float32)
    p, r = hvd.size(), hvd.rank()
    for make in makes:

        def filled(value: torch.Tensor, make: Callable[[], torch.Tensor] = make) -> torch.Tensor:
            tensor = make()
            tensor.copy_(value)
            return tensor

        tensor = filled(values[r])
        strides = tensor.stride()
        dist.all_reduce(tensor)
        require_equal(tensor, total(values))
        assert tensor.stride() == strides
        tensor = filled(values[r])
        dist.broadcast(tensor, p - 1)
        require_equal(tensor, values[p - 1])
        tensor = filled(values[r])
        dist.reduce(tensor, 0)
        require_equal(tensor, values[r] if r else total(values))
        found = [make() for _ in range(p)]
        dist.all_gather(found, filled(values[r]))
        for one, expected in zip(found, values, strict=True):
            require_equal(one, expected)
        output = make()
        dist.reduce_scatter(output, [filled(values[r]) for _ in range(p)])
        require_equal(output, total(values))
        output = make()
        dist.scatter(output, [filled(each) for each in values] if r == 0 else None, 0)
        require_equal(output, values[r])
        found = [make() for _ in range(p)] if r == 0 else None
        dist.gather(filled(values[r]), found, 0)
        for one, expected in zip(found or [], values, strict=not r):
            require_equal(one, expected)
        found = [make() for _ in range(p)]
        dist.all_to_all(found, [filled(values[r]) for _ in range(p)])
        for one, expected in zip(found, values, strict=True):
            require_equal(one, expected)
        both = [filled(values[r]), filled(values[r])]
        dist.all_reduce_coalesced(both)
        for one in both:
            require_equal(one, total(values))
    beside = torch.arange(12.0).reshape(3, 4)
    dist.all_reduce(beside[:, 1])
    expected = torch.arange(12.0).reshape(3, 4)
    expected[:, 1] *= p
    require_equal(beside, expected)


@grouped
def check_negated_and_partial_views() -> None:
    values = everyones((4,), torch.complex64)
    for view in (torch._neg_view, torch.real, torch.imag):
        tensor = view(values[hvd.rank()].clone())
        dist.all_reduce(tensor)
        require_equal(tensor.resolve_conj().resolve_neg(), total([view(value).resolve_neg() for value in values]), view)


@grouped
def check_leaves_and_expanded_tensors() -> None:
    """Parameters change without no_grad(); an expanded tensor is read."""
    p, r = hvd.size(), hvd.rank()
    weight = torch.nn.Parameter(torch.full((3,), r + 1.0))
    dist.all_reduce(weight)
    assert (weight == p * (p + 1) / 2).all() and weight.requires_grad
    dist.broadcast(weight, 0)
    given = torch.full((1,), float(r)).expand(4)
    found = [torch.zeros(4) for _ in range(p)]
    dist.all_gather(found, given)
    assert [one.tolist() for one in found] == [[float(rank)] * 4 for rank in range(p)]


@grouped
def check_storages_can_still_be_resized() -> None:
    """FSDP and PowerSGD resize the memory of tensors that took part."""
    tensor, output = torch.ones(4), torch.ones(4 * hvd.size())
    dist.all_reduce(tensor)
    dist.all_gather_into_tensor(output, tensor)
    for each in (tensor, output):
        each.untyped_storage().resize_(0)
        each.untyped_storage().resize_(1024)


# Coalesced


@grouped
def check_coalesced_calls() -> None:
    p, r = hvd.size(), hvd.rank()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        lists = [everyones(shape, dtype, seed) for seed, shape in enumerate(((3,), (2, 2), (0,), (1000,)))]
        for wait in WAYS:
            tensors = [values[r].clone() for values in lists]
            done(dist.all_reduce_coalesced, tensors, wait=wait)
            for tensor, values in zip(tensors, lists, strict=True):
                require_equal(tensor, reduced(dist.ReduceOp.SUM, values))
            outputs = [[torch.zeros_like(values[r]) for values in lists] for _ in range(p)]
            done(dist.all_gather_coalesced, outputs, [values[r].clone() for values in lists], wait=wait)
            for rank in range(p):
                for one, values in zip(outputs[rank], lists, strict=True):
                    require_equal(one, values[rank])


@grouped
def check_the_coalescing_manager() -> None:
    p, r = hvd.size(), hvd.rank()
    for wait in WAYS:
        values = [everyones((length,), torch.float32, length) for length in (2, 3, 50)]
        tensors = [each[r].clone() for each in values]
        with dist._coalescing_manager(async_ops=wait) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        if wait:
            manager.wait()
        for tensor, each in zip(tensors, values, strict=True):
            require_equal(tensor, total(each))
        outputs = [torch.zeros(p * len(each[r])) for each in values]
        with dist._coalescing_manager(async_ops=wait) as manager:
            for output, each in zip(outputs, values, strict=True):
                dist.all_gather_into_tensor(output, each[r])
        if wait:
            manager.wait()
        for output, each in zip(outputs, values, strict=True):
            require_equal(output, torch.cat(each))
        outputs = [torch.zeros(len(each[r])) for each in values]
        with dist._coalescing_manager(async_ops=wait) as manager:
            for output, each in zip(outputs, values, strict=True):
                dist.reduce_scatter_tensor(output, each[r].repeat(p))
        if wait:
            manager.wait()
        for output, each in zip(outputs, values, strict=True):
            require_equal(output, total(each))


@grouped
def check_coalesced_calls_of_several_dtypes() -> None:
    """The group's own coalesced methods take tensors of several dtypes."""
    p, r = hvd.size(), hvd.rank()
    group = dist.group.WORLD
    assert group is not None
    dtypes = (torch.float32, torch.int64, torch.bfloat16)
    values = [everyones((4,), dtype) for dtype in dtypes]
    tensors = [each[r].clone() for each in values]
    group.allreduce_coalesced(tensors).wait()
    for tensor, each in zip(tensors, values, strict=True):
        require_equal(tensor, reduced(dist.ReduceOp.SUM, each))
    outputs = [torch.zeros(4 * p, dtype=dtype) for dtype in dtypes]
    group.all_gather_single_coalesced(outputs, [each[r] for each in values]).wait()
    for output, each in zip(outputs, values, strict=True):
        require_equal(output, torch.cat(each))


# Objects


@grouped
def check_objects() -> None:
    p, r = hvd.size(), hvd.rank()
    thing: object = {"rank": r, "text": "x" * (10 * r), "tensor": torch.full((r,), 1.0)}
    found: list[object] = [None] * p
    dist.all_gather_object(found, thing)
    assert [len(pickle.dumps(each)) > 0 and each["rank"] for each in found] == list(range(p))  # type: ignore[index]
    found = [None] * p
    dist.gather_object(r, found if last() else None, p - 1)
    assert found == (list(range(p)) if last() else [None] * p)
    sent: list[object] = [thing if r == 1 else None, ["a", r] if r == 1 else None]
    dist.broadcast_object_list(sent, 1)
    assert sent[1] == ["a", 1] and sent[0]["rank"] == 1  # type: ignore[index]
    got: list[object] = [None]
    dist.scatter_object_list(got, [f"for {rank}" for rank in range(p)] if r == 0 else None, 0)
    assert got == [f"for {r}"]
    if r < 2:
        peers: list[object] = [f"from {r}", None] if r == 0 else [None, None]
        if r == 0:
            dist.send_object_list(peers, 1)
        else:
            assert dist.recv_object_list(peers, 0) == 0 and peers == ["from 0", None]


# Works and futures


@grouped
def check_works() -> None:
    p, r = hvd.size(), hvd.rank()
    tensors = [torch.full((100,), float(r + number)) for number in range(50)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for number, tensor in enumerate(tensors):
        assert (tensor == p * (p - 1) / 2 + p * number).all()
    work = dist.all_reduce(tensors[0], async_op=True)
    work.wait()
    work.wait()
    assert work.is_success() and work.result()[0] is tensors[0]
    require_error(hvd.HvdliteError, work.source_rank, "source_rank")


@grouped
def check_futures() -> None:
    """Callbacks run, may begin and wait for other collectives, and see errors."""
    p = hvd.size()
    ones = torch.ones(4)
    future = dist.all_reduce(ones, async_op=True).get_future()

    def again(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        (value,) = done.value()
        second = value.clone()
        dist.all_reduce(second)
        return second

    assert (future.then(again).wait() == p * p).all()
    several = [dist.all_reduce(torch.ones(2), async_op=True).get_future().then(lambda done: done.value()[0] * 2)
               for _ in range(20)]  # fmt: skip
    assert all((value == 2 * p).all() for value in torch.futures.wait_all(several))
    late = dist.all_reduce(torch.ones(2), async_op=True)
    late.wait()
    assert (late.get_future().wait()[0] == p).all()
    wrong = dist.all_reduce(torch.ones(2 + hvd.rank()), async_op=True)
    require_error(RuntimeError, wrong.get_future().wait, "MismatchError")


@grouped
def check_dropped_works_are_done() -> None:
    """A tensor's memory lasts until the operation is done, though nobody keeps the tensor or the Work."""
    for _ in range(50):
        dist.all_reduce(torch.ones(1000), async_op=True)
        dist.broadcast(torch.ones(1000), 0, async_op=True)
    p, works, outputs = hvd.size(), list[dist.Work](), [torch.zeros(500) for _ in range(20)]
    for output in outputs:
        works.append(dist.reduce_scatter_tensor(output, torch.ones(500 * p), async_op=True))
        works.append(dist.all_to_all_single(torch.empty(500 * p), torch.ones(500 * p), async_op=True))
    for work in works:
        work.wait()
    assert all((output == p).all() for output in outputs)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones == hvd.size()


# Gradients through collectives


@grouped
def check_differentiable_operations() -> None:
    p, r = hvd.size(), hvd.rank()
    world = dist.group.WORLD  # the default of these functions is the group at the time of their import
    given = torch.full((3,), r + 1.0, requires_grad=True)
    differentiable.all_reduce(given, group=world).sum().backward()
    assert (given.grad == p).all()
    given = torch.full((3,), r + 1.0, requires_grad=True)
    parts = differentiable.all_gather(given, group=world)
    sum((rank + 1) * part.sum() for rank, part in enumerate(parts)).backward()
    assert (given.grad == p * (r + 1)).all()
    given = torch.full((p, 2), r + 1.0, requires_grad=True)
    output = differentiable.reduce_scatter(torch.empty(2), [*given.unbind(0)], group=world)
    assert (output == p * (p + 1) / 2).all()
    ((r + 1) * output.sum()).backward()
    assert given.grad is not None and given.grad.tolist() == [[rank + 1.0] * 2 for rank in range(p)]
    given = torch.full((p, 2), float(r), requires_grad=True)
    output = differentiable.all_to_all_single(torch.empty(p, 2), given, group=world)
    ((r + 1) * output.sum()).backward()
    assert given.grad is not None and given.grad.tolist() == [[rank + 1.0] * 2 for rank in range(p)]
    given = torch.full((2,), float(r), requires_grad=True)
    (differentiable.broadcast(given, 0, group=world) * (r + 1)).sum().backward()
    assert (given.grad == (p * (p + 1) / 2 if r == 0 else 0)).all()


# Errors


@grouped
def check_different_calls_are_a_mismatch() -> None:
    r, p = hvd.rank(), hvd.size()
    lengths, dtypes = torch.ones(3 + last()), torch.ones(3, dtype=torch.float64 if last() else torch.float32)
    require_mismatch(lambda: dist.all_reduce(lengths), "all_reduce", "shape", "(3,)", "(4,)")
    require_mismatch(lambda: dist.all_reduce(dtypes), "float32", "float64")
    require_mismatch(lambda: dist.all_reduce(torch.ones(6).reshape((2, 3) if last() else (3, 2))), "shape")
    require_mismatch(lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX if last() else dist.ReduceOp.SUM), "max")
    require_mismatch(lambda: dist.broadcast(torch.ones(3), int(last())), "root")
    require_mismatch(lambda: dist.broadcast(torch.ones(3), 0) if last() else dist.all_reduce(torch.ones(3)),
                     "broadcast", "all_reduce")  # fmt: skip
    require_mismatch(lambda: dist.barrier() if last() else dist.all_reduce(torch.ones(3)), "barrier")
    require_mismatch(lambda: dist.reduce(torch.ones(3 + last()), 0), "reduce")
    require_mismatch(lambda: dist.all_gather([torch.ones(3 + last()) for _ in range(p)], torch.ones(3 + last())))
    require_mismatch(lambda: dist.all_gather_into_tensor(torch.ones(p * (3 + last())), torch.ones(3 + last())))
    require_mismatch(lambda: dist.reduce_scatter_tensor(torch.ones(3 + last()), torch.ones(p * (3 + last()))))
    require_mismatch(lambda: dist.gather(torch.ones(3 + last()), [torch.ones(3)] * p if r == 0 else None, 0))
    require_mismatch(lambda: dist.scatter(torch.ones(3 + last()), [torch.ones(3)] * p if r == 0 else None, 0))
    require_mismatch(lambda: dist.all_reduce_coalesced([torch.ones(3)] * (1 + last())))
    work = dist.all_reduce(torch.ones(3 + last()), async_op=True)
    after = torch.ones(2)
    dist.all_reduce(after)
    assert (after == p).all() and not work.is_success() and isinstance(work.exception(), hvd.MismatchError)
    require_error(hvd.MismatchError, work.wait)


@grouped
def check_a_bucket_of_another_shape_is_a_mismatch_in_place_of_wrong_values() -> None:
    p = hvd.size()
    tensors = [torch.ones(2), torch.ones(3)] if last() else [torch.ones(3), torch.ones(2)]
    require_mismatch(lambda: dist.all_reduce_coalesced(tensors), "shape")
    splits = [1 + last()] * p
    outcome = require_error(hvd.HvdliteError, lambda: dist.all_to_all_single(
        torch.ones(p), torch.ones(sum(splits)), [1] * p, splits), "splits")  # fmt: skip
    assert outcome
    ones = torch.ones(2)
    dist.all_reduce(ones)
    assert (ones == p).all()


@grouped
def check_bad_arguments() -> None:
    """Errors on this rank alone, before other ranks take part: all ranks make the same mistakes."""
    p = hvd.size()
    ones = torch.ones(3)
    errors = (ValueError, TypeError, RuntimeError)
    require_error(errors, lambda: dist.all_gather([ones] * (p + 1), ones), str(p))
    require_error(errors, lambda: dist.all_gather_into_tensor(torch.ones(3 * p + 1), ones), str(3 * p + 1))
    require_error(errors, lambda: dist.all_gather_into_tensor(torch.ones(3 * p, dtype=torch.int32), ones), "int32")
    require_error(errors, lambda: dist.reduce_scatter_tensor(ones, torch.ones(3 * p + 1)), str(3 * p + 1))
    require_error(errors, lambda: dist.all_to_all_single(torch.ones(p + 1), torch.ones(p + 1)), "split")
    require_error(errors, lambda: dist.all_to_all_single(torch.ones(p), torch.ones(p), [2] * p, [1] * p), "split")
    require_error(errors, lambda: dist.broadcast(ones, p + 3), str(p + 3))
    require_error(errors, lambda: dist.reduce(ones, -1))
    require_error(errors, lambda: dist.all_reduce(torch.ones(3, dtype=torch.float32), dist.ReduceOp.BAND), "BAND")
    require_error(errors, lambda: dist.all_reduce(torch.ones(2, dtype=torch.complex64), dist.ReduceOp.MAX))
    require_error(errors, lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG), "AVG")
    require_error(errors, lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e5m2)), "float8")
    require_error(errors, lambda: dist.all_reduce(torch.ones(2, device="meta")), "meta")
    require_error(errors, lambda: dist.broadcast(torch.eye(3).to_sparse(), 0), "sparse")
    require_error(errors, lambda: dist.all_reduce(ones.numpy()), "ndarray")
    require_error(errors, lambda: dist.monitored_barrier(), "GLOO")
    dist.all_reduce(ones)
    assert (ones == p).all()


@grouped
def check_sparse_all_reduce() -> None:
    p, r = hvd.size(), hvd.rank()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        parts = [torch.sparse_coo_tensor(torch.tensor([[0, rank + 1]]), torch.ones(2, 3, dtype=dtype), (p + 2, 3))
                 for rank in range(p)]  # fmt: skip
        for wait in WAYS:
            tensor = parts[r].clone()
            done(dist.all_reduce, tensor, wait=wait)
            require_equal(tensor.to_dense(), total([part.to_dense() for part in parts]))
    nothing = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.long), torch.zeros(0), (4,))
    tensor = nothing if r else torch.tensor([0, 2.0, 0, 0]).to_sparse()
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert torch.allclose(tensor.to_dense(), torch.tensor([0, 2.0 / p, 0, 0]))
    require_error(ValueError, lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX), "sparse")


@at_sizes(2)
@grouped
def check_large_tensors() -> None:
    """Above every threshold between algorithms."""
    for count in (2**15, 2**18 + 1, 2**21 + 3, 2**23):
        tensor = torch.arange(count, dtype=torch.float32)
        dist.all_reduce(tensor)
        assert tensor.equal(torch.arange(count, dtype=torch.float32) * hvd.size())
        found = torch.zeros(hvd.size() * count)
        dist.all_gather_into_tensor(found, torch.full((count,), float(hvd.rank())))
        assert found.view(hvd.size(), -1).sum(1).tolist() == [float(rank * count) for rank in range(hvd.size())]
