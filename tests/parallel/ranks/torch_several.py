"""Several attached optimizers. On other ranks their gradients come in another order, or not at all."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

import hvdlite.torch as hvd
from hvdlite.errors import HvdliteError
from hvdlite.gradients.reducer import Reducer
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Round
from tests.parallel.common import at_sizes, last, require_error, require_same_bits, restart
from tests.parallel.ranks.torch_gradients import attach, average, loss_of, require_grads, weights


def in_order(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """A loss that has gradients of r+1 everywhere, the last one's first."""
    loss = torch.zeros(())
    for p in params:
        loss = (loss + p.sum()) * 1
    return loss * (hvd.rank() + 1)


def turned(parts: Sequence[list[torch.nn.Parameter]], by: int) -> list[torch.nn.Parameter]:
    """All parameters of these, from another part on for each rank."""
    first = (hvd.rank() + by) % len(parts)
    return [p for part in (*parts[first:], *parts[:first]) for p in part]


def check_plans_of_several_in_one_backward() -> None:
    """Parameters come to all optimizers, are unfrozen, or are cast, between two backwards."""
    for overlap in ("0", "1"):
        restart(OVERLAP=overlap, BUCKET_MB="0.00001")
        parts = [weights((3,), (4,)) for _ in range(3)]
        optimizers = [attach(part) for part in parts]
        for step in range(8):
            for part, optimizer in zip(parts, optimizers, strict=True):
                if step == 2:
                    part += weights((2,))
                    optimizer.add_param_group({"params": part[2:]})
                if step in (4, 5):
                    part[0].requires_grad_(step == 5)
                if step == 6:
                    part[1].data = part[1].data.double()
                optimizer.zero_grad()
            in_order(turned(parts, step)).backward()
            for part, optimizer in zip(parts, optimizers, strict=True):
                require_grads([p for p in part if p.requires_grad], average())
                optimizer.step()
    restart()


def check_a_rank_joins_before_any_round_of_an_optimizer_that_took_over() -> None:
    """Its plan is there when it is attached, and the optimizer before has none."""
    trunk, *heads = params = weights((3,), (4,), (5,))
    optimizers = [attach(params[:2]), attach(params)]
    if hvd.rank() == 0:
        in_order(params).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert hvd.join() == 0
    hvd.broadcast_parameters(params, root_rank=0)
    for p, steps in ((trunk, 2), (heads[0], 2), (heads[1], 1)):
        torch.testing.assert_close(p.detach(), torch.full_like(p, -steps / hvd.size()), rtol=1e-6, atol=0)


def check_threads_that_train_a_model_each() -> None:
    """On one rank, one's backward ends while some of the other's buckets have left: at its end, or in step() for what
    no_sync() has accumulated."""
    restart(OVERLAP="1", BUCKET_MB="0.00001")
    models = [weights((3,), (4,), (5,)) for _ in range(2)]
    optimizers = [attach(params) for params in models]
    usual, begun, done = Reducer.request, threading.Event(), threading.Event()

    def request(reducer: Reducer, number: int, tag: Round, flag: int = 0) -> Request:
        last = number == len(reducer.plan.buckets) - 1
        if hvd.rank() == 0 and threading.current_thread() is not threading.main_thread() and last:
            begun.set()
            assert done.wait(30)
        return usual(reducer, number, tag, flag)

    def train(number: int, local: bool = False) -> None:
        optimizers[number].zero_grad()
        with optimizers[number].no_sync() if local else contextlib.nullcontext():
            loss_of(models[number]).backward()
        optimizers[number].step()
        require_grads(models[number], average())

    try:
        Reducer.request = request  # type: ignore[assignment]
        for local in (False, True):
            with ThreadPoolExecutor(1) as other:
                training = other.submit(train, 1, local)
                assert hvd.size() == 1 or hvd.rank() or begun.wait(30)
                train(0)
                done.set()
                training.result()
            begun.clear()
            done.clear()
    finally:
        Reducer.request = usual
    restart()


def check_failures_at_different_places_before_a_backward_of_all() -> None:
    """All ranks' backwards of one optimizer raise, on rank 0 before any gradient is there, on others behind some. They
    train another one, and then both in one backward: an error on all, and the next is right."""
    for firsts_first in (True, False):
        restart(OVERLAP="1", BUCKET_MB="0.00001")
        parts = [weights((3,), (4,), (5,)) for _ in range(2)]
        optimizers = [attach(part) for part in parts]

        def step(*numbers: int) -> None:
            for optimizer in optimizers:
                optimizer.zero_grad()
            in_order([p for number in numbers for p in parts[number]]).backward()
            for number in numbers:
                require_grads(parts[number], average())
                optimizers[number].step()

        for _ in range(2):
            step(0)
            step(1)
        hook = parts[1][0 if hvd.rank() else 2].register_hook(fail)
        require_error(KeyError, lambda: step(1), "in the middle")
        hook.remove()
        step(0)
        both = (0, 1) if firsts_first else (1, 0)
        if hvd.size() > 1:
            require_error(HvdliteError, lambda: step(*both), "raised after some of its gradients had left")
        for _ in range(2):
            step(*both)
    restart()


def fail(grad: torch.Tensor) -> None:
    raise KeyError("in the middle")


def check_ranks_reach_different_ones_within_no_sync() -> None:
    """Experts: the ranks' backwards reach different ones within no_sync() of each, also behind one that reached all.
    step() averages, on all ranks; so it does where a rank has no backward there."""
    trunk, expert = params = weights((3,), (4,))
    optimizers = [attach([p]) for p in params]
    for behind in (0, 1, 0, 2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(behind):
            loss_of(params).backward()
        with optimizers[0].no_sync(), optimizers[1].no_sync():
            loss_of([trunk, *[expert] * hvd.rank()], 1).backward()
            if hvd.rank():
                loss_of([expert], 1).backward()
        for optimizer in optimizers:
            optimizer.step()
        p = hvd.size()
        of_expert = behind * average() + sum(r + (r > 0) for r in range(p)) / p
        torch.testing.assert_close(trunk.grad, torch.full((3,), 1 + behind * average()), rtol=1e-6, atol=0)
        if p > 1 or behind:
            torch.testing.assert_close(expert.grad, torch.full((4,), of_expert), rtol=1e-6, atol=0)


@at_sizes(2, 3, 4)
def check_an_optimizer_gets_parameters_that_another_has() -> None:
    """By add_param_group: an error on all ranks in the next backward, or the next step; what was right stays right."""
    for overlap, by_hand in (("0", False), ("1", False), ("0", True)):
        restart(OVERLAP=overlap, BUCKET_MB="0.00001")
        trunk, *heads = params = weights((3,), (5,), (6,))
        optimizers = [attach([trunk, heads[0]]), attach([heads[1]])]
        for step in range(4):
            for p in params:
                p.grad = None
            if step == 2:
                optimizers[1].add_param_group({"params": [trunk]})
            if by_hand:
                for p in params:
                    p.grad = torch.full_like(p, hvd.rank() + 1)
            else:
                loss = in_order(params[:: 1 if last() else -1])
                if step < 2:
                    loss.backward()
                else:
                    require_error(ValueError, loss.backward, "1 parameters", "are also those of another SGD")
            if step < 2 or not by_hand:
                optimizers[0].step()
            if step < 2:
                optimizers[1].step()
                require_grads(params, average())
            else:
                require_error(ValueError, optimizers[1].step, "1 parameters", "are also those of another SGD")
    restart()


def check_an_optimizer_whose_place_was_taken_gets_more() -> None:
    """The optimizer that reduces for it must get them, too: until then its step is an error."""
    trunk, late = weights((3,), (4,))
    before, now = attach([trunk]), attach([trunk])
    before.add_param_group({"params": [late]})
    loss_of([trunk, late]).backward()
    if hvd.size() > 1:
        require_error(ValueError, before.step, "add them to the other")
    now.add_param_group({"params": [late]})
    for p in (trunk, late):
        p.grad = None
    for optimizer in (before, now):
        loss_of([trunk, late]).backward()
        require_grads([trunk, late], average())
        optimizer.step()
        optimizer.zero_grad()


def check_dropped_ones_go_though_one_that_stays_shares() -> None:
    """A model that keeps its first optimizer, and gets others for each of six tasks: the first one keeps the latest."""
    trunk = weights((3,))
    stays = attach(trunk)
    dropped = []
    for _ in range(6):
        optimizer = attach(trunk)
        dropped.append(weakref.ref(optimizer))
        loss_of(trunk).backward()
        require_grads(trunk, average())
        optimizer.step()
        stays.step()
        optimizer.zero_grad()
        del optimizer
    gc.collect()
    assert len([each for each in dropped if each() is not None]) <= (1 if hvd.size() > 1 else 0)
    loss_of(trunk).backward()
    require_grads(trunk, average())
    stays.step()
    require_same_bits(trunk)
