"""Process sets in hvdlite.torch: collectives with gradients, and optimizers that reduce within a set."""

from __future__ import annotations

from typing import Any

import torch

import hvdlite.torch as hvd
from hvdlite import elastic
from tests.parallel.common import require_error

SIZES = (2, 3, 4)


def with_set(ranks: list[int]) -> hvd.ProcessSet:
    hvd.shutdown()
    s = hvd.ProcessSet(ranks)
    hvd.init(process_sets=[s])
    return s


def odd_ones() -> hvd.ProcessSet:
    """All ranks but rank 0."""
    hvd.shutdown()
    hvd.init()
    return with_set(list(range(1, hvd.size())))


def check_collectives_and_their_gradients() -> None:
    s = odd_ones()
    n, r = len(s.ranks), hvd.rank()
    if r in s.ranks:
        place, mean = s.rank(), (sum(s.ranks) + n) / n
        x = torch.ones(2, requires_grad=True)
        (hvd.allreduce(x, process_set=s) * (r + 1)).sum().backward()
        assert (x.grad == mean).all()
        x = torch.ones(place + 1, requires_grad=True)
        rows = hvd.allgather(x * r, process_set=s)
        assert rows.tolist() == [float(o) for i, o in enumerate(s.ranks) for _ in range(i + 1)]
        rows.sum().backward()
        assert (x.grad == r).all()
        x = torch.ones(2, requires_grad=True)
        (hvd.broadcast(x, s.ranks[-1], process_set=s) * (r + 1)).sum().backward()
        assert (x.grad == (mean if r == s.ranks[-1] else 0)).all()
        x = torch.ones(n, requires_grad=True)
        (hvd.alltoall(x, process_set=s) * (r + 1)).sum().backward()
        assert x.grad.tolist() == [o + 1.0 for o in s.ranks]
        x = torch.ones(n, requires_grad=True)
        (hvd.reducescatter(x, op=hvd.Sum, process_set=s) * (r + 1)).sum().backward()
        assert x.grad.tolist() == [n * (o + 1.0) for o in s.ranks]
        if n > 1 and n < hvd.size():
            require_error(NotImplementedError, lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum, process_set=s))
    else:
        for call in (
            lambda: hvd.allreduce(torch.ones(1), process_set=s),
            lambda: hvd.allgather(torch.ones(1), process_set=s),
            lambda: hvd.alltoall(torch.ones(n), process_set=s),
            lambda: hvd.barrier(s),
        ):
            require_error(ValueError, call, "not a member")
    hvd.shutdown()
    hvd.init()


def step(w: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    (w.sum() * hvd.rank()).backward()
    optimizer.step()


def require_removal_told(w: torch.nn.Parameter, optimizer: torch.optim.Optimizer, s: hvd.ProcessSet) -> None:
    hvd.add_process_set(s)
    hvd.DistributedOptimizer(optimizer, process_set=s)
    step(w, optimizer)
    hvd.remove_process_set(s)
    if hvd.rank() in s.ranks:
        for kind in (hvd.HorovodInternalError, ValueError):
            require_error(kind, lambda: step(w, optimizer), str(s.ranks), "remove_process_set", "hvd.add_process_set()",
                          "hvd.DistributedOptimizer")  # fmt: skip
    for call in (lambda: hvd.allreduce(w.detach(), process_set=s),
                 lambda: hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), process_set=s)):  # fmt: skip
        require_error(ValueError, call, str(s.ranks), "not registered", "hvd.add_process_set()")
    hvd.add_process_set(s)
    if hvd.rank() in s.ranks:
        require_error(ValueError, lambda: step(w, optimizer), "hvd.DistributedOptimizer")
    hvd.remove_process_set(s)


def check_an_optimizer_whose_set_is_removed() -> None:
    """step() names the set and the cure, before and after the set is added again; then attaching again is the cure."""
    p, r = hvd.size(), hvd.rank()
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    s = hvd.ProcessSet(range(p - 1) if p > 2 else [1])
    for _ in range(2):
        w = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([w], lr=1.0)
        for _ in range(2):
            require_removal_told(w, optimizer, s)
        hvd.add_process_set(s)
        hvd.DistributedOptimizer(optimizer, process_set=s)
        with torch.no_grad():
            w.zero_()
        step(w, optimizer)
        expected = sum(s.ranks) / len(s.ranks) if r in s.ranks else r
        torch.testing.assert_close(w.detach(), torch.full((3,), -float(expected)))
        hvd.remove_process_set(s)
    hvd.shutdown()
    hvd.init()


def check_an_optimizer_within_a_set() -> None:
    """Members average among themselves; outside nothing is attached, and the methods do nothing."""
    s = odd_ones()
    r = hvd.rank()
    w = torch.nn.Parameter(torch.zeros(3))
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), process_set=s)
    for _ in range(2):
        optimizer.zero_grad()
        (w.sum() * r).backward()
        assert (w.grad == (sum(s.ranks) / len(s.ranks) if r in s.ranks else r)).all()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    require_error(
        ValueError,
        lambda: hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), process_set=hvd.ProcessSet([0])),
        "not registered",
    )
    hvd.shutdown()
    hvd.init()


def check_optimizers_of_a_set_and_of_all() -> None:
    """Attached in that order: members of the set have one more, and all still find each other."""
    s = odd_ones()
    p, r = hvd.size(), hvd.rank()
    inner, outer = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))
    a = hvd.DistributedOptimizer(torch.optim.SGD([inner], lr=1.0), process_set=s)
    b = hvd.DistributedOptimizer(torch.optim.SGD([outer], lr=1.0))
    for _ in range(3):
        (inner.sum() * r + outer.sum() * r).backward()
        assert (outer.grad == (p - 1) / 2).all()
        assert r not in s.ranks or (inner.grad == sum(s.ranks) / len(s.ranks)).all()
        for optimizer in (a, b):
            optimizer.step()
            optimizer.zero_grad()
    assert hvd.join() in range(p)
    (outer.sum() * r).backward()
    assert (outer.grad == (p - 1) / 2).all()
    hvd.shutdown()
    hvd.init()


def check_starting_anew_without_a_set_that_was_removed() -> None:
    """Its optimizer is attached no more; others are."""
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    members = hvd.add_process_set(range(hvd.size() - 1))
    w, v = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
    theirs = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), process_set=members)
    ours = hvd.DistributedOptimizer(torch.optim.SGD([v], lr=1.0))
    hvd.remove_process_set(members)
    elastic.start_again()
    (v.sum() * (hvd.rank() + 1)).backward()
    assert (v.grad == (hvd.size() + 1) / 2).all()
    ours.step()
    if hvd.rank() < hvd.size() - 1:
        require_error(RuntimeError, theirs.step, "removed")


def check_some_parameters_of_an_optimizer_over_other_ranks() -> None:
    """Refused on all ranks, also on those that are in one of the sets only, in either order; not where the other is
    no more, or the sets are those of the same optimizer made anew."""
    s = odd_ones()
    trunk, *heads = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    for first, then in ((hvd.global_process_set, s), (s, hvd.global_process_set)):
        one = attached([trunk, heads[0]], first)
        require_error(ValueError, lambda: attached([trunk, heads[1]], then), "1 parameters", str(then.ranks))
        del one
        attached([trunk, heads[1]], then)
        one = attached([trunk, heads[1]], first)
        one = attached([trunk, *heads], then)
        sum(p.sum() * (hvd.rank() + 1) for p in (trunk, *heads)).backward()
        one.step()
        expected = sum(r + 1 for r in then.ranks) / len(then.ranks) if hvd.rank() in then.ranks else hvd.rank() + 1
        assert all((p.grad == expected).all() for p in (trunk, *heads)), (trunk.grad, expected)
        one.zero_grad()
        del one
    hvd.shutdown()
    hvd.init()


def attached(params: list[torch.nn.Parameter], process_set: hvd.ProcessSet) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.0), process_set=process_set)
