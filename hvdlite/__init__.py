"""hvdlite: data-parallel training over MPI, with Horovod's names, for any framework.

    import hvdlite as hvd
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer)
    hvd.broadcast_variables(model, root_rank=0)

The functions here serve every framework: which one is found from the object they are given, and only then imported.
`hvdlite.torch` has Horovod's full set of names for PyTorch. Importing hvdlite imports no framework and no MPI. Most
names come from `hvdlite.api.neutral`, which is imported when the first of them is used.
"""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from hvdlite.api import frameworks
from hvdlite.job import exit_codes as _exit_codes  # noqa: F401  # now: it must see sys.exit before the script does
from hvdlite.job.hooks import when_started
from hvdlite.job.process_sets import ProcessSet as ProcessSet
from hvdlite.job.process_sets import global_process_set as global_process_set

if TYPE_CHECKING:
    from hvdlite import elastic as elastic
    from hvdlite.api.collectives import *  # noqa: F403  # type checkers do not find these names in neutral.__all__
    from hvdlite.api.names import *  # noqa: F403
    from hvdlite.api.neutral import *  # noqa: F403

when_started.append(frameworks.prepare_torch)

__version__ = "0.1.0"
T = TypeVar("T")


def DistributedOptimizer(optimizer: T, *args: Any, **kwargs: Any) -> T:
    """Make the optimizer's gradients those of all ranks; returns the same object. The arguments are the framework's:
    see `hvdlite.torch.DistributedOptimizer`. Collective."""
    return frameworks.function_of(optimizer, "DistributedOptimizer")(optimizer, *args, **kwargs)  # type: ignore[no-any-return]


def broadcast_variables(variables: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> None:
    """Overwrite the weights of a model, an optimizer's state, or variables in a dict or sequence with root_rank's.
    Waits for all ranks of the process set. Raises MismatchError with a diff (of TensorFlow's variables
    tf.errors.FailedPreconditionError), on every rank, where lists differ."""
    variables = frameworks.materialized(variables)
    frameworks.adapter(variables).broadcast_variables(variables, root_rank, process_set=process_set)


def save(path: str | os.PathLike[str], /, *, rng: bool = False, **what: Any) -> None:
    """Save a checkpoint, which rank 0 writes: `hvd.save("run.pt", model=model, optimizer=optimizer, epoch=epoch + 1)`.
    See `hvdlite.torch.save` and, for the other frameworks, `hvdlite.keras.save`. Collective."""
    frameworks.adapter_of(what.values()).save(path, rng=rng, **what)


def load(
    path: str | os.PathLike[str], /, *, missing_ok: bool = False, rng: bool = False, **what: Any
) -> dict[str, Any]:
    """Restore a checkpoint on every rank, which rank 0 reads; what else the file has. See `hvdlite.torch.load` and, for
    the other frameworks, `hvdlite.keras.load`. Collective."""
    found: dict[str, Any] = frameworks.adapter_of(what.values()).load(path, missing_ok=missing_ok, rng=rng, **what)
    return found


_OWN = ("DistributedOptimizer", "broadcast_variables", "elastic", "load", "save")

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import all other names when the first of them is used. A submodule's name is left to Python's import."""
        if name == "elastic":
            return importlib.import_module("hvdlite.elastic")
        is_module = find_spec(f"hvdlite.{name}") is not None
        if name == "__all__" or not (name.startswith("_") or is_module):
            neutral = importlib.import_module("hvdlite.api.neutral")
            globals().update({each: getattr(neutral, each) for each in neutral.__all__})
            globals()["__all__"] = [*neutral.__all__, *_OWN]
            if name in globals():
                return globals()[name]
        raise AttributeError(
            f"module 'hvdlite' has no {name}: it has what all frameworks share (broadcast_variables(model) for "
            "broadcast_parameters, say); what one has alone is in hvdlite.torch, hvdlite.tensorflow, hvdlite.keras"
        )

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
