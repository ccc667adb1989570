"""The modules of torch/attach: what each imports, and parts of an attachment alone."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.torch import attach  # noqa: E402
from hvdlite.torch.attach.sharing import Sharing, reducer_of  # noqa: E402
from hvdlite.torch.attach.steps import Steps  # noqa: E402

FOLDER = Path(attach.__file__).parent
MODULES = {path.stem: ast.parse(path.read_text()) for path in sorted(FOLDER.glob("*.py")) if path.stem != "__init__"}
MOST_ATTRIBUTES = 12


def imported(module: str) -> Iterator[str]:
    """The modules of the folder that one module imports, at its top or inside functions."""
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(attach.__name__):
            last = str(node.module).removeprefix(attach.__name__).removeprefix(".")
            yield from [last] if last else [alias.name for alias in node.names]


def test_no_module_imports_itself_by_others() -> None:
    above: dict[str, set[str]] = {}

    def reach(module: str, way: tuple[str, ...]) -> set[str]:
        assert module not in way, f"a circle of imports: {' -> '.join((*way, module))}"
        if module not in above:
            above[module] = set().union(*({name} | reach(name, (*way, module)) for name in imported(module)))
        return above[module]

    assert all("settings" not in reach(module, ()) or module != "settings" for module in MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_no_class_has_many_attributes(module: str) -> None:
    for node in (each for each in ast.walk(MODULES[module]) if isinstance(each, ast.ClassDef)):
        own = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)
               and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"}  # fmt: skip
        own |= {each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}
        assert len(own) <= MOST_ATTRIBUTES, (node.name, sorted(own))


def test_the_walk_names_functions_that_there_are() -> None:
    """Each function named in the walk of a gradient is in the file beside it."""
    root = FOLDER.parents[1]
    walk = [line.split() for line in str(attach.__doc__).splitlines() if line.startswith("      ")]
    steps = [words for words in walk if len(words) > 1 and words[1].endswith(".py")]
    assert len(steps) > 8
    for function, file, *_ in steps:
        path = root / file if "/" in file else FOLDER / file
        names = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
        assert function in names, (function, file)


class Attached:
    """An attachment as `sharing` sees it: who reduces an optimizer's gradients."""

    def __init__(self) -> None:
        self.sharing, self.optimizer = Sharing(renewed=False), SimpleNamespace(_hvdlite=self)

    @property
    def alive(self) -> bool:
        return not self.sharing.detached


def test_the_newest_of_several_reduces_and_those_between_are_let_go() -> None:
    first, second, third = chain = [Attached() for _ in range(3)]
    assert all(reducer_of(each) is each for each in chain)  # type: ignore[type-var]
    for before, after in itertools.pairwise(chain):
        before.sharing.detach(after.optimizer)  # type: ignore[arg-type]
    assert all(reducer_of(each) is third for each in chain)  # type: ignore[type-var]
    assert first.sharing.heir is third.optimizer
    third.sharing.detach(None)
    assert reducer_of(second) is None  # type: ignore[type-var]


def test_steps_inside_a_step_are_not_counted_twice() -> None:
    seen: list[bool] = []
    steps = Steps()

    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()

    weight = torch.nn.Parameter(torch.ones(2))
    torch.optim.SGD([weight])  # from now on torch also calls hooks around SGD.step
    optimizer = Outer([weight])
    optimizer.register_step_pre_hook(lambda *_: seen.append(steps.enter(optimizer)))
    optimizer.register_step_post_hook(lambda *_: steps.leave())
    for _ in range(2):
        optimizer.step()
    assert seen == [True, False] * 2 and steps.depth == 0


def test_a_step_that_has_raised_does_not_hide_the_next() -> None:
    steps = Steps()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    assert steps.enter(optimizer) and steps.enter(optimizer)
