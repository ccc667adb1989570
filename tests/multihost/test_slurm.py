"""Slurm starts the ranks: by itself (`srun python train.py`) and through hvdliterun inside an allocation."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hvdlite_launcher.probe import Family

from tests.launcher.conftest import SCRIPTS, Runner, available, wait_until
from tests.multihost import slurm
from tests.multihost.hosts import Hosts, hosts

pytestmark = pytest.mark.full
TELLS = (sys.executable, str(Path(__file__).parent / "scripts" / "tells.py"))
COUNTS = (sys.executable, str(Path(__file__).parent / "scripts" / "counts.py"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hosts, dict[str, str]]]:
    if reason := slurm.missing():
        pytest.skip(reason)
    with hosts(2, shared=[tmp_path_factory.getbasetemp()]) as pair:
        yield pair, slurm.start(pair)


@pytest.fixture(params=list(available()), ids=lambda mpi: mpi.family.name.lower())
def runner(
    request: pytest.FixtureRequest, cluster: tuple[Hosts, dict[str, str]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Runner:  # fmt: skip
    pair, env = cluster
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return Runner(request.param, tmp_path, prefix=pair[0].command([]))


def within(runner: Runner, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command on the cluster's first host."""
    env = runner.env(MPI4PY_LIBMPI=runner.mpi.library or "", **more)
    null = subprocess.DEVNULL
    return subprocess.run([*runner.prefix, *command], env=env, stdin=null, capture_output=True, text=True, timeout=60)


def ranks(text: str) -> list[dict[str, object]]:
    """What the ranks have printed, by rank."""
    told = [json.loads(line[line.index("{") :]) for line in text.splitlines() if "{" in line]
    return sorted(told, key=lambda each: int(each["rank"]))


def dialect(runner: Runner) -> str:
    return "pmix" if runner.mpi.family is Family.OPEN_MPI else "pmi2"


def test_srun_needs_no_launcher(runner: Runner) -> None:
    job = within(runner, "srun", "-N2", "--ntasks-per-node=2", f"--mpi={dialect(runner)}", *TELLS)
    assert job.returncode == 0, job.stderr
    told = ranks(job.stdout)
    assert [each["host"] for each in told] == ["hosta", "hosta", "hostb", "hostb"]
    assert {each["sum"] for each in told} == {10.0}


def test_srun_without_pmi_says_what_to_do(runner: Runner) -> None:
    job = within(runner, "srun", "-N1", "-n2", "--mpi=none", *TELLS)
    assert job.returncode != 0
    assert "--mpi=pmix" in job.stderr and "--mpi=pmi2" in job.stderr


def allocated(runner: Runner, *arguments: str) -> subprocess.CompletedProcess[str]:
    """hvdliterun inside an allocation of two hosts with two ranks each."""
    command = shlex.join([sys.executable, "-m", "hvdlite_launcher.cli", *arguments])
    return within(runner, "salloc", "-Q", "-N2", "--ntasks-per-node=2", "sh", "-c", command)


def test_hvdliterun_takes_what_the_allocation_has(runner: Runner) -> None:
    job = allocated(runner, *TELLS, "SLURM_JOB_ID")
    assert job.returncode == 0, job.stderr
    told = ranks(job.stdout)
    assert [(each["host"], each["local"]) for each in told] == [
        ("hosta", [0, 2]), ("hosta", [1, 2]), ("hostb", [0, 2]), ("hostb", [1, 2]),
    ]  # fmt: skip
    assert sorted(line[:12] for line in job.stdout.splitlines()) == [f"[{rank}]<stdout>:" for rank in range(4)]


def test_hvdliterun_within_an_interactive_step(runner: Runner) -> None:
    """`srun --pty bash` has the cores for which another step would wait."""
    command = shlex.join([sys.executable, "-m", "hvdlite_launcher.cli", *TELLS])
    job = within(runner, "srun", "-N1", "--ntasks-per-node=2", "sh", "-c", f'[ "$SLURM_PROCID" != 0 ] || {command}')
    assert job.returncode == 0, job.stderr
    assert len(ranks(job.stdout)) == 2


@pytest.mark.parametrize(("how", "code"), [("exit", 7), ("signal9", 137)])
def test_a_rank_that_fails_on_another_host_is_named(runner: Runner, how: str, code: int) -> None:
    """fails.py fails on rank 1, which is on the other host. Under Open MPI rank 0 then loses its connection and aborts
    with code 14 within milliseconds, and Slurm may kill all ranks before it sees which failed first."""
    command = [sys.executable, "-m", "hvdlite_launcher.cli", sys.executable, str(SCRIPTS / "fails.py"), how]
    job = within(runner, "salloc", "-Q", "-N2", "--ntasks-per-node=1", *command)
    if runner.mpi.family is Family.OPEN_MPI:
        assert job.returncode in (code, 14, 137), job.stderr
    else:
        assert job.returncode == code, job.stderr
        assert "rank 1 on hostb" in job.stderr.splitlines()[-1]


def template(runner: Runner, *command: str) -> Path:
    """The template's script for a job of two hosts with two ranks each, in a file."""
    path = runner.tmpdir / "slurm.sh"
    words = ["--template", "slurm", "-H", "a:2,b:2", *command]
    argv = [sys.executable, "-m", "hvdlite_launcher.cli", *words]
    path.write_text(subprocess.run(argv, env=runner.env(), stdout=subprocess.PIPE, text=True, check=True).stdout)
    return path


def submitted(runner: Runner, script: Path) -> str:
    """Submit a job script, whose log is the file `log` beside it. Returns the job's number."""
    folder = f"--chdir={script.parent}"
    job = within(runner, "sbatch", "--parsable", folder, f"--output={script.parent}/log", str(script))
    assert job.returncode == 0, job.stderr
    return job.stdout.strip()


def has_said(runner: Runner, text: str, seconds: float = 20.0) -> bool:
    log = runner.tmpdir / "log"
    return wait_until(lambda: log.exists() and text in log.read_text(), seconds)


def fact(runner: Runner, number: str, name: str) -> str:
    """What `scontrol show job` says of a job."""
    words = within(runner, "scontrol", "show", "job", number).stdout.split()
    return next((word.partition("=")[2] for word in words if word.startswith(f"{name}=")), "")


def test_the_templates_job_is_queued_again_when_its_time_is_up(runner: Runner) -> None:
    """scancel signals as Slurm does for `--signal=B:TERM`. The second start waits until the first start's credential has
    expired (`cred_expire` in slurm.conf)."""
    saved = runner.tmpdir / "step"
    number = submitted(runner, template(runner, *COUNTS, str(saved)))
    assert has_said(runner, "4 ranks begin at step 0"), (runner.tmpdir / "log").read_text()
    within(runner, "scancel", "--batch", "--signal=TERM", number)
    assert has_said(runner, "ended by SIGTERM")
    step = int(saved.read_text())
    assert has_said(runner, f"saved step {step}")
    assert wait_until(lambda: fact(runner, number, "JobState") == "PENDING", 20)
    assert has_said(runner, f"4 ranks begin at step {step}", 40), (runner.tmpdir / "log").read_text()
    assert has_said(runner, f"saved step {step + 5}")
    assert wait_until(lambda: fact(runner, number, "JobState") == "COMPLETED", 20)
    assert fact(runner, number, "Restarts") == "1"


def test_a_job_of_the_template_that_fails_or_is_cancelled_is_not_queued_again(runner: Runner) -> None:
    number = submitted(runner, template(runner, sys.executable, str(SCRIPTS / "fails.py"), "exit", "7"))
    assert wait_until(lambda: fact(runner, number, "JobState") == "FAILED", 20), fact(runner, number, "JobState")
    (runner.tmpdir / "log").unlink()
    number = submitted(runner, template(runner, *COUNTS, str(runner.tmpdir / "step")))
    assert has_said(runner, "begin at step 0")
    within(runner, "scancel", number)
    assert wait_until(lambda: within(runner, "squeue", "-hj", number).stdout.strip() == "", 40)
    assert (fact(runner, number, "JobState"), fact(runner, number, "Restarts")) == ("CANCELLED", "0")
