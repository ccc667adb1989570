"""Which optimizers can be cut: those that look at each element of a parameter by itself.

torch's own are known by their exact class. Any other is tried: three steps on random data, whole and in pieces. Groups
with other options are tried one by one, since an option may choose another algorithm.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import cast

import torch
from torch import optim

from hvdlite.sharding.kinds import ELEMENTS_CUT, SHAPE, Kind
from hvdlite.torch.private_api import without_step_hooks

ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.ASGD, optim.Rprop,
)  # fmt: skip
REFUSED = {
    optim.LBFGS: "it steps all parameters as one",
    optim.SparseAdam: "its gradients are sparse",
}
RATES = {"params", "lr", "initial_lr"}
"""The contents of a group that do not choose the algorithm."""


def kind_of(optimizer: optim.Optimizer) -> Kind:
    """Return how the optimizer's parameters can be divided.

    Raises:
        ValueError: They cannot be divided.
    """
    name = type(optimizer).__name__
    for refused, reason in REFUSED.items():
        if isinstance(optimizer, refused):
            raise ValueError(f"sharded=True cannot serve {name}: {reason} [HVD412]")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            f"sharded=True cannot serve {name}(differentiable=True): a step on a piece has no graph [HVD412]"
        )
    if type(optimizer) in ELEMENTWISE:
        return Kind.ELEMENTS
    try:
        kinds = {tried(optimizer, group) for group in distinct(optimizer.param_groups)}
    except Exception as error:
        raise ValueError(
            f"sharded=True cannot serve {name}: three steps on random data, to find out whether it may be cut, "
            f"failed: {type(error).__name__}: {error} [HVD412]"
        ) from error
    return Kind.TENSORS if Kind.TENSORS in kinds else Kind.ELEMENTS


def distinct(groups: Sequence[Mapping[str, object]]) -> Iterable[Mapping[str, object]]:
    """Return groups that differ in more than parameters and learning rates: one of each kind."""
    return {repr({key: group[key] for key in sorted(group.keys() - RATES)}): group for group in groups}.values()


def tried(optimizer: optim.Optimizer, group: Mapping[str, object]) -> Kind:
    """Find out how an optimizer can be divided, by steps on random data. The optimizer itself does not change.

    Args:
        optimizer: The optimizer.
        group: The options.

    Raises:
        ValueError: A parameter's step depends on other parameters.
    """
    device = next(iter(cast("Sequence[torch.Tensor]", group["params"])), torch.empty(0)).device
    random = partial(torch.randn, SHAPE, generator=torch.Generator().manual_seed(0), device="cpu")
    values = [[random().to(device) for _ in range(5)] for _ in range(2)]  # of two parameters: itself, its gradients
    whole, state = stepped(optimizer, group, values)
    moved = all((after != before).all() for after, (before, *_) in zip(whole, values, strict=True))
    if moved and not any(map(is_nested, state)):
        cut = slice(ELEMENTS_CUT), slice(ELEMENTS_CUT, None)
        rows = [[each.reshape(-1)[part] for each in its] for its in values for part in cut]
        with contextlib.suppress(Exception):  # of optimizers that take matrices only
            # Each alone: a norm over all gradients is nearly the same in pieces.
            pieces = [stepped(optimizer, group, [row])[0][0] for row in rows]
            together = [torch.cat(pieces[first : first + 2]).reshape(SHAPE) for first in (0, 2)]
            if all(map(torch.equal, whole, together)):
                return Kind.ELEMENTS
    alone = [stepped(optimizer, group, [its])[0][0] for its in values]
    if not all(map(torch.equal, whole, alone)):
        raise ValueError("the step of a parameter depends on other parameters")
    return Kind.TENSORS


def stepped(
    optimizer: optim.Optimizer, options: Mapping[str, object], values: Sequence[Sequence[torch.Tensor]]
) -> tuple[list[torch.Tensor], list[object]]:
    """Return parameters after steps of a twin of the optimizer, and the values of their state.

    Args:
        optimizer: The optimizer.
        options: Those of the twin's only group.
        values: Each parameter's value and its gradients.
    """
    parameters = [torch.nn.Parameter(first.clone()) for first, *_ in values]
    twin = object.__new__(type(optimizer))
    state: Mapping[torch.Tensor, dict[str, object]] = defaultdict(dict)
    group = {**options, "params": parameters, "lr": options.get("lr") or 0.1}  # a warm-up begins with 0
    twin.__dict__.update(optimizer.__dict__, param_groups=[group], state=state, **without_step_hooks())
    twin.__dict__.pop("step", None)
    for number in range(1, len(values[0])):
        for p, its in zip(parameters, values, strict=True):
            p.grad = its[number].clone()
        try:
            twin.step()
        except TypeError:  # it needs a closure
            twin.step(lambda: 0.0)
    return [p.detach() for p in parameters], [value for its in state.values() for value in its.values()]


def is_nested(value: object) -> bool:
    """Whether a value of a parameter's state is a container, of earlier gradients, say. It cannot be cut."""
    return isinstance(value, Collection) and not isinstance(value, (torch.Tensor, str))
