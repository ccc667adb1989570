"""Machines shared with other users, whose files and processes are not ours; and ones that lack something."""

from __future__ import annotations

import errno
import os
import pwd
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from hvdlite_launcher import cli, janitor, wire
from hvdlite_launcher.agent import Agent
from hvdlite_launcher.hosts import parse_hosts
from hvdlite_launcher.keeper import WATCHED, _own
from hvdlite_launcher.options import parse
from hvdlite_launcher.output import Printer
from hvdlite_launcher.place import a_place
from hvdlite_launcher.probe import Family, Mpi
from hvdlite_launcher.settings import settings
from hvdlite_launcher.usage import UsageError

from tests.launcher.conftest import ROOT, Runner, wait_until

SHARED = Path("/dev/shm")


@contextmanager
def sleeper(daemon: Path, **env: str) -> Iterator[int]:
    """A process with these variables, started by this program, which has none."""
    words = [f"{name}={value}" for name, value in env.items()]
    parent = subprocess.Popen([daemon, *words], env={"PATH": os.environ["PATH"]}, stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    child = int(parent.stdout.readline())
    try:
        path = Path(f"/proc/{child}/comm")
        assert wait_until(lambda: path.read_text() == "sleep\n", 5.0)  # its environment is there from now on
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        parent.communicate()


def test_a_batch_job_that_a_rank_has_submitted_goes_on(tmp_path: Path) -> None:
    """It inherits the job's id. On other hosts a scheduler's login may know of the batch job that our side does not.
    What a rank has started itself is the job's, whatever it has put into its environment."""
    daemon, script = tmp_path / "slurmstepd", tmp_path / "script"
    for path in (daemon, script):
        path.write_text('#!/bin/sh\nenv "$@" sleep 60 & echo $!\nwait\n')
        path.chmod(0o755)
    with (
        sleeper(daemon, HVDLITE_JOB_ID="j1", SLURM_JOB_ID="7") as rank,
        sleeper(daemon, HVDLITE_JOB_ID="j1", SLURM_JOB_ID="8") as other,
        sleeper(daemon, HVDLITE_JOB_ID="j1") as bare, sleeper(daemon, HVDLITE_JOB_ID="j2", SLURM_JOB_ID="7"),
        sleeper(script, HVDLITE_JOB_ID="j1", SLURM_JOB_ID="local") as own,
    ):  # fmt: skip
        ours, others = {"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8"}
        assert set(janitor.marked(janitor.mark_of("j1", ours))) == {rank, bare, own}
        assert set(janitor.marked(janitor.mark_of("j1", {}))) == {bare, own}
        assert set(janitor.marked(janitor.mark_of("j1", ours, others))) == {rank, bare, own, other}


def test_a_folder_that_somebody_else_may_have_made_is_not_the_jobs(tmp_path: Path) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    (folder / "pid.0").write_text(str(os.getpid()))
    assert janitor.rank_processes(str(folder)) == [os.getpid()] and janitor.rank_processes(str(link)) == []
    assert _own(str(folder)) == os.devnull  # in which nobody reads
    (folder / WATCHED).touch()
    assert _own(str(folder)) == str(folder)
    assert _own(str(link)) == _own(str(tmp_path / "none")) == os.devnull
    if os.geteuid() == 0:
        os.chown(folder, 54321, 54321)
        assert janitor.rank_processes(str(folder)) == [] and _own(str(folder)) == os.devnull


def test_hosts_that_share_a_folder_have_a_part_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that leaves does not take the others' away; but who has begun the job takes all."""
    base, name = tmp_path / "job", "a"
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=name))
    first = janitor.claim(str(base))
    with pytest.raises(FileExistsError):
        janitor.claim(str(base))
    name = "b"
    assert _own(str(base)) == os.devnull  # the other host's pipes would be read by nobody
    second = janitor.claim(str(base))
    assert first != second and janitor.part_of(str(base)) == second
    Path(second, WATCHED).touch()
    assert _own(str(base)) == second
    janitor.leave(str(base), whole=False)
    assert os.listdir(base) == [os.path.basename(first)]
    name = "a"
    janitor.leave(str(base), whole=False)
    assert not base.exists()
    name = "b"
    janitor.claim(str(base))
    name = "a"
    janitor.leave(str(base), whole=True)
    assert not base.exists()


def test_an_agent_writes_into_folders_of_its_own_only(tmp_path: Path) -> None:
    agent = Agent(wire.Decoder())
    agent._job = {"folder": str(tmp_path)}
    agent._publish("task", b"secret")
    assert list(tmp_path.iterdir()) == []


def test_only_mpichs_own_segments_are_removed(tmp_path: Path) -> None:
    """Whatever else a rank has mapped, and whatever it is called."""
    folder = tmp_path / "dev" / "shm" / "mpich_shm_x"
    folder.parent.mkdir(parents=True)
    mine = SHARED / f"mpich_shm_{os.getpid()}"
    for path in (folder, mine):
        path.write_bytes(b"x" * 4096)
    opened = "import mmap, os, sys\nheld = [mmap.mmap(os.open(path, os.O_RDWR), 0) for path in sys.argv[1:]]\n"
    argv = [sys.executable, "-c", f"{opened}print(flush=True)\ninput()", str(folder), str(mine)]
    holder = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout and holder.stdout.readline()
        assert janitor._segments_of(holder.pid) == {str(mine)}
    finally:
        mine.unlink()
        holder.communicate(b"\n")


def test_the_folders_names_are_on_no_command_line() -> None:
    """Who saw them there could make the folders before us."""
    with a_place() as place:
        lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
        assert os.path.isdir(place.folder) and not any(place.id.encode() in line for line in lines)
    assert not os.path.exists(place.folder)


@pytest.mark.parametrize("text", ["-oProxyCommand=x", "-Fcfg:2", "a,-l"])
def test_a_host_is_no_option(text: str) -> None:
    with pytest.raises(UsageError, match="cannot read the host"):
        parse_hosts(text)


def test_modules_in_the_current_folder_are_not_ours(tmp_path: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be /tmp."""
    for name in ("json", "hvdlite", "mpi4py", "rich"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'came')!r}, 'a').write('{name} ')\n")
    monkeypatch.chdir(tmp_path)
    launcher = [sys.executable, "-P", "-m", "hvdlite_launcher.cli"]  # as the script hvdliterun is
    for arguments in (["-v", "-np", "1", sys.executable, "-P", "-c", "print('fine')"], ["--check"]):
        found = subprocess.run([*launcher, *arguments], env=runner.env(), capture_output=True, text=True, timeout=60)
        assert found.returncode == 0, found.stderr
    program = "import hvdlite\nprint(hvdlite.run(abs, (-3,), np=1))"
    found = subprocess.run([sys.executable, "-P", "-c", program], env=runner.env(), capture_output=True, text=True, timeout=60)
    assert "[3]" in found.stdout, found.stderr
    assert not (tmp_path / "came").exists(), (tmp_path / "came").read_text()


def test_secrets_are_not_shown(runner: Runner) -> None:
    found = runner.run("-v", "-np", "1", "-x", "WANDB_API_KEY=hush", "-x", "COLOUR=red", "echo", "hello")
    assert found.returncode == 0 and "COLOUR=red" in found.stderr
    assert "WANDB_API_KEY=..." in found.stderr and "hush" not in found.stderr


def test_a_link_of_somebody_elses_is_not_written_through(tmp_path: Path) -> None:
    """Of an output folder that others may write into."""
    victim, folder = tmp_path / "victim", tmp_path / "out" / "rank.0"
    victim.write_text("precious")
    folder.mkdir(parents=True)
    (folder / "stdout").symlink_to(victim)
    folder.chmod(0o777)
    with pytest.raises(OSError, match="symbolic links"), Printer(True, folder=str(tmp_path / "out")):
        pass
    assert victim.read_text() == "precious"
    if os.geteuid() == 0:
        os.chown(folder, 54321, 54321)
        with pytest.raises(OSError, match="belongs to another user"), Printer(True, folder=str(tmp_path / "out")):
            pass


@pytest.mark.parametrize(("rule", "ours"), [("yes", False), ("no", False), ("ask", True), (None, True)])
def test_a_sites_rule_for_host_keys_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str | None, ours: bool
) -> None:
    (tmp_path / "config").write_text(f"Host nodeb\n  StrictHostKeyChecking {rule}\n" if rule else "")
    (tmp_path / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/config "$@"\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    mpi = Mpi("/mpi/bin/mpirun", Family.OPEN_MPI, (5, 0, 11))
    made, _ = settings(parse(["-H", "nodea:1,nodeb:1", sys.executable, "train.py"]), mpi, {})
    assert any("StrictHostKeyChecking" in word for word in made.ssh.options) is ours


def test_limits_and_variables_are_given_back(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a notebook, and to the ranks: a program that closes all files that it may have must not take minutes."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setenv("HVDLITE_MPIEXEC", runner.mpi.launcher)
    monkeypatch.delenv("HOME")
    code = "import resource, sys; sys.exit(resource.getrlimit(resource.RLIMIT_NOFILE)[0] != 200)"
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    try:
        outcome = cli.launch(parse(["-np", "1", sys.executable, "-c", code]))
        assert outcome.code == 0 and resource.getrlimit(resource.RLIMIT_NOFILE) == (200, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert "HOME" not in os.environ


def test_who_has_got_the_number_of_a_process_that_is_gone_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the signal."""
    with subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"]}) as stranger:
        found = iter([[stranger.pid], []])
        monkeypatch.setattr(janitor, "marked", lambda mark: next(found))
        janitor.kill_all(b"HVDLITE_JOB_ID=none")
        assert stranger.poll() is None
        stranger.kill()


def test_ranks_that_have_met_are_let_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To look for segments takes milliseconds of a process with thousands of mappings."""
    looks: list[str] = []
    monkeypatch.setattr(janitor, "segments_of_ranks", lambda folder: looks.append(folder) or set())
    monkeypatch.setattr(janitor, "_SETTLING", 0.1)
    segments = janitor.Segments(str(tmp_path))
    for name in ("pid.0", "pid.1", "present.0"):
        (tmp_path / name).touch()
    segments.look()
    time.sleep(0.15)
    segments.look()
    (tmp_path / "present.1").touch()
    segments.look()
    assert len(looks) == 3
    time.sleep(0.15)
    (tmp_path / "present.1").unlink()
    segments.look()
    assert len(looks) == 3
    segments.look(last=True)
    assert len(looks) == 4


def test_a_user_without_a_name_has_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """mpirun does nothing without one."""
    monkeypatch.delenv("HOME")
    cli._find_home()
    assert os.environ["HOME"] == pwd.getpwuid(os.getuid()).pw_dir
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    cli._find_home()
    assert os.environ["HOME"] == "/"


def test_no_room_for_the_jobs_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="cannot be written: No such file or directory: free some room"), a_place():
        pass
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    with pytest.raises(UsageError, match="name a folder in TMPDIR"), a_place():
        pass


def test_no_room_for_what_is_in_the_folder(monkeypatch: pytest.MonkeyPatch, runner: Runner) -> None:
    def full(path: str, mode: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "mkfifo", full)
    monkeypatch.setenv("HVDLITE_MPIEXEC", runner.mpi.launcher)
    with pytest.raises(UsageError, match="cannot be written: No space left on device: free some room"):
        cli.launch(parse(["-np", "1", sys.executable]))


def test_no_ssh(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "env").symlink_to("/usr/bin/env")
    begin = time.monotonic()
    command = ["-H", "localhost:1,nosuchhost:1", sys.executable, "-c", "pass"]
    launcher = [sys.executable, "-m", "hvdlite_launcher.cli", *command]
    env = {**runner.env(), "PATH": str(tmp_path), "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"}
    found = subprocess.run(launcher, env=env, capture_output=True, text=True, timeout=30)
    assert found.returncode == 127 and "install OpenSSH's client" in found.stderr and "Traceback" not in found.stderr
    assert time.monotonic() - begin < 10
