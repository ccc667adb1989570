"""hvdliterun's settings: flags and YAML files set variables of the ranks; also network interfaces and output folders."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hvdlite_launcher import UsageError, options, tunables
from hvdlite_launcher.cli import main
from hvdlite_launcher.command import Job, compose
from hvdlite_launcher.probe import Family, Mpi
from hvdlite_launcher.settings import settings

from tests.launcher.conftest import Runner

JOB = Job("job", "/tmp/job", None, ("keep",))
OPEN_MPI = Mpi("/mpi/bin/mpirun", Family.OPEN_MPI, (5, 0, 11))


def environment(*arguments: str, mpi: Mpi = OPEN_MPI, **environ: str) -> dict[str, str]:
    """What these arguments add to the ranks' environment."""
    wanted, _ = settings(options.parse([*arguments, "-np", "2", sys.executable, "train.py"]), mpi, environ)
    return dict(compose(wanted, mpi, JOB, environ).env)


def test_tcp_speaks_the_mpis_language_and_leaves_what_is_set() -> None:
    older = Mpi("/mpi/bin/mpirun", Family.OPEN_MPI, (4, 1, 4))
    assert environment("--tcp")["OMPI_MCA_btl"] == "self,sm,tcp"
    assert environment("--tcp", mpi=older)["OMPI_MCA_btl"] == "self,vader,tcp"
    assert "OMPI_MCA_btl" not in environment("--tcp", OMPI_MCA_btl="self,tcp") and environment("--tcp")["UCX_TLS"]


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["--fusion-threshold-mb", "32"], {"FUSION_THRESHOLD": str(32 << 20)}),
        (["--timeline-filename", "/tmp/t.json", "--timeline-mark-cycles"],
         {"TIMELINE": "/tmp/t.json", "TIMELINE_MARK_CYCLES": "1"}),
        (["--no-stall-check"], {"STALL_CHECK_DISABLE": "1"}),
        (["--stall-check"], {"STALL_CHECK_DISABLE": "0"}),
        (["--stall-check-warning-time-seconds", "5", "--stall-check-shutdown-time-seconds", "9"],
         {"STALL_CHECK_TIME_SECONDS": "5", "STALL_SHUTDOWN_TIME_SECONDS": "9"}),
        (["--log-level", "debug", "--log-without-timestamp"], {"LOG_LEVEL": "DEBUG", "LOG_HIDE_TIME": "1"}),
        (["--log-hide-timestamp"], {"LOG_HIDE_TIME": "1"}),
        (["--no-log-hide-timestamp"], {"LOG_HIDE_TIME": "0"}),
        (["--cycle-time-ms", "0.5"], {"CYCLE_TIME": "0.5"}),
    ],
)  # fmt: skip
def test_flags_become_variables(arguments: list[str], variables: dict[str, str]) -> None:
    env = environment(*arguments)
    for name, value in variables.items():
        assert env[f"HOROVOD_{name}"] == env[f"HVDLITE_{name}"] == value


def test_hvdlite_reads_what_the_flags_say() -> None:
    from hvdlite.config import Config

    read = Config.from_env({"HVDLITE_BUCKET_MB": "9", **environment("--fusion-threshold-mb", "32")})
    assert read.bucket_bytes == 32 << 20
    assert Config.from_env(environment("--hierarchical-allreduce")).algorithm == "hierarchical"
    assert Config.from_env(environment("--no-hierarchical-allreduce")).algorithm == "ring"


YAML = """
controller: mpi
params: {fusion_threshold_mb: 8, cycle_time_ms: 3}
stall_check: {enabled: false, warning_time_seconds: 7}
logging: {level: info, with_timestamp: false}
future: {unknown: 1}
"""


def test_the_yaml_file_says_the_same_and_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(YAML)
    env = environment("--config-file", str(file), "--stall-check-warning-time-seconds", "5")
    assert env["HVDLITE_FUSION_THRESHOLD"] == str(8 << 20)
    assert (env["HVDLITE_STALL_CHECK_DISABLE"], env["HVDLITE_STALL_CHECK_TIME_SECONDS"]) == ("1", "5")
    assert (env["HVDLITE_LOG_LEVEL"], env["HVDLITE_LOG_HIDE_TIME"]) == ("INFO", "1")
    assert environment("--config-file", str(file), "--stall-check")["HVDLITE_STALL_CHECK_DISABLE"] == "0"


def test_what_the_yaml_file_says_in_vain_is_told(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(YAML + "num-proc: 2\ntimeline: {hide-timestamp: true}\nautotune:\n")
    parsed = options.parse(["--config-file", str(file), "-np", "1", sys.executable])
    _, said = settings(parsed, OPEN_MPI, {})
    told = [line for line in said if "no such setting" in line]
    assert told == [
        f"{file}: {name}: no such setting, no effect" for name in ("future", "num-proc", "timeline.hide-timestamp")
    ]


@pytest.mark.parametrize(("text", "said"), [("controller: gloo", "gloo"), ("[1", "cannot read"), ("word", "sections")])
def test_a_yaml_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=said):
        tunables.load(str(file))


def test_the_command_line_chooses_the_controller(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("controller: gloo\nparams: {fusion_threshold_mb: 2}")
    assert environment("--config-file", str(file), "--mpi")["HVDLITE_FUSION_THRESHOLD"] == str(2 << 20)


@pytest.mark.parametrize(("arguments", "environ", "seconds"), [
    ([], {}, 13), ([], {"HOROVOD_START_TIMEOUT": "30"}, 33), (["--start-timeout", "4"], {"HOROVOD_START_TIMEOUT": "30"}, 7),
])  # fmt: skip
def test_how_long_hosts_may_take(arguments: list[str], environ: dict[str, str], seconds: int) -> None:
    parsed = options.parse([*arguments, "-np", "1", sys.executable])
    assert settings(parsed, OPEN_MPI, environ)[0].start_timeout == seconds
    with pytest.raises(UsageError, match="HOROVOD_START_TIMEOUT: soon: must be a number of seconds above 0"):
        settings(options.parse(["-np", "1", sys.executable]), OPEN_MPI, {"HOROVOD_START_TIMEOUT": "soon"})


def test_a_wrong_value_in_yaml_is_named(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("params: {fusion_threshold_mb: -1}")
    with pytest.raises(UsageError, match=r"params.fusion_threshold_mb -1: must be a whole number, 0 or more"):
        environment("--config-file", str(file))


@pytest.mark.parametrize(("text", "said"), [
    ("params: {hierarchical_allreduce: 'no'}", "params.hierarchical_allreduce no: must be true or false, without quotes"),
    ("stall_check: {enabled: 'false'}", "stall_check.enabled false: must be true or false"),
    ("params: [1, 2]", "params must be a section"),
])  # fmt: skip
def test_yaml_that_would_mean_something_else_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=said):
        environment("--config-file", str(file))


def test_every_flag_of_horovodrun_is_there() -> None:
    """Also hidden flags."""
    for tunable in tunables.TUNABLES:
        options.parse([tunable.flag, *(["0"] if tunable.read and tunable.variable != "LOG_LEVEL" else []),
                       *(["INFO"] if tunable.variable == "LOG_LEVEL" else [])])  # fmt: skip
        if tunable.inverse:
            options.parse([tunable.inverse])
    options.parse(
        [
            "-p",
            "22",
            "-i",
            "key",
            "--network-interface",
            "a",
            "--network-interfaces",
            "b,c",
            "--tcp",
            "--disable-cache",
            "--mpi",
        ]
    )


def test_interfaces_add_up() -> None:
    a, b, c = "10.1.0.0/16", "10.2.0.0/16", "lo"
    parsed = options.parse(
        ["--network-interface", f"{a},{b}", "--network-interfaces", f"{b},{c}", "-np", "1", sys.executable]
    )
    assert set(settings(parsed, OPEN_MPI, {})[0].interfaces) == {a, b, c}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cycle-time-ms", "-1"], "--cycle-time-ms -1: must be a number, 0 or more"),
        (["--cycle-time-ms", "x"], "--cycle-time-ms x: must be a number, 0 or more"),
        (["--fusion-threshold-mb", "0.5"], "--fusion-threshold-mb 0.5: must be a whole number, 0 or more"),
        (["--autotune-gaussian-process-noise", "2"], "must be a number between 0 and 1"),
        (["--log-level", "LOUD"], "must be one of TRACE"),
        (["--fusion-threshold-mb", "big"], "--fusion-threshold-mb big"),
        (["--gloo"], "--gloo: hvdlite communicates over MPI only"),
        (["--min-np", "2"], "--min-np: ranks cannot come and go yet"),
        (["--host-discovery-script", "x"], "ranks cannot come and go yet"),
        (["--jsrun"], "--jsrun: not inside a job of LSF"),
        (["--start-timeout", "nan"], "nan: must be a number of seconds above 0"),
        (["--host-timeout", "0"], "0: must be a number of seconds above 0"),
        (["-x", "=3"], "-x =3: write -x NAME=VALUE"),
        (["--stall-check", "--no-stall-check"], "cannot be given together with"),
        (["--network-interfaces", "nope0"], "--network-interfaces: this host has no network interface nope0 (it has "),
        (["--config-file", "/no/such.yaml"], "/no/such.yaml: No such file"),
    ],
)
def test_what_cannot_be_is_refused(capfd: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert main([*arguments, "-np", "2", "true"]) == 2
    err = capfd.readouterr().err
    assert said in err and err.count("\n") == 1


def test_what_has_no_effect_is_explained_once(runner: Runner) -> None:
    job = runner.run("-np", "1", "--cycle-time-ms", "1", "--autotune", "--autotune-log-file", "x", "true")
    assert job.returncode == 0
    assert job.stderr.count("\n") == 2
    assert "hvdliterun: --cycle-time-ms: no effect, there are no cycles" in job.stderr
    assert "hvdliterun: --autotune, --autotune-log-file: no effect, algorithms are chosen" in job.stderr


def test_output_goes_to_a_folder_per_rank_too(runner: Runner, tmp_path: Path) -> None:
    code = "import os, sys; print('out', os.getpid()); print('err', file=sys.stderr, end='')"
    job = runner.run("-np", "11", "--output-filename", str(tmp_path / "logs"), sys.executable, "-c", code)
    assert job.returncode == 0 and job.stdout.count(">:out") == 11
    assert sorted(os.listdir(tmp_path / "logs")) == [f"rank.{rank:02d}" for rank in range(11)]
    assert (tmp_path / "logs" / "rank.07" / "stdout").read_text().startswith("out ")
    assert (tmp_path / "logs" / "rank.07" / "stderr").read_text() == "err"


def test_the_folder_holds_this_job_alone(runner: Runner, tmp_path: Path) -> None:
    """Files of an earlier job become empty, also those of a rank that writes nothing."""
    logs = tmp_path / "logs"
    for command in ("echo out; echo err >&2", "true"):
        assert runner.run("-np", "2", "--output-filename", str(logs), "sh", "-c", command).returncode == 0
    texts = [(logs / f"rank.{rank}" / name).read_text() for rank in range(2) for name in ("stdout", "stderr")]
    assert texts == ["", "", "", ""]


def test_lines_begin_with_the_time(runner: Runner) -> None:
    job = runner.run("-np", "1", "--prefix-output-with-timestamp", "echo", "hello")
    day, month, _, clock, rest = job.stdout.split(maxsplit=4)
    assert len(day) == len(month) == 3 and clock.count(":") == 2
    assert rest.endswith("[0]<stdout>:hello\n")
