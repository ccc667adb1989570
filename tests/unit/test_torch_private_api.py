"""torch's private names: each does what hvdlite needs it for, and a missing name is an error."""

from __future__ import annotations

import ast
import inspect
import os
import sys
import weakref
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd
from hvdlite.errors import HvdliteError
from hvdlite.torch import private_api


def backward_with(hook: Any) -> None:
    """Run a backward whose only gradient's hook is this."""
    p = torch.nn.Parameter(torch.ones(2))
    p.register_post_accumulate_grad_hook(hook)
    p.sum().backward()


def test_the_number_of_a_run() -> None:
    """The same within a run, another one in the next, -1 outside."""
    found: list[int] = []
    for _ in range(2):
        backward_with(lambda p: found.extend([private_api.current_run(), private_api.current_run()]))
    assert private_api.current_run() == -1
    assert found[0] == found[1] != found[2] == found[3] and -1 not in found


def test_a_callback_at_the_end_of_a_run() -> None:
    found: list[str] = []

    def hook(p: Any) -> None:
        private_api.queue_callback(lambda: found.append("end"))
        found.append("hook")

    backward_with(hook)
    assert found == ["hook", "end"]


def test_an_exception_of_a_callback_reaches_the_user() -> None:
    def fail() -> None:
        raise KeyError("in the callback")

    with pytest.raises(KeyError, match="in the callback"):
        backward_with(lambda p: private_api.queue_callback(fail))


def test_a_backward_that_fails_lets_go_of_its_callbacks() -> None:
    """So hvdlite finds out that it has failed."""

    class Kept:
        def __call__(self) -> None:
            raise AssertionError

    kept: list[weakref.ref[Kept]] = []

    def hook(p: Any) -> None:
        callback = Kept()
        kept.append(weakref.ref(callback))
        private_api.queue_callback(callback)

    def fail(p: Any) -> None:
        raise ArithmeticError

    p = torch.nn.Parameter(torch.ones(2))
    p.register_post_accumulate_grad_hook(hook)
    p.register_post_accumulate_grad_hook(fail)
    with pytest.raises(ArithmeticError):
        p.sum().backward()
    assert kept[0]() is None


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, hook: Any) -> torch.Tensor:
        ctx.hook = hook
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.enable_grad():
            backward_with(ctx.hook)
        return grad, None


def test_the_outermost_node_of_nested_runs() -> None:
    found: list[Any] = []
    backward_with(lambda p: found.append(private_api.outermost_node()))
    result = Nested.apply(torch.ones(2, requires_grad=True), lambda p: found.append(private_api.outermost_node()))
    result.sum().backward()
    assert found == [None, result.grad_fn]


def test_the_uses_of_a_storage() -> None:
    tensor = torch.ones(3)
    storage = tensor.untyped_storage()
    number = private_api.storage_number(storage)
    before = private_api.storage_uses(number)
    other = tensor.detach()
    assert private_api.storage_uses(number) == before + 1
    del other
    assert private_api.storage_uses(number) == before


def test_the_version_of_a_tensor() -> None:
    tensor = torch.ones(3)
    before = private_api.version(tensor)
    tensor.add_(1)
    assert private_api.version(tensor) == before + 1


def test_copying_many_at_once() -> None:
    targets = [torch.zeros(2), torch.zeros(3)]
    private_api.copy_all(targets, [torch.ones(2), torch.full((3,), 2.0)])
    assert targets[0].tolist() == [1, 1] and targets[1].tolist() == [2, 2, 2]
    private_api.copy_all([], [])


def test_tensors_without_memory() -> None:
    assert private_api.is_zero_tensor(torch._efficientzerotensor((3,)))
    assert not private_api.is_zero_tensor(torch.zeros(3))


def test_tensors_that_overlap_themselves() -> None:
    assert private_api.overlaps_itself(torch.ones(1).expand(3))
    assert not private_api.overlaps_itself(torch.ones(3))


def test_hooks_after_accumulation() -> None:
    """In their order, by the handle's id; none where there are none."""
    p = torch.nn.Parameter(torch.ones(2))
    assert not private_api.hooks_after_accumulation(p)
    hooks = [lambda p: None, lambda p: None]
    handles = [p.register_post_accumulate_grad_hook(hook) for hook in hooks]
    found = private_api.hooks_after_accumulation(p)
    assert list(found.items()) == [(handle.id, hook) for handle, hook in zip(handles, hooks, strict=True)]


def test_hooks_are_called_again_after_swap_tensors() -> None:
    called: list[int] = []
    p, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    p.register_post_accumulate_grad_hook(lambda p: called.append(1))
    torch.utils.swap_tensors(p, other)
    for each in (p, other):
        if private_api.hooks_after_accumulation(each):
            private_api.renew_hooks_after_accumulation(each)
            each.sum().backward()
    assert called == [1]


def test_the_base_of_batch_normalizations() -> None:
    assert issubclass(torch.nn.BatchNorm2d, private_api.BatchNorm)
    assert issubclass(torch.nn.SyncBatchNorm, private_api.BatchNorm)


def test_children_of_a_module() -> None:
    """One that has two names twice, and None as None."""
    child = torch.nn.Linear(2, 2)
    module = torch.nn.Sequential(child, child)
    module.register_module("none", None)
    assert list(private_api.children_of(module).items()) == [("0", child), ("1", child), ("none", None)]


def test_a_step_inside_a_step() -> None:
    found: list[bool] = []

    class Inner(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            found.append(private_api.step_is_nested(self))
            super().step()

    class Outer(Inner):
        def step(self, closure: Any = None) -> None:
            super().step()

    p = torch.nn.Parameter(torch.ones(2))
    Inner([p]).step()
    Outer([p]).step()
    assert found == [False, True] and private_api.AROUND_STEP


def test_an_optimizer_that_takes_hooks() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    assert private_api.takes_hooks(optimizer) and not private_api.takes_hooks(object.__new__(torch.optim.SGD))
    hook = optimizer.register_step_pre_hook(lambda *_: None)
    before, after = (optimizer.__dict__[name] for name in private_api.names_of_step_hooks())
    assert isinstance(before, OrderedDict) and list(before) == [hook.id] and not after


def test_an_optimizer_that_scales_by_itself() -> None:
    """A GradScaler leaves the scale to it, and calls step() always."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])
    setattr(optimizer, private_api.SCALES, True)
    seen: list[bool] = []
    optimizer.step = lambda *_, **__: seen.append(hasattr(optimizer, "found_inf"))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    weight.grad.fill_(float("inf"))
    scaler.step(optimizer)
    assert seen == [True]


def test_moving_a_storage() -> None:
    """Its values and views follow to other memory, which belongs to this descriptor."""
    tensor = torch.arange(1 << 16)
    part, before = tensor[3:], tensor.data_ptr()
    descriptor = private_api.to_own_mapping(tensor.untyped_storage())
    assert tensor.data_ptr() != before and part.data_ptr() == tensor.data_ptr() + 24
    assert os.fstat(descriptor).st_size == tensor.nbytes and tensor.equal(torch.arange(1 << 16))
    os.pwrite(descriptor, b"\x07", 24)
    assert part[0] == 7
    del tensor, part
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


def test_a_weak_reference_to_a_storage_lasts_as_long_as_its_memory() -> None:
    tensor = torch.ones(4)
    reference = weakref.ref(tensor.untyped_storage())
    part = tensor[1:]
    del tensor
    assert reference() is not None
    del part
    assert reference() is None


def test_a_call_of_autograd() -> None:
    """Only a function that the engine calls directly has its frame above it."""
    found: list[bool] = []

    def hook(p: Any) -> None:
        here = inspect.currentframe()
        assert here
        found.extend([private_api.is_autograd(here.f_back), private_api.is_autograd(here)])

    backward_with(hook)
    assert found == [True, False]


def test_dynamo_leaves_a_package_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo

    assert private_api.rules_of_dynamo() is torch._dynamo.trace_rules
    added: list[str] = []
    monkeypatch.setattr(torch._dynamo.trace_rules, "add", added.append)
    private_api.leave_out(private_api.rules_of_dynamo(), "hvdlite")
    assert added == ["hvdlite"]
    with pytest.raises(HvdliteError, match=r"torch\._dynamo\.trace_rules\.add"):
        private_api.leave_out(SimpleNamespace(), "hvdlite")
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    assert private_api.rules_of_dynamo() is None


def test_compiled_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import compiled_autograd

    assert compiled_autograd.__name__ == private_api.AUTOGRAD
    assert not private_api.in_compiled_autograd() and hasattr(compiled_autograd, "in_compiled_autograd_region")
    monkeypatch.setattr(compiled_autograd, "in_compiled_autograd_region", True)
    assert private_api.in_compiled_autograd()


@pytest.mark.parametrize("name", private_api.NEEDED)
def test_a_name_that_is_gone_is_an_error_when_an_optimizer_is_attached(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, _, attribute = name.rpartition(".")
    without = {name: "for a test", f"{owner}.{attribute}_that_is_gone".strip("."): "for a test"}
    monkeypatch.setattr(private_api, "NEEDED", {name: "for a test"})
    private_api.require()
    monkeypatch.setattr(private_api, "NEEDED", without)
    hvd.init()
    try:
        with pytest.raises(HvdliteError, match=f"no torch.*{attribute}_that_is_gone, which hvdlite needs for a test"):
            hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]))
    finally:
        hvd.shutdown()


KNOWN = {"_hvdlite", "_handlers", "_saved_state", "_set_attributes", "_replace", "_told"}
"""hvdlite's own, and namedtuple's."""


def test_no_other_file_uses_a_name_that_torch_keeps_to_itself() -> None:
    folder = Path(private_api.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        if path.name == "private_api.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch"):
                assert not [alias.name for alias in node.names if alias.name.startswith("_")], path
            name = node.attr if isinstance(node, ast.Attribute) else ""
            own = isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()", "cls")
            assert not name.startswith("_") or name.startswith("__") or name in KNOWN or own, (
                f"{path}: {ast.unparse(node)}"
            )
