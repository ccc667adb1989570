"""Which hook is told of a gradient."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hvdlite.torch._backward import Backward  # noqa: E402
from hvdlite.torch._parameters import Hooks  # noqa: E402


def test_hooks_change_with_what_is_to_be_known() -> None:
    """Of the gradients, or only that there are some; and no more of what is no member."""
    class Owner:
        pass

    told, owner = list[str](), Owner()
    hooks = Hooks(owner, lambda p: told.append("call"), lambda p: told.append("announce"))
    kept, left = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    for members, announcing in ([kept, left], True), ([kept], False), ([kept], False):
        hooks.renew(members, announcing)
        (kept.sum() + left.sum()).backward()
        assert told == ["announce" if announcing else "call"] * len(members)
        assert len(kept._post_accumulate_grad_hooks) == 1
        told.clear()
    hooks.remove()
    kept.sum().backward()
    assert not told
    hooks.renew([left], False)
    assert len(left._post_accumulate_grad_hooks) == 1
    del owner
    assert not left._post_accumulate_grad_hooks


def test_a_run_is_announced_once() -> None:
    """Whoever hears of it says so, or is told again."""
    begun: list[int] = []
    backward = Backward(lambda: None)
    hook = backward.announcing(begun.append)
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for p in parameters:
        p.register_post_accumulate_grad_hook(hook)

    def run() -> None:
        sum(p.sum() for p in parameters).backward()

    run()
    assert len(begun) == 3 and len(set(begun)) == 1
    hook = backward.announcing(lambda run: setattr(backward, "run", run) or begun.append(run))
    for p in parameters:
        p._post_accumulate_grad_hooks.clear()
        p.register_post_accumulate_grad_hook(hook)
    begun.clear()
    run()
    run()
    assert len(begun) == 2 and begun[0] < begun[1]
