"""Host lists and hostfiles."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hvdlite_launcher.hosts import Host, HostsError, is_local, parse_hostfile, parse_hosts, total_slots


def test_a_host_without_slots_holds_one_rank() -> None:
    assert parse_hosts("a,b:3") == (Host("a", 1), Host("b", 3))


def test_slots_add_up() -> None:
    assert total_slots(parse_hosts("a:2, node-1.cluster:4,[::1]:1")) == 7


@pytest.mark.parametrize("text", ["", "a:", "a:x", ":4", "a:0", "a:-1", "a:2,,b:2", "a:1,a:2", "a b"])
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(HostsError):
        parse_hosts(text)


def test_all_hostfile_dialects_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# cluster\na slots=4\n\nb:2   # half of it\nc\nd slots = 3\n")
    assert parse_hostfile(str(file)) == (Host("a", 4), Host("b", 2), Host("c", 1), Host("d", 3))


@pytest.mark.parametrize("text", ["", "# nobody\n", "a slots=many\n"])
def test_a_hostfile_that_cannot_be_used_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(HostsError):
        parse_hostfile(str(file))


def test_a_missing_hostfile_is_named() -> None:
    with pytest.raises(HostsError, match="'/no/such/file'"):
        parse_hostfile("/no/such/file")


def test_this_machine_is_local_and_others_are_not() -> None:
    assert all(is_local(name) for name in ("localhost", "127.0.0.1", socket.gethostname()))
    assert not is_local("elsewhere.example")
