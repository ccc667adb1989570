"""Children of a rank. A forked one that ends as scripts do, through Python's own exit, must not finalize its parent's
MPI; one that runs a script of its own is no rank, although its environment says so; jobs that it starts are jobs."""

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
    # Alone, Open MPI 5 would leave its shared memory behind.
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
