"""`hvdlite.run`: a function runs on several ranks; results come in rank order, and exceptions are raised here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import hvdlite
from hvdlite.api.run import RemoteTraceback
from tests.launcher.conftest import Runner


@pytest.fixture(autouse=True)
def _mpi(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs use the parameter's MPI, and have the runner's mark."""
    name, value = runner.mark.split("=")
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("HVDLITE_MPIEXEC", runner.mpi.launcher)
    monkeypatch.setenv("TMPDIR", str(runner.tmpdir))


def test_results_come_in_rank_order(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    factor = 10.0  # a closure goes along
    monkeypatch.setattr(sys, "path", [*sys.path, Path("no text, which imports pass over")])

    def work(start: float, *, step: float) -> tuple[int, float, int]:
        hvdlite.init()
        total = hvdlite.allreduce(np.array([start + hvdlite.rank() * step]), op=hvdlite.Sum)
        return hvdlite.rank(), factor * float(total[0]), os.getpid()

    results = hvdlite.run(work, (1.0,), {"step": 2.0}, np=3)
    assert [rank for rank, _, _ in results] == [0, 1, 2]
    assert {total for _, total, _ in results} == {10.0 * (3 + 2 * 3)}
    assert len({process for _, _, process in results} | {os.getpid()}) == 4
    assert runner.leftovers() == []


def test_two_ranks_are_the_default_and_the_environment_is_set() -> None:
    assert hvdlite.run(lambda: os.environ["GIVEN"], env={"GIVEN": "a b"}) == ["a b", "a b"]


def test_folders_of_the_interpreter_stay_out_of_pythonpath(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a venv, whose standard library is that of another interpreter's folder."""
    monkeypatch.setattr(sys, "path", [*sys.path, "/a folder/of mine"])
    found = hvdlite.run(lambda: os.environ["PYTHONPATH"], np=1)[0].split(":")
    assert "/a folder/of mine" in found
    assert not [folder for folder in found if "lib-dynload" in folder or folder.endswith(".zip")], found


def test_large_results_and_arguments() -> None:
    data = np.arange(4_000_000.0)
    (back,) = hvdlite.run(lambda array: array * 2, (data,), np=1)
    assert np.array_equal(back, data * 2)


def test_the_exception_of_a_rank_is_raised_with_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    class Unlucky(Exception):
        pass

    def work() -> None:
        hvdlite.init()
        if hvdlite.rank() == 1:
            raise Unlucky("on rank", 1)
        hvdlite.barrier()

    begun = time.monotonic()
    with pytest.raises(Exception, match="on rank") as caught:
        hvdlite.run(work, np=3)
    assert time.monotonic() - begun < 10
    assert type(caught.value).__name__ == "Unlucky" and caught.value.args == ("on rank", 1)
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert "rank 1:" in str(cause) and 'raise Unlucky("on rank", 1)' in str(cause)
    assert capfd.readouterr().err.count("Traceback") == 1


def test_a_rank_without_a_result(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(hvdlite.HvdliteError, match="rank 1 was killed by SIGKILL"):
        hvdlite.run(lambda: os.environ["HVDLITE_JOB_RANK"] == "1" and os.kill(os.getpid(), 9), np=2)
    with pytest.raises(hvdlite.HvdliteError, match="exit code 7"):
        hvdlite.run(lambda: sys.exit(7), np=1)
    with pytest.raises(hvdlite.HvdliteError, match=r"ranks \[0\] ended without an error"):
        hvdlite.run(lambda: sys.exit(0), np=1)


def test_what_is_no_ordinary_exception_is_raised_too() -> None:
    class Stop(BaseException):
        """The kind of exception that pytest.fail() raises."""

    def work() -> None:
        raise Stop("here")

    with pytest.raises(Stop, match="here"):
        hvdlite.run(work, np=1)


def test_ranks_find_what_this_process_finds_and_other_pythons_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text("here = 1")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def work() -> tuple[int, list[str]]:
        import beside  # type: ignore[import-not-found]

        return beside.here, os.environ["PYTHONPATH"].split(os.pathsep)

    ((found, folders),) = hvdlite.run(work, np=1)
    assert found == 1 and str(tmp_path) in folders
    assert not [folder for folder in folders if folder == os.path.dirname(os.__file__) or "-packages" in folder]


def test_what_cannot_be_pickled_is_said() -> None:
    with pytest.raises(TypeError, match="rank 0: what the function returned cannot be pickled"):
        hvdlite.run(lambda: (each for each in "abc"), np=1)


def test_a_result_that_does_not_come_back_is_said() -> None:
    class Broken:
        def __reduce__(self) -> tuple[type[int], tuple[str]]:
            return int, ("no number",)

    with pytest.raises(hvdlite.HvdliteError, match="returned on rank 0 was pickled, but cannot be unpickled here"):
        hvdlite.run(Broken, np=1)


@pytest.mark.parametrize(("number", "told"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "own handler")])
def test_a_signal_does_what_it_would_have_done(runner: Runner, number: int, told: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import hvdlite, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('own handler'))\n"
        "try: hvdlite.run(lambda: (print('ready', flush=True), time.sleep(30)), np=1, prefix=False)\n"
        "except KeyboardInterrupt: print('KeyboardInterrupt')\n"
        "except hvdlite.HvdliteError: print('HvdliteError')\n"
    )
    pipe = subprocess.PIPE
    job = subprocess.Popen([sys.executable, str(script)], env=runner.env(), stdout=pipe, stdin=pipe, text=True)
    assert job.stdout is not None and job.stdout.readline() == "ready\n"
    job.send_signal(number)
    out, _ = job.communicate(timeout=8)
    assert out.splitlines()[0] == told


def test_nobody_reads_the_output(runner: Runner) -> None:
    """`script | head -1`."""
    program = "import hvdlite\nhvdlite.run(lambda: print('x' * (1 << 20)), np=1)"
    pipe = subprocess.PIPE
    job = subprocess.Popen([sys.executable, "-c", program], env=runner.env(), stdout=pipe, stderr=pipe, text=True)
    assert job.stdout and job.stdout.read(1) == "["
    job.stdout.close()
    assert (
        job.stderr and "BrokenPipeError: [Errno 32] run: nobody reads the ranks' output any more" in job.stderr.read()
    )
    assert job.wait(10) == 1


def test_the_callers_stdin_stays_its_own(runner: Runner, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import hvdlite, sys\nprint(hvdlite.run(lambda: sys.stdin.read(), np=1), sys.stdin.read())")
    done = subprocess.run(
        [sys.executable, str(script)], env=runner.env(), input="text", capture_output=True, text=True, timeout=30
    )
    assert done.stdout == "[''] text\n", done.stderr


def test_horovods_parameters() -> None:
    assert hvdlite.run(
        func=lambda: os.environ["PYTHONPATH"].split(":")[0], num_proc=1, env={"PYTHONPATH": "/mine"}
    ) == ["/mine"]
    assert hvdlite.run(lambda: hvdlite.is_initialized(), num_proc=1, network_interfaces=["lo"]) == [False]
    for arguments, kind, words in (
        ({"network_interfaces": ["lo", "none0"]}, ValueError, "no network interface none0"),
        ({"min_num_proc": 2}, ValueError, "min_num_proc=.*ranks cannot come and go yet"),
        ({"network_interfaces": 5}, TypeError, "a list of names, not 5"),
        ({"args": 5}, TypeError, r"args=\(x,\)"),
        ({"env": {"A": None}}, TypeError, "value of A"),
        ({"nonsense": 1}, TypeError, "'nonsense'"),
    ):
        with pytest.raises(kind, match=words):
            hvdlite.run(print, **arguments)


def test_wrong_parameters() -> None:
    with pytest.raises(ValueError, match="either -H or --hostfile"):
        hvdlite.run(print, hosts="localhost:1", hostfile="x")
    with pytest.raises(ValueError, match="needs at least 1 rank"):
        hvdlite.run(print, np=0)
    with pytest.raises(ValueError, match="over MPI only"):
        hvdlite.run(print, use_gloo=True)


def test_a_script_with_functions_of_its_own(runner: Runner, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import hvdlite\n"
        "def twice(x): return 2 * x\n"
        "def work(x):\n    hvdlite.init(); return twice(x) + hvdlite.rank()\n"
        "if __name__ == '__main__': print(hvdlite.run(work, (5,), np=2))\n"
    )
    env = runner.env()
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.returncode) == ("[10, 11]\n", 0), done.stderr
