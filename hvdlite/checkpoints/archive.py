"""Checkpoints of Keras, TensorFlow and NumPy: an .npz file, which `numpy.load` reads without running code.

    variables/model/00003/dense/kernel      a variable of the object that was saved as "model"
    arrays/NAME                             an extra that is an array
    unsent/NAME/1 dense/kernel/residual     what lossy compression has not sent: the sum over all hosts
    strategy/NAME/momentum                  what the optimizer's strategy continues from, on rank 0
    extras                                  all other extras: a pickle without classes or functions

An extra is a value without variables, such as an epoch.

The file holds values and no configuration: a script builds its model, and `load` restores the values. Therefore one
file serves every backend of Keras, and every object that has variables.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn, Protocol, TypeGuard, cast

import numpy as np

from hvdlite.arrays import Array
from hvdlite.checkpoints import checkpoint
from hvdlite.checkpoints.checkpoint import not_plain, plain, random_states, set_random_states
from hvdlite.checkpoints.files import File
from hvdlite.compression.saved import EMPTY, Saved, as_arrays, of_arrays
from hvdlite.gradients.lists import Gradients
from hvdlite.gradients.tensors import Variable
from hvdlite.gradients.variables import have_layers_follow, name_of, variables_of
from hvdlite.job import runtime
from hvdlite.sharding.slots import first_slot, slot_of

OPTIMIZER = ".optimizer"
"""The name of a model's optimizer is the model's name and this ending."""
UNSENT = ".unsent"
"""The name of what has not been sent is the optimizer's name and this ending."""
STRATEGY = ".strategy"
"""The name of a strategy's state is the optimizer's name and this ending."""


class Model(Protocol):
    """A model of Keras."""

    trainable_variables: Sequence[Variable]


class Optimizer(Protocol):
    """An optimizer of Keras.

    Attributes:
        built: Whether its variables exist.
    """

    built: bool

    def build(self, variables: Sequence[Variable], /) -> object:
        """Make its variables."""


class Readable(Protocol):
    """A variable of Keras or TensorFlow outside of graphs."""

    def numpy(self) -> object:
        """The value on the host."""


def save(path: File, /, *, rng: bool = False, consolidate: bool = False, **what: object) -> None:
    """Save a checkpoint: `hvd.save("run.npz", model=model, epoch=epoch + 1)`.

    Rank 0 writes the file. The file gets its name when it is complete, and until then an older file stays. `numpy.load`
    reads it. Collective; waits until the file is written.

    Args:
        path: The file on rank 0's host, with any ending. Other ranks' paths are ignored.
        rng: Whether to save each rank's random number generators, too: Python's, NumPy's, the models' own (dropout),
            and PyTorch's if PyTorch is the backend. TensorFlow's global generator is not saved.
        consolidate: Ignored: the file has all of the state. Accepted for the sake of `hvdlite.torch.save`.
        **what: By name, objects with variables, variables in a dict or list, and extras: arrays and plain data. A
            compiled model includes its optimizer. The file has all of the state of an optimizer with sharded=True.
            NumPy's numbers become Python's.

    Raises:
        OSError: Rank 0 cannot write the file (disk full, no such folder, read-only). Every rank raises it, and an older
            file stays as it was.
        TypeError: An extra is not plain data. Every rank raises it.
        ValueError: The ranks give different names (every rank raises it), or a model has no weights yet.
    """
    checkpoint.save(ArchiveFormat(), path, what, rng, consolidate)


def load(path: File, /, *, missing_ok: bool = False, rng: bool = False, **what: object) -> dict[str, Any]:
    """Restore a checkpoint on every rank:

        start = hvd.load("run.npz", missing_ok=True, model=model, epoch=0)["epoch"]
        model.fit(data, initial_epoch=start, ...)

    Rank 0 reads the file. Collective; waits for all ranks. As at the beginning of training, the next steps compare the
    ranks' weights.

    Args:
        path: The file on rank 0's host. Other ranks' paths are ignored.
        missing_ok: Whether to restore nothing, instead of raising FileNotFoundError, if there is no file.
        rng: Whether to restore each rank's random number generators, too. If another number of ranks saved the file,
            rank 0 logs a warning, and all generators stay as they are.
        **what: By name, objects whose variables get the saved values, and defaults of extras. A compiled model includes
            its optimizer.

    Returns:
        By name: the file's extras, and the defaults of extras that the file lacks. For each object that was not given,
        a list of the file's arrays.

    Raises:
        OSError: Rank 0 cannot read the file. Every rank raises it.
        ValueError: The file lacks an object, or its shapes differ, or the ranks give different names.
        HvdliteError: Another rank's object does not fit the file.
    """
    return checkpoint.load(ArchiveFormat(), path, what, missing_ok, rng)


class Stateful(Protocol):
    """An optimizer's strategy."""

    def settle(self) -> None:
        """Finish what is under way. Collective."""

    def state(self) -> dict[str, Array]:
        """What a file must contain."""

    def load(self, state: Mapping[str, Array], /) -> None:
        """Continue from what a file contains; empty if it has nothing."""


@dataclass(frozen=True)
class WholeState:
    """The state of an object whose variables are a rank's parts. values: names and values, as the file has them."""

    values: Sequence[tuple[str, Array | None]]


class ArchiveFormat:
    """The `Format` of .npz files.

    Attributes:
        unsent: On rank 0, what lossy compression has not sent, by the optimizer's name: the sum over all hosts.
        strategies: The states of strategies, by the optimizer's name.
    """

    parts = None

    def __init__(self) -> None:
        self.unsent: dict[str, Saved] = {}
        self.strategies: dict[str, dict[str, Array]] = {}

    def prepare(self, what: Mapping[str, object]) -> None:
        """Make the variables of optimizers that have not stepped yet."""
        models = [value for value in what.values() if is_model(value)]
        for name, value in with_optimizers(what).items():
            if hasattr(value, "jax_state_sync"):  # during fit, Keras on JAX keeps values outside of variables
                value.jax_state_sync()
            if is_optimizer(value) and not value.built:
                mine = [model for model in models if getattr(model, "optimizer", None) is value] or models
                if len(mine) != 1:
                    raise ValueError(f"{name} has no state yet: call its build(model.trainable_variables)")
                value.build(mine[0].trainable_variables)

    def collect(self, what: Mapping[str, object]) -> None:
        """Add up what lossy compression has not sent, and let strategies finish what is under way. Collective."""
        for name, value in sorted(with_optimizers(what).items()):
            lists = lists_of(value)
            if strategy := strategy_of(value):
                strategy.settle()
                self.strategies[name] = strategy.state()
            found = lists.unsent() if lists else None
            if found and runtime.rank() == 0:
                self.unsent[name] = found

    def whole(self, what: Mapping[str, object]) -> Mapping[str, object]:
        """Return the objects and the models' optimizers. Waits for all ranks if each has a part of a state."""
        return {name: whole_state(value) if self.has_state(value) else value
                for name, value in with_optimizers(what).items()}  # fmt: skip

    def has_state(self, value: object) -> bool:
        """Return whether a value has variables."""
        try:
            return bool(variables_of(value))
        except TypeError:
            return False

    def write(self, file: BinaryIO, what: Mapping[str, object]) -> None:
        """Write what `whole` has returned. Raises TypeError for an extra that is not plain data."""
        entries, extras = dict[str, Any](), dict[str, object]()
        for name, value in what.items():
            if isinstance(value, WholeState) or self.has_state(value):
                for index, (its, array) in enumerate(values_of(value)):
                    entries[f"variables/{name}/{index:05}/{its}"] = array
            elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
                entries[f"arrays/{name}"] = value
            else:
                extras[name] = plain(value)
                if not is_plain(extras[name]):
                    raise not_plain(name, value)
        for name, saved in self.unsent.items():
            entries |= {f"unsent/{name}/{key}": array for key, array in as_arrays(saved).items()}
        for name, state in self.strategies.items():
            entries |= {f"strategy/{name}/{key}": array for key, array in state.items()}
        entries["extras"] = np.frombuffer(pickle.dumps(extras), np.uint8)
        np.savez(file, **entries)

    def read(self, file: BinaryIO) -> dict[str, object]:
        """Return extras, and a list of arrays for each object. Raises ValueError for a file of another kind."""
        try:
            with np.load(file, allow_pickle=False) as archive:
                entries = dict(archive)
            found: dict[str, object] = PlainUnpickler(io.BytesIO(entries.pop("extras").tobytes())).load()
        except (ValueError, KeyError, AttributeError, EOFError, zipfile.BadZipFile) as error:
            what = "hvd.save has not written this file (hvdlite.torch.load reads files of PyTorch)"
            raise ValueError(what) from error
        objects: dict[str, list[Array]] = {}
        for key in sorted(entries):
            kind, name, *_ = key.split("/", 2)
            if kind == "variables":
                objects.setdefault(name, []).append(entries[key])
            elif kind in ("unsent", "strategy"):
                its = cast("dict[str, Array]", found.setdefault(name + (UNSENT if kind == "unsent" else STRATEGY), {}))
                its[key.split("/", 2)[2]] = entries[key]
            else:
                found[name] = entries[key]
        return found | objects

    def restore(self, what: Mapping[str, object], found: dict[str, object]) -> None:
        """Assign the saved values, if all objects fit. Raises ValueError otherwise."""
        pairs = [pair for name, value in with_optimizers(what).items() if name in found
                 for pair in matched(name, variables_of(value), cast("list[Array]", found[name]))]  # fmt: skip
        for variable, value in pairs:
            variable.assign(value)
        have_layers_follow([variable for variable, _ in pairs])
        for name, each in with_optimizers(what).items():
            unsent, lists = found.pop(name + UNSENT, None), lists_of(each)
            if lists:
                lists.stores.load(of_arrays(cast("dict[str, np.ndarray]", unsent)) if unsent else EMPTY)
            state, strategy = found.pop(name + STRATEGY, {}), strategy_of(each)
            if strategy:
                strategy.load(cast("dict[str, Array]", state))
        for name in what:
            found.pop(name + OPTIMIZER, None)

    def random_state(self, what: Mapping[str, object]) -> dict[str, object]:
        """Return the states of this process' generators and of the models' own."""
        return {**random_states(), "seeds": [value_of(seed).tolist() for seed in seeds(what)]}

    def set_random_state(self, what: Mapping[str, object], state: Mapping[str, object]) -> None:
        """Put the generators into these states."""
        set_random_states(state)
        for variable, value in zip(seeds(what), cast("list[object]", state["seeds"]), strict=True):
            variable.assign(np.array(value, value_of(variable).dtype))


def is_model(value: object) -> TypeGuard[Model]:
    """Return whether a value is a model or layer of Keras. Optimizers have no `trainable_weights`."""
    return hasattr(value, "trainable_weights")


def is_optimizer(value: object) -> TypeGuard[Optimizer]:
    """Return whether a value is an optimizer of Keras."""
    return hasattr(value, "apply_gradients") and hasattr(value, "built")


def with_optimizers(what: Mapping[str, object]) -> dict[str, object]:
    """Return the given objects, and the optimizers with which the models among them were compiled."""
    inside = {name + OPTIMIZER: getattr(value, "optimizer", None) for name, value in what.items()}
    given = [*map(id, what.values())]
    return {**what, **{name: value for name, value in inside.items() if is_optimizer(value) and id(value) not in given}}


def lists_of(value: object) -> Gradients | None:
    """Return what reduces the gradients of an attached optimizer; None for another object."""
    inner = getattr(value, "inner_optimizer", value)
    found = getattr(getattr(inner, "_hvdlite", None), "gradients", None)
    return found if isinstance(found, Gradients) else None


def strategy_of(value: object) -> Stateful | None:
    """Return the strategy of an attached optimizer; None for another object."""
    inner = getattr(value, "inner_optimizer", value)
    found: Stateful | None = getattr(getattr(inner, "_hvdlite", None), "strategy", None)
    return found


def seeds(what: Mapping[str, object]) -> list[Variable]:
    """Return the variables in which models keep their generators' states, which differ between ranks."""
    models = [value for value in what.values() if hasattr(value, "layers")]
    variables = [variable for model in models for variable in getattr(model, "variables", ())]
    return [variable for variable in variables if name_of(variable).endswith("seed_generator_state")]


def value_of(variable: Variable) -> Array:
    """Copy a variable's value to the host."""
    return np.array(cast(Readable, variable).numpy())


def whole_state(value: object) -> object:
    """Return an object itself, or its whole state if its variables are a rank's parts. Waits for all ranks then."""
    variables = variables_of(value)
    if first_slot(variables) is None:
        return value
    slots = ((variable, slot_of(variable)) for variable in variables)
    return WholeState([(name_of(each), slot.whole() if slot else value_of(each)) for each, slot in slots])


def values_of(value: object) -> Iterator[tuple[str, Array | None]]:
    """Yield the names and values of an object's variables."""
    if isinstance(value, WholeState):
        yield from value.values
    else:
        yield from ((name_of(variable), value_of(variable)) for variable in variables_of(value))


def matched(name: str, variables: Sequence[Variable], values: Sequence[Array]) -> list[tuple[Variable, Array]]:
    """Return each variable of an object with its saved value. Raises ValueError if their numbers or shapes differ."""
    if len(variables) != len(values):
        raise ValueError(f"{name} has {len(variables)} variables, and {len(values)} in the file")
    parts = [slot.part(value) if (slot := slot_of(variable)) else value
             for variable, value in zip(variables, values, strict=True)]  # fmt: skip
    for variable, value in zip(variables, parts, strict=True):
        if tuple(variable.shape) != value.shape:
            shapes = f"{list(variable.shape)}, and {list(value.shape)} in the file"
            raise ValueError(f"{name}: {name_of(variable)} has the shape {shapes}")
    return [(variable, typed(value, variable)) for variable, value in zip(variables, parts, strict=True)]


def typed(value: Array, variable: Variable) -> Array:
    """Return the value with the variable's dtype. NumPy's files store foreign dtypes (bfloat16) as bytes."""
    return value.view(value_of(variable).dtype) if value.dtype.kind == "V" else value


class PlainUnpickler(pickle.Unpickler):
    """Reads numbers, strings, bytes, lists, tuples, dicts and sets, and refuses everything that would run code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Raise UnpicklingError for a class or function."""
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")


def is_plain(value: object) -> bool:
    """Return whether `PlainUnpickler` reads the value."""
    try:
        PlainUnpickler(io.BytesIO(pickle.dumps(value))).load()
    except Exception:
        return False
    return True
