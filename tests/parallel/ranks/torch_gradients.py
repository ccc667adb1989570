"""What p.grad holds after backward(), by arithmetic: rank r's loss is (r+1) * sum of all weights, so its gradients are
r+1 everywhere, and their average over p ranks is (p+1)/2."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import hvdlite.torch as hvd
from hvdlite.errors import HvdliteError
from hvdlite.torch._tensors import to_tensor
from tests.parallel.common import last, require_error, require_same_bits, restart


def weights(*shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes or ((3, 4), (5,), (), (2, 0), (40, 40))]


def loss_of(params: Sequence[torch.Tensor], factor: float | None = None) -> torch.Tensor:
    """Gradients of `factor` everywhere; r+1 by default."""
    return sum((p.sum() for p in params), torch.zeros(())) * (hvd.rank() + 1 if factor is None else factor)


def average() -> float:
    return (hvd.size() + 1) / 2


def attach(params: Sequence[torch.nn.Parameter], **how: Any) -> torch.optim.SGD:
    return hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), **how)


def require_grads(params: Sequence[torch.Tensor], value: float) -> None:
    for i, p in enumerate(params):
        assert p.grad is not None and (p.grad == value).all(), f"gradient {i} is {p.grad}, not {value}"


def check_average_at_the_end_of_backward() -> None:
    """Before step(), in the backward's own time; and the step takes it as it is."""
    params = weights()
    optimizer = attach(params)
    for step in range(1, 4):
        loss_of(params).backward()
        require_grads(params, average())
        optimizer.step()
        assert all((p == -step * average()).all() for p in params)
        optimizer.zero_grad()


def check_every_operation() -> None:
    p = hvd.size()
    for op, value in ((hvd.Sum, p * (p + 1) / 2), (hvd.Min, 1), (hvd.Max, p), (hvd.Average, average())):
        params = weights()
        optimizer = attach(params, op=op)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(params).backward()
            require_grads(params, value)
            optimizer.step()


def check_gradient_is_the_arena() -> None:
    """p.grad is the view into the arena, whether zero_grad() sets None or zeros: there is no second copy."""
    for set_to_none in (True, False):
        params = weights()
        optimizer = attach(params)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(params).backward()
            require_grads(params, average())
            if hvd.size() > 1:
                attachment = optimizer._hvdlite
                for p, view in zip(params, attachment.slots.views, strict=True):
                    assert p.grad.data_ptr() == view.data_ptr() and p.grad.shape == view.shape
                    (arena,) = attachment.reducer.arenas.values()
                    memory = to_tensor(arena.own)
                    start, stop = memory.data_ptr(), memory.data_ptr() + memory.nbytes
                    assert p.numel() == 0 or start <= p.grad.data_ptr() < stop
            optimizer.step()


def check_gradients_made_to_point_elsewhere() -> None:
    """p.grad belongs to the user, who may have it point to other memory: between backward and step, where its values
    count as they are; and after it, for the next backward."""
    ways: list[Callable[[torch.nn.Parameter], None]] = [
        lambda p: setattr(p.grad, "data", p.grad.data.clamp(-1e3, 1e3)),
        lambda p: setattr(p.grad, "data", torch.zeros_like(p)),
        lambda p: p.grad.set_(torch.zeros_like(p)),
    ]
    for op, value in ((hvd.Average, average()), (hvd.Sum, average() * hvd.size())):
        for way, set_to_none in itertools.product(ways, (True, False) if op is hvd.Average else (True,)):
            params = weights()
            optimizer = attach(params, op=op)
            for _ in range(3):
                optimizer.zero_grad(set_to_none=set_to_none)
                loss_of(params).backward()
                require_grads(params, value)
                for p in params:
                    way(p)
                optimizer.step()


def check_gradients_that_are_kept() -> None:
    """A gradient kept in a variable keeps its values when p.grad is another tensor."""
    for how in ({}, {"op": hvd.Sum}, {"compression": hvd.Compression.fp16}):
        factor = hvd.size() if how.get("op") is hvd.Sum else 1
        params = weights()
        optimizer = attach(params, **how)
        kept: list[tuple[float, torch.Tensor | None]] = []
        for step in range(1, 5):
            optimizer.zero_grad()
            if step == 4:  # no gradient
                params[0].sum().mul(step * (hvd.rank() + 1)).backward()
                require_grads(params[:1], step * average() * factor)
            else:
                loss_of(params, step * (hvd.rank() + 1)).backward()
                require_grads(params, step * average() * factor)
                kept += [(step * average() * factor, p.grad) for p in params]
            optimizer.step()
        for value, grad in kept:
            assert grad is not None and (grad == value).all(), (value, grad)
        if hvd.size() > 1 and "compression" not in how:  # where nobody keeps any, none is copied
            del kept, grad
            handed_out: list[list[int]] = []
            for _ in range(3):
                optimizer.zero_grad()
                loss_of(params).backward()
                require_grads(params, average() * factor)
                handed_out.append([id(alias) for alias in optimizer._hvdlite.slots.aliases])
                optimizer.step()
            assert handed_out[1] == handed_out[2]


def check_gradients_whose_memory_is_given_away() -> None:
    """What is shared with other processes gets another storage."""
    params = weights((3, 4), (5,))
    optimizer = attach(params)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(params).backward()
        require_grads(params, average())
        for p in params:
            p.grad.share_memory_()
        optimizer.step()
    require_same_bits(params)


def check_gradients_replaced_by_a_hook() -> None:
    """A hook of the user's runs behind ours, which may have taken the gradient already."""
    for overlap in ("0", "1"):
        restart(OVERLAP=overlap, BUCKET_MB="1")
        params = weights((600, 600), (5,), (600, 600))
        optimizer = attach(params)
        for p in params:
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 2))
        for _ in range(2):
            optimizer.zero_grad()
            if overlap == "1" and hvd.size() > 1:
                require_error(HvdliteError, loss_of(params).backward, "parameter.", "in place", "HVDLITE_OVERLAP=0")
                break
            loss_of(params).backward()
            require_grads(params, 2 * average())
            optimizer.step()
    restart()


def check_optimizers_that_step_in_backward() -> None:
    """A hook that steps and forgets the gradient, registered before or after attaching."""
    for before in (True, False):
        params = weights((3,), (4,))
        optimizers = {p: torch.optim.SGD([p], lr=1.0) for p in params}

        def step(p: torch.nn.Parameter) -> None:
            optimizers[p].step()  # noqa: B023
            optimizers[p].zero_grad()  # noqa: B023

        for attaching in (not before, before):
            for p in params:
                if attaching:
                    hvd.DistributedOptimizer(optimizers[p])
                else:
                    p.register_post_accumulate_grad_hook(step)
        for number in range(1, 4):
            loss_of(params).backward()
            assert all((p == -number * average()).all() for p in params), (before, params)


def check_parameters_replaced_again_and_again() -> None:
    """New ones may have the ids of old ones, on some ranks."""
    (p,) = weights((8,))
    optimizer = attach([p])
    for number in range(12):
        (p,) = weights((8,))
        optimizer.param_groups[0]["params"] = [p]
        junk = weights((3,)) if hvd.rank() == 0 and number % 3 == 0 else None
        for step in range(3):
            optimizer.zero_grad()
            loss_of([p]).backward()
            if step > 0:  # the first backward knows nothing of it
                require_grads([p], average())
            optimizer.step()
        assert (p == -3 * average()).all()
        del junk


def check_two_optimizers_of_the_same_parameters() -> None:
    """Gradients set by hand are averaged at either's step."""
    params = weights()
    first, second = attach(params), attach(params)
    for number, optimizer in enumerate((first, second, first), 1):
        for p in params:
            p.grad = torch.full_like(p, hvd.rank() + 1.0)
        optimizer.step()
        if number == 1:
            assert all((p == -average()).all() for p in params)
            second.step()  # the same gradients
    require_same_bits(params)


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
            loss = loss_of(params)  # noqa: B023
            loss.backward()
            return loss

        _ = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        assert all((p == -2 * average()).all() for p in params)


def check_gradients_stay_readable_after_shutdown() -> None:
    params = weights()
    optimizer = attach(params)
    loss_of(params).backward()
    restart()
    require_grads(params, average())
    del optimizer


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


def check_backward_passes_per_step() -> None:
    """The local sum of two passes, reduced once; then three; fewer passes are reduced by step()."""
    params = weights()
    optimizer = attach(params, backward_passes_per_step=2)
    for passes in (2, 3):
        optimizer.set_backward_passes_per_step(passes)
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
        require_error(ValueError, lambda: attach(weights(), backward_passes_per_step=wrong), str(wrong))  # noqa: B023


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
            require_error(RuntimeError, lambda: loss_of(params).backward(), "op=Sum", "no_sync",  # noqa: B023
                          "backward_passes_per_step")
            optimizer.zero_grad()
            loss_of(params).backward()
            require_grads(params, p * (p + 1) / 2)
            optimizer.step()
            optimizer.zero_grad()


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


def check_grad_scaler() -> None:
    """unscale_ and clip see averages; an infinity on one rank makes all skip, and agree on the smaller scale."""
    if hvd.size() == 1:
        return
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


def check_exception_in_backward() -> None:
    """The user catches what a hook raised in the middle of a backward; the next backward is right."""
    for overlap in ("0", "1"):
        restart(OVERLAP=overlap, BUCKET_MB="0.001")
        first, second = (torch.nn.Parameter(torch.ones(1000)) for _ in range(2))
        optimizer = attach([first, second])
        broken = [False]

        def maybe(grad: torch.Tensor) -> None:
            if broken[0]:  # noqa: B023
                raise KeyError("in the middle")

        for step in range(6):
            broken[0] = step % 2 == 1
            between = first * 1
            between.register_hook(maybe)
            loss = (between.sum() + second.sum()) * (hvd.rank() + 1)
            optimizer.zero_grad()
            if broken[0]:
                require_error(KeyError, loss.backward, "in the middle")
                continue
            loss.backward()
            require_grads([first, second], average())
            optimizer.step()
    restart()


def check_backward_in_another_graph_and_autograd_grad() -> None:
    """torch.autograd.grad and backwards of foreign weights do not communicate; double backward works."""
    params = weights((3,))
    _ = attach(params)
    if hvd.rank() == 0:  # alone: it must not wait for the others
        (found,) = torch.autograd.grad((params[0] ** 2).sum(), params, create_graph=True)
        assert (found == 0).all()
        other = torch.ones(2, requires_grad=True)
        (other * 2).sum().backward()
        assert (other.grad == 2).all()
    (penalty,) = torch.autograd.grad(((params[0] + 1) ** 2).sum() * (hvd.rank() + 1), params, create_graph=True)
    penalty.sum().backward()  # d/dw of 2(w+1)(r+1) is 2(r+1)
    require_grads(params, 2 * average())


class Maybe(torch.autograd.Function):
    """Changes nothing. Its backward raises KeyError when it is told to."""

    broken = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if Maybe.broken:
            raise KeyError("in the middle")
        return grads[0]


def segments(params: Sequence[torch.Tensor], reentrant: bool) -> torch.Tensor:
    """A loss through checkpointed segments: beside each other, one in another, and one parameter in two."""
    from functools import partial

    from torch.utils.checkpoint import checkpoint

    again = partial(checkpoint, use_reentrant=reentrant)
    x = again(lambda x: x * params[0], torch.ones(3, requires_grad=True))
    x = Maybe.apply(x * params[1])
    one = again(lambda x: again(lambda y: y * params[2], x) * params[3], x)
    other = again(lambda x: x * params[2] * 2, x)
    return (one + other).sum() * (hvd.rank() + 1)


def check_reentrant_checkpoint() -> None:
    """Reentrant activation checkpointing runs backwards inside a backward: to the user it is one, as without."""
    for how, passes in (({}, 1), ({"op": hvd.Sum}, 1), ({"backward_passes_per_step": 2}, 2)):
        found: dict[bool, list[torch.Tensor]] = {}
        for reentrant in (True, False):
            params = [torch.nn.Parameter(torch.full((3,), 1.0 + i)) for i in range(4)]
            optimizer = attach(params, **how)
            optimizer.param_groups[0]["lr"] = 0.0
            values = found[reentrant] = []
            for step in range(4):
                optimizer.zero_grad()
                if step == 1 and passes == 1:
                    loss, Maybe.broken = segments(params, reentrant), True
                    require_error(KeyError, loss.backward, "in the middle")
                    Maybe.broken = False
                    optimizer.zero_grad()
                for _ in range(passes):
                    segments(params, reentrant).backward()
                values += [p.grad.clone() for p in params if p.grad is not None]
                optimizer.step()
        assert len(found[True]) == 16
        assert all(torch.equal(a, b) for a, b in zip(found[True], found[False], strict=True)), how


def check_nested_run_whose_outer_one_tells_nothing() -> None:
    """Nothing behind the function's node runs, with autograd.grad; or the function fails. The next backward is one."""
    params = weights((3,))
    optimizer = attach(params)

    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            with torch.enable_grad():
                loss_of(params).backward()
            if Maybe.broken:
                raise KeyError("in the middle")
            return grads[0]

    for Maybe.broken in (False, True, False):
        x = torch.ones(3, requires_grad=True)
        kept = Inside.apply(x).sum()  # its graph lives on
        if Maybe.broken:
            require_error(KeyError, kept.backward, "in the middle")
        else:
            torch.autograd.grad(kept, [x])
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(params).backward()
            require_grads(params, average())
            optimizer.step()
        del kept


def check_training_inside_a_backward() -> None:
    """A function whose backward trains another model: each of its steps sees averages."""
    params = weights()
    optimizer = attach(params)

    class Train(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            for _ in range(3):
                optimizer.zero_grad()
                with torch.enable_grad():
                    loss_of(params).backward()
                optimizer.step()
            return grads[0]

    for times in range(1, 3):
        Train.apply(torch.ones(2, requires_grad=True)).sum().backward()
        assert all((p == -3 * times * average()).all() for p in params)
    optimizer.zero_grad()
    loss_of(params).backward()
    require_grads(params, average())


def check_segments_that_differ() -> None:
    """How many backwards run inside a backward is a rank's own affair."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(4)]
    optimizer = attach(params)
    for _ in range(2):
        optimizer.zero_grad()
        segments(params, reentrant=last()).backward()
        require_grads(params[:2], 3 * average())
        optimizer.synchronize()


def check_gradient_that_changes_after_it_left() -> None:
    """A weight that reentrant segments share gets its gradient in parts: an error, where the first has left."""
    for overlap in ("0", "1"):
        restart(OVERLAP=overlap, BUCKET_MB="0.00001")
        params = [torch.nn.Parameter(torch.ones(3)) for _ in range(4)]
        _ = attach([params[0], params[1], params[3], params[2]])  # the last leaves first
        loss = segments(params, reentrant=True)
        if overlap == "1" and hvd.size() > 1:
            require_error(HvdliteError, loss.backward, "parameter.3", "use_reentrant=False", "HVDLITE_OVERLAP=0")
        else:
            loss.backward()
            require_grads(params[2:3], 3 * average())
    restart()


def check_copies_of_a_model_are_free() -> None:
    """A deepcopy taken after attaching (an EMA, a frozen teacher) is not reduced."""
    model = torch.nn.Linear(3, 2)
    _ = attach(list(model.parameters()))
    ema = copy.deepcopy(model)
    (sum(p.sum() for p in ema.parameters()) * (hvd.rank() + 1)).backward()
    require_grads(list(ema.parameters()), hvd.rank() + 1)
