"""Ranks (`hvdlite.job`) and the launcher have a copy each of the table of the job's folder. Both copies agree."""

from __future__ import annotations

import errno
import os
import resource
import struct
from pathlib import Path

import pytest
from hvdlite_launcher import job_folder
from hvdlite_launcher.watch import Polled, appeared, watch

from hvdlite.job import folder


def test_both_sides_have_the_same_table() -> None:
    """About all files that ranks write or read."""
    theirs = {name: row for name, row in job_folder.FILES.items() if "rank" in f"{row[0]}, {row[1]}".split(", ")}
    assert theirs == folder.FILES


def test_a_file_that_is_in_no_table_is_an_error_at_once(tmp_path: Path) -> None:
    """Otherwise a rank could wait for it for ever."""
    assert job_folder.path_of("/job", "pid", 3) == "/job/pid.3"
    for call in (lambda: job_folder.path_of("/job", "pids"), lambda: job_folder.publish(str(tmp_path), "tolt", b"1")):
        with pytest.raises(KeyError):
            call()


def test_new_files_are_reported_as_they_appear(tmp_path: Path) -> None:
    descriptor = watch(str(tmp_path))
    assert list(appeared(descriptor)) == []
    (tmp_path / "pid.0").write_text("1")
    os.mkfifo(tmp_path / "out.0")
    assert list(appeared(descriptor)) == [("pid.0", False), ("pid.0", True), ("out.0", False)]
    os.close(descriptor)


def test_new_files_are_found_where_the_kernel_reports_none(tmp_path: Path) -> None:
    """A file counts when its writer has surely finished it."""
    polled = Polled(str(tmp_path))
    os.mkfifo(tmp_path / "out.0")
    for name in ("pid.0", "failed", "swallowed.0", "result.0"):
        (tmp_path / name).touch()
    assert list(polled.appeared()) == [("out.0", False)]
    (tmp_path / "pid.0").write_text("1")
    (tmp_path / "failed").write_text("0 1 0 1.0\n")
    (tmp_path / "result.0").write_text("half")
    assert sorted(polled.appeared()) == [("failed", True), ("pid.0", True)]
    (tmp_path / "ended.0").touch()
    (tmp_path / "ended.1").touch()  # its `pid.1` has come and gone
    (tmp_path / "swallowed.1").touch()
    found = list(polled.appeared())
    assert sorted(found) == [
        (f"{name}", True) for name in ("ended.0", "ended.1", "pid.1", "result.0", "swallowed.0", "swallowed.1")
    ]
    assert found.index(("pid.1", True)) < found.index(("ended.1", True))
    assert list(polled.appeared()) == []


def test_names_that_the_kernel_has_dropped_end_the_agent() -> None:
    """A keeper that nobody hears would wait for ever."""
    reader, writer = os.pipe()
    os.write(writer, struct.pack("iIII", -1, 0x4000, 0, 0))
    with pytest.raises(OSError, match="max_queued_events"):
        list(appeared(reader))


def test_a_folder_that_cannot_be_watched(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(OSError, match=rf"^\[Errno {errno.EMFILE}\] Too many open files: '{tmp_path}'$"):
            watch(str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    with pytest.raises(OSError, match="No such file"):
        watch(str(tmp_path / "none"))
