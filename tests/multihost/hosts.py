"""Several hosts on one machine: sets of Linux namespaces.

    python -m tests.multihost.hosts --hosts 2 --rate 1gbit -- hvdliterun -np 4 -H hosta:2,hostb:2 python train.py

runs a command on the first of them. Each host has its own network (one interface, `eth0`, on a common switch), host
name, process ids, /tmp, /run, /dev/shm and SSH server; a rank cannot see, kill or share memory with one of another
host. The rest of the file system is common, as on a cluster with a shared home. Logging in needs no password: a key
made for the purpose is in every host's ssh configuration.

Nothing is left in any case: no namespace has a name, every host is a process tree that the kernel kills when this
process dies, and interfaces vanish with their namespaces. (After SIGKILL this process leaves its folder of keys.)
Several such sets may exist at the same time.
Needs root, and the packages openssh-server and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PRIVATE = ("/tmp", "/run", "/var/tmp")  # of each host; what must be seen in there by all is mounted into it
NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")
_PATIENCE = 15.0  # seconds for a host to come up

_SSHD = """\
HostKey {folder}/host_key
PidFile {folder}/{name}.up
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
"""
_SSH = """\
Host *
    IdentityFile {folder}/{key}
    IdentitiesOnly yes
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
"""


def missing() -> str | None:
    """Why this machine cannot have hosts, in one line, or None."""
    if os.geteuid() != 0:
        return "several hosts need root"
    for tool, package in (("sshd", "openssh-server"), ("ssh", "openssh-client"), ("ip", "iproute2")):
        if not _tool(tool):
            return f"several hosts need {tool} (apt-get install {package})"
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", "mount", "-t", "tmpfs", "none", "/run"], capture_output=True, text=True
    )
    return f"several hosts need namespaces: {tried.stderr.strip()}" if tried.returncode else None


@dataclass(frozen=True)
class Machine:
    """One host. process: the id of its first process, as seen from outside."""

    name: str
    address: str
    process: int

    def command(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on this host, in the current folder."""
        where = ["nsenter", "--target", str(self.process), *NAMESPACES]
        return [*where, "env", "-C", os.getcwd(), *command]

    def run(self, *command: str, timeout: float = 60.0) -> str:
        """Run a command here to its end; returns its stdout. Raises CalledProcessError, with stderr in it."""
        done = subprocess.run(self.command(command), capture_output=True, text=True, timeout=timeout)
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        return done.stdout

    def traffic(self) -> tuple[int, int]:
        """Bytes received and sent by `eth0` so far, headers included."""
        for line in Path(f"/proc/{self.process}/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == "eth0":
                values = counters.split()
                return int(values[0]), int(values[8])
        raise OSError(f"{self.name} has no eth0")


@dataclass(frozen=True)
class Hosts:
    """Machines on one switch. folder: keys and configuration, which all machines see."""

    machines: tuple[Machine, ...]
    folder: Path
    switch: int

    def __getitem__(self, index: int) -> Machine:
        return self.machines[index]

    def unplug(self, machine: Machine) -> None:
        """Cut a machine's cable: nothing arrives any more, and no connection is closed."""
        _in_network(self.switch, "ip", "link", "set", machine.name, "down")

    def plug_in(self, machine: Machine) -> None:
        """Undo `unplug`."""
        _in_network(self.switch, "ip", "link", "set", machine.name, "up")


@contextmanager
def hosts(count: int = 2, rate: str | None = None, shared: Sequence[Path] = (), key: str = "key") -> Iterator[Hosts]:
    """Machines hosta (10.99.0.1), hostb, ..., gone at the end.

    rate: what each may send, as `tc` spells it ("1gbit"). shared: folders that all see although they lie in /tmp;
    the repository, the interpreter's environment and the current folder always are.
    key: the identity in the hosts' ssh configuration; anything but "key" is refused by the servers.
    """
    folder = Path(tempfile.mkdtemp(prefix="hosts-"))
    children: list[subprocess.Popen[bytes]] = []
    try:
        names = [f"host{letter}" for letter in "abcdefghijklmnop"[:count]]
        addresses = [f"10.99.0.{number}" for number in range(1, count + 1)]
        _configure(folder, names, addresses, key)
        switch = _born(children, ["--net"], "sleep", "infinity")
        _in_network(switch, "ip", "link", "add", "switch", "type", "bridge")
        _in_network(switch, "ip", "link", "set", "switch", "up")
        python = [Path(path) for path in (sys.prefix, sys.base_prefix, *sys.path) if os.path.isdir(path)]
        visible = _visible([folder, ROOT, Path.cwd(), *python, *shared])
        machines = []
        for name, address in zip(names, addresses, strict=True):
            process = _born(
                children, [*NAMESPACES, "--mount-proc"], "sh", str(HERE / "host.sh"), name, str(folder), *visible
            )
            _plug(switch, process, name, address, rate)
            machines.append(Machine(name, address, process))
        _until(lambda: all((folder / f"{name}.up").exists() for name in names), "SSH servers")
        yield Hosts(tuple(machines), folder, switch)
    finally:
        for child in children:
            child.kill()  # unshare takes its child, the host's first process, with it: all others follow
        for child in children:
            child.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _configure(folder: Path, names: Sequence[str], addresses: Sequence[str], key: str) -> None:
    for name in ("host_key", "key", "stranger"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    lines = [f"{address} {name}\n" for address, name in zip(addresses, names, strict=True)]
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
    (folder / "ssh_config").write_text(_SSH.format(folder=folder, key=key))
    for name in names:
        (folder / f"{name}.sshd").write_text(_SSHD.format(folder=folder, name=name))


def _visible(paths: Sequence[Path]) -> list[str]:
    """Those of the paths that lie in a private folder, outermost first, without paths inside others."""
    found: list[Path] = []
    for path in sorted({path.resolve() for path in paths} | {path.absolute() for path in paths}):
        private = any(path.is_relative_to(top) for top in PRIVATE)
        if private and not any(path.is_relative_to(other) for other in found):
            found.append(path)
    return [str(path) for path in found]


def _born(children: list[subprocess.Popen[bytes]], namespaces: Sequence[str], *command: str) -> int:
    """Start a command in namespaces of its own, to die with this process; returns its process id."""
    die = ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "--fork", "--kill-child=KILL"]
    child = subprocess.Popen([*die, *command], stdin=subprocess.DEVNULL, start_new_session=True)
    children.append(child)
    inner = Path(f"/proc/{child.pid}/task/{child.pid}/children")
    _until(lambda: child.poll() is not None or inner.read_text().strip() != "", "namespaces")
    return int(inner.read_text().split()[0])


def _plug(switch: int, process: int, name: str, address: str, rate: str | None) -> None:
    cable = ["ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(process)]
    _in_network(switch, *cable)
    _in_network(switch, "ip", "link", "set", name, "master", "switch", "up")
    _in_network(process, "ip", "link", "set", "lo", "up")
    _in_network(process, "ip", "address", "add", f"{address}/24", "dev", "eth0")
    _in_network(process, "ip", "link", "set", "eth0", "up")
    if rate:
        shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        _in_network(process, "tc", "qdisc", "add", "dev", "eth0", "root", *shape)


def _in_network(process: int, *command: str) -> None:
    argv = ["nsenter", "--target", str(process), "--net", _tool(command[0]) or command[0], *command[1:]]
    subprocess.run(argv, check=True)


def _tool(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {_PATIENCE:.0f} s for {what}")
        time.sleep(0.01)


def main() -> int:
    """The command line; returns the command's exit code."""
    parser = argparse.ArgumentParser(description="run a command on the first of several hosts: hosta, hostb, ...")
    parser.add_argument("--hosts", type=int, default=2, metavar="N")
    parser.add_argument("--rate", help="what each host may send, for example 1gbit")
    parser.add_argument("--share", type=Path, action="append", default=[], metavar="FOLDER", help="one under /tmp")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if reason := missing():
        print(reason, file=sys.stderr)
        return 77
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with hosts(options.hosts, options.rate, options.share) as there:
        child = subprocess.Popen(there[0].command(command or ["bash"]))
        with contextlib.suppress(KeyboardInterrupt):
            return child.wait()
        return child.wait()


if __name__ == "__main__":
    sys.exit(main())
