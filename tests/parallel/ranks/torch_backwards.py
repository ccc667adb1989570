"""Where a backward() begins and ends: if it fails, if it runs inside another one, if it reaches no parameter."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

import hvdlite.torch as hvd
from hvdlite.errors import HvdliteError
from tests.parallel.common import last, require_error, require_mismatch, require_same_bits, restart
from tests.parallel.ranks.torch_gradients import attach, average, loss_of, require_grads, weights


def check_exception_in_backward() -> None:
    """The user catches what a hook raised in the middle of a backward; the next backward is right."""
    for overlap in ("0", "1"):
        restart(OVERLAP=overlap, BUCKET_MB="0.001")
        first, second = (torch.nn.Parameter(torch.ones(1000)) for _ in range(2))
        optimizer = attach([first, second])
        broken = [False]

        def maybe(grad: torch.Tensor) -> None:
            if broken[0]:
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


def check_exceptions_at_different_places() -> None:
    """All ranks' backwards raise, some before and some after most gradients are there. What has left is not taken for
    the next one's: where buckets had left, that is void for who has begun it, and the one after it is right."""
    for buckets, to_none in (("25", True), ("25", False), ("0.00001", True), ("0.00001", False)):
        restart(OVERLAP="1", BUCKET_MB=buckets)
        params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(4)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0))

        def step(factor: float, failing: torch.nn.Parameter | None = None) -> None:
            def fail(p: torch.Tensor) -> None:
                raise ArithmeticError

            hook = failing.register_post_accumulate_grad_hook(fail) if failing is not None else None
            optimizer.zero_grad(to_none)
            try:
                loss = torch.zeros(())
                for p in params:
                    loss = loss * 1.0 + p.sum()
                (loss * factor * (hvd.rank() + 1)).backward()
            finally:
                if hook is not None:
                    hook.remove()
            optimizer.step()

        step(1.0)
        require_error(ArithmeticError, lambda: step(1000.0, params[0 if hvd.rank() else -1]))
        done = 1
        while done < 5:
            try:
                step(1.0)
                done += 1
            except HvdliteError as error:
                text = "call zero_grad()" if hvd.rank() else f"rank {hvd.size() - 1} raised after"
                assert buckets != "25" and done == 1 and text in str(error) and (hvd.rank() == 0 or not to_none), error
            mean = (hvd.size() + 1) / 2
            assert all((p == -done * mean).all() for p in params), (buckets, done, params)
        require_same_bits(params)
    restart()


def check_kept_gradients_outlive_a_failure() -> None:
    """What users have kept of earlier steps lies where buckets that had not left are sent from when the round is void."""
    restart(OVERLAP="1", BUCKET_MB="0.001")
    params = [torch.nn.Parameter(torch.zeros(300)) for _ in range(4)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), op=hvd.Sum)
    kept: list[torch.Tensor] = []

    def backward(fails: bool) -> None:
        def fail(p: torch.Tensor) -> None:
            raise ArithmeticError

        hooks = [params[1].register_post_accumulate_grad_hook(fail)] if fails else []
        optimizer.zero_grad()
        loss = torch.ones(300)
        for p in params:
            loss = loss + p * 1.0
        try:
            loss.sum().backward()
        finally:
            for hook in hooks:
                hook.remove()

    for step in range(4):
        if step == 2:  # the first two find the order of gradients, the last parameter's first
            require_error((ArithmeticError, HvdliteError), lambda: backward(hvd.rank() == hvd.size() - 1))
        backward(False)
        # Those whose buckets had not left; then all, which leave at the end of the next backward.
        kept += [p.grad for p in (params[:2] if step < 2 else params) if p.grad is not None]
        optimizer.step()
        assert all((grad == hvd.size()).all() for grad in kept), (step, [grad[0] for grad in kept])
    restart()


def check_optimizers_of_one_backward_after_a_failure() -> None:
    """One rank's backward raises when gradients of one optimizer have left: the others wait for the other's. All
    optimizers begin anew on all ranks, whichever was attached first, and also where one is not in every backward."""
    ways = [
        (first, fails_at, both)
        for first in (True, False)
        for fails_at, both in ((3, True), (1, True), (1, False), (4, False))
    ]
    for bodys_first, fails_at, both in ways:
        restart(OVERLAP="1", BUCKET_MB="0.001")
        params = [torch.nn.Parameter(torch.zeros(300)) for _ in range(6)]
        body, head = params[:3], params[3:]  # the head's gradients come first
        optimizers = [attach(part, op=hvd.Sum) for part in ((body, head) if bodys_first else (head, body))]

        def losses(fails: bool) -> list[torch.Tensor]:
            x, found = torch.ones(300), []
            for index, p in enumerate(params):
                x = x + p * (hvd.rank() + 1)
                if fails and index == fails_at:
                    x.register_hook(lambda grad: fail())
                if not both and index == 2:
                    found.append(x.sum())
                    x = torch.ones(300)
            return [*found, x.sum()]

        def backward(fails: bool = False) -> None:
            for optimizer in optimizers:
                optimizer.zero_grad()
            for loss in losses(fails):
                loss.backward()

        want = torch.full((300,), hvd.size() * (hvd.size() + 1) / 2)
        failed = 0
        for step in range(6):
            if step in (2, 4) and last():
                require_error(KeyError, lambda: backward(fails=True), "in the middle")
            try:
                backward()
            except HvdliteError as error:
                assert "raised after some of its gradients had left" in str(error), error
                failed += 1
                backward()
            require_grads(params, want)
            for optimizer in optimizers:
                optimizer.step()
        assert failed == (2 if hvd.size() > 1 and (both or not last()) else 0), (bodys_first, fails_at, both, failed)
        assert all((p == -6 * want).all() for p in params)
    restart()


def check_gradients_before_a_failure_are_forgotten() -> None:
    """Also where the next backward comes to them later than to the others of their bucket, which then is not full."""
    restart(OVERLAP="1", BUCKET_MB="0.0002")
    params = [torch.nn.Parameter(torch.zeros(30)) for _ in range(4)]
    optimizer = attach(params)

    def backward(order: Sequence[int], fails: bool = False) -> None:
        optimizer.zero_grad(set_to_none=False)
        x = torch.zeros(30)
        for i in reversed(order):
            x = x * 1 + params[i]
            if fails and i == order[1]:
                x.register_hook(lambda grad: fail())
        (x.sum() * (hvd.rank() + 1)).backward()

    backward((3, 2, 1, 0))
    backward((3, 2, 1, 0))
    require_error(KeyError, lambda: backward((3, 2, 1, 0), fails=True), "in the middle")
    backward((2, 3, 1, 0))
    require_grads(params, average())
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


class Calling(torch.autograd.Function):
    """Changes nothing. Its backward calls a function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.enable_grad():
            ctx.call()
        return grads[0], None


def fail() -> None:
    raise KeyError("in the middle")


def nothing() -> None:
    pass


def segments(params: Sequence[torch.Tensor], reentrant: bool, then: Callable[[], None] = nothing) -> torch.Tensor:
    """A loss through checkpointed segments: beside each other, one in another, and one parameter in two."""
    from functools import partial

    from torch.utils.checkpoint import checkpoint

    again = partial(checkpoint, use_reentrant=reentrant)
    x = again(lambda x: x * params[0], torch.ones_like(params[0], requires_grad=True))
    x = Calling.apply(x * params[1], then)
    one = again(lambda x: again(lambda y: y * params[2], x) * params[3], x)
    other = again(lambda x: x * params[2] * 2, x)
    return (one + other).sum() * (hvd.rank() + 1)


def check_reentrant_checkpoint() -> None:
    """Reentrant activation checkpointing runs backwards inside a backward: to the user it is one, as without. Also
    where gradients are copied while backward goes on (large ones), and where those of the last step were kept. With
    buckets that leave during backward, as they do on a GPU unless told otherwise, it is an error."""
    restart(OVERLAP="0")
    cases: list[tuple[dict[str, Any], int, int]] = [({}, 1, 3), ({"op": hvd.Sum}, 1, 3)]
    cases += [({}, 1, 300_000), ({"op": hvd.Sum}, 1, 300_000), ({"backward_passes_per_step": 2}, 2, 3)]
    for how, passes, length in cases:
        found: dict[bool, list[torch.Tensor]] = {}
        for reentrant in (True, False):
            params = [torch.nn.Parameter(torch.full((length,), 1.0 + i)) for i in range(4)]
            optimizer = attach(params, **how)
            optimizer.param_groups[0]["lr"] = 0.0
            values = found[reentrant] = []
            for step in range(4):
                optimizer.zero_grad()
                if step == 1 and passes == 1:
                    require_error(KeyError, segments(params, reentrant, fail).backward, "in the middle")
                    optimizer.zero_grad()
                for _ in range(passes):
                    segments(params, reentrant).backward()
                values += [p.grad.clone() for p in params if p.grad is not None]
                kept = [p.grad for p in params if step == 1]  # noqa: F841
                optimizer.step()
        assert len(found[True]) == 16
        assert all(torch.equal(a, b) for a, b in zip(found[True], found[False], strict=True)), how
    restart()


def check_sums_of_what_segments_share() -> None:
    """A weight that reentrant segments share is taken once for each: no sum is summed again, and nothing is told."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(4)]
    optimizer = attach(params, op=hvd.Sum)
    optimizer.param_groups[0]["lr"] = 0.0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the gradient of")
        for stepping in (True, True, False, False, True):
            optimizer.zero_grad()
            segments(params, reentrant=True).backward()
            require_grads(params[2:3], 3 * average() * hvd.size())
            if stepping:
                optimizer.step()


def check_nested_run_whose_outer_one_tells_nothing() -> None:
    """Nothing behind the function's node runs, with autograd.grad; or the function fails. The next backward is one."""
    params = weights((3,))
    optimizer = attach(params)

    def inside() -> None:
        loss_of(params).backward()
        if broken:
            fail()

    for broken in (False, True, False):
        x = torch.ones(3, requires_grad=True)
        kept = Calling.apply(x, inside).sum()  # its graph lives on
        if broken:
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

    def train() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(params).backward()
            optimizer.step()

    for times in range(1, 3):
        Calling.apply(torch.ones(2, requires_grad=True), train).sum().backward()
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


def check_a_compiled_step() -> None:
    """Nothing of hvdlite's is compiled, neither what the step calls nor what autograd does."""
    params = weights((3, 2))
    optimizer = attach(params)
    ours: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        ours.extend(node for node in graph.graph.nodes if "hvdlite/" in (node.meta.get("stack_trace") or ""))
        return graph.forward

    @torch.compile(backend=backend)
    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(params)
        loss.backward()
        optimizer.step()
        return hvd.allreduce(loss.detach())

    for _ in range(3):
        step()
        require_grads(params, average())
    assert hvd.size() == 1 or not ours, ours


def large() -> tuple[list[torch.nn.Parameter], Any]:
    """Parameters whose gradients are large enough for ranks to add their parts where they lie, and an optimizer: one of
    them in columns, one that lies across two ranks' parts, one alone in its bucket, and small ones between."""
    params = weights((5,), (600, 700), (3, 4), (800, 900), (7,), (1100, 2500))
    columns = torch.nn.Parameter(torch.zeros(600, 800).t())
    params.insert(3, columns)
    optimizer = attach(params)
    if hvd.size() > 1 and not columns.is_cuda:
        assert optimizer._hvdlite.packing.large and optimizer._hvdlite.packing.at_end
    return params, optimizer


def numbers(params: Sequence[torch.Tensor], seed: int, rank: int | None = None) -> list[torch.Tensor]:
    """A rank's gradients: other ones for each element, as whole numbers, so that sums are exact."""
    generator = torch.Generator(params[0].device).manual_seed(1000 * seed + (hvd.rank() if rank is None else rank))
    return [torch.randint(-99, 99, p.shape, generator=generator, device=p.device).to(p.dtype) for p in params]


def require_averages(params: Sequence[torch.Tensor], seed: int) -> None:
    """p.grad is the average of all ranks' numbers, rounded once."""
    of_ranks = [numbers(params, seed, rank) for rank in range(hvd.size())]
    for i, (p, *grads) in enumerate(zip(params, *of_ranks, strict=True)):
        assert torch.equal(p.grad, torch.stack(grads).sum(0) / hvd.size()), (seed, i)


def backward_of(params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
    torch.autograd.backward([p * 1.0 for p in params], list(grads))


def check_large_gradients() -> None:
    """Step after step, also where this or that is not as usual on a rank; who keeps a result keeps its values."""
    params, optimizer = large()
    kept: list[torch.Tensor] = []
    for step in range(8):
        optimizer.zero_grad(set_to_none=step != 2)
        backward_of(params, numbers(params, step))
        require_averages(params, step)
        if step == 4 and last():
            kept = [p.grad for p in params if p.grad is not None]
            values = [grad.clone() for grad in kept]
        if kept:
            assert all(map(torch.equal, kept, values))
        elif hvd.size() > 1:
            assert all(map(optimizer._hvdlite.gradients.is_alias, range(len(params))))
        optimizer.step()
    require_same_bits([p.detach() for p in params])


def check_large_gradients_are_changed_by_hooks() -> None:
    """Of other parameters, at any time before backward has ended, and in any way. (From a GPU they leave earlier.)"""
    params, _ = large()
    if params[0].is_cuda:
        return

    def change(p: torch.Tensor) -> None:
        for other in params:
            if other.grad is not None and other is not p:
                other.grad.data.mul_(2.0)

    for step in range(2):
        handle = params[0].register_post_accumulate_grad_hook(change)  # the first parameter's comes last, or first
        backward_of(params, numbers(params, step))
        handle.remove()
        require_same_bits([p.grad for p in params])
        for p in params:
            p.grad = None
    backward_of(params, numbers(params, 2))
    require_averages(params, 2)


def few(unused: int = 0) -> tuple[list[torch.nn.Parameter], torch.optim.SGD]:
    """Parameters with few gradients, and an optimizer that has some more."""
    params = weights((5,), (3, 4), (400,), (), *[(2,)] * unused)
    return params[: len(params) - unused], attach(params)


def check_few_gradients() -> None:
    """Step after step, also where results are added to, kept, or some parameters have no gradient."""
    for unused in (0, 1):
        params, optimizer = few(unused)
        kept: list[torch.Tensor] = []
        for step in range(9):
            before = [p.grad.clone() for p in params] if step % 3 == 2 else []
            if not before:
                optimizer.zero_grad(set_to_none=step % 3 == 0)
            backward_of(params, numbers(params, step))
            if before:  # the average of averages is theirs
                of_ranks = [numbers(params, step, rank) for rank in range(hvd.size())]
                for p, old, *grads in zip(params, before, *of_ranks, strict=True):
                    assert torch.allclose(p.grad, old + torch.stack(grads).sum(0) / hvd.size(), atol=1e-4), step
            else:
                require_averages(params, step)
            require_same_bits([p.grad for p in params])
            if step == 5 and last():  # the next step sets None
                kept = [p.grad for p in params]
                values = [grad.clone() for grad in kept]
            optimizer.step()
        assert not kept or all(map(torch.equal, kept, values))
        require_same_bits([p.detach() for p in params])


def check_a_mismatch_leaves_gradients_to_their_rank() -> None:
    """One rank's parameters are others than the plan's, so that all are told; then all train on. (From a GPU some have
    left by then.)"""
    for make in (large, few, lambda: few(1)) if hvd.size() > 1 else ():
        params, optimizer = make()
        if not params[0].is_cuda:
            train_past_a_mismatch(params, optimizer)


def train_past_a_mismatch(params: list[torch.nn.Parameter], optimizer: Any) -> None:
    backward_of(params, numbers(params, 0))
    optimizer.step()
    for step in (1, 2):
        optimizer.zero_grad()
        more = torch.nn.Parameter(torch.zeros(3))
        if last():
            optimizer.add_param_group({"params": [more]})
        grads = numbers(params, step)
        require_mismatch(lambda: backward_of(params, grads), "gradients", "a new list of parameters")
        if last():
            optimizer.param_groups.pop()
        else:
            assert all(torch.equal(p.grad, grad) for p, grad in zip(params, grads, strict=True))
        if step == 1:
            optimizer.zero_grad()
            backward_of(params, numbers(params, step + 10))
            require_averages(params, step + 10)
        else:  # what came of the one that failed stays, and is nobody else's
            backward_of(params, numbers(params, step))
            require_same_bits([p.grad for p in params])
            of_ranks = [numbers(params, step, rank) for rank in range(hvd.size())]
            for p, *its in zip(params, *of_ranks, strict=True):
                assert torch.equal(p.grad, 2 * torch.stack(its).sum(0) / hvd.size())
        assert not optimizer._hvdlite.gradients.slots.own
        optimizer.step()
    require_same_bits([p.detach() for p in params])
