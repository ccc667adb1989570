"""hvdliterun starts ranks on two hosts: their places and environments are right, and no output is lost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hvdlite_launcher.probe import Family

from tests.launcher.conftest import Runner
from tests.multihost.hosts import Hosts

TELLS = (sys.executable, str(Path(__file__).parent / "scripts" / "tells.py"))


def told(runner: Runner, *arguments: str, names: tuple[str, ...] = ()) -> list[dict[str, object]]:
    """What the ranks of a job print, by rank."""
    job = runner.run("--no-prefix", *arguments, *TELLS, *names)
    assert job.returncode == 0 and not job.stderr, job.stderr
    return sorted((json.loads(line) for line in job.stdout.splitlines()), key=lambda each: int(each["rank"]))


def test_hosts_are_filled_in_order(runner: Runner) -> None:
    ranks = told(runner, "-np", "4", "-H", "hosta:1,hostb:3")
    assert [each["host"] for each in ranks] == ["hosta", "hostb", "hostb", "hostb"]
    assert [each["local"] for each in ranks] == [[0, 1], [0, 3], [1, 3], [2, 3]]
    assert [each["cross"] for each in ranks] == [[0, 2], [1, 2], [0, 1], [0, 1]]
    assert {each["sum"] for each in ranks} == {10.0}
    assert {each["folder"] for each in ranks} == {os.getcwd()}


@pytest.mark.parametrize("binding", ["", "--bind-to core"])
def test_slots_hold_whatever_ranks_are_bound_to(runner: Runner, binding: str) -> None:
    if runner.mpi.family is not Family.OPEN_MPI:
        binding = ""
    ranks = told(runner, "-H", "hosta:1,hostb:1", "--binding-args", binding)
    assert [each["host"] for each in ranks] == ["hosta", "hostb"]


def test_more_ranks_than_cores_on_each_host(runner: Runner) -> None:
    here = len(os.sched_getaffinity(0)) + 1
    ranks = told(runner, "-H", f"hosta:{here},hostb:{here}")
    assert [each["host"] for each in ranks] == ["hosta"] * here + ["hostb"] * here


def test_all_ranks_on_another_host(runner: Runner) -> None:
    assert [each["host"] for each in told(runner, "-H", "hostb:2")] == ["hostb", "hostb"]


def test_input_that_would_be_lost_is_refused(runner: Runner) -> None:
    job = runner.run("-H", "hostb:1", "cat", text="x" * 5000)
    assert job.returncode == 2 and "rank 0 is on hostb" in job.stderr.splitlines()[-1], job.stderr
    assert runner.run("-H", "hostb:1", "cat").returncode == 0


def test_the_environment_is_the_same_on_all_hosts(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"OMP_NUM_THREADS": "3", "HVDLITE_ALGORITHM": "ring", "NAMED": "two words; $(echo)", "MY_KEY": "named"}
    unwanted = {"AWS_PROFILE": "a", "HF_TOKEN": "b", "HVDLITE_SECRET": "c", "UNNAMED": "d"}
    for name, value in {**wanted, **unwanted}.items():
        monkeypatch.setenv(name, value)
    names = (*wanted, *unwanted, "GIVEN")
    ranks = told(runner, "-H", "hosta:1,hostb:1", "-x", "NAMED", "-x", "MY_KEY", "-x", "GIVEN=x=y", names=names)
    for each in ranks:
        assert each["env"] == {**wanted, **dict.fromkeys(unwanted), "GIVEN": "x=y"}


def test_no_line_of_another_host_is_lost_or_torn(runner: Runner) -> None:
    # A line in one write: parts of one may come so late on a busy machine that hvdliterun no longer waits for the rest.
    code = "import sys; [print(f'{i} ' + 'x' * (i % 300) + '\\n', end='') for i in range(20000)]; print('bye', file=sys.stderr, end='')"
    job = runner.run("-np", "2", "-H", "hosta:1,hostb:1", sys.executable, "-c", code)
    assert job.returncode == 0
    for rank in range(2):
        label = f"[{rank}]<stdout>:"
        lines = [line.removeprefix(label) for line in job.stdout.splitlines() if line.startswith(label)]
        assert lines == [f"{i} {'x' * (i % 300)}" for i in range(20000)]
        assert f"[{rank}]<stderr>:bye" in job.stderr


def test_each_host_has_its_own_number_of_threads(runner: Runner, pair: Hosts) -> None:
    """hvdliterun runs on hosta, which may use one core. hostb may use all cores for its one rank."""
    every = os.sched_getaffinity(0)
    runner.prefix = pair[0].command(["taskset", "-c", str(min(every))])
    command = (sys.executable, "-c", "import os; print(os.uname().nodename, os.environ['OMP_NUM_THREADS'])")
    job = runner.run("--no-prefix", "-H", "hosta:1,hostb:1", *command)
    assert (job.returncode, sorted(job.stdout.splitlines())) == (0, ["hosta 1", f"hostb {len(every)}"]), job.stderr


def test_hosts_that_share_the_folder_for_temporary_files(runner: Runner, pair: Hosts, tmp_path: Path) -> None:
    """Diskless nodes and containers do. Nothing is left in that folder (TMPDIR)."""
    runner.tmpdir = tmp_path
    code = (
        "import os, hvdlite as hvd; hvd.init(); print(os.environ['HVDLITE_JOB_DIR'], hvd.allgather_object(hvd.rank()))"
    )
    job = runner.run("--no-prefix", "-H", "hosta:2,hostb:1", sys.executable, "-c", code)
    assert job.returncode == 0, job.stderr
    folders = {Path(line.split()[0]) for line in job.stdout.splitlines()}
    assert {folder.name for folder in folders} == {"at-hosta", "at-hostb"}
    assert {folder.parent.parent for folder in folders} == {tmp_path} and job.stdout.count("[0, 1, 2]") == 3
    assert list(tmp_path.iterdir()) == []
    script = tmp_path / "function.py"
    script.write_text("import os, hvdlite; print(hvdlite.run(lambda: os.uname().nodename, hosts='hosta:1,hostb:1'))\n")
    command = [*runner.prefix, sys.executable, str(script)]
    done = subprocess.run(command, env=runner.env(), capture_output=True, text=True, timeout=60)
    assert done.stdout == "['hosta', 'hostb']\n", done.stderr
    assert list(tmp_path.iterdir()) == [script]


def test_a_folder_for_temporary_files_that_one_host_lacks(runner: Runner, pair: Hosts) -> None:
    """The agent makes it, and removes it."""
    pair[0].run("mkdir", "-p", "/tmp/spacious")
    runner.tmpdir = Path("/tmp/spacious")
    job = runner.run("--no-prefix", "-H", "hosta:1,hostb:1", "sh", "-c", "echo $HVDLITE_JOB_DIR")
    assert job.returncode == 0 and job.stdout.count("/tmp/spacious/hvdlite-") == 2, job.stderr
    assert "spacious" not in pair[1].run("ls", "/tmp") and pair[0].run("ls", "/tmp/spacious") == ""
    pair[0].run("rmdir", "/tmp/spacious")


def test_a_command_that_is_no_python(runner: Runner) -> None:
    job = runner.run("--no-prefix", "-H", "hosta:1,hostb:1", "hostname")
    assert (job.returncode, sorted(job.stdout.split())) == (0, ["hosta", "hostb"])


def test_nothing_is_left_on_any_host(runner: Runner, pair: Hosts) -> None:
    before = [machine.run("ls", "/tmp", "/dev/shm") for machine in pair.machines]
    told(runner, "-H", "hosta:2,hostb:2")
    assert [machine.run("ls", "/tmp", "/dev/shm") for machine in pair.machines] == before
    assert runner.leftovers() == []


def test_a_function_on_two_hosts(runner: Runner, tmp_path: Path) -> None:
    """hvdlite.run: the function, some megabytes and the results travel over ssh."""
    script = tmp_path / "function.py"
    script.write_text(
        "import socket, numpy as np, hvdlite\n"
        "def work(data):\n"
        "    hvdlite.init()\n"
        "    total = hvdlite.allreduce(data[:3] * hvdlite.rank(), op=hvdlite.Sum)\n"
        "    return hvdlite.rank(), socket.gethostname(), total.tolist(), data + hvdlite.rank()\n"
        "results = hvdlite.run(work, (np.arange(500_000.0),), hosts='hosta:1,hostb:1')\n"
        "assert all(np.array_equal(each[3], np.arange(500_000.0) + each[0]) for each in results)\n"
        "print([each[:3] for each in results])\n"
    )
    command = [*runner.prefix, sys.executable, str(script)]
    done = subprocess.run(command, env=runner.env(), capture_output=True, text=True, timeout=60)
    assert done.stdout == "[(0, 'hosta', [0.0, 1.0, 2.0]), (1, 'hostb', [0.0, 1.0, 2.0])]\n", done.stderr


def test_a_login_shell_that_is_no_bourne_shell(runner: Runner, pair: Hosts, tmp_path: Path) -> None:
    """tcsh and fish do not know `NAME=value; export NAME`, which Open MPI writes for other hosts."""
    shell, users = tmp_path / "shell", tmp_path / "passwd"
    shell.write_text(
        '#!/bin/sh\ncase "$2" in [A-Z_]*=* | "("*) echo "$2: Command not found." >&2; exit 1;; esac\nexec sh "$@"\n'
    )
    shell.chmod(0o755)
    lines = Path("/etc/passwd").read_text().splitlines()
    root = r"^(root:.*:).*"
    users.write_text("".join(re.sub(root, rf"\1{shell}", line) + "\n" for line in lines))
    pair[1].run("mount", "--bind", str(users), "/etc/passwd")
    try:
        assert [each["host"] for each in told(runner, "-H", "hosta:1,hostb:1")] == ["hosta", "hostb"]
    finally:
        pair[1].run("umount", "/etc/passwd")


def test_another_remote_shell(runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes operators name one for Open MPI. hvdliterun and every MPI use it; its arguments are host and command."""
    shell, log = tmp_path / "shell", tmp_path / "log"
    shell.write_text(f'#!/bin/sh\necho "$1" >> {log}\nexec ssh "$@"\n')
    shell.chmod(0o755)
    monkeypatch.setenv("OMPI_MCA_plm_rsh_agent", str(shell))
    ranks = told(runner, "-H", "hosta:1,hostb:1")
    assert [each["host"] for each in ranks] == ["hosta", "hostb"]
    assert set(log.read_text().split()) == {"hostb"} and len(log.read_text().split()) >= 2
