"""Checkpoints of Keras, TensorFlow and NumPy: an .npz file, which `numpy.load` reads without running code.

    variables/model/00003/dense/kernel      a variable, under the name that its object was given
    arrays/NAME                             an extra that is an array
    extras                                  all other extras: a pickle without classes or functions

Only values are kept, no configuration: a script builds its model, and `load` restores it. So one file serves every
backend of Keras, and all objects that have variables.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NoReturn

import numpy as np

from hvdlite.arrays import Array
from hvdlite.checkpoints import checkpoint
from hvdlite.checkpoints.checkpoint import File, not_plain, plain, random_states, set_random_states
from hvdlite.gradients.variables import have_layers_follow, name_of, variables_of

OPTIMIZER = ".optimizer"
"""After a model's name: the optimizer that it was compiled with."""


def save(path: File, /, *, rng: bool = False, **what: Any) -> None:
    """Save a checkpoint, which rank 0 writes: `hvd.save("run.npz", model=model, epoch=epoch + 1)`.

    The file takes its name when it is whole; until then an older one stays. `numpy.load` reads it. Collective; waits
    until the file is written.

    Args:
        path: of the file, on rank 0's host, with any ending; the others' paths do not matter.
        rng: save each rank's generators of random numbers, too: Python's, NumPy's, PyTorch's where it is the backend,
            and the models' own (dropout). There a model's first fit draws numbers of its own; TensorFlow's global
            generator stays as it is.
        what: by name, objects with variables (a compiled model brings its optimizer along), variables in a dict or
            list, and extras: arrays and plain data. NumPy's numbers become Python's.

    Raises:
        OSError: on every rank, where rank 0 cannot write the file (no room, no such folder, read-only). An older file
            is as before.
        TypeError: on every rank, for an extra that is no plain data.
        ValueError: on every rank, where ranks give other names; for a model that has no weights yet.
    """
    checkpoint.save(ArchiveFormat(), path, what, rng)


def load(path: File, /, *, missing_ok: bool = False, rng: bool = False, **what: Any) -> dict[str, Any]:
    """Restore a checkpoint on every rank, which rank 0 reads:

        start = hvd.load("run.npz", missing_ok=True, model=model, epoch=0)["epoch"]
        model.fit(data, initial_epoch=start, ...)

    Collective; waits for all ranks. Ranks' weights are compared from now on as they are from the beginning of training.

    Args:
        path: of the file, on rank 0's host; the others' paths do not matter.
        missing_ok: where there is no such file, restore nothing.
        rng: restore each rank's generators of random numbers. If the file is of another number of ranks, rank 0 logs a
            warning, and all generators stay as they are.
        what: by name, objects whose variables are assigned to (a compiled model brings its optimizer along), and
            defaults of extras.

    Returns:
        What else the file has, by name: extras, and lists of arrays for objects that were not given. And the defaults
        of extras that it has not.

    Raises:
        OSError: on every rank, where rank 0 cannot read the file; FileNotFoundError where there is none.
        ValueError: where the file lacks an object that is given, or has other shapes, or ranks give other names; on
            ranks whose objects fit HvdliteError.
    """
    return checkpoint.load(ArchiveFormat(), path, what, missing_ok, rng)


class ArchiveFormat:
    """The `Format` of .npz files."""

    def prepare(self, what: Mapping[str, Any]) -> None:
        """Make the variables of optimizers that have not stepped yet."""
        models = [value for value in what.values() if hasattr(value, "trainable_weights")]  # optimizers lack it
        for name, value in with_optimizers(what).items():
            if hasattr(value, "jax_state_sync"):  # during fit, JAX keeps values elsewhere
                value.jax_state_sync()
            if is_optimizer(value) and not value.built:
                mine = [model for model in models if getattr(model, "optimizer", None) is value] or models
                if len(mine) != 1:
                    raise ValueError(f"{name} has no state yet: call its build(model.trainable_variables)")
                value.build(mine[0].trainable_variables)

    def has_state(self, value: Any) -> bool:
        try:
            return bool(variables_of(value))
        except TypeError:
            return False

    def write(self, file: BinaryIO, what: Mapping[str, Any]) -> None:
        entries, extras = dict[str, Any](), dict[str, Any]()
        for name, value in with_optimizers(what).items():
            if self.has_state(value):
                for index, variable in enumerate(variables_of(value)):
                    entries[f"variables/{name}/{index:05}/{name_of(variable)}"] = value_of(variable)
            elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
                entries[f"arrays/{name}"] = value
            else:
                extras[name] = plain(value)
                if not is_plain(extras[name]):
                    raise not_plain(name, value)
        entries["extras"] = np.frombuffer(pickle.dumps(extras), np.uint8)
        np.savez(file, **entries)

    def read(self, file: BinaryIO) -> dict[str, Any]:
        try:
            with np.load(file, allow_pickle=False) as archive:
                entries = dict(archive)
            found: dict[str, Any] = PlainUnpickler(io.BytesIO(entries.pop("extras").tobytes())).load()
        except (ValueError, KeyError, AttributeError, EOFError, zipfile.BadZipFile) as error:
            what = "the file is none that hvd.save has written (hvdlite.torch.load reads one of PyTorch)"
            raise ValueError(what) from error
        for key in sorted(entries):
            kind, name, *_ = key.split("/", 2)
            if kind == "variables":
                found.setdefault(name, []).append(entries[key])
            else:
                found[name] = entries[key]
        return found

    def restore(self, what: Mapping[str, Any], found: dict[str, Any]) -> None:
        pairs = [pair for name, value in with_optimizers(what).items() if name in found
                 for pair in matched(name, variables_of(value), found[name])]  # fmt: skip
        for variable, value in pairs:
            variable.assign(value)
        have_layers_follow([variable for variable, _ in pairs])
        for name in what:
            found.pop(name + OPTIMIZER, None)

    def random_state(self, what: Mapping[str, Any]) -> Any:
        return {**random_states(), "seeds": [value_of(seed).tolist() for seed in seeds(what)]}

    def set_random_state(self, what: Mapping[str, Any], state: Any) -> None:
        set_random_states(state)
        for variable, value in zip(seeds(what), state["seeds"], strict=True):
            variable.assign(np.array(value, value_of(variable).dtype))


def is_optimizer(value: Any) -> bool:
    """Whether a value is an optimizer of Keras."""
    return hasattr(value, "apply_gradients") and hasattr(value, "built")


def with_optimizers(what: Mapping[str, Any]) -> dict[str, Any]:
    """The given objects, and the optimizers that the models among them were compiled with."""
    inside = {name + OPTIMIZER: getattr(value, "optimizer", None) for name, value in what.items()}
    given = [*map(id, what.values())]
    return {**what, **{name: value for name, value in inside.items() if is_optimizer(value) and id(value) not in given}}


def seeds(what: Mapping[str, Any]) -> list[Any]:
    """The state of Keras' generators in models, which differs between ranks."""
    variables = [each for value in what.values() if hasattr(value, "layers") for each in value.variables]
    return [variable for variable in variables if name_of(variable).endswith("seed_generator_state")]


def value_of(variable: Any) -> Array:
    """A copy on the host."""
    return np.array(variable.numpy())


def matched(name: str, variables: Sequence[Any], values: Sequence[Array]) -> list[tuple[Any, Array]]:
    """Each variable with its value. Raises ValueError if their numbers or shapes differ."""
    if len(variables) != len(values):
        raise ValueError(f"{name} has {len(variables)} variables, and {len(values)} in the file")
    for variable, value in zip(variables, values, strict=True):
        if tuple(variable.shape) != value.shape:
            shapes = f"{list(variable.shape)}, and {list(value.shape)} in the file"
            raise ValueError(f"{name}: {name_of(variable)} has the shape {shapes}")
    return [(variable, typed(value, variable)) for variable, value in zip(variables, values, strict=True)]


def typed(value: Array, variable: Any) -> Array:
    """The value with the variable's dtype. NumPy's files store dtypes that are not NumPy's own (bfloat16) as bytes."""
    return value.view(value_of(variable).dtype) if value.dtype.kind == "V" else value


class PlainUnpickler(pickle.Unpickler):
    """Reads numbers, strings, bytes, lists, tuples, dicts and sets, and nothing that would run code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")


def is_plain(value: Any) -> bool:
    """Whether `PlainUnpickler` reads the value."""
    try:
        PlainUnpickler(io.BytesIO(pickle.dumps(value))).load()
    except Exception:
        return False
    return True
