"""Collectives on torch tensors: Horovod's names and handles, and gradients by analytic expectation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

import hvdlite
import hvdlite.torch as hvd
from tests.parallel.common import at_sizes, last, require_error, require_mismatch, require_same_bits

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32,
          torch.int64, torch.uint8)  # fmt: skip


def triangle() -> int:
    """The sum of all ranks' numbers."""
    return hvd.size() * (hvd.size() - 1) // 2


def check_allreduce_in_every_way() -> None:
    """allreduce, allreduce_, and both asynchronously; what is not in place leaves its argument alone."""
    for dtype in DTYPES:
        for shape in ((), (0,), (3,), (2, 3), (5, 1, 2)):
            mine = torch.full(shape, hvd.rank(), dtype=dtype)
            for result in (hvd.allreduce(mine, op=hvd.Sum), hvd.synchronize(hvd.allreduce_async(mine, op=hvd.Sum))):
                assert result.dtype == dtype and result.shape == shape and (result == triangle()).all()
            assert (mine == hvd.rank()).all()
            for call in (hvd.allreduce_, lambda t, op: hvd.synchronize(hvd.allreduce_async_(t, op=op))):
                changed = mine.clone()
                assert call(changed, op=hvd.Sum) is changed and (changed == triangle()).all()
    assert hvd.allreduce(torch.tensor([hvd.rank() > 0, True]), op=hvd.Min).tolist() == [False, True]


def check_operations_and_factors() -> None:
    p, r = hvd.size(), hvd.rank()
    mine = torch.tensor([r + 1.0])
    for op, value in ((hvd.Average, (p + 1) / 2), (hvd.Sum, p * (p + 1) / 2), (hvd.Min, 1), (hvd.Max, p)):
        assert hvd.allreduce(mine, op=op) == value
    assert hvd.allreduce(mine) == (p + 1) / 2
    assert hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2, postscale_factor=4) == 4 * p * (p + 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert (
            hvd.allreduce(mine, average=False) == p * (p + 1) / 2 and hvd.allreduce(mine, average=True) == (p + 1) / 2
        )
        hvd.synchronize(hvd.allreduce_async(mine, average=True))
    assert [(w.category, w.filename) for w in caught] == [(DeprecationWarning, __file__)] * 3
    require_error(ValueError, lambda: hvd.allreduce(mine, average=True, op=hvd.Sum), "not both")


def check_averages_that_the_dtype_holds() -> None:
    """In every collective that averages, whatever the sum of all ranks' numbers."""
    p = hvd.size()
    for dtype, value in (
        (torch.float16, 40000.0), (torch.bfloat16, 1e38 / p), (torch.int8, 100), (torch.uint8, 200), (torch.int16, -(2**15)),
        (torch.int32, 2**31 - 1), (torch.int64, 2**62 + 1), (torch.int64, -(2**63)), (torch.uint16, 2**16 - 1),
    ):  # fmt: skip
        mine = torch.full((p, 3), value, dtype=dtype)
        found = [
            hvd.allreduce(mine), hvd.allreduce_(mine.clone()), hvd.synchronize(hvd.allreduce_async(mine)),
            *hvd.grouped_allreduce([mine, mine]), *hvd.synchronize(hvd.grouped_allreduce_async([mine])),
            hvd.reducescatter(mine), *hvd.grouped_reducescatter([mine]), hvd.synchronize(hvd.reducescatter_async(mine)),
        ]  # fmt: skip
        whole = hvd.reduce(mine, p - 1)
        for result in [*found, *([] if whole is None else [whole])]:
            assert result.dtype == dtype and result.tolist() == mine.tolist()[: len(result)], (dtype, result)


def check_layouts_are_kept() -> None:
    """A result of its argument's shape has its layout, even if that is another one on each rank."""
    p, r = hvd.size(), hvd.rank()
    plain = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    layouts = (
        plain.to(memory_format=torch.channels_last), plain.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0), plain,
        plain.reshape(1, 2, 3, 4, 5).to(memory_format=torch.channels_last_3d), plain.to(torch.complex64).transpose(0, 1),
        plain.to(torch.bfloat16).to(memory_format=torch.channels_last),
    )  # fmt: skip
    for mine in layouts:
        found = [
            hvd.allreduce(mine), hvd.synchronize(hvd.allreduce_async(mine)), *hvd.grouped_allreduce([mine, mine]),
            *hvd.synchronize(hvd.grouped_allreduce_async([mine])), hvd.broadcast(mine, p - 1),
            hvd.synchronize(hvd.broadcast_async(mine, 0)), hvd.allreduce(mine, compression=hvd.Compression.none),
            hvd.allreduce_(mine.clone()),
        ]  # fmt: skip
        whole = hvd.reduce(mine, 0)
        for result in [*found, *([] if whole is None else [whole])]:
            assert torch.equal(result, mine) and result.stride() == mine.stride(), (result.stride(), mine.stride())
    mine = layouts[0].clone() if r == 0 else plain.clone()
    for result in (hvd.allreduce(mine), hvd.broadcast(mine, 0)):
        assert torch.equal(result, plain) and result.stride() == mine.stride()
    leaf = layouts[0].clone().requires_grad_()
    hvd.allreduce(leaf).mul(layouts[0]).sum().backward()
    assert leaf.grad is not None and leaf.grad.stride() == leaf.stride() and torch.equal(leaf.grad, plain)


def check_parameters_in_place() -> None:
    """allreduce_ and broadcast_ change leaf parameters without no_grad()."""
    w = torch.nn.Parameter(torch.full((3,), float(hvd.rank())))
    assert hvd.broadcast_(w, hvd.size() - 1) is w and (w == hvd.size() - 1).all() and w.requires_grad
    assert hvd.allreduce_(w, op=hvd.Sum) is w and (w == hvd.size() * (hvd.size() - 1)).all()


def check_handles() -> None:
    """Plain numbers; poll, wait, in any order; twice is None; unknown ones are refused."""
    handles = {i: hvd.allreduce_async(torch.full((i + 1,), float(hvd.rank())), op=hvd.Sum, name=f"item {i}")
               for i in (range(10) if hvd.rank() % 2 else reversed(range(10)))}  # fmt: skip
    assert all(isinstance(handle, int) for handle in handles.values())
    for i in range(10):
        assert hvd.poll(handles[i]) in (True, False)
        assert (hvd.synchronize(handles[i]) == triangle()).all()
        assert hvd.synchronize(handles[i]) is None
        require_error(ValueError, lambda: hvd.poll(handles[i]), "not a pending handle")
    require_error(ValueError, lambda: hvd.poll(-5), "-5")


@at_sizes(2, 3, 4)
def check_error_of_a_handle() -> None:
    handle = hvd.allreduce_async(torch.ones(2 + last()), name="loss")
    require_mismatch(lambda: hvd.synchronize(handle), "loss")
    assert issubclass(hvdlite.MismatchError, hvd.HorovodInternalError)


def check_grouped() -> None:
    """Shapes and dtypes may differ within a group."""
    r = hvd.rank()
    group = [torch.full((2, 2), float(r)), torch.full((3,), r), torch.full((), r, dtype=torch.bfloat16)]
    for result in (
        hvd.grouped_allreduce(group, op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async(group, op=hvd.Sum)),
    ):
        assert len(result) == 3 and all((t == triangle()).all() for t in result)
    assert all((t == r).all() for t in group)
    result = hvd.grouped_allreduce_(group, op=hvd.Sum, name="group")
    assert all(a is b and (a == triangle()).all() for a, b in zip(result, group, strict=True))
    again = [torch.ones(2), torch.ones(3)]
    assert all((t == hvd.size()).all() for t in hvd.synchronize(hvd.grouped_allreduce_async_(again, op=hvd.Sum)))
    require_error(ValueError, lambda: hvd.grouped_allreduce([]), "at least one")
    twice = [torch.ones(2)] * 2
    for call in (hvd.grouped_allreduce_, hvd.grouped_allreduce_async_):
        require_error(ValueError, lambda: call(twice), "tensors 0 and 1 share memory", "grouped_allreduce,")
    assert all((t == hvd.size()).all() for t in hvd.grouped_allreduce(twice, op=hvd.Sum))


def check_compression() -> None:
    """Rounded on the way, the dtype kept; integers are left alone."""
    r = hvd.rank()
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        for dtype in (torch.float32, torch.float64, torch.int64):
            result = hvd.allreduce(torch.full((3,), r, dtype=dtype), op=hvd.Sum, compression=compression)
            assert result.dtype == dtype and (result == triangle()).all()
        results = hvd.grouped_allreduce([torch.ones(2), torch.ones(1)], op=hvd.Sum, compression=compression)
        assert all(t.dtype == torch.float32 and (t == hvd.size()).all() for t in results)
    whole = hvd.allreduce(torch.tensor([70_001]), op=hvd.Sum, compression=hvd.Compression.fp16)
    assert whole.dtype == torch.int64 and whole == 70_001 * hvd.size()  # as it is
    rounded = hvd.allreduce(torch.tensor([1 + 2.0**-12]), op=hvd.Max, compression=hvd.Compression.fp16)
    assert rounded == 1.0


def check_allgather() -> None:
    p, r = hvd.size(), hvd.rank()
    expected = torch.repeat_interleave(torch.arange(p), torch.arange(p))
    for dtype in (*DTYPES, torch.bool):
        for rest in ((), (2,)):
            mine = torch.full((r, *rest), r, dtype=dtype)
            for result in (hvd.allgather(mine), hvd.synchronize(hvd.allgather_async(mine, name="rows"))):
                assert result.dtype == dtype and result.shape == (triangle(), *rest)
                assert (result == expected.to(dtype).reshape(-1, *(1 for _ in rest))).all()
    assert hvd.allgather(torch.ones(4, 2).t()).shape == (2 * p, 4)  # not contiguous
    require_error(IndexError, lambda: hvd.allgather(torch.tensor(1.0)), "dimension")
    handle = hvd.allgather_async(torch.tensor(1.0))
    require_error(hvd.HorovodInternalError, lambda: hvd.synchronize(handle), "dimension")


def check_broadcast() -> None:
    p, r = hvd.size(), hvd.rank()
    for root in range(p):
        for dtype in (*DTYPES, torch.bool):
            mine = torch.full((2, 3), r, dtype=dtype)
            wanted = torch.full((2, 3), root, dtype=dtype)
            assert torch.equal(hvd.broadcast(mine, root), wanted)
            assert torch.equal(hvd.synchronize(hvd.broadcast_async(mine, root)), wanted)
            assert torch.equal(mine, torch.full((2, 3), r, dtype=dtype))
            assert hvd.synchronize(hvd.broadcast_async_(mine, root, name="b")) is mine and torch.equal(mine, wanted)


def check_in_place_whatever_the_layout() -> None:
    """A transposed or strided tensor gets the result in place, and what lies between its elements stays."""
    p, r = hvd.size(), hvd.rank()
    for change, value in (
        (lambda t: hvd.allreduce_(t, op=hvd.Sum), triangle()),
        (lambda t: hvd.broadcast_(t, p - 1), p - 1),
        (lambda t: hvd.synchronize(hvd.allreduce_async_(t, op=hvd.Sum)), triangle()),
        (lambda t: hvd.grouped_allreduce_([t], op=hvd.Sum)[0], triangle()),
    ):
        whole = torch.full((4, 6), float(r))
        part = whole[:, ::2].t()
        assert change(part) is part and (part == value).all() and (whole[:, 1::2] == r).all()
    w = torch.nn.Parameter(torch.full((3, 2), float(r)))
    columns = w.t()
    hvd.broadcast_(columns, 0)
    assert (w == 0).all()


def check_elements_that_share_memory() -> None:
    """Nowhere to write each one's result."""
    shared = torch.ones(1).expand(4)
    require_error(ValueError, lambda: hvd.allreduce_(shared), "expand", ".clone()")
    assert (hvd.allreduce(shared, op=hvd.Sum) == hvd.size()).all()


def check_refusals() -> None:
    """What cannot be communicated is refused where it is called, and harms no one."""
    if hvd.rank() == 0:
        require_error(ValueError, lambda: hvd.allreduce(torch.ones(2, dtype=torch.float8_e4m3fn)), "float8_e4m3fn")
        require_error(ValueError, lambda: hvd.broadcast(torch.ones(2), hvd.size()), "root_rank")
        require_error(TypeError, lambda: hvd.allreduce(torch.ones(2), "loss"), "name='loss'")  # type: ignore[arg-type]
        wrong: Any = torch.distributed.ReduceOp.SUM
        require_error(ValueError, lambda: hvd.allreduce(torch.ones(2), op=wrong), "hvd.Average")
        short: Any = "fp16"
        require_error(ValueError, lambda: hvd.allreduce(torch.ones(2), compression=short), "hvd.Compression", "'fp16'")
        require_error(TypeError, lambda: hvd.allreduce(torch.ones(2), process_set=7), "hvd.ProcessSet", "7")  # type: ignore[arg-type]
        require_error(ValueError, lambda: hvd.allreduce(torch.empty(2, device="meta")), "meta", "no values")
        require_error(ValueError, lambda: hvd.broadcast(torch.ones(2), "0"), "root_rank='0'")  # type: ignore[arg-type]
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
        require_error(ValueError, lambda: hvd.allreduce(quantized), "quint8", ".dequantize()")
        require_error(TypeError, lambda: hvd.broadcast_optimizer_state(None, 0), "not NoneType")
    hvd.barrier()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()


def check_what_is_no_dense_tensor() -> None:
    """The caller is told what to use instead."""
    sparse = torch.eye(2).to_sparse()
    calls: list[Callable[[Any], object]] = [
        hvd.allreduce, hvd.allreduce_, hvd.allgather, hvd.reducescatter, hvd.alltoall,
        lambda x: hvd.broadcast(x, 0), lambda x: hvd.grouped_allreduce_([x]),
    ]  # fmt: skip
    for call in calls:
        require_error(TypeError, lambda: call([1.0, 2.0]), "not list", "torch.as_tensor")
        require_error(ValueError, lambda: call(sparse), "sparse", "hvd.sparse_allreduce_async", "to_dense")
    require_error(
        ValueError, lambda: hvd.sparse_allreduce_async(torch.eye(2), "x", hvd.Sum), "strided", "hvd.allreduce"
    )
    rows = torch.eye(2).to_sparse_csr()
    require_error(ValueError, lambda: hvd.allreduce(rows), "sparse_csr): make it .to_dense()")
    require_error(ValueError, lambda: hvd.sparse_allreduce_async(rows, "x", hvd.Sum), ".to_sparse_coo()")
    bad: Any
    for bad in (3, "weights", [1, 2], torch.ones(2), [["a", torch.ones(2)]]):
        require_error(ValueError, lambda: hvd.broadcast_parameters(bad, 0), "state_dict")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()


def check_gradient_of_allreduce() -> None:
    """The gradient of an all-reduce is the same all-reduce of the gradients: r+1 from each rank."""
    p, r = hvd.size(), hvd.rank()
    for op, value in ((hvd.Average, (p + 1) / 2), (hvd.Sum, p * (p + 1) / 2)):
        x = torch.ones(3, requires_grad=True)
        (hvd.allreduce(x, op=op) * (r + 1)).sum().backward()
        assert (x.grad == value).all()
    x = torch.ones(3, requires_grad=True)
    (hvd.allreduce(x, op=hvd.Sum, prescale_factor=2, postscale_factor=3) * (r + 1)).sum().backward()
    assert (x.grad == 6 * p * (p + 1) / 2).all()


def check_second_derivative_of_allreduce() -> None:
    """The sum s over ranks of x: d/dx of s^2 is 2ps; d/dx of that is 2p^2 (each rank's loss taken into account)."""
    p = hvd.size()
    x = torch.full((1,), 1.0, dtype=torch.float64, requires_grad=True)
    s = hvd.allreduce(x, op=hvd.Sum)
    (first,) = torch.autograd.grad((s**2).sum(), x, create_graph=True)
    assert first == 2 * p * p
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second == 2 * p * p


def check_gradient_of_allgather() -> None:
    """The average of the ranks' gradients, at the rows that this rank contributed: row k has gradient (k+1)(r+1)."""
    p, r = hvd.size(), hvd.rank()
    x = torch.ones(r + 1, 2, requires_grad=True)
    rows = p * (p + 1) // 2
    factors = (torch.arange(rows) + 1.0)[:, None]
    (hvd.allgather(x) * factors * (r + 1)).sum().backward()
    start = r * (r + 1) // 2
    assert torch.equal(x.grad, (factors * (p + 1) / 2)[start : start + r + 1].expand(-1, 2))
    empty = torch.ones(0 if r == 0 else 1, 2, requires_grad=True)
    hvd.allgather(empty).sum().backward()
    assert empty.grad.shape == empty.shape and (empty.grad == 1).all()


def check_gradient_of_broadcast() -> None:
    """The average at the root, zero elsewhere."""
    p, r = hvd.size(), hvd.rank()
    for root in range(p):
        x = torch.ones(3, requires_grad=True)
        (hvd.broadcast(x, root) * (r + 1)).sum().backward()
        assert (x.grad == ((p + 1) / 2 if r == root else 0)).all()


def check_gradient_of_grouped_allreduce() -> None:
    p, r = hvd.size(), hvd.rank()
    group = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    sums = hvd.grouped_allreduce(group, op=hvd.Sum)
    (sum(t.sum() for t in sums) * (r + 1)).backward()
    assert all((t.grad == p * (p + 1) / 2).all() for t in group)


def check_gradient_through_compression() -> None:
    x = torch.ones(3, requires_grad=True)
    (hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16) * (hvd.rank() + 1)).sum().backward()
    assert x.grad.dtype == torch.float32 and (x.grad == hvd.size() * (hvd.size() + 1) / 2).all()


def check_neutral_front() -> None:
    """hvdlite's own functions find torch from the tensor."""
    mine = torch.full((2,), float(hvd.rank()))
    assert torch.equal(hvdlite.allreduce(mine, op=hvdlite.Sum), torch.full((2,), float(triangle())))
    assert hvdlite.allgather(mine).shape == (2 * hvd.size(),) and (hvdlite.broadcast(mine, 0) == 0).all()
    require_same_bits(hvdlite.allreduce(torch.randn(1000)))
