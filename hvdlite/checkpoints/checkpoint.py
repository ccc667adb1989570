"""Checkpoints: the same state on all ranks, from files that are replaced all at once.

    hvd.save("run.pt", model=model, optimizer=optimizer, epoch=epoch + 1)
    epoch = hvd.load("run.pt", missing_ok=True, model=model, optimizer=optimizer, epoch=0)["epoch"]

"run.pt" is always a complete checkpoint, the new one or the previous one (`files`). Rank 0 writes it. If an object's
state is on several ranks, each of these writes its part into a separate file, unless one file is asked for
(`consolidate`). If a rank cannot write or read, every rank raises the same error.

To load, all ranks get the main file's bytes and decode them, so that other hosts need no file. Rank 0 reads the parts,
too, one after another; each rank gets each part, and takes from it what it needs, so that another number of ranks may
load. A `Format` encodes and decodes objects. Rejected: to broadcast decoded objects of the main file, because each kind
of object needs another call.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar, cast

import numpy as np

from hvdlite.checkpoints.files import File, Stream, Target, bytes_of, replace_file
from hvdlite.errors import HvdliteError
from hvdlite.job import runtime
from hvdlite.lanes.calls import calling
from hvdlite.ops.objects import allgather_object, broadcast_object

RNG = "rng_of_ranks"  # the name of the generators' states in the file
PARTS = "parts_of_ranks"  # the name of the list of parts in the main file
T = TypeVar("T")


class Joining(Protocol):
    """Takes from the parts of an object's state what this rank needs of it."""

    def take(self, part: object) -> None:
        """Take from one part."""

    def state(self) -> object:
        """Return what `Format.restore` needs, when all parts have been taken. Raises ValueError if some are missing."""


class Parts(Protocol):
    """Encodes objects whose state is on several ranks, in parts. Not collective.

    The main file has a header in place of such an object: all but its state. The file of each rank has its part of the
    state.
    """

    def headers(self, what: Mapping[str, object]) -> dict[str, object]:
        """Return what this rank knows for the header of each object, if the rank has a part of that object's state."""

    def header(self, name: str, known: Sequence[object]) -> object:
        """Return an object's header, of what the ranks know. Raises ValueError if their parts do not fit together."""

    def write(self, file: BinaryIO, what: Mapping[str, object]) -> None:
        """Write this rank's parts. Raises TypeError if one is not plain data."""

    def read(self, file: BinaryIO) -> dict[str, object]:
        """Return a rank's parts by name, as what travels well between ranks. Raises an error if they are damaged."""

    def join(self, name: str, value: object, header: object) -> Joining:
        """Begin to join the state that an object needs on this rank. Raises ValueError if it does not fit."""


class Format(Protocol):
    """Encodes a framework's objects into a file, and restores them from it.

    Attributes:
        parts: Encodes objects whose state is on several ranks; None if there are none.
    """

    @property
    def parts(self) -> Parts | None: ...

    def prepare(self, what: Mapping[str, object]) -> None:
        """Make all objects hold their state. Called on every rank before a file is written or read."""

    def collect(self, what: Mapping[str, object]) -> None:
        """Before a file is written: bring together on rank 0 what each host has a part of. Collective."""

    def whole(self, what: Mapping[str, object]) -> Mapping[str, object]:
        """Return the objects; in place of one whose state is on several ranks, rank 0 gets the whole state.

        Collective then.
        """

    def has_state(self, value: object) -> bool:
        """Return whether a value is an object that is restored in place. Otherwise it is an extra."""

    def write(self, file: BinaryIO, what: Mapping[str, object]) -> None:
        """Write objects' states and extras. Raises TypeError, with the extra's name, if an extra is not plain data."""

    def read(self, file: BinaryIO) -> dict[str, object]:
        """Return objects' states and extras by name. Raises ValueError for a file of another kind."""

    def restore(self, what: Mapping[str, object], found: dict[str, object]) -> None:
        """Give each object its state. Raises ValueError if one does not fit.

        Args:
            what: The objects by name.
            found: What `read` returned. States that are restored with an object but have other names are removed.
        """

    def random_state(self, what: Mapping[str, object]) -> dict[str, object]:
        """Return the states of this rank's random number generators, as plain data."""

    def set_random_state(self, what: Mapping[str, object], state: Mapping[str, object]) -> None:
        """Put this rank's random number generators into these states."""


def save(form: Format, path: File, what: Mapping[str, object], rng: bool, consolidate: bool) -> None:
    """Write the files of a checkpoint. Collective; waits for all ranks. See `hvdlite.torch.save`."""
    call, whole = "hvd.save", dict(what)
    with calling(f"hvd.save({str(path)!r})"):
        form.prepare(what)
        states = agree(call, what, form.random_state(what) if rng else None)
        extras = {RNG: states} if rng else {}
        on_each(call, path, lambda: form.collect(what))
        if form.parts and not consolidate:
            save_in_parts(form, form.parts, path, what, extras)
        else:
            on_each(call, path, lambda: whole.update(form.whole(what)))
            on_rank_0(call, path, lambda: replace_file(path, lambda file: form.write(file, {**whole, **extras})))


def save_in_parts(
    form: Format, parts: Parts, path: File, what: Mapping[str, object], extras: Mapping[str, object]
) -> None:
    """Write the main file, and each rank's part of objects whose state is on several ranks. Collective."""
    call, rank = "hvd.save", runtime.rank()
    target = on_rank_0(call, path, lambda: Target.of(path))
    known = on_each(call, path, lambda: parts.headers(what))
    divided = [name for name in what if any(name in each for each in known)]
    headers = {name: parts.header(name, [each[name] for each in known if name in each]) for name in divided}
    files = {writer: target.part(writer, len(known)) for writer, each in enumerate(known) if each}
    listed = {PARTS: {"files": [*files.values()], "of": divided}} if divided else {}
    everything = {**what, **headers, **extras, **listed}
    mine, sizes = {name: what[name] for name in known[rank]}, list[int]()

    def write_part() -> int:
        return target.write_part(files[rank], lambda file: parts.write(file, mine)) if mine else 0

    def write_main() -> None:
        written = {name: sizes[writer] for writer, name in files.items()}
        replace_file(path, lambda file: form.write(file, everything), written)

    try:
        if divided:
            sizes += on_each(call, path, write_part)
        on_rank_0(call, path, write_main)
    except BaseException:
        if mine:
            target.remove_part(files[rank])
        raise


def load(form: Format, path: File, what: Mapping[str, object], missing_ok: bool, rng: bool) -> dict[str, Any]:
    """Read the files on rank 0, and restore objects on every rank. Collective. See `hvdlite.torch.load`."""
    call = "hvd.load"
    with calling(f"hvd.load({str(path)!r})"):
        form.prepare(what)
        agree(call, what)
        data = on_rank_0(call, path, lambda: bytes_of(path, missing_ok))
    extras = {name: value for name, value in what.items() if not form.has_state(value)}
    if data is None:
        return extras
    objects = {name: value for name, value in what.items() if name not in extras}
    with calling(f"hvd.load({str(path)!r})"):
        found = on_all(call, path, partial(understood, form, io.BufferedReader(Stream(data)), objects, rng))
        del data
        join_parts(form, path, objects, found)
        rest = on_all(call, path, lambda: restored(form, objects, found, rng))
    compare_again()
    return extras | rest


def understood(form: Format, file: BinaryIO, objects: Mapping[str, object], rng: bool) -> dict[str, object]:
    """Return all that is in the main file.

    Raises:
        ValueError: The file lacks a state.
    """
    found = form.read(file)
    if missing := [name for name in objects if name not in found]:
        there = ", ".join(str(name) for name in found if name not in (RNG, PARTS)) or "nothing"
        raise ValueError(f"hvd.load: the file has no {' and no '.join(missing)}: it has {there}")
    if rng and RNG not in found:
        raise ValueError("hvd.load: rng=True, but the file was saved without it")
    return found


def join_parts(form: Format, path: File, objects: Mapping[str, object], found: dict[str, object]) -> None:
    """Replace the headers of objects by the states that they need on this rank. Collective; waits for all ranks.

    Args:
        form: The format.
        path: The main file.
        objects: The objects that are to be restored.
        found: What the main file has; changed in place.
    """
    call, listed = "hvd.load", cast("dict[str, list[str]]", found.pop(PARTS, {}))
    names, parts = [name for name in listed.get("of", ()) if name in objects], form.parts
    if not names or not parts:
        return
    joinings = on_all(call, path, lambda: {name: parts.join(name, objects[name], found[name]) for name in names})

    def take(part: Mapping[str, object]) -> None:
        for name in names:
            if name in part:
                joinings[name].take(part[name])

    for file in listed["files"]:
        part = on_rank_0(call, path, partial(read_part, parts, path, file))
        on_all(call, path, partial(take, part))
        del part
    found |= on_all(call, path, lambda: {name: each.state() for name, each in joinings.items()})


def read_part(parts: Parts, path: File, name: str) -> dict[str, object]:
    """Read a part.

    Raises:
        ValueError: It is missing, or damaged.
        OSError: The file cannot be read.
    """
    file = Path(os.path.realpath(path)).with_name(name)
    if not file.exists():  # not a FileNotFoundError: there is a checkpoint
        raise ValueError(
            f"hvd.load: {os.fspath(path)!r} has its optimizer's state in several files, and {str(file)!r} is missing. "
            "Copy and move all of them together, under their names, or save with consolidate=True. If a job has just "
            "saved a newer checkpoint there, load again [HVD401]"
        )
    with open(file, "rb") as opened:
        try:
            return parts.read(opened)
        except pickle.UnpicklingError:  # the file is whole, and has types that have to be trusted first
            raise
        except Exception as error:
            damage = f"{type(error).__name__}: {error}"
    raise ValueError(f"hvd.load: a part of {os.fspath(path)!r} is damaged, {str(file)!r}: {damage} [HVD401]")


def restored(form: Format, objects: Mapping[str, object], found: dict[str, object], rng: bool) -> dict[str, object]:
    """Restore objects on this rank. Returns everything else in the file."""
    form.restore(objects, found)
    states = cast("list[dict[str, object]]", found.pop(RNG, []))
    if rng and len(states) == runtime.size():
        form.set_random_state(objects, states[runtime.rank()])
    elif rng and runtime.rank() == 0:
        logging.getLogger("hvdlite").warning(
            "hvd.load: the file has the random states of %d ranks, but this job has %d ranks: none is restored",
            len(states), runtime.size(),
        )  # fmt: skip
    return {name: value for name, value in found.items() if name not in objects}


# Agreement


def agree(call: str, what: Mapping[str, object], state: object = None) -> list[object]:
    """Return each rank's `state`. Raises ValueError on every rank if the ranks give different names."""
    everyone = allgather_object((sorted(what), state), name=call)
    for rank, (names, _) in enumerate(everyone):
        if names != everyone[0][0]:
            first, other = (", ".join(each) or "nothing" for each in (everyone[0][0], names))
            raise ValueError(f"{call}: rank 0 gives {first}, but rank {rank} gives {other}: give the same on all ranks")
    return [state for _, state in everyone]


def on_rank_0(call: str, path: File, work: Callable[[], T]) -> T:
    """Call work() on rank 0, and return its result on every rank. If it raises, every rank raises the same error."""
    result, failure = None, None
    if runtime.rank() == 0:
        try:
            result = work()
        except Exception as error:
            failure = named(error, call, path, 0)
    result, sent = broadcast_object((result, portable(failure)), 0, name=f"{call} on rank 0")
    if sent is not None:
        raise failure or sent
    return result  # type: ignore[no-any-return]


def on_each(call: str, path: File, work: Callable[[], T]) -> list[T]:
    """Call work() on every rank, and return all results on every rank, in rank order.

    If work() raises on some ranks, every rank raises the error of the first of these.
    """
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = named(error, call, path, runtime.rank())
    everyone = allgather_object((result, portable(failure)), name=f"{call} on each rank")
    for rank, (_, sent) in enumerate(everyone):
        if sent is not None:
            raise (failure if rank == runtime.rank() else None) or sent
    return [each for each, _ in everyone]


def on_all(call: str, path: File, work: Callable[[], T]) -> T:
    """Call work() on every rank, and wait for all ranks. If it raises on some, the others raise HvdliteError."""
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
        failure.add_note(f"{call}: this rank cannot restore from {os.fspath(path)!r}")
    failures = allgather_object(failure and f"{type(failure).__name__}: {failure}", name=f"{call} on all ranks")
    if failure is not None:
        raise failure
    for rank, failed in enumerate(failures):
        if failed:
            raise HvdliteError(f"{call}: rank {rank} cannot restore from {os.fspath(path)!r}: {failed}")
    return result  # type: ignore[return-value]


def named(error: Exception, call: str, path: File, rank: int) -> Exception:
    """Return the error that every rank raises: if an OSError caused `error`, that one with the call and the path."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return error
    return OSError(cause.errno, f"{call}: rank {rank} cannot use the file: {cause.strerror} [HVD402]", os.fspath(path))


def portable(error: Exception | None) -> Exception | None:
    """Return the error, or an HvdliteError with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return HvdliteError(f"{type(error).__name__}: {error}")
    return error


def compare_again() -> None:
    """Make each optimizer's next step compare the ranks' weights."""
    for each in runtime.current().registries.joining():
        if alike := each.alike:
            alike.expect("0", ("weights", "state"))


# What all formats share


def plain(value: object) -> object:
    """Replace NumPy's numbers in a value by Python's. Returns the same object if it has none."""
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, (dict, list, tuple)) or type(value) not in (dict, list, tuple):
        return value
    before = list(value.values()) if isinstance(value, dict) else list(value)
    after = [plain(each) for each in before]
    if all(new is old for new, old in zip(after, before, strict=True)):
        return value
    return dict(zip(value, after, strict=True)) if isinstance(value, dict) else type(value)(after)


def not_plain(name: str, value: object) -> TypeError:
    """Return the error for an extra that is not plain data."""
    return TypeError(
        f"hvd.save: {name!r} ({type(value).__name__}) is not plain data, so nothing is saved: reading it would "
        "run code from the file. Give numbers, strings, lists, dicts (such as vars(args)) or tensors; an object that "
        "can restore itself needs state_dict() and load_state_dict() (PyTorch) or variables (Keras, TensorFlow) "
        "[HVD403]"
    )


@dataclass(frozen=True)
class Generator:
    """A random number generator of this process.

    Attributes:
        get: Returns its state, as plain data.
        set: Puts it into a state.
    """

    get: Callable[[], object]
    set: Callable[[Any], None]


def numpys_state() -> tuple[object, ...]:
    """Return the state of NumPy's global generator, as plain data."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return kind, np.asarray(keys).tolist(), *rest


GENERATORS = {
    "python": Generator(random.getstate, random.setstate), "numpy": Generator(numpys_state, np.random.set_state),
}  # fmt: skip
"""The generators that `rng=True` saves, by name. Adapters add those of their frameworks."""


def random_states() -> dict[str, object]:
    """Return the states of all generators, by name."""
    return {name: each.get() for name, each in GENERATORS.items()}


def set_random_states(states: Mapping[str, object]) -> None:
    """Put generators into these states, and ignore the states of generators that are not in use here."""
    for name in states.keys() & GENERATORS.keys():
        GENERATORS[name].set(states[name])
