"""What the user asked `DistributedOptimizer` for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hvdlite.gradients.terms import Terms
from hvdlite.job.process_sets import ProcessSet


@dataclass(frozen=True)
class Settings:
    """What the user asked for; see DistributedOptimizer."""

    known: tuple[torch.nn.Parameter, ...]
    """The parameters when it was attached: while they are kept, no other has their id()."""
    names: dict[int, str]
    """Parameter names by id()."""
    groups: dict[int, int]
    """Bucket group by id(), where the user grouped parameters."""
    terms: Terms
    compression: Any
    sparse_as_dense: bool
    process_set: ProcessSet
    replica_check: str
    """One of `config.REPLICA_CHECKS`."""
