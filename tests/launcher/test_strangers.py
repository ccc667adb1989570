"""hvdliterun does no harm to other users' files and processes, and says what a machine lacks."""

from __future__ import annotations

import errno
import os
import pwd
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from hvdlite_launcher import UsageError, cli, job_folder, processes, wire
from hvdlite_launcher.agent import Agent
from hvdlite_launcher.command import Job, Settings
from hvdlite_launcher.failures import Failures
from hvdlite_launcher.hosts import Host, parse_hosts
from hvdlite_launcher.job_folder import watched_part
from hvdlite_launcher.lending import lending
from hvdlite_launcher.options import parse
from hvdlite_launcher.output import Printer
from hvdlite_launcher.probe import Family, Mpi
from hvdlite_launcher.run import new_job
from hvdlite_launcher.settings import settings
from hvdlite_launcher.streams import Streams
from hvdlite_launcher.team import Team, a_team, own_agent

from tests.launcher.conftest import ROOT, Runner, wait_until

SHARED = Path("/dev/shm")


@contextmanager
def sleeper(daemon: Path, **env: str) -> Iterator[int]:
    """A process with these variables. Its parent is this program, without these variables."""
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
    """The batch job inherits the job's id. On other hosts the agent's environment may name the batch job, and hvdliterun's
    does not. A process that a rank has started itself belongs to the job, whatever its environment says."""
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
        assert set(processes.marked(processes.mark_of("j1", ours))) == {rank, bare, own}
        assert set(processes.marked(processes.mark_of("j1", {}))) == {bare, own}
        assert set(processes.marked(processes.mark_of("j1", ours, others))) == {rank, bare, own, other}


def test_a_folder_that_somebody_else_may_have_made_is_not_the_jobs(tmp_path: Path) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    (folder / "pid.0").write_text(str(os.getpid()))
    assert processes.rank_processes(str(folder)) == [os.getpid()] and processes.rank_processes(str(link)) == []
    assert watched_part(str(folder)) == os.devnull  # in which nobody reads
    (folder / "watched").touch()
    assert watched_part(str(folder)) == str(folder)
    assert watched_part(str(link)) == watched_part(str(tmp_path / "none")) == os.devnull
    if os.geteuid() == 0:
        os.chown(folder, 54321, 54321)
        assert processes.rank_processes(str(folder)) == [] and watched_part(str(folder)) == os.devnull


def test_hosts_that_share_a_folder_have_a_part_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that leaves removes its own part; hvdliterun's host removes the whole folder."""
    base, name = tmp_path / "job", "a"
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=name))
    first = job_folder.claim(str(base))
    with pytest.raises(FileExistsError):
        job_folder.claim(str(base))
    name = "b"
    assert watched_part(str(base)) == os.devnull  # the other host's pipes would be read by nobody
    second = job_folder.claim(str(base))
    assert first != second and job_folder.part_of(str(base)) == second
    Path(second, "watched").touch()
    assert watched_part(str(base)) == second
    job_folder.leave(str(base), whole=False)
    assert os.listdir(base) == [os.path.basename(first)]
    name = "a"
    job_folder.leave(str(base), whole=False)
    assert not base.exists()
    name = "b"
    job_folder.claim(str(base))
    name = "a"
    job_folder.leave(str(base), whole=True)
    assert not base.exists()


def test_an_agent_writes_into_folders_of_its_own_only(tmp_path: Path) -> None:
    stranger = Agent(wire.Link(1))
    stranger._job = {"folder": str(tmp_path)}
    stranger._publish("task", b"secret")
    assert list(tmp_path.iterdir()) == []


def test_only_mpichs_own_segments_are_removed(tmp_path: Path) -> None:
    """Not other files that a rank has mapped, also if they have such a name."""
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
        assert processes._segments_of(holder.pid) == {str(mine)}
    finally:
        mine.unlink()
        holder.communicate(b"\n")


def test_the_folders_names_are_on_no_command_line() -> None:
    """Another user could read the names there, and make the folders first."""
    job, alone, streams = new_job(), Settings(1, (Host("localhost", 1),), ("true",)), Streams(Printer())
    with a_team(Team(alone, job, streams, Failures(), own_agent()), {}, None) as team:
        team.prepare(lambda: False)
        lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
        assert os.path.isdir(job.folder) and not any(job.id.encode() in line for line in lines)
    assert not os.path.exists(job.folder)


def test_an_agent_that_was_killed_before_it_has_answered_has_a_successor() -> None:
    """Its folders may exist already."""
    job, alone, streams = new_job(), Settings(1, (Host("localhost", 1),), ("true",)), Streams(Printer())
    own = own_agent()
    own.kill()
    with a_team(Team(alone, job, streams, Failures(), own), {}, None):
        os.mkdir(job.folder, 0o700)
    assert not os.path.exists(job.folder)


@pytest.mark.parametrize("text", ["-oProxyCommand=x", "-Fcfg:2", "a,-l"])
def test_a_host_is_no_option(text: str) -> None:
    with pytest.raises(UsageError, match="cannot read the host"):
        parse_hosts(text)


def test_modules_in_the_current_folder_are_not_ours(
    tmp_path: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current folder may be /tmp."""
    for name in ("json", "hvdlite", "mpi4py", "rich"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'came')!r}, 'a').write('{name} ')\n")
    monkeypatch.chdir(tmp_path)
    launcher = [sys.executable, "-P", "-m", "hvdlite_launcher.cli"]  # as the script hvdliterun is
    for arguments in (["-v", "-np", "1", sys.executable, "-P", "-c", "print('fine')"], ["--check"]):
        found = subprocess.run([*launcher, *arguments], env=runner.env(), capture_output=True, text=True, timeout=60)
        assert found.returncode == 0, found.stderr
    program = "import hvdlite\nprint(hvdlite.run(abs, (-3,), np=1))"
    found = subprocess.run(
        [sys.executable, "-P", "-c", program], env=runner.env(), capture_output=True, text=True, timeout=60
    )
    assert "[3]" in found.stdout, found.stderr
    assert not (tmp_path / "came").exists(), (tmp_path / "came").read_text()


def test_secrets_are_not_shown(runner: Runner) -> None:
    found = runner.run("-v", "-np", "1", "-x", "WANDB_API_KEY=hush", "-x", "COLOUR=red", "echo", "hello")
    assert found.returncode == 0 and "COLOUR=red" in found.stderr
    assert "WANDB_API_KEY=..." in found.stderr and "hush" not in found.stderr


def test_a_link_of_somebody_elses_is_not_written_through(tmp_path: Path) -> None:
    """Other users may write into this output folder."""
    victim, folder = tmp_path / "victim", tmp_path / "out" / "rank.0"
    victim.write_text("precious")
    folder.mkdir(parents=True)
    (folder / "stdout").symlink_to(victim)
    folder.chmod(0o777)
    with pytest.raises(OSError, match="symbolic links"), Printer(folder=str(tmp_path / "out")):
        pass
    assert victim.read_text() == "precious"
    if os.geteuid() == 0:
        os.chown(folder, 54321, 54321)
        with pytest.raises(OSError, match="belongs to another user"), Printer(folder=str(tmp_path / "out")):
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
    """For a notebook, and for the ranks: a program that closes all possible descriptors must not take minutes."""
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
    """The process has ended between the look and the signal."""
    with subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"]}) as stranger:
        found = iter([[stranger.pid], []])
        monkeypatch.setattr(processes, "marked", lambda mark: next(found))
        processes.kill_all(b"HVDLITE_JOB_ID=none")
        assert stranger.poll() is None
        stranger.kill()


def test_ranks_that_have_met_are_let_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look for segments takes milliseconds for a process with thousands of mappings."""
    looks: list[str] = []
    monkeypatch.setattr(processes, "segments_of_ranks", lambda folder: looks.append(folder) or set())
    monkeypatch.setattr(processes, "SEGMENTS_SETTLED", 0.1)
    segments = processes.Segments(str(tmp_path))
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


def test_a_successor_removes_the_segments_that_a_killed_agent_has_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks are gone when it comes, since the MPI has killed them. Other paths in the file are left alone."""
    ours, other = (Path(f"/dev/shm/{kind}_{os.getpid()}_test") for kind in ("mpich_shm", "somebody_elses"))
    for path in (ours, other):
        path.touch()
    try:
        monkeypatch.setattr(processes, "segments_of_ranks", lambda folder: {str(ours)})
        processes.Segments(str(tmp_path)).look()
        with (tmp_path / "segments").open("a") as file:
            file.write(f"\n{other}")
        monkeypatch.setattr(processes, "segments_of_ranks", lambda folder: set())
        successor = processes.Segments(str(tmp_path))
        successor.look(last=True)
        successor.remove()
        assert (ours.exists(), other.exists()) == (False, True)
    finally:
        for path in (ours, other):
            path.unlink(missing_ok=True)


def test_a_user_without_a_name_has_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """mpirun does nothing without HOME."""
    monkeypatch.delenv("HOME")
    cli._find_home()
    assert os.environ["HOME"] == pwd.getpwuid(os.getuid()).pw_dir
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    cli._find_home()
    assert os.environ["HOME"] == "/"


def test_no_room_for_the_jobs_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runner: Runner) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    monkeypatch.setenv("HVDLITE_MPIEXEC", runner.mpi.launcher)
    with pytest.raises(UsageError, match=r"not ready: Not a directory: \S+: name another place in TMPDIR"):
        cli.launch(parse(["-np", "1", sys.executable]))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    with pytest.raises(UsageError, match="name a folder in TMPDIR"):
        new_job()


def test_no_room_for_the_socket_that_lends_stdin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(door: socket.socket, path: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(socket.socket, "bind", full)
    job, alone, streams = (
        Job("job", str(tmp_path), None, ()),
        Settings(1, (Host("a", 1),), ("true",)),
        Streams(Printer()),
    )
    with pytest.raises(UsageError, match=f"No space left on device: {tmp_path}: free some room"):
        lending(job, alone, streams, wanted=False).__enter__()


def test_an_agent_finds_the_libraries_of_its_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of a cluster name libpython's folder so. The agent has no mark of a job: another agent would kill it."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/python/lib")
    monkeypatch.setenv("HVDLITE_JOB_ID", "another")
    agent = own_agent()
    path = Path(f"/proc/{agent.pid}/environ")
    assert wait_until(lambda: path.read_bytes() != b"", 5.0)  # it is empty while the kernel starts the program
    environ = path.read_bytes()
    agent.communicate()
    assert b"LD_LIBRARY_PATH=/opt/python/lib" in environ and b"HVDLITE_JOB_ID" not in environ


def test_no_room_for_what_is_in_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(folder: str, name: str, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(job_folder, "publish", full)
    reader, writer = os.pipe()
    told = Agent(wire.Link(writer))
    job = {"id": "job", "folder": str(tmp_path / "job"), "shared": None, "cwd": os.getcwd(), "parts": False, "ranks": 1}
    told.take(wire.message(job={**job, "successor": False}))
    ((_, _, frame),) = wire.Decoder().feed(os.read(reader, 4096))
    answer = wire.decode(frame)
    assert answer["problem"].startswith(f"No space left on device: {tmp_path}/job: free some room there")


def test_no_ssh(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "env").symlink_to("/usr/bin/env")
    begin = time.monotonic()
    command = ["-H", "localhost:1,nosuchhost:1", sys.executable, "-c", "pass"]
    launcher = [sys.executable, "-m", "hvdlite_launcher.cli", *command]
    env = {**runner.env(), "PATH": str(tmp_path), "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"}
    found = subprocess.run(launcher, env=env, capture_output=True, text=True, timeout=30)
    assert found.returncode == 127 and "install OpenSSH's client" in found.stderr and "Traceback" not in found.stderr
    assert time.monotonic() - begin < 10
