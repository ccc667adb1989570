"""The compression benchmark on two hosts, over networks of several speeds.

    python -m tests.multihost.compression --json found.json --plot found.png --seeds 5

makes two hosts (`hosts`), and runs `python -m hvdlite.bench compression` over each network of LINKS, with one rank on
each host. The first run trains all models, on the unlimited network. The others take its curves and measure the
seconds per step. The last one prints tables of all networks. Options that this program does not know go to all runs.

A limited network is `tc`'s token bucket on both hosts' interfaces. Its burst is small: a host that has computed for a
while may not send the next gradients for nothing. The benchmark itself reads the counters of its host's interface.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.multihost.hosts import Hosts, hosts, missing

LINKS = {"unlimited": None, "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
BURST = {"1gbit": "128kb", "100mbit": "32kbit"}  # at 1 Gbit/s the kernel's clock needs more
RUN = [sys.executable, "-m", "hvdlite_launcher.cli", "--no-prefix", "-np", "2", "-H", "hosta:1,hostb:1"]
BENCH = [sys.executable, "-m", "hvdlite.bench", "compression"]


def limit(there: Hosts, rate: str) -> None:
    """Limit what each host can send; `rate` is spelled as `tc` does."""
    for machine in there.machines:
        shape = f"tbf rate {rate} burst {BURST[rate]} latency 400ms"
        machine.run("sh", "-c", f"PATH=$PATH:/usr/sbin:/sbin; exec tc qdisc replace dev eth0 root {shape}")


def measure(there: Hosts, folder: Path, options: Sequence[str], last: Sequence[str]) -> int:
    """Run the benchmark over all networks; returns the first exit code that is not 0.

    Args:
        there: The hosts.
        folder: Where the results of each run go. The hosts see it.
        options: Options of all runs.
        last: Options of the last run.
    """
    earlier: list[str] = []
    for number, (link, rate) in enumerate(LINKS.items()):
        if rate:
            limit(there, rate)
        path = folder / f"{number}.json"
        more = [*last] if number == len(LINKS) - 1 else ["--json", str(path)]
        done = subprocess.run(there[0].command([*RUN, *BENCH, "--link", link, *earlier, *options, *more]),
                              stdout=None if more == [*last] else subprocess.DEVNULL)  # fmt: skip
        if done.returncode:
            return done.returncode
        earlier = ["--earlier", str(path)]
    return 0


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="the compression benchmark on two hosts, over several networks")
    parser.add_argument("--json", type=Path, help="write everything measured")
    parser.add_argument("--plot", type=Path, help="draw it")
    known, options = parser.parse_known_args()
    if reason := missing():
        print(reason, file=sys.stderr)
        return 77
    files = {"--json": known.json, "--plot": known.plot}
    last = [text for option, path in files.items() if path for text in (option, str(path.resolve()))]
    folders = {path.resolve().parent for path in files.values() if path}
    with tempfile.TemporaryDirectory() as folder, hosts(2, shared=[Path(folder), *folders]) as there:
        return measure(there, Path(folder), options, last)


if __name__ == "__main__":
    sys.exit(main())
