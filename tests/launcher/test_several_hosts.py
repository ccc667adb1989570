"""The code for several hosts, tested on one machine without ssh: commands, frames, silence, and the first failure."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hvdlite_launcher import UsageError, agent, facts, readiness, times, wire
from hvdlite_launcher.command import Job, Settings, compose
from hvdlite_launcher.ending import Ending
from hvdlite_launcher.environment import forwarded, is_secret, kept
from hvdlite_launcher.failures import ABSENT, Failure, Failures, deserter, of_scheduler, parse
from hvdlite_launcher.hosts import Host
from hvdlite_launcher.job_folder import arrivals, path_of
from hvdlite_launcher.output import Printer
from hvdlite_launcher.probe import Family, Mpi
from hvdlite_launcher.ssh import Ssh
from hvdlite_launcher.streams import Streams
from hvdlite_launcher.team import Member, Team, own_agent

from tests.launcher.conftest import ROOT

JOB_FOLDERS = Job("job", "/tmp/job", "/dev/shm/job", ("keep",))
HOSTS = (Host("a", 2), Host("b", 1, local=False))
SETTINGS = Settings(3, HOSTS, ("python", "train.py"), ssh=Ssh(2222, "/home/me/key"))
OPEN_MPI_5 = Mpi("/mpi/bin/mpirun", Family.OPEN_MPI, (5, 0, 11))
OPEN_MPI_4 = Mpi("/usr/bin/mpirun", Family.OPEN_MPI, (4, 1, 4))
MPICH = Mpi("/mpich/bin/mpiexec", Family.MPICH, (5, 0, 2))
INTEL = Mpi("/intel/bin/mpiexec.hydra", Family.INTEL_MPI, (2021, 17))
SSH = "-p 2222 -i /home/me/key -o BatchMode=yes -o ConnectTimeout=10 -o StrictHostKeyChecking=accept-new -o LogLevel=ERROR -o ForwardAgent=no -o ForwardX11=no -o ClearAllForwardings=yes"
JOB = {
    "HVDLITE_JOB_DIR": "/tmp/job",
    "HVDLITE_JOB_HOSTS": "2",
    "HVDLITE_JOB_ID": "job",
    "HVDLITE_JOB_SLOTS": "2",
    "HVDLITE_LAUNCHED": "0.000",
}


def test_open_mpi_5_is_told_hosts_ssh_and_each_variable() -> None:
    environ = {"PATH": "/bin", "HOME": "/root", "GLIBC_TUNABLES": "x"}
    command = compose(SETTINGS, OPEN_MPI_5, JOB_FOLDERS, environ)
    place = "-np 3 --host a:2,b:1 --bind-to none --map-by slot"
    names = sorted({*command.env, "PATH", "GLIBC_TUNABLES"})
    words = [*place.split(), *(word for name in names for word in ("-x", name))]
    assert command.argv == ("/mpi/bin/mpirun", *words, "keep", "python", "train.py")
    assert JOB.items() <= command.env.items()
    assert command.env["PRTE_MCA_plm_ssh_args"] == SSH
    assert command.env["PRTE_MCA_plm_ssh_no_tree_spawn"] == "1"


def test_what_is_named_goes_to_other_hosts_though_each_has_its_own() -> None:
    named = compose(
        dataclasses.replace(SETTINGS, env={"TMPDIR": "/scratch"}), OPEN_MPI_5, JOB_FOLDERS, {"HOME": "/root"}
    )
    assert ("-x", "TMPDIR") in zip(named.argv, named.argv[1:], strict=False) and named.env["TMPDIR"] == "/scratch"
    assert "HOME" not in named.argv


def test_open_mpi_4_has_its_own_names() -> None:
    env = compose(SETTINGS, OPEN_MPI_4, JOB_FOLDERS, {}).env
    assert (env["OMPI_MCA_plm_rsh_args"], env["OMPI_MCA_plm_rsh_no_tree_spawn"]) == (SSH, "1")


@pytest.mark.parametrize(
    ("bourne", "csh", "stands"),
    [
        (("/usr/bin/python", "-I", "/x/bourne.py"), False, True),
        (("/usr/bin/python", "-I", "/x/bourne.py"), True, False),  # then Open MPI writes for csh, or asks
        (("/my python/bin/python", "/x/bourne.py"), False, False),
        (("/usr/bin/python", "/a:b/bourne.py"), False, False),
    ],
)
def test_what_stands_before_ssh(bourne: tuple[str, ...], csh: bool, stands: bool) -> None:
    settings = dataclasses.replace(SETTINGS, ssh=Ssh(csh=csh))
    env = compose(settings, OPEN_MPI_5, dataclasses.replace(JOB_FOLDERS, bourne=bourne), {}).env
    assert env.get("PRTE_MCA_plm_ssh_agent") == (" ".join(bourne) if stands else None)
    assert env["PRTE_MCA_plm_ssh_args"].startswith("-o BatchMode=yes")
    assert env.get("PRTE_MCA_plm_ssh_assume_same_shell") == ("0" if csh else None)


def test_hydra_forwards_by_itself() -> None:
    command = compose(SETTINGS, MPICH, JOB_FOLDERS, {"GLIBC_TUNABLES": "x"})
    assert command.argv == ("/mpich/bin/mpiexec", "-n", "3", "-hosts", "a:2,b:1", "keep", "python", "train.py")
    assert command.env == {
        **JOB, "HYDRA_LAUNCHER_EXTRA_ARGS": SSH, "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


def test_intel_mpi_reads_a_host_per_rank() -> None:
    hosts = (*HOSTS, Host("c", 4, local=False), Host("d", 1, local=False))
    command = compose(dataclasses.replace(SETTINGS, hosts=hosts, ranks=4), INTEL, JOB_FOLDERS, {})
    assert " ".join(command.argv) == f"{INTEL.launcher} -hosts a,a,b,c -ppn 1 -n 4 keep python train.py"
    assert command.env["I_MPI_HYDRA_BOOTSTRAP"] == "ssh"
    assert command.env["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"] == SSH


@pytest.mark.parametrize(
    ("mpi", "name"),
    [
        (OPEN_MPI_5, "PRTE_MCA_plm_ssh_agent"),
        (OPEN_MPI_4, "OMPI_MCA_plm_rsh_agent"),
        (MPICH, "HYDRA_LAUNCHER_EXEC"),
        (INTEL, "I_MPI_HYDRA_BOOTSTRAP_EXEC"),
    ],
)
def test_another_remote_shell(mpi: Mpi, name: str) -> None:
    env = compose(dataclasses.replace(SETTINGS, ssh=Ssh(program="/bin/blaunch")), mpi, JOB_FOLDERS, {}).env
    assert env[name] == "/bin/blaunch" and not [key for key in env if key.endswith("_args") or "EXTRA_ARGS" in key]


@pytest.mark.parametrize(
    ("mpi", "name"),
    [(OPEN_MPI_5, "OMPI_MCA_btl_tcp_if_include"), (MPICH, "FI_TCP_IFACE"), (INTEL, "FI_TCP_IFACE")],
)
def test_interfaces(mpi: Mpi, name: str) -> None:
    command = compose(dataclasses.replace(SETTINGS, interfaces=("ib0",)), mpi, JOB_FOLDERS, {})
    assert command.env[name] == command.env["NCCL_SOCKET_IFNAME"] == "ib0"
    assert ("-iface" in command.argv) == (mpi is MPICH)


def test_daemons_have_no_network_on_one_host() -> None:
    """Open MPI 5 ends with an error, or crashes, if its daemons are told to use the loopback."""
    alone = dataclasses.replace(SETTINGS, hosts=(Host("a", 3),), interfaces=("lo",))
    name = "PRTE_MCA_prte_if_include"
    assert name not in compose(alone, OPEN_MPI_5, JOB_FOLDERS, {}).env
    assert compose(dataclasses.replace(SETTINGS, interfaces=("ib0",)), OPEN_MPI_5, JOB_FOLDERS, {}).env[name] == "ib0"


@pytest.mark.parametrize(("given", "left"), [("--bind-to", "--map-by"), ("--map-by", "--bind-to")])
def test_no_option_is_given_twice(given: str, left: str) -> None:
    argv = compose(dataclasses.replace(SETTINGS, mpi_args=(given, "core")), OPEN_MPI_5, JOB_FOLDERS, {}).argv
    assert argv.count(given) == argv.count(left) == 1 and argv[argv.index(given) + 1] == "core"


def test_binding_args_replace_ours() -> None:
    argv = compose(dataclasses.replace(SETTINGS, binding_args=("--bind-to", "core")), OPEN_MPI_5, JOB_FOLDERS, {}).argv
    assert (
        "none" not in argv
        and "--map-by" not in argv
        and "--oversubscribe" not in argv
        and argv[argv.index("--bind-to") + 1] == "core"
    )


def test_threads_are_each_hosts_own_affair() -> None:
    """hvdliterun's host may have fewer cores than others, or no ranks."""
    assert "OMP_NUM_THREADS" not in compose(SETTINGS, MPICH, JOB_FOLDERS, {}).env


def test_an_ssh_command() -> None:
    assert Ssh().command("a", ["echo", "two words"])[-2:] == ["a", "echo 'two words'"]
    assert not [word for word in Ssh(has_own_rule=True).options if "StrictHostKey" in word]
    assert Ssh(program="/etc/kubexec.sh -v").command("a", ["x"]) == ["/etc/kubexec.sh", "-v", "a", "x"]


def test_only_what_is_known_and_no_secret_is_forwarded() -> None:
    go = ["PATH", "LINES", "TTY_COMPATIBLE", "PYTHONPATH", "OMP_NUM_THREADS", "OMPI_MCA_btl", "HVDLITE_X", "HOROVOD_X", "NCCL_DEBUG", "LC_ALL", "HF_HOME",
          "HF_TOKENIZERS_X"]  # fmt: skip
    stay = ["HOME", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_FD", "CUDA_VISIBLE_DEVICES", "DISPLAY", "LR", "PATHOLOGY"]
    secret = ["HF_TOKEN", "HVDLITE_API_KEY", "NCCL_SECRET_X", "AWS_REGION", "TF_PASSWORD", "HOROVOD_SECRET", "HF_token",
              "TF_TOKEN_app_terraform_io", "NVIDIA_NGC_APIKEY", "HF_ACCESS_TOKENS", "UCX_PASS", "HF_PAT", "KERAS_DSN", "HF_AUTH",
              "TF_PASSPHRASE", "TORCH_CREDENTIALS"]  # fmt: skip
    assert sorted(forwarded(dict.fromkeys([*go, *stay, *secret], ""))) == sorted(go)
    assert all(map(is_secret, secret)) and not any(map(is_secret, go))


def test_launchers_keep_what_logins_and_schedulers_need() -> None:
    keep = ["HOME", "SSH_AUTH_SOCK", "SLURM_JOB_ID", "LSB_JOBID", "PBS_NODEFILE", "FLUX_URI"]
    assert sorted(kept(dict.fromkeys([*keep, "LR", "HF_TOKEN", "HOMES"], ""))) == sorted(keep)


def test_frames_survive_any_cut() -> None:
    random.seed(1)
    frames = [(wire.STDOUT, 3, b"x" * 1000), (wire.STDERR, 70000, b""), (wire.STDOUT, 0, b"\0\n")]
    stream = b"Welcome!\nto this host\n" + wire.MARK + b"".join(wire.encode(*frame) for frame in frames)
    for _ in range(50):
        decoder, found, rest = wire.Decoder(marked=True), list[tuple[int, int, bytes]](), stream
        while rest:
            cut = random.randint(1, len(rest))
            found += decoder.feed(rest[:cut])
            rest = rest[cut:]
        assert found == frames


@pytest.mark.parametrize("kind", [wire.MESSAGE, wire.STDOUT, wire.STDERR, 99])
def test_what_is_no_frame_is_not_waited_for(kind: int) -> None:
    """Otherwise another host could take any amount of memory."""
    with pytest.raises(ValueError, match="no frame"):
        list(wire.Decoder().feed(struct.pack("!BIQ", kind, 0, 1 << 40)))


@pytest.fixture
def member() -> Iterator[Member]:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield Member("b", False, process, Streams(Printer()), Failures(), (3.5, 60.0), SETTINGS.ranks_of("b"))
    process.kill()
    process.communicate()


@pytest.mark.parametrize("nonsense", [
    struct.pack("!BIQ", 99, 0, 4), struct.pack("!BIQ", wire.MESSAGE, 0, 1 << 40), wire.encode(wire.MESSAGE, 0, b"{"),
    wire.encode(wire.MESSAGE, 0, b"[]"), wire.message(started=1),
])  # fmt: skip
def test_a_host_that_talks_nonsense_is_lost(member: Member, nonsense: bytes) -> None:
    member.listen(wire.MARK + wire.message(now=1.0))
    assert member.lost is None
    member.listen(nonsense)
    assert member.lost and member.lost.startswith("host b sent unreadable data: ")


def test_a_host_returns_results_of_its_own_ranks_only(member: Member) -> None:
    """hvdliterun unpickles them."""
    assert member.ranks == range(2, 3)
    member.listen(wire.MARK + b"".join(wire.encode(wire.RESULT, rank, b"x") for rank in range(4)))
    assert list(member.report.results) == [2]
    assert dataclasses.replace(SETTINGS, mpi_args=("--map-by", "node")).ranks_of("b") is None


def test_a_host_may_be_silent_for_longer_once_ranks_have_started(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    member.link.forgive()
    clock += 10.0
    assert member.lost
    member.listen(wire.MARK + wire.message(now=1.0, started=0))
    clock += 10.0
    assert member.lost is None
    clock += 60.0
    assert member.lost == "host b was lost: no sign of life for 60 s (--host-timeout) [HVD909]"


def test_long_frames_take_no_longer_per_byte() -> None:
    """A frame of 32 MiB in pieces takes 0.1 s; 7 s if all earlier pieces were copied with each piece."""
    frame, decoder, piece, began = (
        wire.encode(wire.RESULT, 1, bytes(32 << 20)),
        wire.Decoder(),
        1 << 16,
        time.monotonic(),
    )
    found = [data for start in range(0, len(frame), piece) for _, _, data in decoder.feed(frame[start : start + piece])]
    assert [len(data) for data in found] == [32 << 20] and time.monotonic() - began < 3.0


def test_messages() -> None:
    ((kind, _, data),) = wire.Decoder().feed(wire.message(failed="1 7 0", now=2.5))
    assert kind == wire.MESSAGE and wire.decode(data) == {"failed": "1 7 0", "now": 2.5}


@pytest.mark.parametrize(
    ("notes", "first"),
    [
        (["0 1 0 100.00", "3 1 0 99.99"], 3),  # the earlier one
        (["0 143 15 99.00", "3 7 0 99.50"], 3),  # the MPI's SIGTERM is a consequence
        (["0 14 0 99.99", "3 137 9 100.00"], 3),  # so is Open MPI's end of a rank that lost a connection
        (["0 143 15 99.00", "3 14 0 99.50"], 0),  # of consequences the earlier one
    ],
)
def test_of_failures_on_two_hosts_the_first_is_told(notes: list[str], first: int) -> None:
    failures = Failures(several=True)
    for host, note in zip("ab", notes, strict=True):
        failures.add(parse(note, host))
    found = failures.first(final=True)
    assert found and found.rank == first
    failures.add(parse("9 1 0 1.0", "c"))
    assert failures.first() is found  # the same ever after


def test_a_rank_that_has_never_come_is_no_reason_beside_a_real_one() -> None:
    """But it explains the SIGTERM with which the MPI has ended other ranks."""
    for note, first in (("0 139 11 1.0", 0), ("0 143 15 1.0", 2)):
        failures = Failures()
        failures.add(parse(note))
        failures.add(Failure(2, 1, ABSENT, 2.0))
        found = failures.first()
        assert found and found.rank == first


def test_a_rank_that_others_wait_for_in_vain() -> None:
    """Not if all have come, or if no rank has waited for long."""
    for absent, waiting, expected in (
        ([(2, "a"), (1, "b")], 6.0, (1, "b")),
        ([(0, "a")], 6.0, (0, "a")),
        ([], 6.0, None),
        ([(0, "a"), (1, "b")], 4.0, None),
    ):
        found = deserter(absent, waiting, 5.0)
        assert (found and (found.rank, found.host)) == expected


def test_who_has_come_is_read_from_the_jobs_folder(tmp_path: Path) -> None:
    for name, age in (("absent.3", 9.0), ("absent.4", 0.0), ("entering.1", 7.0), ("entering.0", 2.0), ("out.5", 9.0)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, times=(time.time() - age,) * 2)
    assert set(arrivals(str(tmp_path), time.time())[0]) == {3, 4}
    absent, waiting = arrivals(str(tmp_path), time.time(), settled=2.5)
    assert absent == [3] and 7.0 <= waiting < 9.0
    assert arrivals(str(tmp_path / "gone"), time.time()) == ([], 0.0)


def test_what_srun_says_of_a_failure() -> None:
    found = of_scheduler("srun: error: node2: task 2: Exited with exit code 139\n")
    assert found and (found.rank, found.code, found.signal, found.host) == (2, 139, signal.SIGSEGV, "node2")
    found = of_scheduler("srun: error: node1: tasks 0-1: Exited with exit code 7\n")
    assert found and (found.rank, found.code, found.signal, found.host) == (0, 7, 0, "node1")
    assert of_scheduler("srun: error: node1: task 0: Exited with exit code 0\n") is None


def test_failures_are_compared_by_one_clock() -> None:
    failures = Failures(several=True)
    failures.add(parse("0 1 0 100.0", "a"))
    failures.add(parse("3 1 0 130.0", "b", offset=-31.0))
    found = failures.first(final=True)
    assert found and found.rank == 3


def test_a_failure_on_one_of_several_hosts_waits_for_news() -> None:
    alone, several = Failures(), Failures(several=True)
    for failures in (alone, several):
        failures.add(parse("0 1 0 100.0"))
    assert alone.first() is not None
    assert several.first() is None


def test_a_job_that_does_not_start_is_ended_with_advice() -> None:
    """For example if the daemons of an MPI cannot reach each other; most MPIs never notice that."""
    mpirun = subprocess.Popen(["sleep", "60"])
    team = Team(SETTINGS, JOB_FOLDERS, Streams(Printer()), Failures(), own_agent())
    ending = Ending(Failures(several=True), patience=0.3)
    assert not ending.advance(mpirun, team) and ending.lost is None
    time.sleep(0.35)
    ending.advance(mpirun, team)
    assert ending.lost and "no rank has started within 0 s" in ending.lost and "--network-interfaces" in ending.lost
    ending.advance(mpirun, team)
    assert mpirun.wait(5) == -signal.SIGTERM
    team.own.close()


def test_nothing_starts_after_a_signal_that_comes_before_hosts_are_ready() -> None:
    team = Team(SETTINGS, JOB_FOLDERS, Streams(Printer()), Failures(), own_agent())
    assert not team.prepare(stop=lambda: True)
    team.own.close()


class Stalled(Streams):
    """hvdliterun's stdout takes nothing for a while."""

    def output(self, rank: int, destination: int, data: bytes) -> None:
        time.sleep(0.0 if self.first_output else 1.5)
        self.first_output = 1.0
        HEARD.append(len(data))


HEARD: list[int] = []
HASTY = "from hvdlite_launcher import times; times.START_HOST_TIMEOUT = 0.3; "


def agent_after(code: str) -> subprocess.Popen[bytes]:
    """An agent on this host whose Python first runs this code."""
    argv = agent.command(sys.executable, str(ROOT / "launcher"))
    argv = [word.replace("from hvdlite_launcher.agent", code + "from hvdlite_launcher.agent") for word in argv]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, env={}, stdin=pipe, stdout=pipe, stderr=pipe)


def test_a_stdout_that_stalls_at_the_end_of_a_job_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output of a job fills all buffers, and then `less` takes none of it for longer than agents are waited for."""
    monkeypatch.setattr(times, "CLOSING_TIMEOUT", 1.0)
    monkeypatch.setattr(times, "STANDSTILL", 0.3)
    job = Job("job", str(tmp_path / "job"), None, ())
    team = Team(Settings(1, (Host("a", 1),), ("true",)), job, Stalled(Printer()), Failures(), agent_after(HASTY))
    team.open({}, None)
    assert team.prepare(stop=lambda: False)
    os.mkfifo(path_of(job.folder, "out", 0))
    rank = os.open(path_of(job.folder, "out", 0), os.O_RDWR | os.O_NONBLOCK)
    written, deadline = 0, time.monotonic() + 0.5
    while time.monotonic() < deadline:
        try:
            written += os.write(rank, bytes(4096))
            deadline = time.monotonic() + 0.5
        except BlockingIOError:
            time.sleep(0.01)
    Path(path_of(job.folder, "ended", 0)).touch()
    HEARD.clear()
    team.close({})
    os.close(rank)
    assert (sum(HEARD), team.own.report.finished, team.own.report.gone) == (written, 1, True)


NO_INOTIFY = """from hvdlite_launcher import watch
exec("def refuse(folder): raise OSError(24, folder)", watch.__dict__)
watch.watch = watch.refuse
"""


def test_a_host_whose_kernel_reports_no_new_files_takes_part(tmp_path: Path) -> None:
    """Other programs may have used up what a user may have of inotify."""
    job = Job("job", str(tmp_path / "job"), None, ())
    settings = Settings(1, (Host("a", 1),), ("true",))
    team = Team(settings, job, Streams(Printer()), Failures(), agent_after(NO_INOTIFY))
    team.open({}, None)
    assert team.prepare(stop=lambda: False)
    os.mkfifo(path_of(job.folder, "out", 0))
    with open(path_of(job.folder, "out", 0), "wb", buffering=0) as rank:  # waits for a reader
        rank.write(b"hello\n")
    Path(path_of(job.folder, "failed")).write_text("0 7 0 1.0\n")
    Path(path_of(job.folder, "result", 0)).write_bytes(b"pickled")
    Path(path_of(job.folder, "summary", 0)).write_text("3 epochs")
    Path(path_of(job.folder, "summary", 1)).write_text("of another rank")
    Path(path_of(job.folder, "ended", 0)).touch()  # the last, as of a real rank: its other files are complete then
    team.close({})
    found = team.own.report
    assert (found.started, found.finished, found.results, found.gone) == (1, 1, {0: b"pickled"}, True)
    assert found.summary == "3 epochs"
    failure = team.own.failures.first(final=True)
    assert failure and failure.code == 7


def test_a_host_without_ranks_need_not_be_like_the_others(
    member: Member, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hvdliterun may run on a login node, without their networks. But it needs a folder there."""
    hosts = (Host("b", 1, local=False), Host("c", 1, local=False))
    settings = Settings(2, hosts, ("/nosuchpython",), interfaces=("ib0",))
    member.listen(wire.MARK + wire.message(now=1.0, facts={"Python": "3"}, name="b"))
    monkeypatch.setattr(Team, "_reach", lambda team, name: member)
    team = Team(settings, Job("job", str(tmp_path / "job"), None, ()), Streams(Printer()), Failures(), own_agent())
    team.open({}, None)
    assert team.prepare(stop=lambda: False)
    team.others.clear()
    team.close({})
    (tmp_path / "file").touch()
    job = Job("job", str(tmp_path / "file" / "job"), None, ())
    team = Team(settings, job, Streams(Printer()), Failures(), own_agent())
    team.open({}, None)
    with pytest.raises(UsageError, match=r"^this host is not ready: Not a directory: "):
        team.prepare(stop=lambda: False)
    team.others.clear()
    team.close({})


CTRL_Z = """
import signal
from hvdlite_launcher.command import Job, Settings
from hvdlite_launcher.ending import Ending, signals
from hvdlite_launcher.failures import Failures
from hvdlite_launcher.hosts import Host
from hvdlite_launcher.output import Printer
from hvdlite_launcher.streams import Streams
from hvdlite_launcher.team import Team, own_agent
streams, failures = Streams(Printer()), Failures()
team = Team(Settings(1, (Host("a", 1),), ("true",)), Job("j", "/tmp/j", None, ()), streams, failures, own_agent())
with signals(Ending(failures), streams, several=True):
    with team.own.link._lock:
        signal.raise_signal(signal.SIGTSTP)
    team.say(beat=1)
print("went on")
team.own.close()
"""


def test_ctrl_z_may_come_in_the_middle_of_a_message_to_a_host() -> None:
    """The signal handler takes no lock."""
    path = os.pathsep.join(filter(None, sys.path))
    env = {**os.environ, "PYTHONPATH": path}
    job = subprocess.run([sys.executable, "-c", CTRL_Z], env=env, capture_output=True, text=True, timeout=20)
    assert job.stdout == "went on\n", job.stderr


def test_differences_are_told_of_the_few() -> None:
    usual = {"Python": "3.11.7", "hvdlite": "0.1.0", "MPI": "Open MPI v5.0.11"}
    odd = {"Python": "3.12.1", "hvdlite": "missing", "MPI": "MPICH 5.0.2"}
    assert facts.differences({"a": usual, "b": usual}) == {}
    assert facts.differences({"a": usual, "b": odd, "c": usual}) == {
        "b": "differs: Python 3.12.1, others have 3.11.7; hvdlite is missing, others have 0.1.0; "
        "MPICH 5.0.2, others have Open MPI v5.0.11: install the same versions on all hosts [HVD016]"
    }
    assert list(facts.differences({"a": odd, "b": usual, "c": usual})) == ["a"]


@pytest.mark.parametrize(
    ("said", "code", "told", "ends"),
    [
        ("ssh: connect to host b port 22: Connection refused", 255, "unreachable: ", "[HVD013]"),
        ("ssh: connect to host b port 22: Connection timed out", 255, "unreachable: ", "[HVD013]"),
        ("me@b: Permission denied (publickey).", 255, "refused key: ", "[HVD011]"),
        ("ssh: Could not resolve hostname b: Name or service not known", 255, "unknown name: ", "[HVD013]"),
        ("Host key verification failed.", 255, "changed host key: ", "[HVD012]"),
        ("bash: line 1: /venv/bin/python: No such file or directory", 127, "no such interpreter: ", "[HVD015]"),
        ("bash: line 1: /venv/bin/python: Permission denied", 126, "no such interpreter: ", "[HVD015]"),
        ("ModuleNotFoundError: No module named 'hvdlite_launcher'", 1, "no hvdlite in /pack", "[HVD015]"),
        ("something else", 3, "something else (exit code 3)", "(exit code 3)"),
    ],
)
def test_what_ssh_says_is_explained(said: str, code: int, told: str, ends: str) -> None:
    text = readiness.explain("b", said, code, "/pack")
    assert text.startswith(told) and text.endswith(ends)
