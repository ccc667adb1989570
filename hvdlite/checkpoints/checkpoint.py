"""Checkpoints: rank 0 writes and reads one file, and all ranks get the same state.

    hvd.save("run.pt", model=model, optimizer=optimizer, epoch=epoch + 1)
    epoch = hvd.load("run.pt", missing_ok=True, model=model, optimizer=optimizer, epoch=0)["epoch"]

"run.pt" is always a whole checkpoint, the new one or the previous one: the data are written to a file beside it, which
takes its name once all is on the disk. If rank 0 cannot write or read, every rank raises the same error. All ranks get
the file's bytes and decode them, so that other hosts need no file. A `Format` gives the bytes their meaning. Rejected:
to broadcast decoded objects, because each kind of object needs another call.
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
from typing import Any, BinaryIO, Protocol, TypeVar

import numpy as np

from hvdlite.arrays import Array
from hvdlite.errors import HvdliteError
from hvdlite.job import runtime
from hvdlite.lanes.calls import calling
from hvdlite.ops.objects import allgather_object, broadcast_object

RNG = "rng_of_ranks"  # in the file
ENDING = ".unfinished"
LONGEST_PAUSE = 3600.0  # seconds; an unfinished file without a write for so long was abandoned
T = TypeVar("T")
File = str | os.PathLike[str]


class Format(Protocol):
    """How a framework's objects become a file and come back."""

    def prepare(self, what: Mapping[str, Any]) -> None:
        """Make all objects hold their state, on every rank, before a file is written or read."""

    def has_state(self, value: Any) -> bool:
        """Whether a value is an object that is restored in place. Otherwise it is an extra."""

    def write(self, file: BinaryIO, what: Mapping[str, Any]) -> None:
        """Write objects' states and extras. Raises TypeError, which names it, for an extra that is no plain data."""

    def read(self, file: BinaryIO) -> dict[str, Any]:
        """Objects' states and extras by name. Raises ValueError for a file of another kind."""

    def restore(self, what: Mapping[str, Any], found: dict[str, Any]) -> None:
        """Give each object its state. Removes from `found` what the caller did not name. Raises ValueError if one does
        not fit.
        """

    def random_state(self, what: Mapping[str, Any]) -> Any:
        """This rank's generators of random numbers, as plain data."""

    def set_random_state(self, what: Mapping[str, Any], state: Any) -> None:
        """Put this rank's generators into that state."""


def save(form: Format, path: File, what: Mapping[str, Any], rng: bool) -> None:
    """Write one file on rank 0. Waits for all ranks. See `hvdlite.torch.save`."""
    with calling(f"hvd.save({str(path)!r})"):
        form.prepare(what)
        states = agree("hvd.save", what, form.random_state(what) if rng else None)
        everything = {**what, RNG: states} if rng else what
        on_rank_0("hvd.save", path, lambda: replace_file(path, lambda file: form.write(file, everything)))


def load(form: Format, path: File, what: Mapping[str, Any], missing_ok: bool, rng: bool) -> dict[str, Any]:
    """Read one file on rank 0, restore objects on every rank, and return the extras. See `hvdlite.torch.load`."""
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
    begin_anew()
    return extras | found


def restored(form: Format, file: BinaryIO, objects: Mapping[str, Any], rng: bool) -> dict[str, Any]:
    """Restore objects on this rank. Returns what else the file has.

    Raises:
        ValueError: The file lacks a state that is asked for. Nothing is restored.
    """
    found = form.read(file)
    if missing := [name for name in objects if name not in found]:
        there = ", ".join(str(name) for name in found if name != RNG) or "nothing"
        raise ValueError(f"hvd.load: the file has no {' and no '.join(missing)}: it has {there}")
    if rng and RNG not in found:
        raise ValueError("hvd.load: rng=True, and the file was saved without it")
    form.restore(objects, found)
    states = found.pop(RNG, ())
    if rng and len(states) == runtime.size():
        form.set_random_state(objects, states[runtime.rank()])
    elif rng and runtime.rank() == 0:
        logging.getLogger("hvdlite").warning(
            "hvd.load: the file has the random states of %d ranks, and this job has %d: none is restored",
            len(states), runtime.size(),
        )  # fmt: skip
    return {name: value for name, value in found.items() if name not in objects}


# Agreement

def agree(call: str, what: Mapping[str, Any], state: Any = None) -> list[Any]:
    """Each rank's state. Raises ValueError on every rank if they name different things."""
    everyone = allgather_object((sorted(what), state), name=call)
    for rank, (names, _) in enumerate(everyone):
        if names != everyone[0][0]:
            first, other = (", ".join(each) or "nothing" for each in (everyone[0][0], names))
            raise ValueError(f"{call}: rank 0 gives {first}, and rank {rank} gives {other}: they must give the same")
    return [state for _, state in everyone]


def on_rank_0(call: str, path: File, work: Callable[[], T]) -> T:
    """Call work() on rank 0 and return its result on every rank. Waits for all ranks. If it raises, every rank raises
    the same.
    """
    result: Any = None
    failure = None
    if runtime.rank() == 0:
        try:
            result = work()
        except Exception as error:
            failure = told(error, call, path)
    result, sent = broadcast_object((result, portable(failure)), 0, name=f"{call} on rank 0")
    if sent is not None:
        raise failure or sent
    return result  # type: ignore[no-any-return]


def on_all(call: str, path: File, work: Callable[[], T]) -> T:
    """Call work() on every rank. Waits for all ranks. If it raises on some ranks, the others raise HvdliteError."""
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


def told(error: Exception, call: str, path: File) -> Exception:
    """The error that every rank raises: the operating system's with its number, if there is one among the causes."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return error
    return OSError(cause.errno, f"{call}: rank 0 cannot use the file: {cause.strerror}", os.fspath(path))


def portable(error: Exception | None) -> Exception | None:
    """The error, or one with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return HvdliteError(f"{type(error).__name__}: {error}")
    return error


def begin_anew() -> None:
    """Compare the ranks' weights again at each optimizer's next step."""
    for each in runtime.current().registries.joining():
        if alike := each.alike:
            alike.expect("0", ("weights", "state"))


# The file

def replace_file(path: File, write: Callable[[BinaryIO], None]) -> None:
    """Replace `path` by what write(file) writes, as a whole, even if the process is killed or the power fails.

    The new file has the old one's permissions. A link keeps pointing to the file.
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
    """Remove files that processes left beside the target because they were killed while they wrote."""
    for left in target.parent.glob(f".{target.name}.*{ENDING}"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > LONGEST_PAUSE:
                left.unlink()


def settle_folder(folder: Path) -> None:
    """Write the folder's new entry to the disk, if the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def bytes_of(path: File, missing_ok: bool) -> Array | None:
    """All bytes of a file; None if there is none and `missing_ok` is true."""
    try:
        return np.fromfile(path, np.uint8)
    except FileNotFoundError:
        if missing_ok:
            return None
        raise


class Stream(io.RawIOBase):
    """Bytes in memory as a file. (io.BytesIO would copy them.)"""

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

def plain(value: Any) -> Any:
    """The value with Python numbers in place of NumPy's; the same object if it has none."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) not in (dict, list, tuple):
        return value
    before = list(value.values()) if isinstance(value, dict) else list(value)
    after = [plain(each) for each in before]
    if all(new is old for new, old in zip(after, before, strict=True)):
        return value
    return dict(zip(value, after, strict=True)) if isinstance(value, dict) else type(value)(after)


def not_plain(name: str, value: Any) -> TypeError:
    """The error for an extra that a file must not have."""
    return TypeError(
        f"hvd.save: {name!r} ({type(value).__name__}) is not plain data, so nothing is saved: whoever opened the file "
        "would have to trust code in it. Give numbers, strings, lists, dicts (vars(args), say) or tensors; an object "
        "that can restore itself needs state_dict() and load_state_dict() (PyTorch) or variables (Keras, TensorFlow)"
    )


@dataclass(frozen=True)
class Generator:
    """A generator of random numbers of this process.

    Attributes:
        get: Returns its state, as plain data.
        set: Puts it into a state.
    """

    get: Callable[[], Any]
    set: Callable[[Any], None]


def numpys_state() -> Any:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return kind, np.asarray(keys).tolist(), *rest


GENERATORS = {
    "python": Generator(random.getstate, random.setstate), "numpy": Generator(numpys_state, np.random.set_state),
}  # fmt: skip
"""The generators that `rng=True` saves, by name. Frameworks add theirs."""


def random_states() -> dict[str, Any]:
    """The states of all generators, by name."""
    return {name: each.get() for name, each in GENERATORS.items()}


def set_random_states(states: Mapping[str, Any]) -> None:
    """Put the existing generators into these states."""
    for name in states.keys() & GENERATORS.keys():
        GENERATORS[name].set(states[name])
