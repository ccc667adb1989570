"""Where the ranks of an MPI job meet for torch.distributed: a TCPStore, whose address travels over MPI."""

from __future__ import annotations

import fcntl
import socket
import struct
from datetime import timedelta
from urllib.parse import parse_qs, urlparse

from torch._C._distributed_c10d import Store, TCPStore

from hvdlite.errors import HvdliteError
from hvdlite.job import runtime
from hvdlite.lanes.workplace import Workplace

SIOCGIFADDR = 0x8915
LOOPBACK = "127.0.0.1"
REACHED_IN = 3.0  # seconds for one address


def meet(url: str, timeout: timedelta) -> tuple[Store, int, int]:
    """The store of an MPI job, this process' rank and the number of ranks. Collective over all ranks of the job.

    Args:
        url: May name rank and world_size, as in mpi://?rank=0&world_size=2.
        timeout: The longest wait in the store.

    Raises:
        HvdliteError: This process cannot be a rank, or rank 0 cannot be reached.
    """
    if not runtime.is_initialized():
        runtime.init()
    live = runtime.current()
    given = {
        name: int(found[0]) for name, found in parse_qs(urlparse(url).query).items() if name in ("rank", "world_size")
    }
    rank, size = given.get("rank", live.topology.rank), given.get("world_size", live.groups.size)
    if size != live.groups.size:
        raise ValueError(f"world_size={size}, but the MPI job has {live.groups.size} ranks: leave world_size out")
    master = None
    if rank == 0:
        master = TCPStore("0.0.0.0", 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
    offered = (addresses(), master.port) if master else None

    def work(at: Workplace) -> list[tuple[list[str], int] | None]:
        return at.transport.allgather_object(offered)

    offers = live.groups.change("init_process_group", (), work)
    masters = [number for number, offer in enumerate(offers) if offer]
    if len(masters) != 1:
        raise ValueError(f"{len(masters)} ranks called init_process_group with rank=0: leave rank out")
    if master:
        return master, rank, size
    found, port = offers[masters[0]] or ([], 0)
    near = any({masters[0], live.topology.rank} <= set(host) for host in live.topology.hosts)
    address = reached([LOOPBACK] if near else found, port)
    return TCPStore(address, port, size, is_master=False, timeout=timeout), rank, size


def addresses() -> list[str]:
    """This host's IPv4 addresses, but for the loopback's."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith("127.")]


def reached(hosts: list[str], port: int) -> str:
    """The first of these addresses that accepts a connection. Raises HvdliteError if none does."""
    for host in hosts:
        try:
            socket.create_connection((host, port), REACHED_IN).close()
            return host
        except OSError:
            continue
    raise HvdliteError(
        f"this rank cannot reach rank 0's store at port {port} of {', '.join(hosts)}: does a firewall keep ranks "
        "apart? Set MASTER_ADDR and MASTER_PORT to use another address [HVD503]"
    )
