"""Children of a rank.

A forked child that ends through Python's own exit must not finalize its parent's MPI. A child that runs another script
is no rank, although its environment has a rank's variables. Jobs that it starts are jobs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel import jobs

SCRIPT = """
import os, sys, time
import numpy as np
import hvdlite as hvd

hvd.init()
hvd.allreduce(np.ones(3))
child = os.fork()
if child == 0:
    CHILD
deadline = time.monotonic() + 10
while not (ended := os.waitpid(child, os.WNOHANG))[0]:
    assert time.monotonic() < deadline, "the child hangs"
    time.sleep(0.01)
assert os.waitstatus_to_exitcode(ended[1]) == CODE, ended
assert (hvd.allreduce(np.ones(3), op=hvd.Sum) == hvd.size()).all()
print("went on")
"""


@pytest.mark.parametrize("size", [0, 1, 2])
@pytest.mark.parametrize(("child", "code"), [
    ("sys.exit(17)", 17), ("sys.exit()", 0), ("raise KeyError('lost')", 1), ("import mpi4py.MPI; sys.exit(3)", 3),
    ("hvd.shutdown(); sys.exit(5)", 5),
])  # fmt: skip
def test_a_forked_child_ends_and_its_parent_goes_on(size: int, child: str, code: int) -> None:
    # alone, Open MPI 5 would leave files in shared memory
    alone = {} if size else {"OMPI_MCA_btl": "self"}
    result = jobs.run(size, ["-c", SCRIPT.replace("CHILD", child).replace("CODE", str(code))], alone)
    assert result.code == 0 and result.output.count("went on") == max(size, 1), result.output


NO_RANK = """
import os, subprocess, sys
import numpy as np
import hvdlite as hvd

if sys.argv[1:] == ["child"]:
    hvd.init()
    print("child is rank", hvd.rank(), "of", hvd.size())
    sys.exit(0)
hvd.init()
before = hvd.rank() if sys.argv[1:] == ["after shutdown"] else None
if before is not None:
    hvd.shutdown()
script = [sys.executable, sys.argv[0], "child"]
child = subprocess.run(script, capture_output=True, text=True, timeout=20)
assert child.returncode == 1 and 'if __name__ == "__main__"' in child.stderr, child
assert f"process {os.getpid()}" in child.stderr and "is no rank itself" in child.stderr, child
if before is not None:
    hvd.init()
    assert hvd.rank() == before
if hvd.rank() == 0 and hvd.size() > 1:  # jobs of their own
    job = subprocess.run([*LAUNCHER, "-np", "2", *script], capture_output=True, text=True, timeout=60)
    assert job.returncode == 0 and job.stdout.count("of 2") == 2, job
    assert hvd.run(lambda: hvd.init() or hvd.size(), np=2) == [2, 2]
assert (hvd.allreduce(np.ones(3), op=hvd.Sum) == hvd.size()).all()
print("went on")
"""


@pytest.mark.parametrize("when", ["in the middle", "after shutdown"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_script_started_by_a_rank_is_no_rank(size: int, when: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NO_RANK.replace("LAUNCHER", repr(jobs.mpiexec())))
    result = jobs.run(size, [str(script), when])
    assert result.code == 0 and result.output.count("went on") == size, result.output


def test_without_a_launcher_children_are_jobs_of_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import subprocess, sys, hvdlite as hvd\nhvd.init()\nprint('one of', hvd.size(), flush=True)\n"
                      "len(sys.argv) > 1 or subprocess.run([sys.executable, sys.argv[0], 'child'], check=True)")  # fmt: skip
    result = jobs.run(0, [str(script)])
    assert result.code == 0 and result.output.count("one of 1") == 2, result.output


WORKERS = """
import os, sys
import torch
from torch.utils.data import DataLoader, Dataset
import hvdlite.torch as hvd

def facts():
    return [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(),
            hvd.is_homogeneous(), hvd.global_process_set.size(), hvd.global_process_set.rank()]

class Facts(Dataset):
    def __init__(self, process_set):
        self.process_set = process_set
    def __len__(self):
        return 4
    def __getitem__(self, index):
        assert hvd.is_initialized() and hvd.mpi_enabled()
        mine = self.process_set
        assert (mine.size(), mine.included(), mine.ranks) == (1, hvd.rank() == 0, [0]), mine
        for call in (lambda: hvd.allreduce(torch.ones(1)), hvd.barrier, lambda: hvd.allgather_object(1, process_set=mine)):
            try:
                call()
            except hvd.HorovodInternalError as error:
                assert "main process; hvd.rank(), hvd.size() and the like work here" in str(error), error
            else:
                raise AssertionError("it communicates")
        hvd.shutdown()
        return torch.tensor([int(each) for each in facts()])

if __name__ == "__main__":
    first = hvd.ProcessSet([0])
    hvd.init(process_sets=[first])
    loader = DataLoader(Facts(first), batch_size=None,
                        num_workers=2, multiprocessing_context=sys.argv[1])
    found = list(loader)
    assert len(found) == 4 and all(each.tolist() == [int(fact) for fact in facts()] for each in found), (found, facts())
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    print("went on")
"""


@pytest.mark.parametrize("context", ["spawn", "forkserver", "fork"])
def test_workers_of_a_dataloader_know_their_rank_however_they_start(context: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WORKERS)
    result = jobs.run(2, [str(script), context])
    assert result.code == 0 and result.output.count("went on") == 2, result.output


CHILD = """
import multiprocessing, os, subprocess, sys
import numpy as np
import hvdlite as hvd

def facts(_=None):
    return hvd.rank(), hvd.size(), hvd.is_initialized()

if __name__ == "__main__":
    if sys.argv[1:]:
        try:
            print(*facts()[:2])
        except hvd.NotInitializedError:
            print("no rank")
        sys.exit(0)
    script = [sys.executable, sys.argv[0], "child"]
    before = subprocess.run(script, capture_output=True, text=True, timeout=60).stdout
    assert before == "no rank\\n", before
    hvd.init()
    assert subprocess.run(script, capture_output=True, text=True, timeout=60).stdout == f"{hvd.rank()} {hvd.size()}\\n"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(facts, [None]) == [(hvd.rank(), hvd.size(), MPI)]
    if hvd.rank() == 0:  # the ranks of a job of their own are nobody's children
        job = subprocess.run([*LAUNCHER, "-np", "2", *script], capture_output=True, text=True, timeout=60)
        assert job.stdout == "no rank\\n" * 2, job
    hvd.shutdown()
    assert subprocess.run(script, capture_output=True, text=True, timeout=60).stdout == "no rank\\n"
    print("went on")
"""


@pytest.mark.parametrize("size", [0, 2])
def test_children_know_their_parents_rank_between_init_and_shutdown(size: int, tmp_path: Path) -> None:
    """In a job of one rank too, where children may become jobs of one rank themselves."""
    script = tmp_path / "script.py"
    script.write_text(CHILD.replace("LAUNCHER", repr(jobs.mpiexec())).replace("MPI)", f"{size > 0})"))
    result = jobs.run(size, [str(script)])
    assert result.code == 0 and result.output.count("went on") == max(size, 1), result.output


STEPS = """
import os, threading, time
import hvdlite as hvd
from hvdlite.job import runtime

hvd.init()
meter, held, over = runtime.current().observers.meter, threading.Event(), threading.Event()

def other_thread():
    with meter.lock:
        held.set()
        over.wait()

threading.Thread(target=other_thread).start()
held.wait()
child = os.fork()
if child == 0:
    for _ in range(3):
        runtime.end_step(1)
    os._exit(runtime.known().observers.steps.number)
over.set()
deadline = time.monotonic() + 10
while not (ended := os.waitpid(child, os.WNOHANG))[0]:
    if time.monotonic() > deadline:
        os.kill(child, 9)
    time.sleep(0.01)
assert os.waitstatus_to_exitcode(ended[1]) == (0 if hvd.size() > 1 else 3), ended
print("went on")
"""


@pytest.mark.parametrize("size", [0, 2])
def test_a_forked_child_may_step_an_optimizer_while_the_parent_measures(size: int) -> None:
    """A child of a rank counts no steps. In a job without MPI the child goes on by itself."""
    result = jobs.run(size, ["-c", STEPS])
    assert result.code == 0 and result.output.count("went on") == max(size, 1), result.output
