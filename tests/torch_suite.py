"""torch's own tests of torch.distributed, on gloo and on hvdlite: `python -m tests.torch_suite [--fast] [--ranks 2 4]`.

torch's wheel has the tests (torch.testing._internal.distributed.distributed_test). torch starts processes for each
test. Here one set of ranks, started by hvdliterun, runs one test after another, each with a process group and a seed
of its own. A test that fails or hangs ends its set, and a new set runs the rest.

Both backends run the same tests: those for gloo, and those that are for MPI only (all_to_all). The script prints both
backends' counts, and the tests that pass on gloo and not on hvdlite. It exits with 1 if a test hangs on hvdlite, or if
a test passes on gloo and not on hvdlite and is none of EXCEPTIONS. `--fast` runs the tests FAST on hvdlite alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.parallel import jobs

SECONDS = 60
"""The longest time of a test."""

MONITORED = 'torch refuses monitored_barrier unless the backend is called "gloo"; barrier with a timeout does the same'
EXCEPTIONS = {
    "test_monitored_barrier_failure_order": MONITORED,
    "test_monitored_barrier_gloo": MONITORED,
    "test_monitored_barrier_gloo_rank_0_timeout": MONITORED,
    "test_monitored_barrier_gloo_subgroup": MONITORED,
    "test_monitored_barrier_wait_all_ranks": MONITORED,
}
"""The tests that pass on gloo and need not pass on hvdlite, with the reason of each."""

FAST = (
    "test_Backend_enum_class",
    "test_get_rank_size_group",
    "test_destroy_full_group",
    "test_barrier",
    "test_barrier_timeout_global",
    "test_barrier_timeout_full_group",
    "test_all_reduce_sum",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_all_reduce_product",
    "test_all_reduce_full_group_max",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_coalesced_sum",
    "test_sparse_all_reduce_sum",
    "test_reduce_sum_twice",
    "test_reduce_min",
    "test_broadcast",
    "test_all_gather",
    "test_all_gather_complex",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_object_default_pg",
    "test_gather",
    "test_gather_object_subgroup",
    "test_scatter",
    "test_scatter_object_list",
    "test_all_to_all",
    "test_all_to_all_single_unequal_split",
    "test_get_future",
    "test_send_recv",
    "test_send_recv_any_source",
    "test_send_recv_with_tag",
    "test_isend",
    "test_irecv",
    "test_batch_isend_irecv_gloo_tags",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_grads_same_across_ranks_with_no_sync",
    "test_ddp_create_graph",
    "test_ddp_logging_data_cpu",
    "test_static_graph_api_cpu",
)
"""The tests that `--fast` runs."""


class Outcomes:
    """The outcomes of tests on one backend: "pass", "skip", "fail" or "hang", and the errors' texts."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.found: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def add(self, name: str, lines: Sequence[Mapping[str, object]], output: str) -> None:
        """Note a test's outcome. lines: the ranks' reports. A rank without one has died or hung."""
        said = [str(line["outcome"]) for line in lines]
        if "fail" in said:
            outcome = "fail"
        elif len(said) < self.size:
            outcome = "hang" if "Timeout (" in output else "fail"
        else:
            outcome = said[0]  # as torch does: rank 0 knows whether a test is skipped
        self.found[name] = outcome
        self.seconds[name] = max((float(str(line["seconds"])) for line in lines), default=SECONDS)
        errors = [f"rank {line['rank']}: {line['text']}" for line in lines if line["outcome"] == "fail"]
        if outcome != "pass":
            self.errors[name] = "\n".join(errors) or (output if outcome != "skip" else str(lines[0]["text"]))

    def names(self, outcome: str) -> set[str]:
        """The tests with this outcome."""
        return {name for name, found in self.found.items() if found == outcome}

    def counts(self) -> str:
        """The number of tests with each outcome."""
        counted = Counter(self.found.values())
        return ", ".join(f"{counted[outcome]} {outcome}" for outcome in ("pass", "fail", "hang", "skip"))


def run(backend: str, size: int, names: Sequence[str]) -> Outcomes:
    """Run these tests with as few sets of ranks as possible."""
    outcomes, rest = Outcomes(size), list(names)
    while rest:
        before = len(rest)
        with tempfile.TemporaryDirectory() as folder:
            output = run_set(backend, size, rest, Path(folder))
            lines = [
                json.loads(line)
                for path in sorted(Path(folder).glob("rank*"))
                for line in path.read_text().splitlines()
            ]
        for name in rest[:]:
            reports = [line for line in lines if line["test"] == name]
            begun = [line for line in reports if "outcome" not in line]
            ended = [line for line in reports if "outcome" in line]
            if not begun:
                break
            outcomes.add(name, ended, output)
            rest.remove(name)
        if len(rest) == before:
            raise RuntimeError(f"the ranks did not start:\n{output}")
    return outcomes


def run_set(backend: str, size: int, names: Sequence[str], folder: Path) -> str:
    """Have one set of ranks run these tests, until one fails. Returns their output."""
    (folder / "names").write_text("\n".join(names))
    environ = jobs.environment({"BACKEND": backend, "TEMP_DIR": str(folder), "PYTHONWARNINGS": "ignore"})
    environ["PYTHONPATH"] += f":{jobs.ROOT / 'launcher'}"
    hvdliterun = [sys.executable, "-m", "hvdlite_launcher.cli", "-np", str(size)]
    command = [*hvdliterun, sys.executable, "-m", "tests.torch_suite_rank", str(folder)]
    return jobs.finished(command, environ, SECONDS * len(names)).output


def all_names() -> list[str]:
    """The names of torch's tests."""
    command = [sys.executable, "-m", "tests.torch_suite_rank"]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=jobs.ROOT, env=jobs.environment({"BACKEND": "gloo"})
    ).stdout.split()


def known(path: Path | None, size: int) -> Outcomes | None:
    """The outcomes on gloo that an earlier run has written; None if there are none."""
    if path is None or not path.exists():
        return None
    written = json.loads(path.read_text()).get(str(size))
    if written is None:
        return None
    outcomes = Outcomes(size)
    outcomes.found, outcomes.errors, outcomes.seconds = written["found"], written["errors"], written["seconds"]
    return outcomes


def keep(path: Path | None, outcomes: Outcomes) -> None:
    """Write outcomes to a file, beside those with other numbers of ranks."""
    if path is not None:
        written = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**written, str(outcomes.size): vars(outcomes)}, indent=1))


def compare(size: int, names: Sequence[str], gloo: Outcomes, ours: Outcomes) -> bool:
    """Print the counts, and the tests that do not pass on hvdlite. Returns whether all that must pass do."""
    print(f"torch's own tests on {size} ranks: {len(names)}")
    print(f"  gloo:    {gloo.counts()}")
    print(f"  hvdlite: {ours.counts()}")
    missed = sorted((gloo.names("pass") & {*names}) - ours.names("pass"))
    for name in missed:
        print(f"  passes on gloo only: {name}: {EXCEPTIONS.get(name, 'NOT EXPECTED')}")
    for name in sorted(ours.names("pass") - gloo.names("pass")):
        print(f"  passes on hvdlite only: {name}")
    for name in sorted(ours.names("hang") - {*missed}):
        print(f"  hangs on hvdlite: {name}")
    unexpected = [name for name in missed if name not in EXCEPTIONS]
    for name in sorted({*unexpected, *ours.names("hang")}):
        print(f"\n{name}: {ours.found[name]}\n{ours.errors.get(name, '')}")
    return not unexpected and not ours.names("hang")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fast", action="store_true", help="a few tests, on hvdlite alone")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of ranks (default: 2)")
    parser.add_argument("--only", nargs="+", metavar="TEST", help="these tests")
    parser.add_argument("--gloo", type=Path, metavar="FILE", help="keep the outcomes on gloo there, and use them again")
    parser.add_argument("--hvdlite", type=Path, metavar="FILE", help="write the outcomes on hvdlite there")
    options = parser.parse_args(arguments)
    names = options.only or (list(FAST) if options.fast else all_names())
    good = True
    for size in options.ranks:
        began = time.perf_counter()
        if options.fast:
            ours = run("hvdlite", size, names)
            print(f"{len(names)} of torch's own tests on {size} ranks: {ours.counts()}")
            for name in sorted({*names} - ours.names("pass")):
                print(f"\n{name}: {ours.found[name]}\n{ours.errors[name]}")
            good = good and ours.names("pass") == {*names}
        else:
            gloo = known(options.gloo, size)
            if gloo is None:
                gloo = run("gloo", size, names)
                keep(options.gloo, gloo)
            ours = run("hvdlite", size, names)
            keep(options.hvdlite, ours)
            good = compare(size, names, gloo, ours) and good
        print(f"  {time.perf_counter() - began:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    os.chdir(jobs.ROOT)
    sys.exit(main())
