"""Checkpoints: rank 0 writes and reads one file, and all ranks get the same state.

    hvd.save("run.pt", model=model, optimizer=optimizer, epoch=epoch + 1)
    epoch = hvd.load("run.pt", missing_ok=True, model=model, optimizer=optimizer, epoch=0)["epoch"]

"run.pt" is always a complete checkpoint, the new one or the previous one: rank 0 writes a file in the same folder, and
renames it when all data are on the disk. If rank 0 cannot write or read, every rank raises the same error. All ranks
get the file's bytes and decode them, so that other hosts need no file. A `Format` encodes and decodes the bytes.
Rejected: to broadcast decoded objects, because each kind of object needs another call.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import pickle
import random
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar, cast

import numpy as np

from hvdlite.arrays import Array
from hvdlite.errors import HvdliteError
from hvdlite.job import runtime
from hvdlite.lanes.calls import calling
from hvdlite.ops.objects import allgather_object, broadcast_object

RNG = "rng_of_ranks"  # the name of the generators' states in the file
ENDING = ".unfinished"
LONGEST_PAUSE = 3600.0  # seconds without a write after which an unfinished file counts as abandoned
T = TypeVar("T")
File = str | os.PathLike[str]


class Format(Protocol):
    """Encodes a framework's objects into a file, and restores them from it."""

    def prepare(self, what: Mapping[str, object]) -> None:
        """Make all objects hold their state. Called on every rank before a file is written or read."""

    def whole(self, what: Mapping[str, object]) -> Mapping[str, object]:
        """Return the objects; in place of one whose state is on several ranks, the whole state. Collective then."""

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


def save(form: Format, path: File, what: Mapping[str, object], rng: bool) -> None:
    """Write one file on rank 0. Collective; waits for all ranks. See `hvdlite.torch.save`."""
    with calling(f"hvd.save({str(path)!r})"):
        form.prepare(what)
        states = agree("hvd.save", what, form.random_state(what) if rng else None)
        what = form.whole(what)
        everything = {**what, RNG: states} if rng else what
        on_rank_0("hvd.save", path, lambda: replace_file(path, lambda file: form.write(file, everything)))


def load(form: Format, path: File, what: Mapping[str, object], missing_ok: bool, rng: bool) -> dict[str, Any]:
    """Read one file on rank 0, and restore objects on every rank. Collective. See `hvdlite.torch.load`."""
    with calling(f"hvd.load({str(path)!r})"):
        form.prepare(what)
        agree("hvd.load", what)
        data = on_rank_0("hvd.load", path, lambda: bytes_of(path, missing_ok))
    extras = {name: value for name, value in what.items() if not form.has_state(value)}
    if data is None:
        return extras
    objects = {name: value for name, value in what.items() if name not in extras}
    with calling(f"hvd.load({str(path)!r})"):
        found = on_all("hvd.load", path, lambda: restored(form, io.BufferedReader(Stream(data)), objects, rng))
    compare_again()
    return extras | found


def restored(form: Format, file: BinaryIO, objects: Mapping[str, object], rng: bool) -> dict[str, object]:
    """Restore objects on this rank. Returns everything else in the file.

    Raises:
        ValueError: The file lacks a state. Nothing is restored.
    """
    found = form.read(file)
    if missing := [name for name in objects if name not in found]:
        there = ", ".join(str(name) for name in found if name != RNG) or "nothing"
        raise ValueError(f"hvd.load: the file has no {' and no '.join(missing)}: it has {there}")
    if rng and RNG not in found:
        raise ValueError("hvd.load: rng=True, but the file was saved without it")
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
            failure = named(error, call, path)
    result, sent = broadcast_object((result, portable(failure)), 0, name=f"{call} on rank 0")
    if sent is not None:
        raise failure or sent
    return result  # type: ignore[no-any-return]


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


def named(error: Exception, call: str, path: File) -> Exception:
    """Return the error that every rank raises: if an OSError caused `error`, that one with the call and the path."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return error
    return OSError(cause.errno, f"{call}: rank 0 cannot use the file: {cause.strerror}", os.fspath(path))


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


# The file


def replace_file(path: File, write: Callable[[BinaryIO], None]) -> None:
    """Replace a file by what write(file) writes: completely or not at all, even if the process or the host dies.

    The new file gets the old file's permissions. A link to the file stays a link to it.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    sweep(target)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}{ENDING}")
    try:
        with open(beside, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            os.chmod(beside, stat.S_IMODE(target.stat().st_mode))
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    settle_folder(target.parent)


def sweep(target: Path) -> None:
    """Remove the unfinished files of processes that were killed while they wrote the target."""
    for left in target.parent.glob(f".{target.name}.*{ENDING}"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > LONGEST_PAUSE:
                left.unlink()


def settle_folder(folder: Path) -> None:
    """Write the folder's new entry to the disk, if the file system supports that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def bytes_of(path: File, missing_ok: bool) -> Array | None:
    """Return all bytes of a file; None if there is no file and `missing_ok` is true."""
    try:
        return np.fromfile(path, np.uint8)
    except FileNotFoundError:
        if missing_ok:
            return None
        raise


class Stream(io.RawIOBase):
    """Bytes in memory as a file. Unlike io.BytesIO it does not copy them."""

    def __init__(self, data: Array) -> None:
        self.data, self.place = data.data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = self.data[self.place : self.place + len(buffer)]
        buffer[: len(part)] = part
        self.place += len(part)
        return len(part)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: len(self.data)}[whence]
        return self.place


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
        "can restore itself needs state_dict() and load_state_dict() (PyTorch) or variables (Keras, TensorFlow)"
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
