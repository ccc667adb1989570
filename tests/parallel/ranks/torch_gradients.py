"""The values of p.grad after backward().

Rank r's loss is (r+1) * the sum of all weights. So its gradients are r+1 everywhere, and their average over p ranks is
(p+1)/2."""

from __future__ import annotations

import copy
import itertools
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

import hvdlite.torch as hvd
from hvdlite.errors import HvdliteError
from hvdlite.torch.tensors import to_tensor
from tests.parallel.common import logged, require_error, require_same_bits, restart


def weights(*shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [
        torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes or ((3, 4), (5,), (), (2, 0), (40, 40))
    ]


def loss_of(params: Sequence[torch.Tensor], factor: float | None = None) -> torch.Tensor:
    """Gradients of `factor` everywhere; r+1 by default. They are computed, as most are: autograd copies those of a sum."""
    return sum((p.mul(1.0).sum() for p in params), torch.zeros(())) * (hvd.rank() + 1 if factor is None else factor)


def average() -> float:
    return (hvd.size() + 1) / 2


def attach(params: Sequence[torch.Tensor], **how: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), **how)


def train(params: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Three steps as usual."""
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(params).backward()
        optimizer.step()


def require_grads(params: Sequence[torch.Tensor], value: float | torch.Tensor) -> None:
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
                for p, view in zip(params, attachment.gradients.slots.views, strict=True):
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
        lambda p: p.grad.set_(torch.zeros_like(p)),  # type: ignore[call-overload]
        lambda p: setattr(p.grad, "data", p.grad.data.t() if p.shape == (40, 40) else p.grad.data),  # the same memory
    ]
    for op, value in ((hvd.Average, average()), (hvd.Sum, average() * hvd.size())):
        for way, set_to_none in itertools.product(ways, (True, False) if op is hvd.Average else (True,)):
            params = weights()
            optimizer = attach(params, op=op)
            for _ in range(3):
                optimizer.zero_grad(set_to_none=set_to_none)
                loss_of(params).backward()
                require_grads(params, value)
                assert hvd.size() == 1 or all(p.grad.stride() == p.stride() for p in params)
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
                handed_out.append([id(alias) for alias in optimizer._hvdlite.gradients.slots.aliases])
                optimizer.step()
            assert handed_out[1] == handed_out[2]


def check_gradients_are_kept_where_only_others_have_new_ones() -> None:
    params = weights((3,), (4,))
    optimizer = attach(params)
    loss_of(params).backward()
    kept = [p.grad for p in params]
    optimizer.zero_grad()
    loss_of(params[hvd.rank() == 0 :]).backward()
    assert all((grad == average()).all() for grad in kept), kept


def check_views_of_gradients_that_are_kept() -> None:
    """So does what shares a gradient's memory, or a graph that has saved it. (The former not on a GPU, the first time:
    nothing in torch gives a storage there other memory; a warning says so.)"""
    for view in (torch.Tensor.detach, lambda grad: grad.data, lambda grad: grad.view(-1)[1:]):
        for options in ({}, {"compression": hvd.Compression.fp16}):
            params = weights()
            optimizer = attach(params, **options)
            kept: list[tuple[float, torch.Tensor]] = []
            for step in range(1, 4):
                optimizer.zero_grad()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore" if params[0].is_cuda and step == 2 else "error")
                    loss_of(params, step * (hvd.rank() + 1)).backward()
                kept += [(step * average(), view(p.grad)) for p in params]
            for value, part in kept[len(params) :] if params[0].is_cuda else kept:
                assert (part == value).all(), (value, part)
    params = weights()
    optimizer = attach(params)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(params, hvd.rank() + 1).backward()
        penalty = sum((p * p * p.grad).sum() for p in params)
        optimizer.zero_grad()
        loss_of(params, 10.0 * (hvd.rank() + 1)).backward()
        optimizer.zero_grad()
        penalty.backward()
        for p in params:
            assert torch.allclose(p.grad, 2 * p.detach() * average()), (p.grad, p)


def check_a_gradient_that_is_kept_before_a_sparse_one() -> None:
    table = torch.nn.Parameter(torch.zeros(6, 3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([table], lr=1.0), sparse_as_dense=True)
    rows = torch.tensor([hvd.rank() % 6, 2], device=table.device)
    torch.nn.functional.embedding(rows, table).sum().backward()
    kept, before = table.grad, table.grad.clone()
    for _ in range(2):
        optimizer.zero_grad()
        (5 * torch.nn.functional.embedding(rows, table, sparse=True)).sum().backward()
        assert torch.equal(kept, before) and torch.allclose(table.grad.to_dense(), 5 * before)


def check_gradients_of_the_users_stay_theirs() -> None:
    """Parts of one flat tensor, or a list of them, made once and zeroed and scaled as such: results are in them."""
    ways: list[dict[str, Any]] = [{}, {"op": hvd.Sum}, {"compression": hvd.Compression.fp16}]
    for overlap, options in itertools.product("01", ways):
        restart(OVERLAP=overlap, BUCKET_MB="0.00001")
        for kind in ("flat", "list"):
            params = weights()
            optimizer = attach(params, **options)
            flat = torch.zeros(sum(p.numel() for p in params))
            parts = [part.view_as(p) for part, p in zip(flat.split([p.numel() for p in params]), params, strict=True)]
            grads = parts if kind == "flat" else [torch.zeros_like(p) for p in params]
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
            if kind == "flat":
                del grads, grad, parts
            for step in range(1, 4):
                with torch.no_grad():
                    flat.zero_() if kind == "flat" else torch._foreach_zero_(grads)
                loss_of(params, step * (hvd.rank() + 1)).backward()
                value = step * average() * (hvd.size() if "op" in options else 1)
                require_grads(params, value)
                assert (flat == value).all() if kind == "flat" else all((grad == value).all() for grad in grads)
                optimizer.step()
            require_same_bits(params)
    restart()


def check_gradients_of_the_users_that_come_later() -> None:
    """The same, where the rounds before were as usual, and of a parameter that only another rank's backward reaches."""
    params = weights()
    optimizer = attach(params)
    train(params, optimizer)
    flat = torch.zeros(sum(p.numel() for p in params))
    for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad = part.view_as(p)
    del part
    for _ in range(3):
        loss_of(params, hvd.rank() + 1).backward()
        require_grads(params, average())
        assert (flat == average()).all(), flat
        optimizer.step()
        flat.zero_()
    require_same_bits(params)
    params = weights((3,), (4,))
    optimizer = attach(params)
    train(params, optimizer)
    mine = [torch.zeros_like(p) for p in params]
    for p, grad in zip(params, mine, strict=True):
        p.grad = grad
    loss_of(params[: 2 if hvd.rank() == 0 else 1]).backward()
    assert (mine[0] == average()).all() and (mine[1] == 1 / hvd.size()).all() and params[1].grad is mine[1], mine
    optimizer.step()


def check_gradients_that_a_hook_keeps_stay_this_ranks() -> None:
    """Also where it has changed them in place, or autograd has copied them, as it does those of a sum."""
    params = weights((3,), (4,))
    optimizer = attach(params)
    train(params, optimizer)
    kept: list[torch.Tensor] = []

    def keep(p: torch.Tensor) -> None:
        kept.append(p.grad.clamp_(-100, 100) if p is params[0] else p.grad)

    for p in params:
        p.register_post_accumulate_grad_hook(keep)
    for _ in range(3):
        optimizer.zero_grad()
        ((params[0].mul(1.0).sum() + params[1].sum()) * (hvd.rank() + 1)).backward()
        require_grads(params, average())
        optimizer.step()
    assert len(kept) == 6 and all((grad == hvd.rank() + 1).all() for grad in kept), kept


def check_a_hook_changes_gradients_of_the_users() -> None:
    """In place, behind ours: before they are averaged."""

    def tenfold(p: torch.Tensor) -> None:
        p.grad.mul_(10)

    for overlap in "01":
        restart(OVERLAP=overlap, BUCKET_MB="0.00001")
        for shape in ((3,), (600, 600)):  # a megabyte is packed at once
            (param,) = weights(shape)
            optimizer = attach([param])
            param.register_post_accumulate_grad_hook(tenfold)
            flat = torch.zeros(2 * param.numel())
            param.grad = flat[: param.numel()].view_as(param)
            for step in range(1, 3):
                flat.zero_()
                loss_of([param], step * (hvd.rank() + 1)).backward()
                assert (flat[: param.numel()] == 10 * step * average()).all()
                optimizer.step()
    restart()


def check_gradients_in_columns_of_the_users_stay_theirs() -> None:
    p = torch.nn.Parameter(torch.zeros(4, 3))
    optimizer, buffer = attach([p]), torch.zeros(4, 6)
    for step in range(1, 3):
        buffer.zero_()
        p.grad = buffer[:, :3]
        loss_of([p], step * (hvd.rank() + 1)).backward()
        assert (buffer[:, :3] == step * average()).all() and (buffer[:, 3:] == 0).all(), buffer
        optimizer.step()


def check_gradients_that_are_let_go_of_leave_nothing() -> None:
    """Neither a file's descriptor nor a warning, though each took one when it was kept."""
    params = weights(*((4,),) * 20)
    if params[0].is_cuda:
        return  # nor does it take one
    optimizer = attach(params)
    kept: list[torch.Tensor] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(1, 5):
            before = len(os.listdir("/proc/self/fd"))
            optimizer.zero_grad()
            loss_of(params, step * (hvd.rank() + 1)).backward()
            assert all((grad == (step - 1) * average()).all() for grad in kept)
            kept = [p.grad.detach() for p in params]
    kept.clear()
    optimizer.zero_grad()
    assert len(os.listdir("/proc/self/fd")) <= before


def check_gradients_that_are_kept_take_no_descriptors() -> None:
    """A model may have more parameters than a process may have files (1024 by default)."""
    params = weights(*((4,),) * 20)
    if params[0].is_cuda:
        return
    optimizer = attach(params)
    kept: list[torch.Tensor | None] = []
    before = len(os.listdir("/proc/self/fd"))
    for step in range(1, 4):
        optimizer.zero_grad()
        loss_of(params, step * (hvd.rank() + 1)).backward()
        kept += [p.grad for p in params]
    assert all(grad is not None and (grad == (i // 20 + 1) * average()).all() for i, grad in enumerate(kept))
    assert len(os.listdir("/proc/self/fd")) <= before, len(os.listdir("/proc/self/fd")) - before


def check_gradients_in_a_graph_are_told_of() -> None:
    params = weights()
    optimizer = attach(params)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss_of([p * p + p for p in params], hvd.rank() + 1).backward(create_graph=True)
    require_grads(params, average())
    told = [str(each.message) for each in caught if "create_graph" in str(each.message) and "hvd" in str(each.message)]
    assert bool(told) == (hvd.size() > 1), caught
    optimizer.step()


def check_sums_that_a_step_has_applied_are_told_of() -> None:
    """Nothing zeroes them before the next backward, or step: they are summed again. Once, and not where something does,
    or they are averages."""
    for op in (hvd.Sum, hvd.Average):
        for after in ("nothing", "a step", "zeros", "zeros, and no use", "None", "another tensor"):
            params, used = weights((3, 4), (5,)), 2
            optimizer = attach(params, op=op)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(3):
                    if after == "another tensor":
                        for p in params:
                            p.grad = None if p.grad is None else torch.zeros_like(p)
                    elif after not in ("nothing", "a step"):
                        optimizer.zero_grad(set_to_none=after == "None")
                    loss_of(params[:used]).backward()
                    used = 1 if after == "zeros, and no use" else 2
                    optimizer.step()
                    if after == "a step":
                        optimizer.step()
                        optimizer.zero_grad()
            told = [str(each.message) for each in caught if "has applied it" in str(each.message)]
            expected = hvd.size() > 1 and op is hvd.Sum and after in ("nothing", "a step")
            assert len(told) == expected, (op, after, told)
            assert not told or "parameter" in told[0]


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


def check_gradients_changed_by_a_hook() -> None:
    """In place or replaced, by a hook registered after attaching: it runs behind ours, which may have taken the gradient
    already, and must not have sent it."""

    def replace(p: torch.Tensor) -> None:
        p.grad = p.grad * 2

    def change(p: torch.Tensor) -> None:
        p.grad.mul_(2)

    compressions = (hvd.Compression.none, hvd.Compression.fp16)
    for overlap, hook, compression in itertools.product("01", (replace, change), compressions):
        restart(OVERLAP=overlap, BUCKET_MB="0.00001")
        params = weights((600, 600), (5,), (600, 600))
        optimizer = attach(params, compression=compression)
        for p in params:
            p.register_post_accumulate_grad_hook(hook)
        for _ in range(4):
            optimizer.zero_grad()
            loss_of(params).backward()
            require_grads(params, 2 * average())
            optimizer.step()
        require_same_bits(params)
    restart()


def check_what_a_later_hook_costs_is_told_once() -> None:
    """Where buckets would leave during backward, else it costs nothing."""
    with logged(logging.INFO) as told:
        for overlap in "01":
            restart(OVERLAP=overlap, BUCKET_MB="0.00001")
            params = weights((50,), (50,))
            optimizer = attach(params)
            told.clear()
            for p in params:
                p.register_post_accumulate_grad_hook(lambda p: None)
            for _ in range(2):
                loss_of(params).backward()
                optimizer.zero_grad()
            assert len(told) == (overlap == "1" and hvd.size() > 1), told
            assert all("register hooks before" in line for line in told)
    restart()


def check_gradients_changed_too_late() -> None:
    """By what runs later in backward: an error where they have left."""
    for overlap, keep in itertools.product("01", (True, False)):
        restart(OVERLAP=overlap, BUCKET_MB="0.00001")
        first, last = params = weights((50,), (50,))
        optimizer = attach(params)

        def late(grad: torch.Tensor) -> None:
            last.grad = last.grad.mul_(2) if keep else last.grad * 2

        hidden = first + hvd.rank() + 1
        hidden.register_hook(late)
        loss = (hidden * last).sum()
        if overlap == "1" and hvd.size() > 1:
            require_error(HvdliteError, loss.backward, "parameter.1", "after it had left", "HVDLITE_OVERLAP=0")
        else:
            loss.backward()
            require_grads([last], 2 * average())
        del optimizer
    restart()


def check_gradients_that_cannot_be_written() -> None:
    """Expanded ones, as autograd.grad makes them, and those of inference mode: another takes their place."""
    for kind in ("expanded", "inference"):
        params = weights((3,), (4,))
        optimizer = attach(params)
        kept = []
        for step in range(1, 3):
            with torch.inference_mode(kind == "inference"):
                grads = [torch.tensor(hvd.rank() + 1.0).expand(p.shape) for p in params]
                grads = [grad.clone() for grad in grads] if kind == "inference" else grads
            kept.append(grads)
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
            optimizer.step()
            assert all((p == -step * average()).all() for p in params), params


def check_optimizers_that_step_in_backward() -> None:
    """A hook that steps and forgets the gradient, registered before or after attaching."""
    for before in (True, False):
        params = weights((3,), (4,))
        optimizers = {p: torch.optim.SGD([p], lr=1.0) for p in params}

        def step(p: torch.nn.Parameter) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for attaching in (not before, before):
            for p in params:
                if attaching:
                    hvd.DistributedOptimizer(optimizers[p])
                else:
                    p.register_post_accumulate_grad_hook(step)
        for number in range(1, 4):
            loss_of(params).backward()
            assert all((p == -number * average()).all() for p in params), (before, params)


def check_gradients_behind_a_step_in_a_backward() -> None:
    """They are averaged when that ends."""
    params = weights((3,), (4,))
    optimizer = attach(params)

    def step(grad: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        later = loss_of(params[:1], hvd.rank() + 1)
        later.register_hook(step)
        ((later * 1.0) + loss_of(params[1:], hvd.rank() + 1)).backward()
        require_grads(params[:1], average())
        optimizer.step()
        optimizer.zero_grad()


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


def check_gradients_stay_readable_after_shutdown() -> None:
    params = weights()
    optimizer = attach(params)
    loss_of(params).backward()
    restart()
    require_grads(params, average())
    del optimizer


def check_copies_of_a_model_are_free() -> None:
    """A deepcopy taken after attaching (an EMA, a frozen teacher) is not reduced."""
    model = torch.nn.Linear(3, 2)
    _ = attach(list(model.parameters()))
    ema = copy.deepcopy(model)
    (sum(p.sum() for p in ema.parameters()) * (hvd.rank() + 1)).backward()
    require_grads(list(ema.parameters()), hvd.rank() + 1)
