"""Which optimizers can be cut: those that look at each element of a parameter by itself.

torch's own are known by their exact class. Any other is tried: three steps on random data, whole and in pieces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import Enum

import torch
from torch import optim

from hvdlite.torch.private_api import without_step_hooks


class Kind(Enum):
    """How an optimizer's parameters can be divided among ranks."""

    ELEMENTS = "by elements"
    TENSORS = "by whole tensors"


ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.ASGD, optim.Rprop,
)  # fmt: skip
REFUSED = {
    optim.LBFGS: "it steps all parameters as one",
    optim.SparseAdam: "its gradients are sparse",
}
SHAPE, ELEMENTS_CUT = (8, 24), 64  # of the trial's parameters; a cut at a cache line, in the midst of a row


def kind_of(optimizer: optim.Optimizer) -> Kind:
    """Return how the optimizer's parameters can be divided.

    Raises:
        ValueError: They cannot be divided.
    """
    name = type(optimizer).__name__
    for refused, reason in REFUSED.items():
        if isinstance(optimizer, refused):
            raise ValueError(f"sharded=True cannot serve {name}: {reason}")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(f"sharded=True cannot serve {name}(differentiable=True): a step on a piece has no graph")
    if type(optimizer) in ELEMENTWISE:
        return Kind.ELEMENTS
    try:
        return tried(optimizer)
    except Exception as error:
        raise ValueError(
            f"sharded=True cannot serve {name}: three steps on random data, to find out whether it may be cut, "
            f"failed: {type(error).__name__}: {error}"
        ) from error


def tried(optimizer: optim.Optimizer) -> Kind:
    """Find out how an optimizer can be divided, by steps on random data. The optimizer itself does not change.

    Raises:
        ValueError: A parameter's step depends on other parameters.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        values = [[torch.randn(SHAPE) for _ in range(5)] for _ in range(2)]  # of two parameters: itself, its gradients
    whole = stepped(optimizer, values)
    if all((after != before).all() for after, (before, *_) in zip(whole, values, strict=True)):
        cut = slice(ELEMENTS_CUT), slice(ELEMENTS_CUT, None)
        pieces = stepped(optimizer, [[each.reshape(-1)[part] for each in its] for its in values for part in cut])
        together = [torch.cat(pieces[first : first + 2]).reshape(SHAPE) for first in (0, 2)]
        if all(map(torch.equal, whole, together)):
            return Kind.ELEMENTS
    alone = [stepped(optimizer, [its])[0] for its in values]
    if not all(map(torch.equal, whole, alone)):
        raise ValueError("the step of a parameter depends on other parameters")
    return Kind.TENSORS


def stepped(optimizer: optim.Optimizer, values: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Return parameters after steps of a twin of the optimizer. values: each one's value and its gradients."""
    parameters = [torch.nn.Parameter(first.clone()) for first, *_ in values]
    twin = object.__new__(type(optimizer))
    state: Mapping[torch.Tensor, object] = defaultdict(dict)
    group = {**optimizer.param_groups[0], "params": parameters}
    group["lr"] = group.get("lr") or 0.1  # a warm-up begins with 0
    twin.__dict__.update(optimizer.__dict__, param_groups=[group], state=state, **without_step_hooks())
    twin.__dict__.pop("step", None)
    for number in range(1, len(values[0])):
        for p, its in zip(parameters, values, strict=True):
            p.grad = its[number].clone()
        try:
            twin.step()
        except TypeError:  # it needs a closure
            twin.step(lambda: 0.0)
    return [p.detach() for p in parameters]
