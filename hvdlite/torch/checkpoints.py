"""Checkpoints of PyTorch: files of `torch.save` with a dict of state_dicts and plain data."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, TypeGuard, cast

import torch

from hvdlite.checkpoints import checkpoint
from hvdlite.checkpoints.checkpoint import (
    GENERATORS,
    Generator,
    not_plain,
    plain,
    random_states,
    set_random_states,
)
from hvdlite.checkpoints.files import File
from hvdlite.job import runtime
from hvdlite.torch.attach.attachment import Attachment
from hvdlite.torch.attach.unsent import UNSENT, start_anew, state_of
from hvdlite.torch.functions import Stateful, is_stateful, load_in_place
from hvdlite.torch.sharded import parts
from hvdlite.torch.sharded.states import State, shard_of


def save(path: File, /, *, rng: bool = False, consolidate: bool = False, **what: object) -> None:
    """Save a checkpoint: `hvd.save("run.pt", model=model, optimizer=optimizer, epoch=epoch + 1)`.

    Rank 0 writes the file. The file takes its name once it is whole; until then an older file stays. Collective; waits
    until the file is written. `torch.load(path, weights_only=True)` reads the file, and returns a dict of `what`.

    After its first step, each rank has a part of the state of an optimizer with `sharded=True`. Each rank writes its
    part into a separate file beside the main one, "run.pt.TOKEN-RANKofSIZE". The new files count all at once; then
    those of the older checkpoint are removed. Copy and move them together, under their names. `load` reads them on any
    number of ranks, and into optimizers that are not sharded. With `consolidate=True` there is one file, as without
    sharding.

    Args:
        path: The file on rank 0's host, or in a folder that all hosts share, if ranks write parts. Other ranks' paths
            are ignored.
        rng: Whether to save each rank's generators of random numbers: torch's, its GPU's, Python's and NumPy's.
        consolidate: Whether to write all state into the main file, so that plain torch loads it. Rank 0 needs memory
            for all of the state of one optimizer.
        **what: By name, objects with state_dict() and load_state_dict() (models, optimizers, schedulers, a GradScaler),
            and extras: tensors and plain data. NumPy numbers become Python numbers.

    Raises:
        OSError: A rank cannot write its file (no room, no such folder, read-only), or rank 0 does not see another
            rank's; on every rank. An older checkpoint stays as it is.
        TypeError: An extra is not plain data, nor of a type that was given to torch.serialization.add_safe_globals; on
            every rank.
        ValueError: Ranks give different names, or an optimizer's state is incomplete; on every rank.
    """
    checkpoint.save(TorchFormat(), path, what, rng, consolidate)


def load(path: File, /, *, missing_ok: bool = False, rng: bool = False, **what: object) -> dict[str, Any]:
    """Restore a checkpoint on every rank:

        start = hvd.load("run.pt", missing_ok=True, model=model, optimizer=optimizer, epoch=0)["epoch"]

    Rank 0 reads all files. Files of your own `torch.save({"model": model.state_dict(), ...}, path)` load as well.
    Collective; waits for all ranks. The next steps compare the ranks' weights, as at the beginning of training.

    Args:
        path: The file on rank 0's host. Other ranks' paths are ignored.
        missing_ok: Whether to restore nothing, instead of raising an error, if there is no such file.
        rng: Whether to restore each rank's generators of random numbers. If the file was saved by another number of
            ranks, rank 0 logs a warning, and all generators stay as they are.
        **what: By name, objects to restore in place, on any device; and defaults for extras.

    Returns:
        The other contents of the file by name: extras, and states of objects that were not given. Extras that the file
        lacks have their defaults. The state of a sharded optimizer that was not given is not read.

    Raises:
        OSError: Rank 0 cannot read the file; on every rank. FileNotFoundError if there is none.
        ValueError: The file lacks an object that was given, a rank's part is missing or damaged, or ranks give
            different names; on every rank. Nothing has been restored.
        pickle.UnpicklingError: The file has more than plain data in it; on every rank. Call
            torch.serialization.add_safe_globals with types that you trust.
        Exception: A state does not fit an object: that object's error, and HvdliteError on other ranks. Some objects
            may have been restored.
    """
    return checkpoint.load(TorchFormat(), path, what, missing_ok, rng)


class TorchFormat:
    """The `hvdlite.checkpoints.Format` of torch's files.

    Attributes:
        unsent: On rank 0, what lossy compression has not sent, by the optimizer's name: the sum over all hosts.
    """

    def __init__(self) -> None:
        self.unsent: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def parts(self) -> TorchParts:
        """Encodes sharded optimizers."""
        return TorchParts(self)

    def prepare(self, what: Mapping[str, object]) -> None:
        """Do nothing: torch's objects always hold their state."""

    def collect(self, what: Mapping[str, object]) -> None:
        """Add up what lossy compression has not sent. Collective."""
        for name in sorted(what):
            attached = getattr(what[name], "_hvdlite", None)
            found = attached.unsent() if isinstance(attached, Attachment) else None
            if found and runtime.rank() == 0:
                self.unsent[name] = state_of(found)

    def whole(self, what: Mapping[str, object]) -> Mapping[str, object]:
        """Return the objects; in place of a sharded optimizer, its whole state on rank 0. Collective then."""
        shards = {name: shard for name in sorted(what) if (shard := shard_of(what[name]))}  # in one order on all ranks
        return {**what, **{name: found for name, shard in shards.items() if (found := shard.whole(0)) is not None}}

    def has_state(self, value: object) -> TypeGuard[Stateful]:
        """Whether a value is restored in place. Otherwise it is an extra."""
        return is_stateful(value)

    def write(self, file: BinaryIO, what: Mapping[str, object]) -> None:
        """Write states and extras. Raises TypeError for an extra that is not plain data."""
        states = {name: plain(value.state_dict() if self.has_state(value) else value) for name, value in what.items()}
        for name, unsent in self.unsent.items():
            states[name] = {**cast("State", states[name]), UNSENT: unsent}
        self.write_states(file, what, states)

    def write_states(self, file: BinaryIO, what: Mapping[str, object], states: Mapping[str, object]) -> None:
        """Write plain data. Raises TypeError for an extra that is not. what: the objects and extras."""
        written = is_written(states, file)
        file.flush()
        if not (written and is_safe(file.name, mmap=True)):
            extras = [name for name in what if not self.has_state(what[name])]
            name = next(name for name in [*extras, *what] if not is_plain(states[name]))
            raise not_plain(name, what[name])

    def read(self, file: BinaryIO) -> dict[str, object]:
        """Read states and extras. Raises ValueError for a file of another kind."""
        try:
            found = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            error.add_note("hvd.load: call torch.serialization.add_safe_globals on all ranks with types that you trust")
            raise
        if not isinstance(found, dict):
            raise ValueError(f"the file has a {type(found).__name__}, not a dict of states and extras by name")
        return found

    def restore(self, what: Mapping[str, object], found: dict[str, object]) -> None:
        """Give each object its state."""
        for name, value in what.items():
            try:
                if isinstance(value, torch.optim.Optimizer):
                    state = cast("State", found[name])
                    if UNSENT not in state:
                        start_anew(value)
                    load_in_place(value, state)
                    if shard := shard_of(value):
                        shard.division.adopt(value)
                elif self.has_state(value):
                    value.load_state_dict(found[name])
            except Exception as error:
                error.add_note(f"hvd.load: {name!r} does not fit")
                raise

    def random_state(self, what: Mapping[str, object]) -> dict[str, Any]:
        """Return the states of this rank's generators of random numbers."""
        return random_states()

    def set_random_state(self, what: Mapping[str, object], state: Mapping[str, Any]) -> None:
        """Put this rank's generators into these states."""
        set_random_states(state)


class TorchParts:
    """The `hvdlite.checkpoints.Parts` of sharded optimizers."""

    def __init__(self, form: TorchFormat) -> None:
        self.form = form

    def headers(self, what: Mapping[str, object]) -> dict[str, object]:
        """Return what this rank knows for the headers of the optimizers that it has pieces of."""
        return {
            name: parts.known(value, shard)
            for name, value in what.items()
            if isinstance(value, torch.optim.Optimizer) and (shard := shard_of(value)) and shard.division.in_pieces
        }

    def header(self, name: str, known: Sequence[object]) -> object:
        """Return an optimizer's header. Raises ValueError if the ranks' pieces do not fit together."""
        return parts.header(name, cast("Sequence[parts.Known]", known))

    def write(self, file: BinaryIO, what: Mapping[str, object]) -> None:
        """Write this rank's pieces. Raises TypeError if they are not plain data."""
        mine = dict[str, object]()
        for name, value in what.items():
            shard = shard_of(value)
            assert shard and isinstance(value, torch.optim.Optimizer)
            mine[name] = parts.part(value, shard)
        self.form.write_states(file, mine, cast("State", plain(mine)))

    def read(self, file: BinaryIO) -> dict[str, object]:
        """Read a rank's pieces. Raises zipfile.BadZipFile if bytes are missing or have changed."""
        with zipfile.ZipFile(file) as archive:  # torch does not look at the checksums that it has written
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"the checksum of {damaged} is another one")
        file.seek(0)
        return {name: parts.packed(cast("parts.Part", part)) for name, part in self.form.read(file).items()}

    def join(self, name: str, value: object, header: object) -> parts.Join:
        """Begin to join an optimizer's state. Raises ValueError if the file is not of its parameters."""
        return parts.Join(name, value, cast("State", header))


def is_written(value: object, file: BinaryIO) -> bool:
    """Save a value. Returns whether pickle can write it."""
    try:
        torch.save(value, file)
    except (pickle.PicklingError, AttributeError, TypeError):  # pickle's errors for a lambda, a local object, a lock
        return False
    return True


def is_safe(file: str | BinaryIO, mmap: bool = False) -> bool:
    """Whether torch reads a file without trusting code in it. mmap: whether to leave tensors' values on the disk."""
    try:
        torch.load(file, map_location="meta", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError:
        return False
    return True


def is_plain(value: object) -> bool:
    """Whether torch saves a value, and reads it without trusting code in the file."""
    file = io.BytesIO()
    written = is_written(value, file)
    file.seek(0)
    return written and is_safe(file)


def torchs_states() -> list[bytes]:
    """Return the states of torch's generator on the CPU and, if a GPU is in use, of the one on the current GPU."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if used else [])]
    return [state.numpy().tobytes() for state in states]


def set_torchs_states(states: Sequence[bytes]) -> None:
    """Put torch's generators into these states."""
    own, *gpu = [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states]
    torch.set_rng_state(own)
    if gpu and torch.cuda.is_available():
        torch.cuda.set_rng_state(gpu[0])


GENERATORS["torch"] = Generator(torchs_states, set_torchs_states)
