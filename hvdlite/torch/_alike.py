"""Whether all ranks train the same model: weights, the optimizer's state and its settings, compared bit by bit after
the first backward, where a difference is an error, and now and then later, where it is a warning: hours of training may
be worth something to a user, and GPUs of different kinds round differently.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvdlite.alike import Sides, compared, named, valued
from hvdlite.engine import Lane
from hvdlite.errors import MismatchError

ROUNDS = 500  # between comparisons, which take a small part of one step
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Alike:
    """One optimizer's comparisons. names: its parameters', by id(). state: whether that is to be the same, too."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], state: bool = True) -> None:
        self.optimizer, self.names, self.state = optimizer, names, state
        self.rounds = 0
        self.warned = False
        self.expect("0")

    def expect(self, root: str) -> None:
        """Training begins with the next round. root: the rank whose weights are the right ones, in words."""
        self.first, self.root = True, root

    def look(self, lane: Lane, name: str) -> None:
        """At the end of a round: compare, if it is time. Collective then. Raises MismatchError on every rank after a
        first round, and after those that follow, until all is alike."""
        self.rounds += 1
        if not self.first and (self.warned or self.rounds % ROUNDS):
            return
        found = compared(lane, name, self.values())
        if found and self.first:
            raise MismatchError(f"optimizer '{name}': the ranks would train different models:\n{self.told(found)}")
        self.first = False
        if found:
            self.warned = True
            if lane.transport.rank == 0:
                logging.getLogger("hvdlite").warning(
                    "optimizer '%s': after %d rounds the ranks train different models:\n%s", name, self.rounds,
                    self.told(found),
                )  # fmt: skip

    def told(self, found: Mapping[str, Sides]) -> str:
        """What differs, and the cure."""
        kinds = {kind: {name.removeprefix(f"{kind}: "): parties for name, parties in found.items()
                        if name.startswith(f"{kind}: ")} for kind in ("weights", "state", "settings")}  # fmt: skip
        lines = [f"  {kind}: {(valued if kind == 'settings' else named)(its)}" for kind, its in kinds.items() if its]
        calls = [f"hvd.broadcast_parameters(model.state_dict(), root_rank={self.root})"] if kinds["weights"] else []
        if kinds["state"] or kinds["settings"]:
            calls.append(f"hvd.broadcast_optimizer_state(optimizer, root_rank={self.root})")
        if self.first:
            cure = f"Call {' and '.join(calls)} on all ranks before the first backward()."
        else:
            cure = (
                "Something has changed them on some ranks only: weights loaded on one rank, a scheduler that follows a "
                f"rank's own loss (average that first: hvd.allreduce(loss)). On all ranks {' and '.join(calls)} would "
                "bring them together again."
            )
        return "\n".join([*lines, cure])

    def values(self) -> dict[str, Any]:
        """What must be the same on all ranks, by name."""
        values: dict[str, Any] = {}
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for index, p in enumerate(parameters):
            name = self.names.get(id(p), f"parameter.{index}")
            values[f"weights: {name}"] = checksum(p)
            state = self.optimizer.state.get(p, {}) if self.state else {}
            values |= {f"state: {key} of {name}": value if isinstance(value, (int, float)) else checksum(value)
                       for key, value in state.items()}  # fmt: skip
        for number, group in enumerate(self.optimizer.param_groups):
            values |= {f"settings: {key} of param_groups[{number}]": number_in(group[key])
                       for key in self.optimizer.defaults if key in group}  # fmt: skip
        return values


def checksum(value: Any) -> int | None:
    """The sum of a tensor's bits, in words; None for what has none. At the speed of memory."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_quantized:
        return None
    value = value.detach()
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    flat = value.reshape(-1)
    size, per = flat.element_size(), 8 // flat.element_size()
    whole = 0 if flat.storage_offset() % per else flat.numel() // per * per
    return int(flat[:whole].view(torch.int64).sum()) + int(flat[whole:].view(INTEGERS[size]).sum())


def number_in(value: Any) -> Any:
    """A setting that can be compared; None for others."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(number_in(each) for each in value)
    return value if isinstance(value, (int, float)) else None
