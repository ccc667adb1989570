"""hvdlite: data-parallel training over MPI, with Horovod's names, for any framework.

    import hvdlite as hvd
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer)
    hvd.broadcast_variables(model, root_rank=0)

The functions here serve every framework. Each finds the framework from its first argument, and imports only that one.
`hvdlite.torch` has Horovod's full set of names for PyTorch. Importing hvdlite imports no framework and no MPI.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from hvdlite import elastic
from hvdlite.api import frameworks, names
from hvdlite.api.collectives import *  # noqa: F403
from hvdlite.api.collectives import __all__ as _collectives
from hvdlite.api.names import *  # noqa: F403
from hvdlite.api.output import print as print  # not in __all__
from hvdlite.api.run import run
from hvdlite.api.summary import prepare as prepare_summary
from hvdlite.errors import (
    HorovodInternalError,
    HvdliteError,
    MismatchError,
    NotInitializedError,
    ShutdownError,
    StallError,
)
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.job.runtime import when_started
from hvdlite.ops import Op, barrier
from hvdlite.ops.join import join
from hvdlite.ops.objects import allgather_object, broadcast_object

when_started.extend((frameworks.prepare_torch, prepare_summary))

__version__ = "0.1.0"
T = TypeVar("T")


def DistributedOptimizer(optimizer: T, *args: object, **kwargs: object) -> T:
    """Make an optimizer reduce its gradients over all ranks. Collective; waits for all ranks.

    Args:
        optimizer: An optimizer of PyTorch or Keras, which changes in place.
        *args: As for the framework's own function, such as `hvdlite.torch.DistributedOptimizer`.
        **kwargs: As for the framework's own function.

    Returns:
        The same optimizer.

    Raises:
        TypeError: The optimizer's framework is unknown, or has no such function.
    """
    return frameworks.function_of(optimizer, "DistributedOptimizer")(optimizer, *args, **kwargs)  # type: ignore[no-any-return]


def broadcast_variables(variables: object, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> None:
    """Overwrite variables with root_rank's, in place. Collective; waits for all ranks of the process set.

    Args:
        variables: A model, an optimizer, or variables in a dict or sequence.
        root_rank: A global rank.
        process_set: The ranks that take part. Default: all ranks.

    Raises:
        MismatchError: The ranks' names, shapes or dtypes differ. Every rank raises it, with a diff. For TensorFlow's
            variables it may be a tf.errors.FailedPreconditionError.
        TypeError: The framework of the variables is unknown.
    """
    variables = frameworks.materialized(variables)
    frameworks.adapter(variables).broadcast_variables(variables, root_rank, process_set=process_set)


def average_parameters(
    model: object, process_set: ProcessSet = global_process_set
) -> contextlib.AbstractContextManager[object]:
    """Overwrite a model's weights with their averages over all ranks. Collective; waits for all ranks.

    Strategies let the ranks' models differ: average them before evaluation and saving. `hvdlite.torch` and
    `hvdlite.keras` describe the function in full.

    Args:
        model: A model of PyTorch or Keras, the same on every rank.
        process_set: The ranks that take part.

    Returns:
        A context manager. Its end gives the model this rank's own weights back.

    Raises:
        TypeError: The model's framework is unknown, or has no such function.
    """
    function = frameworks.function_of(model, "average_parameters")
    return function(model, process_set)  # type: ignore[no-any-return]


def save(path: str | os.PathLike[str], /, *, rng: bool = False, consolidate: bool = False, **what: object) -> None:
    """Save a checkpoint: `hvd.save("run.pt", model=model, optimizer=optimizer, epoch=epoch + 1)`.

    Rank 0 writes the file. Collective; waits until the file is written. `hvdlite.torch.save` and, for the other
    frameworks, `hvdlite.keras.save` describe it in full.

    Args:
        path: The file on rank 0's host. Other ranks' paths are ignored.
        rng: Whether to save each rank's random number generators, too.
        consolidate: Whether one file has all of a sharded optimizer's state. Otherwise each rank writes its part into a
            file beside the main one.
        **what: By name, objects with a state, and extras: tensors, arrays and plain data.

    Raises:
        OSError: A rank cannot write its file. Every rank raises it.
        TypeError: An extra is not plain data. Every rank raises it.
        ValueError: The ranks give different names. Every rank raises it.
    """
    frameworks.adapter_of(what.values()).save(path, rng=rng, consolidate=consolidate, **what)


def load(
    path: str | os.PathLike[str], /, *, missing_ok: bool = False, rng: bool = False, **what: object
) -> dict[str, Any]:
    """Restore a checkpoint on every rank. Rank 0 reads the file. Collective; waits for all ranks.

    `hvdlite.torch.load` and, for the other frameworks, `hvdlite.keras.load` describe it in full.

    Args:
        path: The file on rank 0's host. Other ranks' paths are ignored.
        missing_ok: Whether to restore nothing, instead of raising FileNotFoundError, if there is no file.
        rng: Whether to restore each rank's random number generators, too.
        **what: By name, objects to restore in place, and defaults of extras.

    Returns:
        By name, everything else in the file, and the defaults of extras that the file lacks.

    Raises:
        OSError: Rank 0 cannot read the file. Every rank raises it.
        ValueError: The file lacks an object, or the ranks give different names. Every rank raises it.
    """
    adapter = frameworks.adapter_of(what.values())
    return adapter.load(path, missing_ok=missing_ok, rng=rng, **what)  # type: ignore[no-any-return]


__all__ = [
    *_collectives, *names.__all__, "DistributedOptimizer", "HorovodInternalError", "HvdliteError", "MismatchError",
    "NotInitializedError", "Op", "ShutdownError", "StallError", "allgather_object", "average_parameters", "barrier",
    "broadcast_object", "broadcast_variables", "elastic", "join", "load", "run", "save",
]  # fmt: skip

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(
            f"module 'hvdlite' has no {name}: it has what all frameworks share, such as broadcast_variables(model) for "
            "broadcast_parameters. For the other names import hvdlite.torch, hvdlite.tensorflow or hvdlite.keras"
        )
