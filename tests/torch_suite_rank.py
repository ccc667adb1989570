"""One rank of torch's own tests: `python -m tests.torch_suite_rank FOLDER`; without a folder it prints all tests' names.

The rank runs the tests that the file FOLDER/names lists, and writes the begin and end of each to FOLDER/rankN. It ends
after the first test that fails. faulthandler ends it in a test that hangs, and prints every thread's stack.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
import unittest
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.testing._internal import common_distributed, common_utils

from tests.torch_suite import SECONDS

NAME = os.environ["BACKEND"]
CODES = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}


class BackendName(str):
    """A backend's name that also equals "gloo": tests for gloo's CPU tensors ask for gloo by this name."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def load() -> Any:
    """torch's module of tests, with the tests for gloo and those for MPI only."""
    skip: Callable[[bool, str], Any] = common_utils.skip_but_pass_in_sandcastle_if
    common_utils.skip_but_pass_in_sandcastle_if = lambda condition, reason: skip(
        condition and not reason.startswith("Only MPI"), reason
    )
    os.environ.update(BACKEND="gloo", INIT_METHOD="file:///")  # read when the module is imported
    os.environ.setdefault("WORLD_SIZE", "2")
    from torch.testing._internal.distributed import distributed_test

    distributed_test.BACKEND = BackendName(NAME)
    for feature in ("ddp", "subgroup"):
        common_distributed.DistTestCases.backend_feature[feature].add(NAME)
    return distributed_test


def names(module: Any) -> list[str]:
    """The names of all tests, in torch's order."""
    return [name for name in vars(module.DistributedTest._DistTestBase) if name.startswith("test_")]


class Reports:
    """The file of this rank's reports."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self.file = (folder / f"rank{rank}").open("a")

    def write(self, test: str, **facts: object) -> None:
        """Add a line."""
        self.file.write(json.dumps({"test": test, "rank": self.rank, **facts}) + "\n")
        self.file.flush()


class Rank:
    """This rank: its place, the ranks' common folder, and a store where ranks meet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.store = FileStore(str(folder / "store"), self.size)

    def meet(self, what: str) -> None:
        """Wait for all ranks."""
        self.store.set(f"{what} {self.rank}", "")
        self.store.wait([f"{what} {rank}" for rank in range(self.size)], timedelta(seconds=2 * SECONDS))

    @contextmanager
    def prepared(self, module: Any, name: str) -> Iterator[None]:
        """A process group for a test, and the files and the seed that the test expects."""
        place = self.folder / name
        for part in ("barrier", "test_dir"):
            (place / part).mkdir(parents=True, exist_ok=True)
        everything = self.size > 3  # torch skips some tests on fewer than 8 ranks, unless the backend is MPI
        os.environ.update(TEMP_DIR=str(place), BACKEND="mpi" if everything else NAME)
        module.INIT_METHOD = f"file://{place}/again"
        module.Barrier.barrier_id = 0
        common_utils.set_rng_seed(zlib.crc32(name.encode()))
        seconds = timedelta(seconds=module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout))
        if NAME == "gloo":
            dist.init_process_group(
                NAME, init_method=f"file://{place}/first", rank=self.rank, world_size=self.size, timeout=seconds
            )
        else:
            dist.init_process_group(NAME, timeout=seconds)
        try:
            yield
            self.meet(name)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def run(self, module: Any, name: str) -> tuple[str, str]:
        """The outcome of a test on this rank, and the reason."""
        base = module.DistributedTest._DistTestBase
        case = type("Case", (common_utils.TestCase, base), {"rank": self.rank, "world_size": self.size})(name)
        try:
            with self.prepared(module, name):
                try:
                    getattr(case, name)()
                except unittest.SkipTest as reason:
                    return "skip", str(reason)
                except SystemExit as end:
                    if end.code in CODES:
                        return "skip", CODES[end.code]
                    raise
        except BaseException:
            return "fail", traceback.format_exc()
        return "pass", ""


def main(folder: Path) -> None:
    module, this = load(), Rank(folder)
    reports = Reports(folder, this.rank)
    for name in (folder / "names").read_text().split():
        this.meet(f"before {name}")
        reports.write(name)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        began = time.perf_counter()
        outcome, text = this.run(module, name)
        reports.write(name, outcome=outcome, text=text, seconds=round(time.perf_counter() - began, 2))
        if outcome == "fail":
            time.sleep(1)  # other ranks report the same error
            os._exit(1)
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        print(*names(load()))
