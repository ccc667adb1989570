"""All-to-all, reduce-scatter, grouped all-gather, gather, scatter, reduce and sparse sums of torch tensors.

The expected gradients are those of the average of the ranks' losses."""

from __future__ import annotations

from typing import Any

import torch

import hvdlite.torch as hvd
from hvdlite.ops.common import Op
from tests.parallel.common import at_sizes, last, require_error, require_mismatch, rows_of

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32,
          torch.int64, torch.uint8)  # fmt: skip


def check_alltoall_with_splits() -> None:
    """Rank r sends r+1 rows of 100r+d to each rank d; each gets o+1 from each o."""
    p, r = hvd.size(), hvd.rank()
    for dtype in (*DTYPES, torch.bool):
        rows = torch.tensor([10 * r + d for d in range(p) for _ in range(r + 1)]).to(dtype)
        wanted = torch.tensor([10 * o + r for o in range(p) for _ in range(o + 1)]).to(dtype)
        for splits in (
            torch.tensor([r + 1] * p, dtype=torch.int32),
            torch.tensor([r + 1] * p),
            [r + 1] * p,
            (r + 1,) * p,
        ):
            output, received = hvd.alltoall(rows, splits)
            assert torch.equal(output, wanted) and received.tolist() == [o + 1 for o in range(p)]
            assert received.dtype == torch.int32
            output, received = hvd.synchronize(hvd.alltoall_async(rows, splits, name="rows"))
            assert torch.equal(output, wanted) and received.tolist() == [o + 1 for o in range(p)]


def check_alltoall_evenly_and_not_at_all() -> None:
    """Without splits equal parts; zero rows to some; a tail that is not sent; other dimensions; no elements."""
    p, r = hvd.size(), hvd.rank()
    output = hvd.alltoall(torch.arange(2 * p).reshape(-1, 1).expand(-1, 3))
    assert torch.equal(output, torch.tensor([2 * r, 2 * r + 1] * p).reshape(-1, 1).expand(-1, 3))
    pair = hvd.synchronize(hvd.alltoall_async(torch.ones(p)))
    assert len(pair) == 2 and pair[1].tolist() == [1] * p
    splits = [0] * p
    splits[0] = 2
    output, received = hvd.alltoall(torch.full((5, 2), float(r)), splits)
    assert received.tolist() == [2 if r == 0 else 0] * p and output.shape == (2 * p if r == 0 else 0, 2)
    output, received = hvd.alltoall(torch.ones(0, 4), [0] * p)
    assert output.shape == (0, 4)


def check_splits_where_another_device_is_the_default() -> None:
    p = hvd.size()
    rows = torch.arange(p)
    with torch.device("meta"):
        output, received = hvd.alltoall(rows, [1] * p)
    assert output.tolist() == [hvd.rank()] * p and received.tolist() == [1] * p


def check_splits_that_would_wrap() -> None:
    """Counts are not cut to 32 bits."""
    wrong = [2**32 + 1, *[1] * (hvd.size() - 1)]
    require_error(ValueError, lambda: hvd.alltoall(torch.ones(hvd.size()), wrong), "splits add up to 42949")


def check_alltoall_refusals() -> None:
    p = hvd.size()
    bad: Any
    for bad, words in (
        (torch.ones(p), "int32 or int64, not"),
        ([1.5] * p, "int64"),
        ([1] * (p + 1), f"{p} whole"),
        ([[1] * p], "whole numbers"),
        ([3 * p] * p, "add up"),
        ([-1] + [1] * (p - 1), "whole numbers"),
    ):
        require_error(ValueError, lambda: hvd.alltoall(torch.ones(2 * p), bad), words)
    for call in (
        lambda: hvd.alltoall(torch.ones(2 * p), "ab"),  # type: ignore[arg-type]
        lambda: hvd.scatter(torch.ones(2 * p), hvd.rank(), "ab"),  # type: ignore[arg-type]
    ):
        require_error(TypeError, call, "splits must be", "whole numbers, not 'ab'")
    if p > 1:
        require_error(ValueError, lambda: hvd.alltoall(torch.ones(p + 1)), "divisible")
        mine = torch.ones(p, 2 + last())
        require_mismatch(lambda: hvd.alltoall(mine, name="x"), "alltoall 'x'", "shape after the first")
    require_error(ValueError, lambda: hvd.alltoall(torch.tensor(1.0)), "dimension")


def check_gradient_of_alltoall() -> None:
    """Each row's gradient is the one of the rank that it went to (its number, from 1); of rows not sent it is 0."""
    p, r = hvd.size(), hvd.rank()
    splits = [d + r + 1 for d in range(p)]
    x = torch.ones(sum(splits) + 2, 3, requires_grad=True)
    output, received = hvd.alltoall(x, splits)
    assert not received.requires_grad
    (output * (r + 1)).sum().backward()
    expected = torch.tensor([float(d + 1) for d in range(p) for _ in range(splits[d])] + [0.0, 0.0])
    assert torch.equal(x.grad, expected[:, None].expand(-1, 3))
    y = torch.ones(2 * p, requires_grad=True)
    (hvd.alltoall(y) * (r + 1)).sum().backward()
    assert y.grad.tolist() == [float(d + 1) for d in range(p) for _ in range(2)]


def check_reducescatter() -> None:
    p, r = hvd.size(), hvd.rank()
    for dtype in (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64, torch.bfloat16):
        for rows in (0, 1, p, 2 * p + 1):
            mine = (torch.arange(rows) + r).to(dtype)[:, None].repeat(1, 2)
            start = sum(rows_of(o, rows) for o in range(r))
            wanted = (torch.arange(rows) * p + p * (p - 1) // 2)[start : start + rows_of(r, rows)].to(dtype)
            for result in (
                hvd.reducescatter(mine, op=hvd.Sum),
                hvd.synchronize(hvd.reducescatter_async(mine, op=hvd.Sum)),
            ):
                assert torch.equal(result, wanted[:, None].expand(-1, 2)) and result.dtype == dtype
            assert torch.equal(mine, (torch.arange(rows) + r).to(dtype)[:, None].repeat(1, 2))
    assert torch.equal(hvd.reducescatter(torch.full((p,), r + 1.0)), torch.tensor([(p + 1) / 2]))
    scaled = hvd.reducescatter(torch.full((p,), r + 1.0), op=hvd.Sum, prescale_factor=2, postscale_factor=4)
    assert scaled == 4 * p * (p + 1)
    assert hvd.reducescatter(
        torch.full((p, 2), r + 1.0).t().contiguous().t(), compression=hvd.Compression.fp16
    ).shape == (1, 2)
    a, b = hvd.grouped_reducescatter([torch.ones(p), torch.full((2 * p, 2), 1, dtype=torch.int64)], op=hvd.Sum)
    assert (a == p).all() and (b == p).all() and a.shape == (1,) and b.shape == (2, 2)
    c, d = hvd.synchronize(hvd.grouped_reducescatter_async([torch.ones(p), torch.ones(p)], op=hvd.Sum, name="g"))
    assert c == p and d == p
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        require_error(hvd.HorovodInternalError, lambda: hvd.reducescatter(torch.ones(p), op=op), "Average and Sum")
    require_error(ValueError, lambda: hvd.reducescatter(torch.tensor(1.0)), "dimension")


def check_gradient_of_reducescatter() -> None:
    """The all-gather of the ranks' gradients: o+1 in the rows of rank o; times p for Sum; times the factors."""
    p, r = hvd.size(), hvd.rank()
    rows = 2 * p + 1
    expected = torch.tensor([o + 1.0 for o in range(p) for _ in range(rows_of(o, rows))])
    for op, factor in ((hvd.Average, 1), (hvd.Sum, p)):
        x = torch.ones(rows, requires_grad=True)
        (hvd.reducescatter(x, op=op) * (r + 1)).sum().backward()
        assert torch.equal(x.grad, expected * factor)
        x = torch.ones(rows, requires_grad=True)
        (hvd.reducescatter(x, op=op, prescale_factor=2.0, postscale_factor=3.0) * (r + 1)).sum().backward()
        assert torch.equal(x.grad, expected * factor * 6)
        group = [torch.ones(rows, requires_grad=True), torch.ones(rows, 2, requires_grad=True)]
        (sum(t.sum() for t in hvd.grouped_reducescatter(group, op=op)) * (r + 1)).backward()
        assert torch.equal(group[0].grad, expected * factor)
        assert torch.equal(group[1].grad, (expected * factor)[:, None].expand(-1, 2))


def check_grouped_allgather() -> None:
    """Uneven rows and different dtypes in one operation; gradients are the ranks' average at the own rows."""
    p, r = hvd.size(), hvd.rank()
    mine = [torch.full((r + 1,), float(r)), torch.full((2, 3), r)]
    for a, b in (hvd.grouped_allgather(mine), hvd.synchronize(hvd.grouped_allgather_async(mine, name="g"))):
        assert a.tolist() == [float(o) for o in range(p) for _ in range(o + 1)]
        assert b.shape == (2 * p, 3) and b[::2, 0].tolist() == list(range(p)) and b.dtype == torch.int64
    group = [torch.ones(r + 1, requires_grad=True), torch.ones(2, 2, requires_grad=True)]
    a, b = hvd.grouped_allgather(group)
    ((a * (torch.arange(a.numel()) + 1)).sum() * (r + 1) + (b * (r + 1)).sum()).backward()
    start = r * (r + 1) // 2
    assert torch.equal(group[0].grad, (torch.arange(start, start + r + 1) + 1.0) * (p + 1) / 2)
    assert (group[1].grad == (p + 1) / 2).all()
    require_error(ValueError, lambda: hvd.grouped_allgather([]), "at least one")
    require_error(hvd.HorovodInternalError, lambda: hvd.grouped_allgather([torch.tensor(1.0)]), "dimension")


def check_second_derivative_through_an_allgather() -> None:
    """y: all ranks' x; every rank's loss is the sum of y^3: the average of equal gradients is 3x^2. Of the sums of
    those each depends on the rank's own x alone: 6x, averaged 6x/p."""
    x = torch.full((2,), 2.0, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad((hvd.allgather(x) ** 3).sum(), x, create_graph=True)
    assert (first == 12).all()
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, torch.full_like(second, 12 / hvd.size()), rtol=2.0**-50, atol=0)


def check_to_and_from_a_root() -> None:
    p, r = hvd.size(), hvd.rank()
    for root in range(p):
        total = hvd.reduce(torch.full((2, 3), r + 1.0), root, op=hvd.Sum)
        assert (total is None) == (r != root) and (r != root or (total == p * (p + 1) / 2).all())
        mean = hvd.synchronize(hvd.reduce_async(torch.full((1000,), r + 1.0), root))
        assert r != root or (mean == (p + 1) / 2).all()
        for op, value in ((hvd.Min, 1), (hvd.Max, p)):
            best = hvd.reduce(torch.tensor(r + 1), root, op=op, name="best")
            assert r != root or best == value
        rows = hvd.gather(torch.full((r, 2), r, dtype=torch.bfloat16), root)
        assert (rows is None) == (r != root)
        assert r != root or rows[:, 0].tolist() == [float(o) for o in range(p) for _ in range(o)]
        given = torch.arange(2 * p + 1.0)[:, None].repeat(1, 2) if r == root else None
        part = hvd.scatter(given, root)
        start = sum(rows_of(o, 2 * p + 1) for o in range(r))
        assert part[:, 1].tolist() == [float(i) for i in range(start, start + rows_of(r, 2 * p + 1))]
        part = hvd.synchronize(hvd.scatter_async(given, root, [1] * p if r == root else None))
        assert part.tolist() == [[float(r)] * 2]
    require_error(ValueError, lambda: hvd.gather(torch.ones(1), p), "root_rank")
    if p > 1:
        require_mismatch(lambda: hvd.gather(torch.ones(1), int(last()), name="w"), "root rank differs")
        require_mismatch(lambda: hvd.scatter(torch.ones(p), int(last()), name="w"), "root rank differs")
        require_mismatch(lambda: hvd.reduce(torch.ones(1), int(last()), name="w"), "root rank differs")


def check_sparse() -> None:
    """Rank r has r+1 at row r and 1 at row 0."""
    p, r = hvd.size(), hvd.rank()
    mine = torch.sparse_coo_tensor(
        torch.tensor([[0, r]]), [[1.0, 1.0], [r + 1.0, 0.0]], (p + 1, 2), check_invariants=True
    )
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, p)):
        for name in ("embedding", None):
            finish = hvd.sparse_allreduce_async(mine, name, op)
            result = finish() if name else hvd.synchronize(finish)
            expected = torch.zeros(p + 1, 2)
            expected[0] += p
            expected[torch.arange(p), 0] += torch.arange(p) + 1.0
            assert result.is_sparse and result.shape == (p + 1, 2)
            assert torch.equal(result.to_dense(), expected / divisor), (result.to_dense(), expected)
    require_error(NotImplementedError, lambda: hvd.sparse_allreduce_async(mine, "x", hvd.Max), "Average and Sum")


@at_sizes(2, 3, 4)
def check_sparse_tensors_that_differ() -> None:
    """Row numbers of a longer tensor would lie outside a shorter one's."""
    rows, op = (9, hvd.Sum) if last() else (4, hvd.Average)

    def total(rows: int, columns: int = 2, op: Op = hvd.Sum) -> torch.Tensor:
        mine = torch.sparse_coo_tensor(
            torch.tensor([[rows - 1]]), torch.ones(1, columns), (rows, columns), check_invariants=True
        )
        return hvd.sparse_allreduce_async(mine, "embedding", op)()

    require_mismatch(
        lambda: total(rows), "sparse_allreduce 'embedding'", "shape of the dense tensor", "(9, 2)", "(4, 2)"
    )
    require_mismatch(lambda: total(9, rows), "shape of the dense tensor", "(9, 9)", "(9, 4)")
    require_mismatch(lambda: total(9, op=op), "sparse_allreduce 'embedding'", "operation differs", "Sum", "Average")


def check_adasum() -> None:
    """Orthogonal tensors add up, equal ones average; each tensor of a group on its own; one rank changes nothing."""
    p, r = hvd.size(), hvd.rank()
    if p & (p - 1):
        require_error(NotImplementedError, lambda: hvd.allreduce(torch.ones(2), op=hvd.Adasum), "power of two")
        return
    for dtype in (torch.float16, torch.float32, torch.float64, torch.bfloat16):
        mine = torch.zeros(p, dtype=dtype)
        mine[r] = r + 1
        assert hvd.allreduce(mine, op=hvd.Adasum).tolist() == [i + 1.0 for i in range(p)]
        same = torch.tensor([3.0, -4.0], dtype=dtype)
        assert torch.equal(hvd.allreduce(same, op=hvd.Adasum), same)
        a, b = hvd.grouped_allreduce([mine, same], op=hvd.Adasum)
        assert a.tolist() == [i + 1.0 for i in range(p)] and torch.equal(b, same)
        assert torch.equal(hvd.allreduce_(torch.zeros(3, dtype=dtype), op=hvd.Adasum), torch.zeros(3, dtype=dtype))
    if p == 2:  # a = (1, 0), b = (1, 1): a.b = 1, |a|^2 = 1, |b|^2 = 2: a/2 + 3b/4
        mine = torch.tensor([1.0, float(r)])
        assert hvd.allreduce(mine, op=hvd.Adasum).tolist() == [1.25, 0.75]
        assert hvd.allreduce(mine, op=hvd.Adasum, prescale_factor=2.0, postscale_factor=0.25).tolist() == [0.625, 0.375]
    if p > 1:
        require_error(
            hvd.HorovodInternalError, lambda: hvd.allreduce(torch.ones(2, dtype=torch.int32), op=hvd.Adasum), "float"
        )
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == p
