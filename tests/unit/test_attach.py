"""The attachment to a torch optimizer: the walk of a gradient in its docstring, and its parts alone."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from hvdlite.gradients.compression import NoneCompressor
from hvdlite.gradients.groups import Groups
from hvdlite.gradients.settings import Settings
from hvdlite.gradients.terms import Terms
from hvdlite.torch import Compression, attach
from hvdlite.torch.attach.parameters import Planned, dtype_sent
from hvdlite.torch.attach.settings import TorchSettings
from hvdlite.torch.attach.sharing import Sharing, reducer_of
from hvdlite.torch.attach.steps import Steps

FOLDER = Path(attach.__file__).parent


def test_the_walk_names_functions_that_there_are() -> None:
    """In the files that it names."""
    root = FOLDER.parents[1]
    walk = [line.split() for line in str(attach.__doc__).splitlines() if line.startswith("      ")]
    steps = [words for words in walk if len(words) > 1 and words[1].endswith(".py")]
    assert len(steps) > 8
    for function, file, *_ in steps:
        path = root / file if "/" in file else FOLDER / file
        names = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
        assert function in names, (function, file)


class Attached:
    """An attachment, as far as it matters who reduces an optimizer's gradients."""

    def __init__(self) -> None:
        self.sharing = Sharing(renewed=False)
        self.optimizer: Any = SimpleNamespace(_hvdlite=self)

    @property
    def alive(self) -> bool:
        return not self.sharing.detached


def test_the_newest_of_several_reduces_and_those_between_are_let_go() -> None:
    first, second, third = chain = [Attached() for _ in range(3)]
    assert all(reducer_of(each) is each for each in chain)  # type: ignore[type-var]
    for before, after in itertools.pairwise(chain):
        before.sharing.detach(after.optimizer)
    assert all(reducer_of(each) is third for each in chain)  # type: ignore[type-var]
    assert first.sharing.heir is third.optimizer
    third.sharing.detach(None)
    assert reducer_of(second) is None  # type: ignore[type-var]


def test_steps_inside_a_step_are_not_counted_twice() -> None:
    seen: list[bool] = []
    steps = Steps()

    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()

    weight = torch.nn.Parameter(torch.ones(2))
    torch.optim.SGD([weight])  # from now on torch calls hooks around SGD.step, too
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


@pytest.mark.parametrize("count", [True, False])
def test_groups_are_those_of_the_parameters_at_the_time_of_attaching(count: bool) -> None:
    """Neither a parameter that was frozen then nor one that is added later joins a group."""
    first, second, frozen, later = parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(4)]
    frozen.requires_grad_(False)
    lists = ((id(frozen),), (id(second),), (id(first),))
    asked = Settings(Terms(), NoneCompressor, groups=Groups(count=2) if count else Groups(members=lists))
    settings = TorchSettings.of(asked, parameters[:3], {id(first): "first"})
    one, another, *others = [spec.group for spec in Planned(parameters, settings, [{"params": parameters}]).specs]
    assert one is not None and another is not None and one != another and others == [None, None]
    assert settings.name(first) == "first" and settings.name(later, "parameter.3") == "parameter.3"
    assert (settings.terms, settings.replica_check) == (asked.terms, "error")


def test_a_compressor_decides_on_the_dtype_that_travels() -> None:
    small = torch.nn.Parameter(torch.zeros(2, dtype=torch.float8_e4m3fn))
    assert dtype_sent(small, Compression.fp16) == "float16"
    with pytest.raises(ValueError, match="float8"):
        dtype_sent(small, Compression.none)
    assert dtype_sent(torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64)), Compression.bf16) == "complex64"
