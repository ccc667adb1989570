"""Measurements of the network between hosts: bytes on the wire, and the speed of the link.

The bytes come from the interfaces' counters, and contain packet headers. The link's time is that of plain TCP streams
of the least bytes that an all-reduce can send: 2S(h-1)/h from each host to the next, all hosts at once.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mpi4py import MPI

from hvdlite.bench.timing import Action
from hvdlite.job import runtime

BLOCK_BYTES = 1 << 20


def bytes_sent() -> int:
    """The bytes that this host has sent since it started, over all interfaces but the loopback."""
    total = 0
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, counters = line.partition(":")
        if name.strip() != "lo":
            total += int(counters.split()[8])
    return total


def most_sent(comm: MPI.Comm, call: Action, calls: int) -> float:
    """The bytes that the busiest host sends per call. Collective."""
    comm.Barrier()
    before = bytes_sent()
    for _ in range(calls):
        call()
    comm.Barrier()
    return float(comm.allreduce(bytes_sent() - before, MPI.MAX)) / calls


def least_bytes(nbytes: int, hosts: int) -> int:
    """The bytes that each host must send for an all-reduce of nbytes, with any algorithm."""
    return 2 * nbytes * (hosts - 1) // hosts


class Link:
    """A TCP connection from the first rank of each host to the first rank of the next host.

    Making one is collective.

    Attributes:
        hosts: The number of hosts.
        active: Whether this rank is the first of its host.
        outgoing: The connection to the next host, on active ranks.
        incoming: The connection from the previous host, on active ranks.
    """

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
        """Send nbytes to the next host, and receive as many from the previous host at the same time."""
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
    """An address of this host that other hosts can reach: its name's address, or the name if that is the loopback."""
    name = MPI.Get_processor_name()
    with suppress(OSError):
        found = socket.gethostbyname(name)
        if not found.startswith("127."):
            return found
    return name
