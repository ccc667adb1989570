"""The parameters that take part: in other models, added, frozen, unfrozen, unused, tied, grouped, sparse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import hvdlite.torch as hvd
from hvdlite.torch.attach import gradients
from tests.parallel.common import at_sizes, digest, last, require_error, require_mismatch, require_same_bits, restart
from tests.parallel.ranks.torch_gradients import attach, average, loss_of, require_grads, weights

SIZES = (1, 2, 3)


def model(*layers: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(*shape, dtype=dtype) for shape in layers))


def require_usable() -> None:
    """After an error: another optimizer on this job averages."""
    params = weights((3,), (2, 2))
    _ = attach(params)
    loss_of(params).backward()
    require_grads(params, average())


@at_sizes(2, 3, 4)
def check_models_that_differ() -> None:
    """Shape, dtype, order or number of the last rank's layers: a diff on every rank, before any gradient moves."""
    cases: list[tuple[str, Callable[[], torch.nn.Sequential], tuple[str, ...]]] = [
        ("shape", lambda: model((4, 3), (3, 3)), ("-1.weight: float32[2, 3]", "+1.weight: float32[3, 3]")),
        ("dtype", lambda: model((4, 3), (3, 2), dtype=torch.float64), ("-0.weight: float32", "+0.weight: float64")),
        ("missing", lambda: model((4, 3)), ("-1.weight", "-1.bias")),
        ("more", lambda: model((4, 3), (3, 2), (2, 2)), ("+2.weight: float32[2, 2]",)),
    ]
    for what, other, words in cases:
        net = other() if last() else model((4, 3), (3, 2))
        before = digest(list(net.parameters()))
        text = require_mismatch(
            lambda: hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters()),
            "parameters differ", "--- rank", f"+++ rank {hvd.size() - 1}\n", "Build the same model", *words)  # fmt: skip
        assert "0.bias" not in text or what == "dtype", "the diff shows what is equal"
        assert digest(list(net.parameters())) == before
        require_usable()


@at_sizes(2, 3, 4)
def check_weights_in_another_memory_order() -> None:
    """Gradients are added as they lie in memory."""
    net = torch.nn.Conv2d(3, 4, 3)
    if last():
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    plain = torch.optim.SGD(net.parameters(), lr=1.0)
    require_mismatch(lambda: hvd.DistributedOptimizer(plain), "parameters differ", "strides [27, 1, 9, 3]")
    require_usable()


@at_sizes(2, 3, 4)
def check_same_layers_in_another_order() -> None:
    net = model((3, 3), (3, 3))
    pairs = list(net.named_parameters())
    if last():
        pairs.reverse()
    require_mismatch(lambda: hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in pairs], lr=1.0), pairs),
                     "parameters differ", "1.weight")  # fmt: skip
    require_usable()


@at_sizes(2, 3, 4)
def check_model_that_failed_can_be_attached_when_repaired() -> None:
    net = model((4, 3 + last()))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    require_mismatch(lambda: hvd.DistributedOptimizer(optimizer), "parameters differ")
    net = model((4, 3))
    optimizer.param_groups[0]["params"] = list(net.parameters())
    hvd.DistributedOptimizer(optimizer)
    loss_of(list(net.parameters())).backward()
    require_grads(list(net.parameters()), average())


def two_steps(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Each of them on averages, which clipping would see."""
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(params).backward()
        require_grads(params, average())
        optimizer.step()


def check_added_parameters() -> None:
    """add_param_group after attaching: the next backward's round includes them, be they small or large."""
    params = weights((3,), (4,))
    optimizer = attach(params)
    for new in ((), weights((2, 2), (5,)), weights((600, 600), (3,))):
        if new:
            optimizer.add_param_group({"params": new, "lr": 2.0})
            params += new
        two_steps(params, optimizer)
    require_same_bits(params)


def check_unfrozen_parameter_of_a_plan() -> None:
    """One that a plan has because of a gradient set by hand: after a backward it is as the others, also alone."""
    params, new = weights((3,), (4,)), weights((2,))
    params[1].requires_grad = False
    optimizer = attach(params)
    params[1].grad = torch.ones(4)
    optimizer.add_param_group({"params": new})
    loss_of([params[0], *new]).backward()
    optimizer.step()
    params[1].requires_grad = True
    for used in ([*params, *new], params[1:]):
        optimizer.zero_grad()
        loss_of(used).backward()
        require_grads(used, average())
        optimizer.step()
    require_same_bits([*params, *new])


def check_model_cast_after_attaching() -> None:
    """Its parameters are the same objects with another dtype: planned anew, or an error where only one rank did it."""
    torch.manual_seed(0)  # or ranks begin with different weights, an error that depends on the checks before
    net = torch.nn.Linear(3, 2)
    optimizer = attach(list(net.parameters()))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        optimizer.zero_grad()
        net.to(dtype)
        loss_of(list(net.parameters())).backward()
        assert all(p.grad.dtype == dtype for p in net.parameters())
        require_grads(list(net.parameters()), average())
        optimizer.step()
    if hvd.size() > 1:
        optimizer.zero_grad()
        net.to(torch.float32 if last() else torch.bfloat16)
        require_mismatch(
            lambda: loss_of(list(net.parameters())).backward(), f"rank {hvd.size() - 1} has a new list of parameters"
        )


def check_frozen_and_unfrozen() -> None:
    """Frozen parameters are left out; from the moment they are unfrozen they take part; refrozen they do not."""
    params = weights((3,), (4,), (2,))
    params[1].requires_grad_(False)
    optimizer = attach(params)
    for frozen in (True, False, True):
        params[1].requires_grad_(not frozen)
        params[1].grad = None
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(params).backward()
            require_grads([params[0], params[2]], average())
            if frozen:
                assert params[1].grad is None
            else:
                require_grads([params[1]], average())
            optimizer.step()
    assert (params[0] == -6 * average()).all() and (params[1] == -2 * average()).all()


def check_backward_of_new_ones_only() -> None:
    """Behind one that has been reduced: step() averages. With Sum it would have to sum again: an error."""
    for unfrozen in (True, False):
        for op in (hvd.Average, hvd.Sum):
            old, new = weights((3,), (4,))
            new.requires_grad_(not unfrozen)
            optimizer = attach([old, new] if unfrozen else [old], op=op)
            loss_of([old]).backward()
            optimizer.step()
            optimizer.zero_grad()
            loss_of([old]).backward()
            if unfrozen:
                new.requires_grad_(True)
            else:
                optimizer.add_param_group({"params": [new]})
            if op is hvd.Sum and hvd.size() > 1:
                if unfrozen:  # its hook tells of the backward
                    require_error(RuntimeError, loss_of([new]).backward, "second backward()", "op=Sum")
                else:
                    loss_of([new]).backward()
                    require_error(RuntimeError, optimizer.step, "parameter.1", "op=Sum")
                optimizer.zero_grad()
                loss_of([old, new]).backward()
            else:
                loss_of([new]).backward()
            optimizer.step()
            require_grads([old, new], average() * (1 if op is hvd.Average else hvd.size()))
            require_same_bits([old.detach(), new.detach()])


def check_frozen_ones_with_a_gradient() -> None:
    """A step moves them, so they are reduced: set by hand, or frozen between backwards."""
    p, r = hvd.size(), hvd.rank()
    for way in ("by hand", "no_sync", "passes"):
        a, b = params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
        passes = 2 if way == "passes" else 1
        sgd = torch.optim.SGD(params, lr=1.0)
        optimizer: Any = hvd.DistributedOptimizer(sgd, backward_passes_per_step=passes)
        for step in range(1, 4):
            optimizer.zero_grad()
            if way == "by hand":
                a.grad, b.grad = torch.full((3,), r + 1.0), torch.full((3,), r + 1.0)
            elif way == "no_sync":
                with optimizer.no_sync():
                    ((a + b) * (r + 1)).sum().backward()
            else:
                ((a + b) * (r + 1)).sum().backward()
            a.requires_grad_(False)
            if way == "by hand":
                b.requires_grad_(False)
            else:
                ((a + b) * (r + 1)).sum().backward()
            optimizer.step()
            a.requires_grad_()
            b.requires_grad_()
            assert (a == -step * (p + 1) / 2).all(), (way, a)
            assert (b == -step * (p + 1) / 2 * (1 if way == "by hand" else 2)).all(), (way, b)
        optimizer.zero_grad()
        if way != "passes":  # unfrozen, and autograd's again
            ((a + b) * (r + 1)).sum().backward()
            assert (a.grad == (p + 1) / 2).all() and (b.grad == (p + 1) / 2).all()


def check_frozen_one_with_an_old_gradient_on_one_rank() -> None:
    """From before attaching: gone with the first zero_grad()."""
    params = weights((3,), (4,))
    if last():
        loss_of(params).backward()
    params[0].requires_grad_(False)
    optimizer = attach(params)
    optimizer.zero_grad()
    loss_of(params).backward()
    require_grads(params[1:], average())


@at_sizes(2, 3, 4)
def check_change_on_one_rank_only() -> None:
    """One rank unfreezes a parameter and the others do not: an error on all, no hang; undone, all goes on."""
    for overlap in ("0", "1"):
        restart(OVERLAP=overlap)
        params = weights((3,), (4,))
        params[1].requires_grad_(False)
        optimizer = attach(params)
        loss_of(params).backward()
        optimizer.step()
        for _ in range(2):
            params[1].requires_grad_(last())
            optimizer.zero_grad()
            require_mismatch(lambda: loss_of(params).backward(), "kind differs", f"rank {hvd.size() - 1} has a new list of parameters",
                             "add_param_group")  # fmt: skip
            params[1].requires_grad_(False)
            params[1].grad = None
            optimizer.zero_grad()
            loss_of(params).backward()
            require_grads(params[:1], average())
            optimizer.step()
    restart()


def check_optimizer_whose_parameters_are_all_frozen() -> None:
    """It waits for its time, also when other optimizers are attached meanwhile."""
    sleeping, others = weights((3,), (4,)), weights((2,))
    for p in sleeping:
        p.requires_grad_(False)
    optimizer = attach(sleeping)
    _ = attach(others)
    for p in sleeping:
        p.requires_grad_(True)
    for step in range(1, 3):
        optimizer.zero_grad()
        loss_of(sleeping).backward()
        optimizer.step()
        require_grads(sleeping, average())
        assert all((p == -step * average()).all() for p in sleeping)


def check_unused_on_all_ranks() -> None:
    """No gradient anywhere: grad stays None, and weight decay does not move the parameter."""
    params = [torch.nn.Parameter(torch.ones(n)) for n in (3, 4, 5)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.5, weight_decay=0.5, momentum=0.5))
    for _ in range(3):
        optimizer.zero_grad()
        loss_of([params[0], params[2]]).backward()
        assert params[1].grad is None
        optimizer.step()
    assert (params[1] == 1).all() and (params[0] != 1).all()


def check_unused_on_some_ranks() -> None:
    """The others' gradients averaged with zeros, on every rank; differently in every step."""
    p, r = hvd.size(), hvd.rank()
    for overlap in ("0", "1"):
        restart(OVERLAP=overlap, BUCKET_MB="0.001")
        params = weights((300,), (400,), (500,))
        optimizer = attach(params)
        for step in range(4):
            optimizer.zero_grad()
            used_by = step % p
            loss_of(params if r == used_by else [params[0], params[2]]).backward()
            require_grads([params[0], params[2]], average())
            require_grads([params[1]], (used_by + 1) / p)
            optimizer.step()
        require_same_bits(params)
    restart()


def check_rank_whose_loss_uses_nothing_else() -> None:
    """Disjoint halves: each parameter used by exactly one rank."""
    p, r = hvd.size(), hvd.rank()
    params = weights(*((n + 2,) for n in range(p)))
    optimizer = attach(params)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of([params[r]]).backward()
        for owner, w in enumerate(params):
            require_grads([w], (owner + 1) / p)
        optimizer.step()


def check_set_to_none_after_use() -> None:
    """A parameter that was used once and not again: no stale gradient comes back from the arena."""
    params = weights((3,), (4,))
    optimizer = attach(params)
    loss_of(params).backward()
    optimizer.zero_grad()
    loss_of(params[:1]).backward()
    assert params[1].grad is None
    optimizer.zero_grad()
    loss_of(params if hvd.rank() == 0 else params[:1]).backward()
    require_grads(params[1:], 1 / hvd.size())


def check_tied_weights() -> None:
    """One weight at two places: its gradient is the sum of both, averaged once."""
    tied = torch.nn.Parameter(torch.zeros(4, 4))
    other = torch.nn.Parameter(torch.zeros(4))
    optimizer = attach([tied, other])
    for _ in range(3):
        optimizer.zero_grad()
        loss_of([tied, tied, other, tied.t()]).backward()
        require_grads([tied], 3 * average())
        require_grads([other], average())
        optimizer.step()


def check_groups() -> None:
    """A number of groups or lists of parameters: right gradients, and the members share a bucket."""
    for how in (2, 5, "lists"):
        params = weights(*((100 * n,) for n in range(1, 6)))
        groups = [[params[0], params[4]], [params[2]]] if how == "lists" else how
        restart(BUCKET_MB="0.001")
        optimizer = attach(params, groups=groups)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(params).backward()
            require_grads(params, average())
        if hvd.size() > 1 and how == "lists":
            slots = optimizer._hvdlite.reducer.plan.slots
            assert slots[0].bucket == slots[4].bucket != slots[2].bucket
        if hvd.size() > 1 and how == 2:
            slots = optimizer._hvdlite.reducer.plan.slots
            assert len({slot.bucket for slot in slots}) == 2
    restart()
    params = weights((2,), (3,))
    for wrong in (0, -1, [[params[0], params[0]]], [["name"]]):
        require_error(ValueError, lambda: attach(params, groups=wrong), "groups")
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _ = attach(params, num_groups=2)
    assert [(w.category, "parallel" in w.filename) for w in caught] == [(DeprecationWarning, True)]
    loss_of(params).backward()
    require_grads(params, average())


def check_predivide_factor() -> None:
    """f divides before the sum and multiplies after: nothing changes but rounding, none here for powers of two."""
    for factor in (2.0, 0.5, 1024.0):
        params = weights()
        _ = attach(params, gradient_predivide_factor=factor)
        loss_of(params).backward()
        require_grads(params, average())
    require_error(ValueError, lambda: attach(weights(), gradient_predivide_factor=2.0, op=hvd.Sum), "Average")


def embed(sparse: bool, rows: int = 10) -> torch.nn.Embedding:
    torch.manual_seed(3)
    return torch.nn.Embedding(rows, 3, sparse=sparse)


def rows_of(step: int) -> torch.Tensor:
    """What this rank looks up: some rows twice, other rows on other ranks; on the last rank of several none."""
    r = hvd.rank()
    return torch.tensor([] if last() else [r, r + 1, r, (r + step) % 10], dtype=torch.int64)


def run_embedding(
    sparse: bool, make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], **how: Any
) -> torch.Tensor:
    """Four steps; odd ones use no embedding at all on the last rank (not even an empty lookup)."""
    table, dense = embed(sparse), torch.nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(make([table.weight, dense]), **how)
    for step in range(4):
        optimizer.zero_grad()
        if last() and step % 2:
            loss = dense.sum()
        else:
            loss = (table(rows_of(step)) * dense).sum() * (hvd.rank() + 1)
        loss.backward()
        if hvd.size() > 1 or sparse:
            assert table.weight.grad is not None
            assert table.weight.grad.is_sparse == sparse, (step, table.weight.grad)
        optimizer.step()
    require_same_bits([table.weight.detach(), dense])
    return table.weight.detach()


def check_sparse_gradients_equal_dense() -> None:
    """SGD on a sparse embedding, also densified for the way, ends where the dense one does (a few float32 sums apart)."""
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    dense = run_embedding(False, sgd)
    # Four steps, each of up to 4 * p products of size below 100: 16 p additions of eps * 100.
    bound = 16 * hvd.size() * 100 * 2.0**-24
    for how in ({}, {"sparse_as_dense": True}, {"op": hvd.Average}):
        found = run_embedding(True, sgd, **how)
        assert (found - dense).abs().max() <= bound, how


def check_sparse_gradients_of_single_elements() -> None:
    """As gather(sparse_grad=True) makes them, with two sparse dimensions, on one rank only."""
    table, w = torch.nn.Parameter(torch.ones(5, 7)), torch.nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([table, w], lr=1.0))
    for _ in range(2):
        optimizer.zero_grad()
        loss = w.sum()
        if hvd.rank() == 0:
            loss = loss + torch.gather(table, 1, torch.tensor([[0, 2]]), sparse_grad=True).sum()
        loss.backward()
        optimizer.step()
    expected = torch.ones(5, 7)
    expected[0, [0, 2]] -= 2 * (1 / hvd.size())
    assert torch.allclose(table, expected) and torch.equal(w, -torch.ones(3)), (table, w)
    require_same_bits([table.detach(), w.detach()])


def check_sparse_gradients_without_rows_are_added_to() -> None:
    """No rank has used the table in one of two backwards, after zero_grad(set_to_none=False)."""
    table, w = embed(sparse=True), torch.nn.Parameter(torch.ones(1))
    optimizer = attach([table.weight, w])
    loss_of([w, table(rows_of(0))]).backward()
    optimizer.step()
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        loss_of([w]).backward()
        loss_of([table(torch.tensor([1, 2, 3]))]).backward()
        optimizer.step()
        assert table.weight.grad is not None
        require_grads([w], average())
        assert (table.weight.grad.to_dense()[1:4] == average()).all(), table.weight.grad


@at_sizes(2, 3, 4)
def check_a_gradient_that_is_sparse_on_some_ranks_and_dense_on_others() -> None:
    """The first time, too, when nobody knows of it before all are reduced; the last rank's is dense."""
    r, p = hvd.rank(), hvd.size()
    bf16 = {"compression": hvd.Compression.bf16}
    for rows, how, keep in (
        (5, {}, False),
        (5, {}, True),
        (200_000, {}, False),
        (5, {"op": hvd.Sum}, False),
        (5, bf16, True),
    ):
        divisor, tolerance = 1 if "op" in how else p, 2**-8 if how is bf16 else 1e-6
        table, w = torch.nn.Parameter(torch.ones(rows, 2)), torch.nn.Parameter(torch.ones(3))
        optimizer = attach([table, w], **how)
        if keep and last():  # a gradient of the user's own, which results would be copied into
            table.grad = torch.zeros_like(table)
            kept = table.grad  # noqa: F841
        expected = torch.full((rows, 2), 8.0 / divisor)
        expected[1] += sum(range(1, p)) / divisor
        for step in range(2):
            looked_up = torch.nn.functional.embedding(torch.tensor([1]), table, sparse=True).sum() * (r + 1)
            loss = (table * 8).sum() if last() else looked_up
            (loss + w.sum()).backward()
            assert table.grad is not None and table.grad.is_sparse
            found = table.grad.to_dense()
            assert torch.allclose(found, expected, rtol=tolerance), (rows, how, step, found[:3])
            require_grads([w], p / divisor)
            optimizer.step()
            optimizer.zero_grad()
        require_same_bits([table.detach(), w.detach()])


@at_sizes(2, 3, 4)
def check_what_is_dense_on_others_goes_with_a_round_that_fails() -> None:
    """The sum of the first table's gradients raises, on all ranks: of the second's nothing is left for the next round."""
    tables = [torch.nn.Parameter(torch.ones(4, 2)) for _ in range(2)]
    optimizer, reduce_sparse = attach(tables), gradients.reduce_sparse  # type: ignore[attr-defined]

    def backward() -> None:
        looked_up = [torch.nn.functional.embedding(torch.tensor([1]), table, sparse=True).sum() for table in tables]
        (sum((table * 8).sum() for table in tables) if last() else sum(looked_up)).backward()

    def fail(*arguments: object) -> None:
        raise KeyError("first")

    try:
        gradients.reduce_sparse = fail  # type: ignore[attr-defined, assignment]
        require_error(KeyError, backward, "first")
    finally:
        gradients.reduce_sparse = reduce_sparse  # type: ignore[attr-defined]
    optimizer.zero_grad()
    backward()
    expected = torch.full((4, 2), 8.0 / hvd.size())
    expected[1] += (hvd.size() - 1) / hvd.size()
    assert all(torch.allclose(table.grad.to_dense(), expected) for table in tables), tables[1].grad.to_dense()


def check_sparse_sum() -> None:
    """op=Sum: row i looked up by rank r adds r+1."""
    p = hvd.size()
    table = embed(True)
    _ = attach([table.weight], op=hvd.Sum)
    (table(torch.tensor([0, hvd.rank()])).sum() * (hvd.rank() + 1)).backward()
    expected = torch.zeros(10, 3)
    expected[0] += p * (p + 1) / 2
    for r in range(p):
        expected[r] += r + 1
    assert torch.equal(table.weight.grad.to_dense(), expected)


def check_sparse_adam() -> None:
    """An embedding alone, with the optimizer that takes sparse gradients only; equal weights on all ranks."""
    table = embed(True)
    before = table.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(table.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        table(torch.tensor([hvd.rank(), hvd.rank() + 1])).sum().backward()
        optimizer.step()
    moved = (table.weight != before).any(1)
    assert moved[: hvd.size() + 1].all() and not moved[hvd.size() + 1 :].any()
    require_same_bits(table.weight)


@at_sizes(2, 3, 4)
def check_sparse_sum_twice_is_refused() -> None:
    table = embed(True)
    optimizer = attach([table.weight], op=hvd.Sum)
    for _ in range(2):
        table(torch.tensor([1])).sum().backward()
        require_error(RuntimeError, lambda: table(torch.tensor([1])).sum().backward(), "op=Sum")
        optimizer.zero_grad()
        table(torch.tensor([1])).sum().backward()
        assert (table.weight.grad.to_dense()[1] == hvd.size()).all()
        optimizer.step()
        optimizer.zero_grad()


def check_a_parameter_without_a_shape_is_named() -> None:
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(2))
    optimizer = torch.optim.SGD(lazy.parameters(), lr=0.1)
    if hvd.size() > 1:
        require_error(
            ValueError,
            lambda: hvd.DistributedOptimizer(optimizer, lazy.named_parameters()),
            "0.weight has no shape yet",
        )


def check_averages_behind_swapped_tensors() -> None:
    """torch.utils.swap_tensors takes away what autograd calls, but not the dictionary in which the hooks are."""
    params = weights((3,), (2, 2))
    optimizer = attach(params)
    for step in range(4):
        if step == 1:
            for p in params:
                torch.utils.swap_tensors(p, torch.nn.Parameter(p.detach().clone()))
        optimizer.zero_grad()
        loss_of(params).backward()
        if step != 1:  # in which no hook told of a backward
            require_grads(params, average())
        optimizer.step()
    require_same_bits(params)


def check_averages_of_a_model_that_is_thawed() -> None:
    """An optimizer all of whose parameters were frozen when it was attached: clipping sees averages at once."""
    params = weights((3,), (2, 2))
    for p in params:
        p.requires_grad_(False)
    optimizer = attach(params)
    for p in params:
        p.requires_grad_(True)
    two_steps(params, optimizer)
    require_same_bits(params)
