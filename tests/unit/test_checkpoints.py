"""The file of a checkpoint: it is written completely or not at all, and it has a fixed content."""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

import hvdlite
import hvdlite.numpy
from hvdlite.checkpoints import archive
from hvdlite.checkpoints.checkpoint import plain
from hvdlite.checkpoints.files import ENDING, Stream, replace_file

ROOT = Path(__file__).resolve().parents[2]


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def writing(data: bytes) -> Callable[[BinaryIO], Any]:
    return lambda file: file.write(data)


def test_a_file_is_replaced(tmp_path: Path) -> None:
    """The file keeps its permissions, and a link to it still works."""
    target, link = tmp_path / "run", tmp_path / "latest"
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to(target)
    replace_file(link, writing(b"new"))
    assert target.read_bytes() == b"new" and link.is_symlink() and target.stat().st_mode & 0o777 == 0o640
    assert names(tmp_path) == ["latest", "run"]


def test_a_new_file_has_the_permissions_of_any(tmp_path: Path) -> None:
    replace_file(tmp_path / "run", writing(b"new"))
    (tmp_path / "any").write_bytes(b"")
    assert (tmp_path / "run").stat().st_mode == (tmp_path / "any").stat().st_mode


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_what_fails_leaves_nothing(tmp_path: Path, kind: type[BaseException]) -> None:
    (tmp_path / "run").write_bytes(b"old")

    def write(file: BinaryIO) -> None:
        file.write(b"half")
        raise kind

    with pytest.raises(kind):
        replace_file(tmp_path / "run", write)
    assert (tmp_path / "run").read_bytes() == b"old" and names(tmp_path) == ["run"]


def test_a_kill_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    """A killed save leaves a temporary file.

    A save an hour later removes it; a save at once does not, since another process may be writing.
    """
    (tmp_path / "run").write_bytes(b"old")
    script = """
import sys, time
from hvdlite.checkpoints.files import replace_file
def write(file):
    file.write(b"half"); file.flush(); print("there", flush=True); time.sleep(60)
replace_file(sys.argv[1], write)
"""
    process = subprocess.Popen([sys.executable, "-c", script, tmp_path / "run"], stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout and process.stdout.readline() == b"there\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert (tmp_path / "run").read_bytes() == b"old"
    (left,) = [name for name in names(tmp_path) if name.endswith(ENDING)]
    replace_file(tmp_path / "run", writing(b"new"))
    assert names(tmp_path) == [left, "run"]
    os.utime(tmp_path / left, (time.time() - 4000,) * 2)
    replace_file(tmp_path / "run", writing(b"newer"))
    assert names(tmp_path) == ["run"] and (tmp_path / "run").read_bytes() == b"newer"


def test_stream_is_a_file() -> None:
    data = bytes(range(200))
    file, wanted = io.BufferedReader(Stream(np.frombuffer(data, np.uint8))), io.BytesIO(data)
    for offset, whence, count in ((0, 0, 10), (5, 1, 7), (-20, 2, 30), (0, 0, -1), (3, 0, 0)):
        assert file.seek(offset, whence) == wanted.seek(offset, whence)
        assert file.read(count) == wanted.read(count) and file.tell() == wanted.tell()
    assert Stream(np.empty(0, np.uint8)).read() == b""


def test_plain_changes_only_what_is_numpys() -> None:
    kept = {"a": [1, (2.0, "x")], "b": None}
    assert plain(kept) is kept
    found = plain({"a": [np.float32(1), (np.int64(2),)], "b": np.bool_(True)})
    assert found == {"a": [1.0, (2,)], "b": True} and type(found["a"][1][0]) is int and found["b"] is True


@pytest.mark.parametrize("value", [1, 2.5, float("nan"), "x", b"x", None, True, [1], (1,), {1: (2,)}, {3}, 10**40])
def test_plain_data(value: object) -> None:
    assert archive.is_plain(value)


@pytest.mark.parametrize("value", [print, int, 1j, Path("x"), np.arange(2), [object()]])
def test_no_plain_data(value: object) -> None:
    assert not archive.is_plain(value)


def test_an_archive_runs_no_code(tmp_path: Path) -> None:
    np.savez(tmp_path / "run.npz", extras=np.frombuffer(pickle.dumps({"x": print}), np.uint8))
    hvdlite.init()
    with pytest.raises(pickle.UnpicklingError, match="print is no plain data"):
        hvdlite.numpy.load(tmp_path / "run.npz")


def test_extras_alone(tmp_path: Path) -> None:
    hvdlite.init()
    hvdlite.save(tmp_path / "run", epoch=3, weights=np.arange(3.0), best=np.float64(0.5))
    found = hvdlite.load(tmp_path / "run", more="default")
    assert found.pop("weights").tolist() == [0, 1, 2] and found == {"epoch": 3, "best": 0.5, "more": "default"}
    (tmp_path / "other").write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"hvd.save has not written this file"):
        hvdlite.load(tmp_path / "other")
    with pytest.raises(ValueError, match=r"hvd.save has not written this file"):
        hvdlite.load(os.devnull)


def test_a_missing_file(tmp_path: Path) -> None:
    hvdlite.init()
    assert hvdlite.load(tmp_path / "run", missing_ok=True, epoch=0) == {"epoch": 0}
    with pytest.raises(FileNotFoundError, match=r"hvd.load: rank 0"):
        hvdlite.load(tmp_path / "run", epoch=0)
