"""Measures a benchmark across hosts besides time: bytes on the wire, and what the link itself can do.

The bytes are those of the interfaces' counters, with packet headers. The link's time is that of a plain TCP stream of
the least bytes that an all-reduce can send: 2S(h-1)/h from each host to the next, all hosts at once.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpi4py import MPI

from hvdlite.job import runtime

BLOCK_BYTES = 1 << 20


def bytes_sent() -> int:
    """By all interfaces of this host but the loopback, since it started."""
    total = 0
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, counters = line.partition(":")
        if name.strip() != "lo":
            total += int(counters.split()[8])
    return total


def most_sent(comm: MPI.Comm, call: Callable[[], Any], calls: int) -> float:
    """Bytes that the busiest host sends per call. Collective."""
    comm.Barrier()
    before = bytes_sent()
    for _ in range(calls):
        call()
    comm.Barrier()
    return float(comm.allreduce(bytes_sent() - before, MPI.MAX)) / calls


def least_bytes(nbytes: int, hosts: int) -> int:
    """What each host must send for an all-reduce of nbytes, whatever the algorithm."""
    return 2 * nbytes * (hosts - 1) // hosts


class Link:
    """A TCP connection from the first rank of each host to that of the next. Making one is collective."""

    def __init__(self, comm: MPI.Comm) -> None:
        place = runtime.current().topology
        self.hosts = len(place.hosts)
        self.active = place.local_rank == 0
        server = socket.create_server(("", 0)) if self.active else None
        port = server.getsockname()[1] if server else 0
        cards: Sequence[tuple[str, int]] = comm.allgather((own_address(), port))
        if server:
            mine = [ranks[0] for ranks in place.hosts].index(comm.Get_rank())
            following = place.hosts[(mine + 1) % self.hosts][0]
            self.outgoing = socket.create_connection(cards[following])
            self.incoming, _ = server.accept()
            server.close()

    def stream(self, nbytes: int) -> None:
        """Send nbytes to the next host and receive as many from the one before, at once."""
        if not self.active:
            return
        sender = threading.Thread(target=self.send, args=(nbytes,))
        sender.start()
        buffer = memoryview(bytearray(BLOCK_BYTES))
        while nbytes:
            nbytes -= self.incoming.recv_into(buffer[: min(nbytes, BLOCK_BYTES)])
        sender.join()

    def send(self, nbytes: int) -> None:
        block = memoryview(bytes(BLOCK_BYTES))
        for start in range(0, nbytes, BLOCK_BYTES):
            self.outgoing.sendall(block[: min(BLOCK_BYTES, nbytes - start)])


def own_address() -> str:
    """An address of this host that others can reach: that of its name, unless it is the loopback's."""
    name = MPI.Get_processor_name()
    with suppress(OSError):
        found = socket.gethostbyname(name)
        if not found.startswith("127."):
            return found
    return name
