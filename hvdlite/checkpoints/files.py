"""The files of a checkpoint: they are replaced completely or not at all.

    run.pt                        the main file
    run.pt.5f0c2a91-1of4          the part of rank 1 of 4; only of objects whose state is on several ranks
    .run.pt.....unfinished        a file that is being written, or whose writer was killed

All files of a checkpoint are written beside the old ones, under unfinished names. When they are on the disk, rank 0
gives the parts their names, and renames the main file last: from then on the new checkpoint counts. The main file
names its parts, so those of an older checkpoint go only after that. Therefore a killed job leaves the old checkpoint
or the new one, and files that no main file names; the next save removes these.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import io
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hvdlite.arrays import Array

ENDING = ".unfinished"
LONGEST_PAUSE = 3600.0  # seconds without a write after which an unfinished file counts as abandoned
PART = re.compile(r"\.[0-9a-f]{8}-\d+of\d+")
"""What the name of a part has after the name of the main file."""
NOT_SHARED = "use a folder that all hosts share, or hvd.save(..., consolidate=True), which writes one file on rank 0"
File = str | os.PathLike[str]


@dataclass(frozen=True)
class Target:
    """A checkpoint that is to be written.

    Attributes:
        path: The main file; not a link.
        token: What the names of this checkpoint's parts have in common.
    """

    path: Path
    token: str

    @classmethod
    def of(cls, path: File) -> Target:
        """Return the target for a user's path.

        Raises:
            OSError: The path is a folder, or its folder does not exist.
        """
        found = Path(os.path.realpath(path))
        if found.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        found.parent.stat()
        return cls(found, secrets.token_hex(4))

    def part(self, rank: int, size: int) -> str:
        """Return the name of a rank's part."""
        return f"{self.path.name}.{self.token}-{rank}of{size}"

    def write_part(self, name: str, write: Callable[[BinaryIO], None]) -> int:
        """Write a part under an unfinished name. Returns its size in bytes.

        Raises:
            FileNotFoundError: This rank does not see rank 0's folder.
        """
        if not self.path.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, f"there is no such folder on its host: {NOT_SHARED}")
        return write_beside(self.path, name, write).stat().st_size

    def remove_part(self, name: str) -> None:
        """Remove a part that has not got its name, if this rank has written one."""
        with contextlib.suppress(OSError):
            unfinished(self.path, name).unlink()


def replace_file(path: File, write: Callable[[BinaryIO], None], parts: Mapping[str, int] | None = None) -> None:
    """Replace a checkpoint by a main file that write(file) writes, and its parts.

    Completely or not at all, even if the process or the host dies. The new files get the old main file's permissions. A
    link to the file stays a link to it.

    Args:
        path: The main file.
        write: Writes the main file.
        parts: The sizes, by name, of parts that are on the disk under unfinished names.

    Raises:
        OSError: The disk is full, say, or this rank does not see a part. The old checkpoint stays. Parts may be left
            under their unfinished names.
    """
    target = Target.of(path).path
    sweep(target, [unfinished(target, name) for name in parts or ()])
    older = parts_of(target)
    beside, named = None, list[Path]()
    try:
        for name, size in (parts or {}).items():
            require_part(target, name, size)
        beside = write_beside(target, f"{target.name}.{secrets.token_hex(4)}", write)
        with contextlib.suppress(FileNotFoundError):
            mode = stat.S_IMODE(target.stat().st_mode)
            for each in (beside, *(unfinished(target, name) for name in parts or ())):
                os.chmod(each, mode)
        for name in parts or ():
            named.append(target.with_name(name))
            os.replace(unfinished(target, name), named[-1])
        if named:
            settle_folder(target.parent)
        os.replace(beside, target)
    except BaseException:
        if beside is None or beside.exists():  # the old main file counts
            for left in (*named, *([beside] if beside else [])):
                left.unlink(missing_ok=True)
        raise
    settle_folder(target.parent)
    for each in older:
        with contextlib.suppress(OSError):
            each.unlink()


def unfinished(target: Path, name: str) -> Path:
    """Return the path of a file beside the target while it is written."""
    return target.with_name(f".{name}{ENDING}")


def write_beside(target: Path, name: str, write: Callable[[BinaryIO], None]) -> Path:
    """Write a file to the disk, beside the target and under an unfinished name. If that fails, no file is left."""
    path = unfinished(target, name)
    try:
        with open(path, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def require_part(target: Path, name: str, size: int) -> None:
    """Raise FileNotFoundError if this rank does not see a part of this size that another rank has written."""
    try:
        with open(unfinished(target, name), "rb") as file:
            seen = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        seen = -1
    if seen != size:
        rank, _, _ = name.rpartition("-")[2].partition("of")
        raise FileNotFoundError(errno.ENOENT, f"it does not see the part that rank {rank} has written: {NOT_SHARED}")


def parts_of(target: Path) -> list[Path]:
    """Return the parts of the target that have their names."""
    found = target.parent.glob(f"{glob.escape(target.name)}.*")
    return [each for each in found if PART.fullmatch(each.name.removeprefix(target.name))]


def sweep(target: Path, kept: Sequence[Path] = ()) -> None:
    """Remove unfinished files whose writers were killed. kept: those of a save that is under way."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*{ENDING}"):
        with contextlib.suppress(OSError):
            if left not in kept and time.time() - left.stat().st_mtime > LONGEST_PAUSE:
                left.unlink()


def settle_folder(folder: Path) -> None:
    """Write the folder's new entries to the disk, if the file system supports that."""
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
