"""Reads lists of hosts (`-H a:4,b:2`, hostfiles), and finds out which of them is this machine.

Hostfiles may be written as for Horovod and Open MPI (`name slots=4`) or MPICH (`name:4`).
"""

import dataclasses
import re
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hvdlite_launcher import UsageError

_ENTRY = re.compile(r"(?P<name>\[[0-9A-Fa-f:]+\]|\w[\w.-]*)(?::(?P<slots>\d+))?")
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_SLOTS = re.compile(r"\s+slots\s*=\s*(\d+)(\s+max[-_]slots\s*=\s*\d+)?\s*$")


@dataclass(frozen=True)
class Host:
    """A machine. slots: the number of ranks that it may have. local: whether it is this machine."""

    name: str
    slots: int
    local: bool = True


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The hosts of `name[:slots],...`. A name without slots has one; the slots of a repeated name add up.

    Raises UsageError for an empty list, a malformed entry or zero slots.
    """
    if text.rstrip().endswith(","):
        raise UsageError(f"the host list {text!r} ends with a comma: write no blank after commas, -H hosta:2,hostb:2")
    return _added_up(_parse_entry(entry) for entry in text.split(","))


def parse_hostfile(path: str) -> tuple[Host, ...]:
    """The hosts of a file with one host per line: `name`, `name:4` or `name slots=4`. A `#` begins a comment.

    Raises UsageError if the file cannot be read, and as `parse_hosts` does.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = [(number, line.split("#")[0].strip()) for number, line in enumerate(file, start=1)]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the hostfile {path!r}: {getattr(error, 'strerror', error)}") from error
    hosts = _added_up(
        _parse_entry(_SLOTS.sub(r":\1", line), f"hostfile {path}, line {number}: ") for number, line in lines if line
    )
    if not hosts:
        raise UsageError(f"the hostfile {path} names no host")
    return hosts


def located(hosts: Sequence[Host]) -> tuple[Host, ...]:
    """The hosts, with `local` set. Among several hosts this machine gets its own name, because Open MPI would reach
    another name by ssh.

    Raises UsageError if several names mean this machine.
    """
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(32) as lookups:  # the look-up of an unknown name may take seconds
        local = lookups.map(is_local, [host.name for host in hosts])
        found = tuple(dataclasses.replace(host, local=is_here) for host, is_here in zip(hosts, local, strict=True))
    own = [host.name for host in found if host.local]
    if len(own) > 1:
        raise UsageError(f"{' and '.join(own)} are both this machine: name it once, with all its slots [HVD017]")
    if len(found) == 1:
        return found
    here = socket.gethostname()
    return tuple(dataclasses.replace(host, name=here) if host.local else host for host in found)


def is_local(name: str) -> bool:
    """Whether `name` is this machine: localhost, its own name, or a name of an address that it has."""
    own = socket.gethostname()
    if name in (*_LOOPBACK, own, own.split(".")[0]):
        return True
    try:
        found = socket.getaddrinfo(name.strip("[]"), 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_is_own(family, address) for family, _, _, _, address in found)


def used(hosts: Sequence[Host], ranks: int) -> tuple[Host, ...]:
    """The first hosts that together have enough slots for these ranks."""
    found: list[Host] = []
    for host in hosts:
        if total_slots(found) < ranks:
            found.append(host)
    return tuple(found)


def total_slots(hosts: Sequence[Host]) -> int:
    """The sum of all hosts' slots."""
    return sum(host.slots for host in hosts)


def _is_own(family: int, address: Any) -> bool:
    """Whether the address is this machine's: a socket can be bound to it."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _parse_entry(entry: str, place: str = "") -> Host:
    """The host of one entry. place: the beginning of error messages."""
    match = _ENTRY.fullmatch(entry.strip())
    if match is None:
        cure = "write name:slots, as in localhost:4"
        if "@" in entry:
            cure = "leave the user out, and name it for that host in ~/.ssh/config"
        elif "::" in entry or entry.count(":") > 6:
            cure = "write an IPv6 address in brackets, as in [::1]:4"
        raise UsageError(f"{place}cannot read the host {entry!r}: {cure}")
    slots = int(match["slots"] or 1)
    if slots < 1:
        raise UsageError(f"{place}host {match['name']}: needs at least 1 slot, not {slots}")
    return Host(match["name"], slots)


def _added_up(entries: Iterable[Host]) -> tuple[Host, ...]:
    """Each host once, with all its slots, in the order of first entries, as with Open MPI and Horovod."""
    slots: Counter[str] = Counter()
    for host in entries:
        slots[host.name] += host.slots
    return tuple(Host(name, count) for name, count in slots.items())
