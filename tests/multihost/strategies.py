"""The strategies benchmark on four hosts: over a slow network, and with a slow rank.

    python -m tests.multihost.strategies --json found.json --plot found.png --seeds 5

makes four hosts (`hosts`) twice, and runs `python -m hvdlite.bench strategies` with one rank on each. First a box between
them delays packets by 5 ms and limits each host to 100 Mbit/s (`delay_box`). Then the network is fast, and rank 3
computes four times as long. The last run prints tables of both. Options that this program does not know go to both.

    python -m tests.multihost.strategies --exchange

times one exchange of D-PSGD on a ring beside all-reduces instead: with 100 Mbit/s, and without a limit.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.multihost.delay_box import delay_box
from tests.multihost.hosts import hosts, missing

DELAY = 0.005  # seconds
RATE = "100mbit"
SLOW = "3:4"  # rank and factor
PLACES = ",".join(f"host{letter}:1" for letter in "abcd")
RUN = [sys.executable, "-m", "hvdlite_launcher.cli", "--no-prefix", "-np", "4", "-H", PLACES]
BENCH = [sys.executable, "-m", "hvdlite.bench"]
EXCHANGE = [*BENCH, "allreduce", "--algorithms", "neighbors,ring,auto", "--min", "1K", "--max", "4M", "--no-pin"]


def on_four_hosts(command: Sequence[str], boxed: bool, rate: str | None, shared: Sequence[Path]) -> int:
    """Run a command with one rank on each of four hosts.

    Args:
        command: The command of each rank.
        boxed: Whether packets are delayed.
        rate: What each host can send, if packets are delayed; None: no limit.
        shared: Folders that the hosts see.

    Returns:
        The exit code.
    """
    with ExitStack() as stack:
        there = stack.enter_context(hosts(4, shared=shared))
        if boxed:
            stack.enter_context(delay_box(there, DELAY, rate))
        return subprocess.run(there[0].command([*RUN, *command])).returncode


def compare(options: Sequence[str], last: Sequence[str], shared: Sequence[Path]) -> int:
    """Run the benchmark under both conditions; returns the first exit code that is not 0.

    Args:
        options: Options of both runs.
        last: Options of the last run.
        shared: Folders that the hosts see.
    """
    with tempfile.TemporaryDirectory() as folder:
        shared, earlier = [Path(folder), *shared], str(Path(folder, "slow_network.json"))
        bench = [*BENCH, "strategies", *options]
        link = f"slow network: round trip {2 * DELAY * 1e3:g} ms, {RATE.removesuffix('mbit')} Mbit/s"
        code = on_four_hosts([*bench, "--link", link, "--json", earlier], True, RATE, shared)
        more = ["--link", "fast network", "--slow", SLOW, "--earlier", earlier, *last]
        return code or on_four_hosts([*bench, *more], False, None, shared)


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="the strategies benchmark on four hosts, under two conditions")
    parser.add_argument("--json", type=Path, help="write everything measured")
    parser.add_argument("--plot", type=Path, help="draw it")
    parser.add_argument("--exchange", action="store_true", help="time one exchange of D-PSGD beside all-reduces")
    known, options = parser.parse_known_args()
    if reason := missing():
        print(reason, file=sys.stderr)
        return 77
    if known.exchange:
        return max(on_four_hosts([*EXCHANGE, *options], True, rate, ()) for rate in (RATE, None))
    files = {"--json": known.json, "--plot": known.plot}
    last = [text for option, path in files.items() if path for text in (option, str(path.resolve()))]
    return compare(options, last, [path.resolve().parent for path in files.values() if path])


if __name__ == "__main__":
    sys.exit(main())
