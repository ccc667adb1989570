"""An attached optimizer stays the user's object: copies, pickles, schedulers, and use after another init()."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import platform
from typing import Any

import torch

import hvdlite
import hvdlite.torch as hvd
from hvdlite.job import runtime
from hvdlite.transports.shared_flags import SharedMaximum
from tests.parallel.common import at_sizes, require_error, require_same_bits, restart
from tests.parallel.ranks.torch_gradients import attach, average, loss_of, require_grads, weights

SIZES = (1, 2, 3)


def check_same_object() -> None:
    params = weights()
    optimizer = torch.optim.Adam(params, lr=0.1)
    assert hvd.DistributedOptimizer(optimizer) is optimizer and type(optimizer) is torch.optim.Adam
    other = torch.optim.SGD(weights(), lr=0.1)
    assert hvdlite.DistributedOptimizer(other) is other and hasattr(other, "synchronize")


def check_attaching_twice() -> None:
    params = weights()
    optimizer = attach(params)
    require_error(RuntimeError, lambda: hvd.DistributedOptimizer(optimizer), "attached already")
    loss_of(params).backward()
    require_grads(params, average())


def check_life_after_shutdown() -> None:
    """An optimizer from before: stepping it raises, attaching it again works, and only once more."""
    params = weights()
    optimizer = attach(params)
    loss_of(params).backward()
    optimizer.step()
    for _ in range(2):
        restart()
        optimizer.zero_grad()
        loss_of(params).backward()
        if hvd.size() > 1:
            require_grads(params, hvd.rank() + 1)
            require_error(RuntimeError, optimizer.step, "DistributedOptimizer(optimizer) again")
        assert hvd.DistributedOptimizer(optimizer) is optimizer
        optimizer.zero_grad()
        loss_of(params).backward()
        require_grads(params, average())
        optimizer.step()
    assert all((p == -3 * average()).all() for p in params)
    require_error(RuntimeError, lambda: hvd.DistributedOptimizer(optimizer), "attached already")


def check_use_after_shutdown() -> None:
    """Without hvdlite the optimizer goes on as an ordinary one (evaluation, saving, a last local step), and says so."""
    import warnings

    import hvdlite

    params = weights()
    optimizer = attach(params)
    loss_of(params).backward()
    several = hvd.size()
    hvdlite.shutdown()
    optimizer.step()
    optimizer.zero_grad()
    rank_free = sum(p.sum() for p in params)
    rank_free.backward()
    require_grads(params, 1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.step()
    assert [str(each.message) for each in told] == ["after hvd.shutdown() each rank trains by itself"] * (several > 1)
    hvdlite.init()


def check_two_optimizers() -> None:
    """Each has its own plan and lane; their backwards may alternate (a GAN)."""
    one, two = weights((3,), (4,)), weights((5,), (2, 2))
    first, second = attach(one), attach(two, op=hvd.Sum)
    for _ in range(3):
        for optimizer, params, value in ((first, one, average()), (second, two, average() * hvd.size())):
            optimizer.zero_grad()
            loss_of(params).backward()
            require_grads(params, value)
            optimizer.step()
    first.zero_grad()
    second.zero_grad()
    loss_of([*one, *two]).backward()  # one backward for both
    require_grads(one, average())
    require_grads(two, average() * hvd.size())


def check_two_optimizers_whose_gradients_come_in_another_order() -> None:
    """On some ranks the first one's come first, on others the second one's."""
    for overlap in ("0", "1"):
        restart(OVERLAP=overlap)
        params = weights((3,), (4,), (5,))
        optimizers = [attach([p]) for p in params]
        for step in range(4):
            order = [params[(i + hvd.rank() + step) % 3] for i in range(3)]
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = torch.zeros(())
            for p in order:  # the last is the first in backward
                loss = (loss + p.sum()) * 1
            (loss * (hvd.rank() + 1)).backward()
            require_grads(params, average())
            for optimizer in optimizers:
                optimizer.step()
    restart()


def check_optimizers_that_share_some_parameters() -> None:
    """A trunk with two heads, each with an optimizer of its own: refused on all ranks, and training goes on. In groups of
    one optimizer they train; so they do where the other optimizer is no more."""
    for overlap in ("0", "1"):
        restart(OVERLAP=overlap, BUCKET_MB="0.00001")
        for op, expected in ((hvd.Average, average()), (hvd.Sum, average() * hvd.size())):
            trunk, *heads = weights((3,), (4,), (5,))
            optimizer = attach([trunk, heads[0]], op=op)
            for turn in range(4):
                optimizer.zero_grad(set_to_none=turn % 2 == 0)
                loss_of([trunk, heads[0]]).backward()
                require_grads([trunk, heads[0]], expected)
                for others in ([heads[1], trunk], [trunk], [heads[0]]) if hvd.size() > 1 else ():
                    require_error(ValueError, lambda: attach(others, op=op), "1 parameters", "SGD", "all", "delete")
                optimizer.step()
                require_grads([trunk, heads[0]], expected)
            optimizer.zero_grad()
            del optimizer
            groups: list[dict[str, Any]] = [{"params": [trunk]}, {"params": heads, "lr": 0.5}]
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=1.0), op=op)
            loss_of([trunk, *heads]).backward()
            require_grads([trunk, *heads], expected)
            optimizer.step()
            require_same_bits([p.detach() for p in (trunk, *heads)])
            optimizer.zero_grad()
            del optimizer
            newest = attach([trunk], op=op)
            loss_of([trunk]).backward()
            newest.step()
            require_grads([trunk], expected)
    restart()


def check_optimizers_of_the_same_parameters_that_reduce_in_another_way() -> None:
    """An error at the step of the one whose place the other has taken."""
    params = weights((3,), (4,))
    first = attach(params, op=hvd.Sum)
    second = attach(params, op=hvd.Average)
    loss_of(params).backward()
    require_grads(params, average())
    if hvd.size() > 1:
        require_error(ValueError, first.step, "op=")
    second.step()


def check_optimizers_whose_place_others_have_taken() -> None:
    """Each of three, the later one's parameters among them the earlier's, may step: also with gradients set by hand."""
    for op, expected in ((hvd.Average, average()), (hvd.Sum, average() * hvd.size())):
        params = weights((3,), (4,), (5,))
        optimizers = [attach(params[:count], op=op) for count in (1, 2, 3)]
        for turn in range(2):
            for optimizer in (*optimizers, *optimizers):
                optimizer.zero_grad(set_to_none=turn == 0)
                loss_of(params[:1]).backward()
                optimizer.step()
                require_grads(params[:1], expected)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(params).backward()
        for optimizer in optimizers:
            optimizer.step()
        require_grads(params, expected)
        for _ in range(3 if op is hvd.Average else 1):
            for p in params:
                p.grad = torch.full_like(p, hvd.rank() + 1)
            optimizers[0].step()
            require_grads(params[:1], expected)
        with optimizers[0].no_sync():
            for _ in range(hvd.rank()):
                optimizers[0].zero_grad()
                loss_of(params[:1]).backward()
                require_grads(params[:1], hvd.rank() + 1)


def check_an_optimizer_that_takes_over_during_a_backward() -> None:
    """The one before no longer reduces what it has begun: else sums would be summed again."""
    params = weights((3,), (4,))
    optimizers = [attach(params, op=hvd.Sum)]

    class TakeOver(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            if len(optimizers) == 1:
                optimizers.append(attach(params, op=hvd.Sum))
            return grad

    for step in range(3):
        (TakeOver.apply(params[0] * 1.0).sum() * (hvd.rank() + 1) + loss_of(params[1:])).backward()
        if step:  # the first backward has begun before there was the second optimizer
            require_grads(params, average() * hvd.size())
        optimizers[1].step()
        require_grads(params, average() * hvd.size())
        optimizers[1].zero_grad()


def check_an_optimizer_that_would_take_some_during_a_backward() -> None:
    """Refused, also when gradients have left already: an error of that backward. The next one is right."""
    for overlap in "01":
        restart(OVERLAP=overlap, BUCKET_MB="0.00001")
        params = weights((3,), (4,), (5,))
        optimizer = attach(params)

        def take(p: torch.Tensor, params: list[Any] = params) -> None:
            attach(params[2:])

        hook = params[0].register_post_accumulate_grad_hook(take)
        if hvd.size() > 1:
            require_error(ValueError, lambda: loss_of(params, hvd.rank() + 1).backward(), "1 parameters")
        hook.remove()
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(params).backward()
            require_grads(params, average())
            optimizer.step()
    restart()


def check_a_dropped_optimizer_is_gone_at_once() -> None:
    """Its hooks too, whenever Python's collector comes: parameters that it had are trained on, those of a part."""
    params = weights((3,), (4,))
    gc.collect()
    gc.disable()
    before = len(runtime.current().registries.attachments)
    optimizer = attach(params)
    loss_of(params).backward()
    optimizer.step()
    del optimizer
    assert len(runtime.current().registries.attachments) == before
    gc.enable()
    optimizer = attach(params[:1])
    for _ in range(2):
        optimizer.zero_grad()
        params[1].grad = None
        loss_of(params).backward()
        require_grads(params[:1], average())
        require_grads(params[1:], hvd.rank() + 1)
        optimizer.step()


def check_names_are_not_inherited() -> None:
    """A parameter made later is none of the first ones', wherever it lies in memory; kept by one rank, dropped by
    others."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    kept = []
    for _ in range(6):
        kept += [net[1]] if hvd.rank() == 0 else []
        net[1] = layer = torch.nn.Linear(2, 1)
        torch.nn.init.ones_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
        optimizer.param_groups[0]["params"][2:] = layer.parameters()
        optimizer.zero_grad()
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    require_same_bits(list(net.parameters()))


@at_sizes(2, 3, 4)
def check_models_that_are_no_more() -> None:
    """A search over many models: those that have been dropped take no memory."""
    living = weights((3,))
    first = attach(living)
    crowd = runtime.current().registries.attachments.many
    gc.disable()  # Python's own collector may come first
    for _ in range(4 * crowd):
        net = torch.nn.Linear(3, 3)
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        optimizer = attach(list(net.parameters()))
        net(torch.ones(3)).sum().backward()
        optimizer.step()
        assert len(runtime.current().registries.attachments) <= 2 * crowd + 8
    assert len(runtime.current().everyone.lanes) <= 2 * crowd + 10  # communicators, of which MPIs have some 2,000
    gc.enable()
    loss_of(living).backward()
    require_grads(living, average())
    first.step()


def check_deepcopy_and_pickle() -> None:
    """Copies are plain optimizers that can be attached themselves; state_dict has what it always has."""
    params = weights((3,), (4,))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0, momentum=0.5))
    loss_of(params).backward()
    optimizer.step()
    plain = torch.optim.SGD(weights((3,), (4,)), lr=1.0, momentum=0.5)
    assert optimizer.state_dict().keys() == plain.state_dict().keys()
    assert optimizer.state_dict()["param_groups"] == plain.state_dict()["param_groups"]
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(other) is torch.optim.SGD and not hasattr(other, "backward_passes_per_step")
        twins = other.param_groups[0]["params"]
        assert all(torch.equal(a, b) and a is not b for a, b in zip(twins, params, strict=True))
        loss_of(twins).backward()  # not attached: nothing is communicated
        other.step()
        other.zero_grad()
        hvd.broadcast_parameters(twins, root_rank=0)
        hvd.broadcast_optimizer_state(other, root_rank=0)
        hvd.DistributedOptimizer(other)
        loss_of(twins).backward()
        require_grads(twins, average())
    optimizer.zero_grad()
    loss_of(params).backward()  # the original is still attached
    require_grads(params, average())


def check_saving_and_loading() -> None:
    """torch.save of model and optimizer; load_state_dict on the attached one; training goes on, equal everywhere."""
    model = torch.nn.Linear(3, 2)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    for _ in range(2):
        loss_of(list(model.parameters())).backward()
        optimizer.step()
        optimizer.zero_grad()
        buffer = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "whole": model}, buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    loss_of(list(model.parameters())).backward()
    require_grads(list(model.parameters()), average())
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 3
    require_same_bits(list(model.parameters()))


def check_schedulers() -> None:
    """LambdaLR on the attached optimizer: rates 1, 2, 3 move the weights by their sum; no warning about the order."""
    import warnings

    params = weights()
    optimizer = attach(params)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: epoch + 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(params).backward()
            optimizer.step()
            scheduler.step()
    assert all((p == -6 * average()).all() for p in params)
    assert isinstance(optimizer, torch.optim.SGD)


def check_named_parameters() -> None:
    """Names must be pairs, unique and complete."""
    net = torch.nn.Linear(2, 2)
    make = lambda: torch.optim.SGD(net.parameters(), lr=0.1)  # noqa: E731
    named: list[Any] = list(net.named_parameters())
    require_error(ValueError, lambda: hvd.DistributedOptimizer(make(), net.parameters()), "pairs")  # type: ignore[arg-type]
    require_error(
        ValueError, lambda: hvd.DistributedOptimizer(make(), [("a", named[0][1]), ("a", named[1][1])]), "repeated", "a"
    )
    require_error(ValueError, lambda: hvd.DistributedOptimizer(make(), named[:1]), "leaves out 1 of", "2 parameters")
    require_error(ValueError, lambda: hvd.DistributedOptimizer(make(), [(None, p) for _, p in named]), "pairs")
    require_error(ValueError, lambda: hvd.DistributedOptimizer(make(), named, groups=[1]), "lists of parameters")  # type: ignore[list-item]
    passes: Any = 1.5
    require_error(ValueError, lambda: hvd.DistributedOptimizer(make(), backward_passes_per_step=passes), "whole number")
    hvd.DistributedOptimizer(make(), named_parameters=[*named, ("extra", torch.nn.Parameter(torch.ones(1)))])


def check_what_is_no_optimizer() -> None:
    """Arguments in another order."""
    net: Any = torch.nn.Linear(2, 2)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    require_error(TypeError, lambda: hvd.DistributedOptimizer(net, optimizer), "optimizer first, not a Linear")
    require_error(ValueError, lambda: hvd.DistributedOptimizer(optimizer, net), "model.named_parameters()")

    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.param_groups = inner, inner.param_groups

    wrapper = Lookahead(optimizer)
    require_error(TypeError, lambda: hvd.DistributedOptimizer(wrapper), "Lookahead", "attach that one")


def check_before_init() -> None:
    import hvdlite

    hvdlite.shutdown()
    require_error(ValueError, lambda: attach(weights()), "hvd.init()")
    hvdlite.init()


def check_optimizer_that_is_dropped() -> None:
    """Attached optimizers that go out of scope take nothing along: 20 of them, on the same parameters."""
    params = weights((3,))
    for _ in range(20):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0))
    del optimizer


@at_sizes(2, 3, 4)
def check_what_goes_by_messages_shares_no_memory() -> None:
    """A GPU's memory that peers look into is not what Open MPI should open for messages besides."""
    on_gpu = weights()[0].is_cuda  # where native, which would be an MPI's reduction, stands for auto
    for way, shared in (("auto", True), ("shared", True), ("ring", False), ("native", on_gpu)):
        restart(ALGORITHM=way)
        optimizer = attach(weights())
        (arena,) = optimizer._hvdlite.reducer.arenas.values()
        assert (arena.peers is not None) == shared, way
        for lane in (optimizer._hvdlite.lane, runtime.current().everyone.eager):
            agrees_in_memory = isinstance(lane.roll_call.maximum, SharedMaximum)
            assert agrees_in_memory == (way in ("auto", "shared") and platform.machine() == "x86_64"), way
    restart()


def check_dropped_optimizers_leave_no_hooks() -> None:
    """Each would take its time in every backward of the model's to come."""
    net = torch.nn.Linear(2, 2)
    hvd.broadcast_parameters(net.state_dict(), 0)

    def phase() -> None:
        optimizer = attach(list(net.parameters()))
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    for _ in range(3):
        phase()
        gc.collect()
        assert not net.weight._post_accumulate_grad_hooks
