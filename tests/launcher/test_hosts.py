"""Host lists and hostfiles."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hvdlite_launcher import UsageError
from hvdlite_launcher.hosts import Host, is_local, located, parse_hostfile, parse_hosts, total_slots, used


def test_a_host_without_slots_holds_one_rank() -> None:
    assert parse_hosts("a,b:3") == (Host("a", 1), Host("b", 3))


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ("me@a:2", "leave the user out"),
        ("::1:2", "in brackets, as in [::1]:4"),
        ("a:2:3", "write name:slots"),
        ("a:2;b:2", "write name:slots"),
    ],
)
def test_what_others_write_is_told_how_to_write(text: str, cure: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_hosts(text)
    assert cure in str(caught.value)


def test_slots_add_up() -> None:
    assert total_slots(parse_hosts("a:2, node-1.cluster:4,[::1]:1")) == 7
    assert parse_hosts("a:1, b:2 ,a:3, b") == (Host("a", 4), Host("b", 3))


def test_lists_and_hostfiles_follow_one_rule(tmp_path: Path) -> None:
    text = "b:1, a:1, b:2, a, localhost:1, localhost:1"
    file = tmp_path / "hosts"
    file.write_text(text.replace(",", "\n"))
    assert parse_hosts(text) == parse_hostfile(str(file)) == (Host("b", 3), Host("a", 2), Host("localhost", 2))


def test_a_blank_after_a_comma_that_the_shell_cuts_at() -> None:
    with pytest.raises(UsageError, match="write no blank after commas"):
        parse_hosts("a:1,")


@pytest.mark.parametrize("text", ["", "a:", "a:x", ":4", "a:0", "a:-1", "a:2,,b:2", "a:1,", "a b"])
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_hosts(text)


def test_all_hostfile_dialects_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("\ufeff# cluster\na slots=4\n\nb:2   # half of it\nc\nd slots = 3\ne slots=1 max-slots=9\r\nc\nb\n")
    hosts = (Host("a", 4), Host("b", 3), Host("c", 2), Host("d", 3), Host("e", 1))
    assert parse_hostfile(str(file)) == hosts


@pytest.mark.parametrize(("text", "words"), [
    ("", "hosts names no host"), ("# nobody\n", "hosts names no host"),
    ("a\n\na slots=many\n", "hosts, line 3: cannot read"), ("a:0", "hosts, line 1: host a: needs at least 1 slot"),
])  # fmt: skip
def test_a_hostfile_that_cannot_be_used_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(UsageError, match=words):
        parse_hostfile(str(file))


def test_a_missing_hostfile_is_named() -> None:
    with pytest.raises(UsageError, match="'/no/such/file'"):
        parse_hostfile("/no/such/file")


def test_this_machine_is_local_and_others_are_not() -> None:
    assert all(is_local(name) for name in ("localhost", "127.0.0.1", socket.gethostname()))
    assert not is_local("elsewhere.example") and not is_local("192.0.2.1")


def test_beside_others_this_machine_goes_by_its_name() -> None:
    """For other machines `localhost` would be another machine."""
    here, other = located(parse_hosts("localhost:2,192.0.2.1:3"))
    assert here == Host(socket.gethostname(), 2, local=True)
    assert other == Host("192.0.2.1", 3, local=False)
    assert located(parse_hosts("127.0.0.2:2,192.0.2.1:3"))[0] == here  # as a name that /etc/hosts has for it
    assert located(parse_hosts("localhost:2")) == (Host("localhost", 2),)


def test_this_machine_has_one_name() -> None:
    with pytest.raises(UsageError, match="once, with all its slots"):
        located(parse_hosts(f"localhost:2,{socket.gethostname()}:2"))


def test_only_the_hosts_that_are_needed_are_used() -> None:
    hosts = parse_hosts("a:2,b:2,c:2")
    assert [len(used(hosts, ranks)) for ranks in (1, 2, 3, 4, 5, 6)] == [1, 1, 2, 2, 3, 3]
