"""The checks of `ranks/` in one process without a launcher: size 1 needs no MPI."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.parallel import jobs


@pytest.mark.parametrize("module", [
    "collectives", "asynchronous", "torch_steps", "torch_state",
    *(pytest.param(module, marks=pytest.mark.full) for module in ("torch_gradients", "torch_training")),
])  # fmt: skip
def test_without_a_launcher(module: str) -> None:
    result = jobs.run(0, ["-m", "tests.parallel.runner", module])
    assert result.ended_well(), result.output
    names = {f"{module}.{check}" for check in jobs.checks(module, 1)}
    assert result.passed() == names


def test_a_check_that_fails_or_is_missing_is_no_success() -> None:
    """The harness does not count a check as passed that has not run."""
    result = jobs.run(0, ["-m", "tests.parallel.runner", "collectives.check_nothing_of_this_name"])
    assert not result.ended_well() and not result.passed()


def test_ctrl_c_ends_a_script_as_if_hvdlite_were_not_there() -> None:
    """The signal ends the script, and so a shell's loop ends too."""
    result = jobs.run(0, ["-c", "import hvdlite; hvdlite.init(); raise KeyboardInterrupt"])
    assert result.code == -signal.SIGINT, result.output


def test_one_of_torchruns_is_not_alone() -> None:
    """A rank of torchrun would train without the other ranks."""
    environ = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}
    result = jobs.run(0, ["-c", "import hvdlite; hvdlite.init()"], environ)
    assert result.code == 1 and "hvdliterun -np 2" in result.output and "[HVD105]" in result.output
    assert jobs.run(0, ["-c", "import hvdlite; hvdlite.init()"], environ | {"WORLD_SIZE": "1"}).code == 0


def test_another_mpi_than_the_launchers() -> None:
    """The launcher has announced two processes, and the library knows of one."""
    environ = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    result = jobs.run(0, ["-c", "import hvdlite; hvdlite.init()"], environ)
    assert result.code == 1 and "(it announces 2 processes, the library sees 1)" in result.output, result.output
    assert "[HVD102]" in result.output.splitlines()[-1]


FACTS = """
import tensorflow as tf
import hvdlite.tensorflow as hvd
hvd.init()

@tf.function
def facts():
    return hvd.rank_op(), hvd.local_rank_op(), hvd.local_size_op(), hvd.size_op(), hvd.process_set_included_op(), hvd.join()

print("facts:", [int(fact) for fact in facts()])
"""


def test_autograph_warns_of_no_function_that_tells_ranks(tmp_path: Path) -> None:
    """A process of its own, because AutoGraph warns once of each function; a file, because AutoGraph reads the source."""
    script = tmp_path / "facts.py"
    script.write_text(FACTS)
    result = jobs.run(0, [str(script)])
    assert result.code == 0 and "facts: [0, 0, 1, 1, 1, 0]" in result.output, result.output
    assert "AutoGraph" not in result.output, result.output


DYNAMIC = """
import hvdlite as hvd
hvd.init()
try:
    hvd.remove_process_set(hvd.global_process_set)
except ValueError as error:
    print("refused:", error)
hvd.shutdown()
hvd.init(process_sets="dynamic")
hvd.shutdown()
hvd.init()
print("allowed:", hvd.remove_process_set(hvd.global_process_set))
"""


def test_what_an_init_has_allowed_lasts_as_with_horovod() -> None:
    """Process sets may change after one init(process_sets="dynamic"), also after a later init()."""
    result = jobs.run(0, ["-c", DYNAMIC])
    assert result.code == 0, result.output
    assert "refused: process sets may change only after" in result.output and "allowed: False" in result.output
