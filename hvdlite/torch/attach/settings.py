"""`TorchSettings`: the common settings of an attached optimizer, plus its parameters and their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hvdlite.gradients.plan import Borders
from hvdlite.gradients.settings import Settings


@dataclass(frozen=True, kw_only=True)
class TorchSettings(Settings):
    """The settings of one attached optimizer. `groups` names parameters by their id().

    Attributes:
        known: The parameters at the time of attaching. While hvdlite keeps them, no other object has their id().
        names: The parameters' names, by id(). Empty if the user gave no names.
        borders: Divides parameters among the ranks, if each rank needs the results of its pieces only: see
            `BucketPlan.borders`.
        scaler: The user's GradScaler, if a lossy compressor needs the scale; None: gradients are not scaled.
    """

    known: tuple[torch.nn.Parameter, ...]
    names: Mapping[int, str]
    borders: Callable[[Sequence[torch.Tensor]], Borders] | None = None
    scaler: torch.amp.GradScaler | None = None

    @classmethod
    def of(cls, asked: Settings, parameters: Sequence[torch.nn.Parameter], names: Mapping[int, str]) -> TorchSettings:
        """Add the parameters to checked settings. Parameters that are frozen now belong to no group."""
        groups = asked.groups.among([id(p) for p in parameters if p.requires_grad])
        return cls(**vars(replace(asked, groups=groups)), known=tuple(parameters), names=names)

    def scale(self) -> float:
        """Return the loss scale of the gradients under way."""
        return self.scaler.get_scale() if self.scaler else 1.0

    def name(self, p: torch.Tensor, otherwise: str = "a parameter") -> str:
        """Return a parameter's name in messages. otherwise: the result if the user gave no name."""
        return self.names.get(id(p), otherwise)


def parameter_key(found: object) -> int:
    """Return the key of a parameter in `groups=`: its id(). Raises ValueError for an object that is no tensor."""
    if not isinstance(found, torch.Tensor):
        raise ValueError(f"groups must be a number or lists of parameters: {found!r} is no tensor")
    return id(found)
