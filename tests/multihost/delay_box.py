"""A network with a delay between test hosts, for kernels without `netem`.

    with hosts(4, shared=...) as there, delay_box(there, seconds=0.005, rate="100mbit"):
        ...

replaces each host's `eth0` by a virtual interface (TUN) with the same address. A process reads every packet that a host
sends, and hands it to the receiver's interface after the delay. `rate` limits what each host can send (tc's token
bucket). The process is in Python, and forwards about 100,000 packets per second. So packets are larger than Ethernet's.
At the end the process dies, and the interfaces vanish with it.

Needs root, the package iproute2, and /dev/net/tun.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address

from tests.multihost.hosts import Hosts

MTU = 9000  # bytes
BURST = "32kb"  # a host that has been silent may send so much at once
MOST = 1 << 16  # bytes of a packet
BATCH = 32  # packets of one host before it is the next one's turn
DESTINATION = slice(16, 20)  # in the header of an IPv4 packet
TUNSETIFF, TUN, NO_PACKET_INFORMATION = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
TOOLS = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
PATIENCE = 15.0  # seconds for the interfaces to come up


@contextmanager
def delay_box(there: Hosts, seconds: float, rate: str | None = None) -> Iterator[None]:
    """Delay all packets between hosts within the block; afterwards they have no network.

    Args:
        there: The hosts.
        seconds: The time from one host to another.
        rate: What each host can send, as `tc` spells it ("100mbit"). None: no limit.

    Raises:
        RuntimeError: The box cannot start. Its own message is on stderr.
    """
    command = [sys.executable, "-m", "tests.multihost.delay_box", "--seconds", str(seconds), "--rate", rate or "none"]
    places = [f"{machine.process}:{machine.address}" for machine in there.machines]
    die = ["setpriv", "--pdeathsig", "KILL"]
    with subprocess.Popen([*die, *command, *places], stdout=subprocess.PIPE, text=True) as box:
        try:
            if box.stdout is None or box.stdout.readline() != "ready\n":
                raise RuntimeError("the delay box did not start")
            yield
        finally:
            box.kill()


def interface(process: int, address: str, rate: str | None) -> int:
    """Make the interface `eth0` of a host, instead of the present one.

    Args:
        process: A process on the host.
        address: The host's IPv4 address.
        rate: As for `delay_box`.

    Returns:
        A file descriptor: a read takes a packet that the host sends, and a write hands one to the host.
    """
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", b"delay%d", TUN | NO_PACKET_INFORMATION)  # the kernel chooses the number
    name = fcntl.ioctl(tun, TUNSETIFF, request)[:16].rstrip(b"\0").decode()
    there = ["nsenter", "--target", str(process), "--net"]
    limit = f"tc qdisc add dev eth0 root tbf rate {rate} burst {BURST} latency 400ms" if rate else ""
    for line in filter(None, (
        "ip link delete eth0", f"ip link set {name} netns {process}", f"ip link set {name} name eth0 mtu {MTU}",
        f"ip address add {address}/24 dev eth0", "ip link set eth0 txqueuelen 5000 up", limit,
    )):  # fmt: skip
        outside = "netns" in line
        subprocess.run([*([] if outside else there), *line.split()], check=True, env=TOOLS)
    return tun


def relay(tuns: dict[bytes, int], seconds: float) -> None:
    """Hand each packet to its receiver after the delay. Never returns.

    Args:
        tuns: File descriptors of `interface`, by address.
        seconds: The delay.
    """
    under_way: deque[tuple[float, int, bytes]] = (
        deque()
    )  # due, receiver, packet. All wait as long: the first is due first
    while True:
        while under_way and under_way[0][0] <= time.monotonic():
            _, receiver, packet = under_way.popleft()
            with suppress(OSError):  # the receiver has gone, or is full: the packet is lost, as in any network
                os.write(receiver, packet)
        left = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for sender in select.select(tuns.values(), (), (), left)[0]:
            for packet in packets(sender):
                receiver = tuns.get(packet[DESTINATION], -1)
                if receiver >= 0:
                    under_way.append((time.monotonic() + seconds, receiver, packet))


def packets(sender: int) -> Iterator[bytes]:
    """The IPv4 packets that a host has sent, at most BATCH."""
    for _ in range(BATCH):
        try:
            packet = os.read(sender, MOST)
        except BlockingIOError:
            return
        if packet[0] >> 4 == 4:
            yield packet


def main(arguments: Sequence[str] | None = None) -> None:
    """The box's process: prints "ready", and forwards packets until it is killed."""
    parser = argparse.ArgumentParser(description="delay packets between hosts; started by `delay_box`")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rate", required=True)
    parser.add_argument("places", nargs="+", help="PROCESS:ADDRESS")
    options = parser.parse_args(arguments)
    rate = None if options.rate == "none" else options.rate
    tuns = {}
    for process, _, address in (place.partition(":") for place in options.places):
        tuns[IPv4Address(address).packed] = interface(int(process), address, rate)
    os.nice(-10)  # a late packet is a longer delay
    print("ready", flush=True)
    relay(tuns, options.seconds)


if __name__ == "__main__":
    main()
