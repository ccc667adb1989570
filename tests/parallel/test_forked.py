"""A forked child that ends as scripts do, through Python's own exit: it must not finalize its parent's MPI."""

from __future__ import annotations

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
