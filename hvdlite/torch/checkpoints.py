"""Checkpoints of PyTorch: what `torch.save` writes, a dict of state_dicts and plain data."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import torch

from hvdlite.checkpoints import checkpoint
from hvdlite.checkpoints.checkpoint import (
    GENERATORS,
    File,
    Generator,
    not_plain,
    plain,
    random_states,
    set_random_states,
)
from hvdlite.torch.functions import load_in_place


def save(path: File, /, *, rng: bool = False, **what: Any) -> None:
    """Save a checkpoint, which rank 0 writes: `hvd.save("run.pt", model=model, optimizer=optimizer, epoch=epoch + 1)`.

    The file takes its name when it is whole; until then an older one stays. It is torch's:
    `torch.load(path, weights_only=True)` gives a dict of what was given. Collective; waits until the file is written.

    Args:
        path: of the file, on rank 0's host; the others' paths do not matter.
        rng: save each rank's generators of random numbers, too: torch's, those of its GPU, Python's and NumPy's.
        what: by name, objects with state_dict() and load_state_dict() (models, optimizers, schedulers, a GradScaler),
            and extras: tensors and plain data. NumPy's numbers become Python's.

    Raises:
        OSError: on every rank, where rank 0 cannot write the file (no room, no such folder, read-only). An older file
            is as before.
        TypeError: on every rank, for an extra that is no plain data. Types that were given to
            torch.serialization.add_safe_globals are.
        ValueError: on every rank, where ranks give other names.
    """
    checkpoint.save(TorchFormat(), path, what, rng)


def load(path: File, /, *, missing_ok: bool = False, rng: bool = False, **what: Any) -> dict[str, Any]:
    """Restore a checkpoint on every rank, which rank 0 reads:

        start = hvd.load("run.pt", missing_ok=True, model=model, optimizer=optimizer, epoch=0)["epoch"]

    Files of your own `torch.save({"model": model.state_dict(), ...}, path)` load, too. Collective; waits for all ranks.
    The next steps compare the ranks' weights, as the first ones did.

    Args:
        path: of the file, on rank 0's host; the others' paths do not matter.
        missing_ok: where there is no such file, restore nothing.
        rng: restore each rank's generators of random numbers. If the file is of another number of ranks, rank 0 logs a
            warning, and all generators stay as they are.
        what: by name, objects to restore in place, on whichever device they are; and defaults of extras.

    Returns:
        What else the file has, by name: extras, and the states of objects that were not given. And the defaults of
        extras that it has not.

    Raises:
        OSError: on every rank, where rank 0 cannot read the file; FileNotFoundError where there is none.
        ValueError: on every rank, where the file lacks an object that is given, or ranks give other names. Nothing has
            been restored then.
        pickle.UnpicklingError: on every rank, for a file with more than plain data in it. Call
            torch.serialization.add_safe_globals with types that you trust.
        Exception: what an object raises that the state does not fit; HvdliteError on the other ranks. Some objects may
            have been restored then.
    """
    return checkpoint.load(TorchFormat(), path, what, missing_ok, rng)


class TorchFormat:
    """A `hvdlite.checkpoints.Format`."""

    def prepare(self, what: Mapping[str, Any]) -> None:
        pass

    def has_state(self, value: Any) -> bool:
        return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")

    def write(self, file: BinaryIO, what: Mapping[str, Any]) -> None:
        states = {name: plain(value.state_dict() if self.has_state(value) else value) for name, value in what.items()}
        torch.save(states, file)
        file.flush()
        if not is_safe(file.name, mmap=True):
            extras = [name for name in what if not self.has_state(what[name])]
            name = next(name for name in [*extras, *what] if not is_safe(alone(states[name])))
            raise not_plain(name, what[name])

    def read(self, file: BinaryIO) -> dict[str, Any]:
        try:
            found = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            error.add_note("hvd.load: call torch.serialization.add_safe_globals on all ranks with types that you trust")
            raise
        if not isinstance(found, dict):
            raise ValueError(f"the file has a {type(found).__name__}, not a dict of states and extras by name")
        return found

    def restore(self, what: Mapping[str, Any], found: dict[str, Any]) -> None:
        for name, value in what.items():
            try:
                if isinstance(value, torch.optim.Optimizer):
                    load_in_place(value, found[name])
                else:
                    value.load_state_dict(found[name])
            except Exception as error:
                error.add_note(f"hvd.load: {name!r} does not fit")
                raise

    def random_state(self, what: Mapping[str, Any]) -> Any:
        return random_states()

    def set_random_state(self, what: Mapping[str, Any], state: Any) -> None:
        set_random_states(state)


def is_safe(file: Any, mmap: bool = False) -> bool:
    """Whether torch reads it without trust. mmap: tensors' values are not looked at."""
    try:
        torch.load(file, map_location="meta", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError:
        return False
    return True


def alone(value: Any) -> BinaryIO:
    """A file of one value."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def torchs_states() -> list[bytes]:
    """Of torch's generator, and of the one on the current GPU, if that is in use."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if used else [])]
    return [state.numpy().tobytes() for state in states]


def set_torchs_states(states: Sequence[bytes]) -> None:
    own, *gpu = [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states]
    torch.set_rng_state(own)
    if gpu and torch.cuda.is_available():
        torch.cuda.set_rng_state(gpu[0])


GENERATORS["torch"] = Generator(torchs_states, set_torchs_states)
