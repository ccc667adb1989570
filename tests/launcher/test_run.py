"""Real jobs: exit codes, the rank that is reported, and output are the same with every MPI."""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
import venv
from dataclasses import replace
from pathlib import Path

import pytest
from hvdlite_launcher import cli
from hvdlite_launcher.probe import Family

from tests.launcher.conftest import LIMIT, ROOT, SCRIPTS, Runner, wait_until

FAILS = (sys.executable, str(SCRIPTS / "fails.py"))


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [
        ("exception", 1, "rank 1 ended the job with exit code 1 [HVD903]"),
        ("thread", 1, "rank 1 ended the job with exit code 1 [HVD903]"),
        ("exit", 7, "rank 1 ended the job with exit code 7 [HVD903]"),
        ("exit-message", 1, "rank 1 ended the job with exit code 1 [HVD903]"),
        ("raise", 7, "rank 1 ended the job with exit code 7 [HVD903]"),
        ("signal9", 137, "rank 1 was killed by SIGKILL (signal 9) [HVD904]"),
        ("signal11", 139, "rank 1 was killed by SIGSEGV (signal 11) [HVD904]"),
        ("signal2", 130, "rank 1 ended the job with exit code 130 [HVD903]"),
    ],
)
def test_one_rank_that_fails_ends_the_job_with_its_code(runner: Runner, how: str, code: int, told: str) -> None:
    begun = time.monotonic()
    job = runner.run("-np", "3", *FAILS, how)
    assert time.monotonic() - begun < 8.0  # MPI's start on busy cores, and the two seconds that an end may take
    assert job.returncode == code, job.stderr
    assert job.stderr.splitlines()[-1] == f"hvdliterun: {told}"
    assert "[1]<stdout>:last words\n" in job.stdout
    assert job.stderr.count("Traceback") == (1 if how in ("exception", "thread") else 0)
    assert ("farewell" in job.stderr) == (how == "exit-message")
    assert not re.search("MPI_ABORT|noticed|BAD TERMINATION|Abort\\(", job.stderr)
    assert runner.leftovers() == []


DIES_IN_INIT = """
import os, signal, time
import hvdlite
if os.environ["HVDLITE_JOB_RANK"] == "0":
    time.sleep(30)
elif os.fork() == 0:
    time.sleep(1)
    os.kill(os.getppid(), signal.SIGSEGV)
    os._exit(0)
hvdlite.init()
"""


def test_a_rank_that_dies_while_its_mpi_begins_may_have_had_no_shared_memory(runner: Runner) -> None:
    """MPICH's ranks die so in a container with 64 MB of shared memory."""
    job = runner.run("-np", "2", sys.executable, "-c", DIES_IN_INIT)
    assert job.returncode == 139, job.stderr
    told = "rank 1 was killed by SIGSEGV (signal 11): /dev/shm may be full, or too small (df /dev/shm) [HVD905]"
    assert job.stderr.splitlines()[-1] == f"hvdliterun: {told}"


def test_of_all_ranks_that_fail_one_is_told(runner: Runner) -> None:
    job = runner.run("-np", "3", *FAILS, "all-exception")
    assert job.returncode == 1
    assert job.stderr.count("Traceback") == job.stderr.count("ValueError: no such luck") == 1
    rank = re.search(r"hvdlite: rank (\d) failed: ValueError \[HVD903\]\n", job.stderr)
    assert rank and f"hvdliterun: rank {rank[1]} ended the job with exit code 1 [HVD903]\n" in job.stderr


FAILS_BEFORE_INIT = """
import sys, time
import {imported}
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    raise ValueError("no data")
time.sleep(60)
"""


@pytest.mark.parametrize("launcher", ["hvdliterun", "mpirun"])
@pytest.mark.parametrize("imported", ["hvdlite", "torch"])
def test_a_rank_that_fails_before_init_in_an_mpi_of_somebody_else(runner: Runner, imported: str, launcher: str) -> None:
    """Lightning imports mpi4py.MPI before any of hvdlite, and MPI's end waits for all ranks."""
    command = (sys.executable, "-c", FAILS_BEFORE_INIT.format(imported=imported))
    job = runner.run("-np", "2", *command) if launcher == "hvdliterun" else runner.plain(2, *command)
    assert job.returncode == 1, job.stderr
    assert job.stderr.count("ValueError: no data") == 1 and "hvdlite: rank 1 failed: ValueError" in job.stderr
    assert runner.wait_gone()


@pytest.mark.parametrize("how", ["nothing", "zero", "caught", "uninstalled", "exit-of-thread"])
def test_what_is_no_failure_ends_well(runner: Runner, how: str) -> None:
    job = runner.run("-np", "2", *FAILS, how)
    assert (job.returncode, job.stderr) == (0, "")


@pytest.mark.parametrize(
    ("how", "code"), [("exception", 1), ("thread", 1), ("exit", 7), ("raise", 7), ("zero", 0), ("signal2", 130)]
)
def test_the_guard_alone_under_plain_mpirun(runner: Runner, how: str, code: int) -> None:
    job = runner.plain(2, *FAILS, how)
    assert job.returncode == code, job.stderr
    assert job.stderr.count("Traceback") == (1 if how in ("exception", "thread") else 0)
    if how not in ("zero", "signal2"):
        assert "hvdlite: rank 1 failed" in job.stderr
    assert runner.wait_gone()


def test_who_waits_offers_its_core_under_plain_mpirun(runner: Runner) -> None:
    """Two ranks share one core. One computes, and the other waits for it in MPI and would take half of the core."""
    if runner.mpi.family is Family.MPICH:
        pytest.skip("MPICH decides itself how often it offers its core")
    code = """if True:
        import os, time, hvdlite
        hvdlite.init()
        from mpi4py import MPI
        os.sched_setaffinity(0, [hvdlite.broadcast_object(min(os.sched_getaffinity(0)))])
        MPI.COMM_WORLD.Barrier()
        before, began = time.process_time(), time.monotonic()
        while hvdlite.rank() == 0 and time.monotonic() - began < 0.7:
            pass
        MPI.COMM_WORLD.Barrier()
        os.write(1, f"{hvdlite.rank()} {time.process_time() - before}\\n".encode())
    """
    job = runner.plain(2, sys.executable, "-c", code)
    used = {line.split()[0]: float(line.split()[1]) for line in job.stdout.splitlines()}
    assert used["1"] < 0.5 * used["0"], job.stdout


def test_lines_carry_rank_and_stream(runner: Runner) -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr)"
    job = runner.run("-np", "2", sys.executable, "-c", code)
    assert job.returncode == 0
    assert sorted(job.stdout.splitlines()) == ["[0]<stdout>:out", "[1]<stdout>:out"]
    assert sorted(job.stderr.splitlines()) == ["[0]<stderr>:err", "[1]<stderr>:err"]


def test_no_prefix(runner: Runner) -> None:
    job = runner.run("-np", "2", "--no-prefix", "echo", "plain")
    assert (job.returncode, job.stdout, job.stderr) == (0, "plain\nplain\n", "")


def test_no_line_is_lost_when_a_rank_goes_at_once(runner: Runner) -> None:
    code = "import os; os.write(1, b'line\\n' * 20000); os.write(1, b'end'); os._exit(5)"
    job = runner.run("-np", "1", sys.executable, "-c", code)
    assert job.returncode == 5
    assert job.stdout == "[0]<stdout>:line\n" * 20000 + "[0]<stdout>:end\n"


def test_an_unfinished_line_shows_while_the_job_runs(runner: Runner) -> None:
    code = "import time; print('\\r10%', end='', flush=True); time.sleep(30)"
    job = runner.start("-np", "1", sys.executable, "-c", code)
    assert job.stdout is not None
    assert job.stdout.read(len("[0]<stdout>:10%")) == "[0]<stdout>:10%"
    job.terminate()
    job.communicate(timeout=5)
    assert job.returncode == 143


def test_rank_0_reads_stdin(runner: Runner) -> None:
    """All of it, also if it comes faster than rank 0 reads."""
    text = "".join(f"{number}\n" for number in range(100_000))
    job = runner.run("-np", "2", "--no-prefix", "sh", "-c", "sleep 0.5; cat", text=text)
    assert (job.returncode, job.stdout) == (0, text)


def test_rank_0_has_the_terminal(runner: Runner) -> None:
    terminal, theirs = pty.openpty()
    code = "import os, sys; print(os.isatty(0), input('name? ')) if os.environ['HVDLITE_JOB_RANK'] == '0' else 0"
    job = runner.start("-np", "2", "--no-prefix", sys.executable, "-c", code, stdin=theirs)
    os.write(terminal, b"Ann\n")
    out, _ = job.communicate(timeout=LIMIT)
    assert (out, job.returncode) == ("name? True Ann\n", 0)


def test_the_terminal_shows_again_what_is_typed(runner: Runner) -> None:
    """After rank 0 has died in getpass()."""
    _terminal, theirs = pty.openpty()
    code = (
        "import getpass, os, time; rank = os.environ['HVDLITE_JOB_RANK']\n"
        "getpass.getpass(stream=open('/dev/null', 'w')) if rank == '0' else time.sleep(1.5) or exit(3)"
    )
    job = runner.start("-np", "2", "--no-prefix", sys.executable, "-c", code, stdin=theirs)
    off = wait_until(lambda: not termios.tcgetattr(theirs)[3] & termios.ECHO, LIMIT)
    job.communicate(timeout=LIMIT)
    assert off and job.returncode == 3 and termios.tcgetattr(theirs)[3] & termios.ECHO


def test_words_that_mean_something_to_an_mpi_pass(runner: Runner) -> None:
    words = ["a", ":", "\\:", "::", "-n", "--", ""]
    job = runner.run("-np", "1", "--no-prefix", sys.executable, "-c", "import sys; print(sys.argv[1:])", *words)
    assert (job.returncode, job.stdout) == (0, f"{words}\n")


@pytest.mark.parametrize("before", ["", "import hvdlite; hvdlite.init(); hvdlite.shutdown(); "])
def test_a_rank_that_ends_before_it_meets_the_others(runner: Runner, before: str) -> None:
    """(If all ranks do, as in a program without hvdlite, that is no failure.)"""
    leave = "exit()" if before else "os._exit(0)"
    code = f"import os; {before} os.environ['HVDLITE_JOB_RANK'] == '1' and {leave}; import hvdlite; hvdlite.init()"
    job = runner.run("-np", "2", sys.executable, "-c", code)
    assert job.returncode == 1
    assert job.stderr.splitlines()[-1] == (
        "hvdliterun: rank 1 ended without hvd.init(), where other ranks wait: every rank must call hvd.init() [HVD906]"
    )
    assert runner.leftovers() == []


def test_a_rank_that_comes_late(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes late to the first hvd.init() and to the second. (If MPI takes long to start, rank 1 waits, too.)"""
    late = "os.environ['HVDLITE_JOB_RANK'] == '1' and time.sleep(2); "
    both = f"{late}hvdlite.init(); hvdlite.shutdown(); {late}hvdlite.init(); {late}hvdlite.shutdown()"
    monkeypatch.setenv("HVDLITE_STALL_CHECK_TIME_SECONDS", "0.5")
    job = runner.run("-np", "2", sys.executable, "-c", f"import os, time, hvdlite; {both}")
    told = "hvdlite: hvd.init() has waited for 0.5 s: every rank of the job must call it, and some have not [HVD911]"
    lines = job.stderr.splitlines()
    assert (job.returncode, lines.count(f"[0]<stderr>:{told}")) == (0, 2), job.stderr
    assert set(lines) <= {f"[0]<stderr>:{told}", f"[1]<stderr>:{told}"}, job.stderr


def test_a_script_may_go_on_without_what_init_has_refused(runner: Runner) -> None:
    """No rank waits for another one then, so each may end at any time."""
    code = (
        "import os; os.environ['HVDLITE_OVERLAP'] = '01'[os.environ['HVDLITE_JOB_RANK'] == '0']; import hvdlite as hvd\n"
        "try: hvd.init()\nexcept hvd.HvdliteError as error: print(error)"
    )
    job = runner.run("-np", "2", "--no-prefix", sys.executable, "-c", code)
    assert (job.returncode, job.stderr) == (0, "")
    assert job.stdout.splitlines() == 2 * [
        "HVDLITE_OVERLAP differs: rank 0 has 1, rank 1 has 0. Set it to one value on all ranks. [HVD109]"
    ]


def test_a_rank_is_told_by_its_number_in_the_job_whatever_communicator_it_is_in(runner: Runner) -> None:
    code = (
        "from mpi4py import MPI; world = MPI.COMM_WORLD; import hvdlite as hvd; hvd.init(world.Split(world.rank % 2)); "
        "hvd.barrier(); world.rank == 3 and exit(5); hvd.barrier()"
    )
    job = runner.run("-np", "4", sys.executable, "-c", code)
    assert job.returncode == 5
    assert "hvdlite: rank 3 failed: exit code 5 [HVD903]\n" in job.stderr
    assert "hvdliterun: rank 3 ended the job with exit code 5 [HVD903]\n" in job.stderr


@pytest.mark.parametrize(("who", "how"), [("1", "raise KeyError"), ("1", "sys.exit(3)"), ("01", "sys.exit(3)")])
def test_what_python_does_at_its_end_is_done_by_ranks_that_fail(runner: Runner, who: str, how: str) -> None:
    code = (
        "import atexit, os, sys, tempfile, hvdlite\n"
        "rank = os.environ['HVDLITE_JOB_RANK']; os.chdir(os.environ['TMPDIR'])\n"
        "atexit.register(open(f'exit.{rank}', 'w').write, 'function')\n"
        "hvdlite.init(); file = open(f'file.{rank}', 'w'); file.write('buffered')\n"
        "folder = tempfile.TemporaryDirectory(prefix=f'folder.{rank}.')\n"
        f"if rank in '{who}': {how}\n"
        "hvdlite.barrier()"
    )
    job = runner.run("-np", "2", sys.executable, "-c", code)
    assert job.returncode == (3 if "3" in how else 1)
    for rank in who:
        assert (runner.tmpdir / f"exit.{rank}").read_text() == "function"
        assert (runner.tmpdir / f"file.{rank}").read_text() == "buffered"
        assert not list(runner.tmpdir.glob(f"folder.{rank}.*"))


@pytest.mark.parametrize(("error", "how"), [
    ("TimeoutError", "with contextlib.suppress(TimeoutError): hvdlite.shutdown()"), ("KeyboardInterrupt", ""),
])  # fmt: skip
def test_a_shutdown_that_is_interrupted(runner: Runner, error: str, how: str) -> None:
    """The other rank would wait for ever, so the job ends, although the script, or Python at its end, has caught the
    error."""
    script = runner.tmpdir / "script.py"
    script.write_text(
        "import contextlib, signal, time, hvdlite\n"
        f"def ring(*how): raise {error}('alarm')\n"
        "signal.signal(signal.SIGALRM, ring)\n"
        "hvdlite.init(); hvdlite.barrier()\n"
        "if hvdlite.rank() == 1: signal.setitimer(signal.ITIMER_REAL, 0.5)\n"
        "else: time.sleep(1.5)\n"
        f"{how}\n"
    )
    job = runner.run("-np", "2", "--no-prefix", sys.executable, str(script))
    assert job.returncode == 1, job.stderr
    assert (
        f"rank 1 failed: ended after communication broke: hvd.shutdown() was interrupted ({error}: alarm)" in job.stderr
    )


@pytest.mark.parametrize(("how", "code", "told"), [
    ("threading.Thread.start = no_more", 0, ""),
    ("os.environ.clear()", 0, ""),
    ("sys.exit(2**80)", 255, "failed: exit code 255"),
    ("sys.exit(Unprintable())", 1, "failed: exit code 1"),
    ("sys.excepthook = lambda *error: print('my hook'); raise KeyError", 1, "failed: KeyError"),
    ("sys.excepthook = None; raise KeyError", 1, "failed: KeyError"),
    ("sys.excepthook = catching(sys.excepthook); raise KeyError", 1, "failed: KeyError"),
    ("sys.stderr = open(os.devnull, 'w'); raise KeyError", 1, "failed: KeyError"),
    ("sys.ps1 = '> '; raise KeyError", 1, "failed: KeyError"),  # as a debugger leaves it
    ("sys.ps1 = '> '; exit(3)", 3, "failed: exit code 3"),
])  # fmt: skip
def test_unusual_ends(runner: Runner, how: str, code: int, told: str) -> None:
    """The other ranks wait for this rank, and learn how it ended. (Since 3.12 Python starts no threads while it ends.)"""
    script = runner.tmpdir / "script.py"
    script.write_text(
        "import contextlib, io, os, sys, threading, hvdlite\n"
        "class Unprintable:\n"
        "    def __str__(self): raise ValueError\n"
        'def no_more(self): raise RuntimeError("can\'t create new thread at interpreter shutdown")\n'
        "def catching(hook):\n"  # as torch.distributed's does
        "    def catch(*error):\n"
        "        with contextlib.redirect_stderr(io.StringIO()) as text: hook(*error)\n"
        "        sys.stderr.write(text.getvalue())\n"
        "    return catch\n"
        "hvdlite.init(); hvdlite.barrier()\n"
        f"if hvdlite.rank() == 1: {how}\n"
        f"if {code}: hvdlite.barrier()\n"
    )
    job = runner.run("-np", "2", "--no-prefix", sys.executable, str(script))
    assert job.returncode == code, job.stderr
    assert job.stderr.count(" 1 failed:") == bool(told) and f"hvdlite: rank 1 {told}" * bool(told) in job.stderr, (
        job.stderr
    )
    assert "ShutdownError" not in job.stderr


def test_without_a_home(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    job = runner.run("-np", "2", "--no-prefix", sys.executable, "-c", "import hvdlite; hvdlite.init()")
    assert (job.returncode, job.stderr) == (0, "")


def test_who_shuts_down_on_the_way_out_is_told_before_those_that_it_stops(runner: Runner) -> None:
    code = """
import sys, hvdlite
hvdlite.init()
try:
    hvdlite.rank() == 1 and sys.exit(7)
    hvdlite.barrier()
finally:
    hvdlite.shutdown()"""
    job = runner.run("-np", "3", sys.executable, "-c", code)
    assert job.returncode == 7 and "rank 1" in job.stderr.splitlines()[-1], job.stderr


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [
        (
            "try: 1 / (rank - 1)\nexcept ZeroDivisionError: hvdlite.shutdown(); raise",
            1,
            "ZeroDivisionError: division by",
        ),
        ("if rank == 1: hvdlite.shutdown(); sys.exit(4)", 4, "rank 1 ended the job with exit code 4 [HVD903]"),
    ],
)
def test_who_shuts_down_before_it_fails_is_told(runner: Runner, how: str, code: int, told: str) -> None:
    text = f"import sys, hvdlite\nhvdlite.init(); rank = hvdlite.rank()\n{how}\nhvdlite.barrier()\n"
    job = runner.run("-np", "2", "--no-prefix", sys.executable, "-c", text)
    assert job.returncode == code and told in job.stderr, job.stderr


def test_a_code_that_main_returns(runner: Runner) -> None:
    code = """
import sys, time, hvdlite
def main():
    hvdlite.init()
    if hvdlite.rank() == 1: return 3
    time.sleep(30)
sys.exit(main())"""
    begun = time.monotonic()
    job = runner.run("-np", "2", sys.executable, "-c", code)
    assert job.returncode == 3 and time.monotonic() - begun < 15, job.stderr


def test_a_rank_that_a_wrapper_starts(runner: Runner) -> None:
    """subprocess closes the descriptor that Hydra gives to its ranks."""
    train = "import hvdlite; hvdlite.init()"
    wrap = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {train!r}]).returncode)"
    job = runner.run("-np", "2", sys.executable, "-c", wrap)
    if runner.mpi.family is Family.OPEN_MPI:
        assert (job.returncode, job.stderr) == (0, "")
    else:
        assert job.returncode == 1 and "pass_fds=" in job.stderr, job.stderr


def test_the_end_of_a_wrappers_thread_is_not_that_of_its_rank(runner: Runner) -> None:
    train = "import hvdlite, time; hvdlite.init(); time.sleep(1.5); hvdlite.barrier(); print('trained')"
    wrap = f"""
import os, subprocess, sys, threading, time
def start():
    global child
    child = subprocess.Popen([sys.executable, "-c", {train!r}], close_fds=False)
    while not os.path.exists(os.environ["HVDLITE_JOB_DIR"] + "/present." + os.environ["HVDLITE_JOB_RANK"]): time.sleep(0.05)
thread = threading.Thread(target=start)
thread.start(); thread.join()
sys.exit(child.wait())"""
    job = runner.run("-np", "2", "--no-prefix", sys.executable, "-c", wrap)
    assert (job.returncode, job.stdout.split()) == (0, ["trained", "trained"]), job.stderr


def test_a_thread_that_communicates_until_the_end_is_no_failure(runner: Runner) -> None:
    code = """
import threading, time, hvdlite, numpy
def go_on():
    while True: hvdlite.allreduce(numpy.ones(1), name="x")
hvdlite.init()
threading.Thread(target=go_on, daemon=True).start()
time.sleep(0.3)"""
    job = runner.run("-np", "2", sys.executable, "-c", code)
    assert job.returncode == 0, job.stderr


@pytest.mark.parametrize("end", ["", "shutdown"])
def test_a_rank_whose_script_catches_that_another_has_left(runner: Runner, end: str) -> None:
    """It ends with exit code 0, but has not trained to the end."""
    pytest.importorskip("torch")
    job = runner.run("-np", "2", "--no-prefix", sys.executable, str(SCRIPTS / "skips.py"), end, limit=60)
    assert (job.returncode, job.stdout) == (1, "trained\n" * 2)
    (line,) = job.stderr.splitlines()
    assert line.startswith("hvdliterun: the script on rank 0 has caught hvdlite's error and gone on: ")
    assert "rank 1 shut down" in line and "except RuntimeError" in line
    assert line.count("[HVD") == 1 and line.endswith("[HVD908]")


CATCHES = """
import contextlib, sys, time, numpy, hvdlite
hvdlite.init()
rank = hvdlite.rank()
if rank != 1:
    with contextlib.suppress(RuntimeError): hvdlite.allreduce(numpy.ones(3), name="loss")
    time.sleep(0.2)
"""


def test_it_is_told_where_nobody_listens(runner: Runner) -> None:
    job = runner.plain(2, sys.executable, "-c", CATCHES)
    assert job.returncode == 1
    assert job.stderr.count("hvdlite: rank 0 ended with exit code 0 after communication had failed") == 1
    assert "allreduce 'loss': rank 1 shut down" in job.stderr and "Traceback" not in job.stderr


@pytest.mark.parametrize(("then", "code", "told"), [
    ("hvdlite.shutdown(); hvdlite.init(); hvdlite.barrier()", 0, ""),  # recovered, as by elastic.run
    ("rank == 0 and sys.exit(5)", 5, "rank 0 ended the job with exit code 5 [HVD903]"),
    ("hvdlite.shutdown(); rank == 0 and sys.exit(5)", 5, "rank 0 ended the job with exit code 5 [HVD903]"),
    ("hvdlite.shutdown(); rank == 0 and 1 / 0", 1, "rank 0 ended the job with exit code 1 [HVD903]"),
])  # fmt: skip
def test_what_is_said_otherwise_is_enough(runner: Runner, then: str, code: int, told: str) -> None:
    job = runner.run("-np", "2", "--no-prefix", sys.executable, "-c", CATCHES + then)
    assert job.returncode == code and "communication had failed" not in job.stderr, job.stderr
    assert (job.stderr.splitlines() or [""])[-1] == f"hvdliterun: {told}" * bool(told)


def test_all_ranks_that_caught_it_are_named_when_all_have_ended(runner: Runner) -> None:
    """The job goes on until then, because other ranks may be saving their work."""
    code = CATCHES + "if rank == 1: hvdlite.shutdown(); time.sleep(2.0); print('saved')"
    job = runner.run("-np", "3", "--no-prefix", sys.executable, "-c", code)
    assert (job.returncode, job.stdout) == (1, "saved\n")
    assert job.stderr.startswith("hvdliterun: the script on ranks 0, 2 has caught"), job.stderr


def test_exit_functions_that_take_too_long_do_not_keep_the_job(runner: Runner) -> None:
    code = "import atexit, time, hvdlite; atexit.register(time.sleep, 30); hvdlite.init(); hvdlite.rank() == 1 and 1 / 0; hvdlite.barrier()"
    begun = time.monotonic()
    job = runner.run("-np", "2", sys.executable, "-c", code)
    assert job.returncode == 1 and time.monotonic() - begun < 15.0


def test_output_that_cannot_be_written(runner: Runner) -> None:
    (runner.tmpdir / "rank.0").mkdir()
    (runner.tmpdir / "rank.0" / "stdout").symlink_to("/dev/full")
    job = runner.run("-np", "1", "--output-filename", str(runner.tmpdir), "sh", "-c", "echo lost; sleep 30")
    assert job.returncode == 1
    assert "hvdliterun: the ranks' output cannot be written: No space left on device" in job.stderr


def test_the_command_that_is_shown_runs_without_hvdliterun(runner: Runner) -> None:
    """Without an agent the ranks write to the MPI's own pipes."""
    shown = runner.run(
        "-v",
        "-np",
        "2",
        sys.executable,
        "-c",
        "import hvdlite as hvd; hvd.init(); print(f'rank {hvd.rank()}\\n', end='')",
    )
    (command,) = re.findall(r"hvdliterun: command:\n((?:.*\\\n)*.*\n)", shown.stderr)
    job = subprocess.run(["sh", "-c", command], env=runner.env(), capture_output=True, text=True, timeout=LIMIT)
    for folder in re.findall(r"(?:HVDLITE_JOB_DIR=|mkdir -m 700 )([^\s;]+)", command):
        shutil.rmtree(folder, ignore_errors=True)  # Open MPI's
    assert job.returncode == 0, job.stderr
    assert "shmem" not in job.stderr, "without a folder for its segments Open MPI falls back to TCP, with an error"
    assert sorted(job.stdout.split()) == ["0", "1", "rank", "rank"]


def test_the_loopback_is_a_network_of_one_host(runner: Runner) -> None:
    code = "import hvdlite as hvd; hvd.init(); print(hvd.size())"
    job = runner.run("--no-prefix", "-np", "2", "--network-interfaces", "lo", sys.executable, "-c", code)
    assert (job.returncode, job.stdout) == (0, "2\n2\n"), job.stderr


@pytest.mark.parametrize("code", [213, 0])
def test_an_end_of_the_mpis_launcher_that_nobody_explains_is_told(runner: Runner, tmp_path: Path, code: int) -> None:
    """Also exit code 0, if ranks have not ended: Open MPI's launcher does that if its daemon on another host crashes."""
    launcher = tmp_path / Path(runner.mpi.launcher).name
    launcher.write_text(f'#!/bin/sh\ncase "$*" in *sleep*) exit {code};; esac\nexec {runner.mpi.launcher} "$@"\n')
    launcher.chmod(0o755)
    runner.mpi = replace(runner.mpi, launcher=str(launcher))
    job = runner.run("-np", "1", "sleep", "1")
    assert job.returncode == (code or 1) and f"launcher ended with exit code {code}" in job.stderr.splitlines()[-1]


def test_variables_and_threads(runner: Runner) -> None:
    variables = ("-x", "LR=0.1", "-x", "OMP_NUM_THREADS=3")
    job = runner.run("-np", "1", *variables, "sh", "-c", "echo $LR $OMP_NUM_THREADS")
    assert job.stdout == "[0]<stdout>:0.1 3\n"


def test_signals_that_python_ignores_are_not_ignored_by_the_command(runner: Runner) -> None:
    """A shell's `yes | head -1` ends by SIGPIPE."""
    job = runner.run("-np", "1", "--no-prefix", "grep", "SigIgn", "/proc/self/status")
    ignored = int(job.stdout.split()[1], 16)
    assert not any(ignored >> number - 1 & 1 for number in (signal.SIGPIPE, signal.SIGXFSZ))


def test_what_the_mpi_refuses_is_shown(runner: Runner) -> None:
    job = runner.run("-np", "1", "--mpi-args=--nonsense", "true")
    assert job.returncode != 0
    assert "nonsense" in job.stderr


def test_verbose_tells_the_command_the_library_and_the_times(runner: Runner) -> None:
    job = runner.run("-v", "-np", "1", "echo", "hello")
    assert job.stdout == "[0]<stdout>:hello\n"
    assert f"MPI: {runner.mpi}" in job.stderr
    assert re.search(rf"libmpi: {re.escape(runner.library)}", job.stderr)
    assert re.search(r"command:\n(.+ \\\n)+ .*keeper.py \\\n  echo hello\n", job.stderr)
    assert re.search(r"start-up: find MPI \d+ ms, .* first output after \d+ ms\n", job.stderr)


def test_a_python_without_hvdlite_is_told(runner: Runner, tmp_path: Path) -> None:
    venv.create(tmp_path / "other", symlinks=True)
    beside = f"{tmp_path / 'other' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = runner.env() | {"PATH": beside, "PYTHONPATH": str(ROOT / "launcher")}
    command = [sys.executable, "-m", "hvdlite_launcher.cli", "-np", "2", "python", "-c"]
    job = subprocess.run(
        [*command, "import hvdlite"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT
    )
    assert job.returncode == 1 and "No module named 'hvdlite'" in job.stderr
    told = (
        f"exit code 1 [HVD903]. {tmp_path}/other/bin/python has no hvdlite. Start the script with {sys.executable}, "
        "which has it [HVD005]"
    )
    assert told in job.stderr.splitlines()[-1]
    job = subprocess.run([*command, "1 / 0"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert job.returncode == 1 and "has no hvdlite" not in job.stderr


@pytest.mark.parametrize(("last", "shown"), [("echo no libmpi >&2", "no libmpi"), ("true", "no answer")])
def test_a_library_that_is_unknown(tmp_path: Path, last: str, shown: str) -> None:
    """-v says why."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{last}\n")
    python.chmod(0o755)
    assert cli._libmpi(str(python), dict(os.environ)) == f"unknown ({shown})"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_without_room_in_shared_memory_a_job_runs(runner: Runner) -> None:
    """A file system for shared memory that takes no more files."""
    full = 'mount -t tmpfs -o nr_inodes=1 none /dev/shm && exec "$@"'
    runner.prefix = ["unshare", "--mount", "sh", "-c", full, "sh"]
    job = runner.run("-np", "2", "--no-prefix", "echo", "hello")
    assert (job.returncode, job.stdout) == (0, "hello\nhello\n"), job.stderr
