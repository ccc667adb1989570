"""Between backward() and step(): accumulating, clipping, unscaling, gradients set by hand."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch

import hvdlite.torch as hvd
from hvdlite.job import runtime
from tests.parallel.common import at_sizes, last, require_error, require_mismatch, require_same_bits
from tests.parallel.ranks.torch_gradients import attach, average, loss_of, require_grads, weights

SIZES = (1, 2, 3)


def check_local_gradients_behind_a_round() -> None:
    """Those of a backward in no_sync() are reduced by step(), also where an earlier backward was."""
    params = weights()
    optimizer = attach(params)
    loss_of(params).backward()
    with optimizer.no_sync():
        loss_of(params).backward()
    optimizer.step()
    assert all((p == -2 * average()).all() for p in params)
    for by_name in (True, False):
        params = weights()
        optimizer = attach(params, backward_passes_per_step=2)
        loss_of(params).backward()

        def closure() -> torch.Tensor:
            loss = loss_of(params)
            loss.backward()
            return loss

        _ = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        assert all((p == -2 * average()).all() for p in params)


def check_no_sync() -> None:
    """Passes inside only accumulate; the one outside reduces the sum of all."""
    params = weights()
    optimizer = attach(params)
    for _ in range(2):
        optimizer.zero_grad()
        with optimizer.no_sync():
            loss_of(params).backward()
            loss_of(params).backward()
            require_grads(params, 2 * (hvd.rank() + 1))
        loss_of(params).backward()
        require_grads(params, 3 * average())
        optimizer.step()


def check_a_step_in_no_sync() -> None:
    """It is told of, at the line that calls it; outside of no_sync() nothing is."""
    params = weights()
    optimizer = attach(params)
    loss_of(params).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    optimizer.zero_grad()
    with optimizer.no_sync():
        loss_of(params).backward()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            optimizer.step()
    assert all((p == -average() - (hvd.rank() + 1)).all() for p in params)
    assert [each.filename for each in told] == ([] if hvd.size() == 1 else [__file__])


def check_backward_passes_per_step() -> None:
    """The local sum of two passes, reduced once; then three; fewer passes are reduced by step()."""
    params = weights()
    optimizer = attach(params, backward_passes_per_step=2)
    for passes in (2, 3):
        optimizer.set_backward_passes_per_step(passes)
        told = (optimizer.op, optimizer.process_set, optimizer.backward_passes_per_step)
        assert told == (hvd.Average, hvd.global_process_set, passes)
        for _ in range(2):
            optimizer.zero_grad()
            for done in range(1, passes):
                loss_of(params).backward()
                require_grads(params, done * (hvd.rank() + 1))
            loss_of(params).backward()
            require_grads(params, passes * average())
            optimizer.step()
            require_grads(params, passes * average())
    optimizer.zero_grad()
    loss_of(params).backward()
    optimizer.step()
    require_grads(params, average())
    for wrong in (0, -1):
        require_error(ValueError, lambda: attach(weights(), backward_passes_per_step=wrong), str(wrong))


def check_accumulation_equals_the_sum() -> None:
    """Random gradients: two passes reduced once are the average of the local sums, in exact arithmetic of halves."""
    generator = torch.Generator().manual_seed(hvd.rank())
    whole = torch.randint(-100, 100, (2, 50), generator=generator, device="cpu").float()
    parts = list(whole.to(torch.get_default_device()))
    w = torch.nn.Parameter(torch.zeros(50))
    _ = attach([w], backward_passes_per_step=2, op=hvd.Sum)
    for part in parts:
        (w * part).sum().backward()
    assert torch.equal(w.grad, hvd.allreduce(parts[0] + parts[1], op=hvd.Sum))


def check_backwards_that_fail_are_no_passes() -> None:
    """On all ranks, and caught: the next ones count from where it was."""
    for op in (hvd.Average, hvd.Sum):
        w = torch.zeros(3, requires_grad=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), op=op, backward_passes_per_step=2)
        total = 2 * sum(range(1, hvd.size() + 1)) / (hvd.size() if op is hvd.Average else 1)
        for fails in (0, 1):
            optimizer.zero_grad()
            for number in range(3):
                (w * (hvd.rank() + 1)).sum().backward() if number != fails else fail_behind(w)
            if hvd.size() > 1:
                assert (w.grad == total).all(), (w.grad, total)
            optimizer.step()
            assert (w == -total * (fails + 1)).all(), w


def fail_behind(w: torch.Tensor) -> None:
    """A backward that raises once w's gradient is there, which is left as it was."""
    before = None if w.grad is None else w.grad.clone()

    def fail(p: torch.Tensor) -> None:
        raise ArithmeticError

    hook = w.register_post_accumulate_grad_hook(fail)
    try:
        w.sum().backward()
    except ArithmeticError:
        pass
    hook.remove()
    w.grad = before


def check_two_backwards_before_a_step() -> None:
    """With Average, gradients accumulate as in one process: the average of the sums."""
    params = weights()
    optimizer = attach(params)
    for _ in range(2):
        optimizer.zero_grad()
        for done in (1, 2, 3):
            loss_of(params).backward()
            require_grads(params, done * average())
        optimizer.step()


@at_sizes(2, 3, 4)
def check_another_number_of_backwards_on_one_rank() -> None:
    """A backward more than the others, who are in their next step: an error in words on all."""
    params = weights((3,))
    optimizer = attach(params)
    loss_of(params).backward()
    if not last():
        optimizer.step()
    require_mismatch(lambda: loss_of(params).backward(), "round differs", "step 2, backward 1", "step 1, backward 2",
                     "equally often", "hvd.join()")  # fmt: skip


def check_two_backwards_with_sum() -> None:
    """With Sum the second would add the first one's result again: an error that says what to do; then all goes on."""
    p = hvd.size()
    if p == 1:
        return
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        params = weights()
        optimizer = attach(params, op=hvd.Sum, compression=compression)
        for _ in range(2):
            loss_of(params).backward()
            require_error(
                RuntimeError,
                lambda: loss_of(params).backward(),
                "op=Sum",
                "no_sync",
                "backward_passes_per_step",
            )
            optimizer.zero_grad()
            loss_of(params).backward()
            require_grads(params, p * (p + 1) / 2)
            optimizer.step()
            optimizer.zero_grad()


def check_two_backwards_with_sum_and_a_plan_between() -> None:
    """A result is one, too, when a parameter has been unfrozen since."""
    params = weights((3,), (4,))
    params[1].requires_grad_(False)
    optimizer = attach(params, op=hvd.Sum)
    loss_of(params[:1]).backward()
    params[1].requires_grad_(True)
    if hvd.size() > 1:
        require_error(RuntimeError, lambda: loss_of(params).backward(), "op=Sum", "no_sync")
    optimizer.zero_grad()
    loss_of(params).backward()
    require_grads(params, average() * hvd.size())


def check_clipping_both_ways() -> None:
    """clip_grad_norm_ sees averages, whether synchronize() is called or not: n weights of (p+1)/2, clipped to norm 1."""
    for drop_in in (False, True):
        params = weights((3, 4), (4,))
        optimizer = attach(params)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(params).backward()
            if drop_in:
                optimizer.synchronize()
            norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
            # 4 (p+1)/2: float32 rounds a square root and a few sums; the cut divides by norm + 1e-6.
            assert abs(norm.item() - 4 * average()) < 1e-5
            before = [p.detach().clone() for p in params]
            if drop_in:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            for p, old in zip(params, before, strict=True):
                assert (old - p - 0.25).abs().max() < 1e-5
        require_same_bits(params)


def check_synchronize_again_does_no_harm() -> None:
    params = weights()
    optimizer = attach(params)
    loss_of(params).backward()
    for _ in range(3):
        optimizer.synchronize()
        require_grads(params, average())
    optimizer.step()
    assert all((p == -average()).all() for p in params)


def check_gradients_set_by_hand() -> None:
    """Without any backward, synchronize() or step() reduces what lies in p.grad."""
    for explicit in (True, False):
        params = weights()
        optimizer = attach(params)
        for step in (1, 2):
            for p in params:
                p.grad = torch.full_like(p, hvd.rank() + 1)
            if explicit:
                optimizer.synchronize()
                require_grads(params, average())
            optimizer.step()
            assert all((p == -step * average()).all() for p in params)


def check_a_step_with_a_closure_is_a_step() -> None:
    """What its closure reduced is applied: gradients set by hand afterwards are new, and Sum may add to zeros."""
    for op in (hvd.Average, hvd.Sum):
        w = torch.zeros(3, requires_grad=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), op=op)
        total = sum(range(1, hvd.size() + 1)) / (hvd.size() if op is hvd.Average else 1)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (w * (hvd.rank() + 1)).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        assert (w == -total).all(), w
        optimizer.zero_grad(set_to_none=False)
        (w * (hvd.rank() + 1)).sum().backward()
        optimizer.step()
        assert (w == -2 * total).all(), w
        optimizer.step(closure)
        optimizer.zero_grad()
        w.grad = torch.full((3,), hvd.rank() + 1.0)
        optimizer.step()
        assert (w == -4 * total).all(), w


@at_sizes(2, 3, 4)
def check_grad_scaler() -> None:
    """unscale_ and clip see averages; an infinity on one rank makes all skip, and agree on the smaller scale."""
    params = weights()
    optimizer = attach(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
    taken = 0
    for step in range(6):
        optimizer.zero_grad()
        infinite = step in (1, 4)
        loss = loss_of(params) * (float("inf") if infinite and last() else 1.0)
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            if not infinite:
                require_grads(params, average())
        scaler.step(optimizer)
        scaler.update()
        taken += not infinite
        assert all((p == -taken * average()).all() for p in params), f"step {step}"
        assert scaler.get_scale() == 64.0 / 2 ** ((step >= 1) + (step >= 4))
        assert len(set(hvd.allgather_object(scaler.get_scale()))) == 1


def check_grad_scaler_the_horovod_way() -> None:
    params = weights()
    optimizer = attach(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in (1, 2):
        optimizer.zero_grad()
        scaler.scale(loss_of(params)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        require_grads(params, average())
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        assert all((p == -step * average()).all() for p in params)


def check_a_closure_without_a_backward_leaves_no_gradient_local() -> None:
    """Set by hand, of a backward that only accumulated, within no_sync(), or made by the closures of other ranks."""
    for how in ("by hand", "accumulated", "no_sync", "some ranks"):
        w = torch.zeros(3, requires_grad=True)
        passes = 2 if how == "accumulated" else 1
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), backward_passes_per_step=passes)
        for step in range(1, 4):
            optimizer.zero_grad()
            loss = (w * (hvd.rank() + 1)).sum()
            if how == "by hand":
                w.grad = torch.full((3,), hvd.rank() + 1.0)
            elif how == "accumulated":
                loss.backward()
            elif how == "no_sync":
                with optimizer.no_sync():  # type: ignore[attr-defined]
                    loss.backward()

            def closure(loss: torch.Tensor = loss, how: str = how) -> torch.Tensor:
                if how == "some ranks" and hvd.rank():
                    loss.backward()
                return loss

            assert optimizer.step(closure) is loss
            total = sum(range(1, hvd.size() + 1)) - (how == "some ranks")
            torch.testing.assert_close(w.detach(), torch.full((3,), -step * total / hvd.size()))


def check_synchronize_reduces_what_has_been_set_since_it_was_called() -> None:
    """Also where the step between was left out, as those that overflow are; and nothing twice within a step."""
    w = torch.zeros(3, requires_grad=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0))
    expected = (hvd.size() + 1) / 2
    for _ in range(3):
        for skipped in (False, True, True):
            w.grad = torch.full((3,), hvd.rank() + 1.0)
            optimizer.synchronize()  # type: ignore[attr-defined]
            assert (w.grad == expected).all(), w.grad
            optimizer.synchronize()  # type: ignore[attr-defined]
            assert (w.grad == expected).all(), w.grad
            if not skipped:
                with optimizer.skip_synchronize():  # type: ignore[attr-defined]
                    optimizer.step()
    assert (w == -3 * expected).all()


class Longer(torch.optim.SGD):
    """What torch calls hooks around twice: once for each step()."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Broken(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ZeroDivisionError


class Persistent(Broken):
    """Goes on where a step inside its own has raised; its own step may raise, too."""

    broken = False

    def step(self, closure: Any = None) -> Any:
        with contextlib.suppress(ZeroDivisionError):
            super().step(closure)
        torch.optim.SGD.step(self, closure)
        torch.optim.SGD.step(self, closure)
        if self.broken:
            raise ZeroDivisionError


def check_a_step_inside_another_that_raises() -> None:
    """However many there are inside, and whichever raise: one step of the user's is one round."""
    torch.optim.SGD(weights(), lr=1.0), Broken(weights(), lr=1.0)
    params = weights()
    optimizer: Any = hvd.DistributedOptimizer(Persistent(params, lr=0.5))
    for step in range(1, 6):
        for p in params:
            p.grad = torch.full_like(p, hvd.rank() + 1.0)
        optimizer.broken = step in (2, 3)
        rounds = optimizer._hvdlite.results.done
        with contextlib.suppress(ZeroDivisionError):
            optimizer.step()
        assert all((p == -step * average()).all() for p in params), (step, params)
        assert optimizer._hvdlite.results.done == rounds + (hvd.size() > 1), step


def check_a_step_that_extends_another() -> None:
    """Of a subclass: one step of the user's is one round."""
    torch.optim.SGD(weights(), lr=1.0)
    for op, by_hand in ((hvd.Sum, False), (hvd.Average, True)):
        params = weights()
        optimizer: Any = hvd.DistributedOptimizer(Longer(params, lr=1.0), op=op)
        for step in range(1, 4):
            optimizer.zero_grad()
            if by_hand:
                for p in params:
                    p.grad = torch.full_like(p, hvd.rank() + 1.0)
            else:
                loss_of(params).backward()
            rounds = optimizer._hvdlite.results.done
            optimizer.step()
            factor = hvd.size() if op is hvd.Sum else 1
            assert all((p == -step * average() * factor).all() for p in params)
            assert optimizer._hvdlite.results.done == rounds + (by_hand and hvd.size() > 1)
    if hvd.size() in (1, 2, 4):
        params = weights()
        optimizer = hvd.DistributedOptimizer(Longer(params, lr=1.0), op=hvd.Adasum)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for infinite in (True, False):
            optimizer.zero_grad()
            (scaler.scale(loss_of(params)) * (float("inf") if infinite and last() else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        require_same_bits(params)


def check_a_step_that_is_given_a_module() -> None:
    """It is no closure."""

    class Given(torch.optim.SGD):
        def step(self, module: Any) -> Any:  # type: ignore[override]
            assert isinstance(module, torch.nn.Linear)
            return super().step()

    params = weights()
    optimizer = hvd.DistributedOptimizer(Given(params, lr=1.0))
    loss_of(params).backward()
    optimizer.step(torch.nn.Linear(1, 1))
    assert all((p == -average()).all() for p in params)


def check_compiled_autograd_is_refused() -> None:
    """It drops what is to be called at the end of a backward."""
    from torch._dynamo import compiled_autograd

    params = weights()
    optimizer = attach(params)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        if hvd.size() > 1:
            require_error(RuntimeError, lambda: loss_of(params).backward(), "compiled_autograd = False")
    optimizer.zero_grad()
    loss_of(params).backward()
    require_grads(params, average())


def check_a_sum_that_a_scaler_leaves_out_and_zeros_in_place() -> None:
    """An infinity on one rank is one on all, so all skip the step; what was zeroed in place counts as zeroed."""
    p, r = hvd.size(), hvd.rank()
    for passes, groups in ((1, 1), (2, 1), (1, 2)):
        a, b = params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(params, lr=1.0), op=hvd.Sum, backward_passes_per_step=passes, groups=groups
        )  # fmt: skip
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
        for step in range(4):
            for number in range(passes):
                broken = step in (1, 2) and r == p - 1 and number == 0
                scaler.scale((a * (float("inf") if broken else 1.0) + b * (r + 1)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=False)
        assert (a == -2 * passes * p).all() and (b == -2 * passes * p * (p + 1) / 2).all(), (a, b)


@at_sizes(2, 3, 4)
def check_results_that_were_not_zeroed_are_not_summed_again() -> None:
    """Clipped, in part zeroed, or zeroed on this rank and not on another, whose error comes in its own backward."""
    p, r = hvd.size(), hvd.rank()
    for change in ("nothing", "clip", "one", "no_sync"):
        a, b = params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), op=hvd.Sum)
        (a + b).sum().backward()
        if change == "clip":
            torch.nn.utils.clip_grad_norm_(params, 1e-3)
        elif change == "one":
            b.grad.zero_()
        elif change == "no_sync":
            optimizer.zero_grad(set_to_none=False)
            with optimizer.no_sync():
                (a + b).sum().backward()
            (a + b).sum().backward()  # of two passes
            assert (a.grad == 2 * p).all() and (b.grad == 2 * p).all()
        require_error(RuntimeError, (a + b).sum().backward, "second backward()", "op=Sum")
    a, b = params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), op=hvd.Sum)
    (a + b).sum().backward()
    if r == 0:
        optimizer.zero_grad(set_to_none=False)
    else:
        require_error(RuntimeError, (a + b).sum().backward, "second backward()", "op=Sum")
        optimizer.zero_grad()
    (a + b).sum().backward()
    assert (a.grad == p).all() and (b.grad == p).all()


def check_steps_are_counted() -> None:
    """Steps of any optimizer count: attached, with accumulation, or several per step of the training loop."""
    for attached in (True, False):
        hvd.shutdown()
        hvd.init()
        params, others = weights(), weights()
        first, second = (torch.optim.SGD(each, 0.1) for each in (params, others))
        if attached:
            first = hvd.DistributedOptimizer(first, backward_passes_per_step=2)
        for _ in range(5):
            for _ in range(2):
                loss_of(params).backward()
            first.step()
            loss_of(others).backward()
            second.step()
        assert runtime.current().observers.steps.number == 5


def check_a_nested_step_counts_once() -> None:
    class Nested(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    torch.optim.SGD(weights(), 0.1)  # torch wraps the step() of each class that has an instance
    hvd.shutdown()
    hvd.init()
    params = weights()
    optimizer = Nested(params, 0.1)
    for _ in range(5):
        loss_of(params).backward()
        optimizer.step()
    assert runtime.current().observers.steps.number == 5
