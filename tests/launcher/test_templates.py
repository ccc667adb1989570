"""`hvdliterun --template` writes job scripts that are right for their readers, and starts nothing."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hvdlite_launcher import cli, templates
from hvdlite_launcher.cli import main
from hvdlite_launcher.templates import Scheduler, job_name

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
FILES = {name: "mpijob.yaml" if name == "k8s" else f"{name}.sh" for name in (each.value for each in Scheduler)}
BATCH = [name for name in FILES if name != "k8s"]
DIRECTIVES = {"slurm": "#SBATCH", "pbs": "#PBS", "lsf": "#BSUB", "flux": "# flux:"}
ODD = [
    "two words", "it's", 'say "no"', "a\nb", "#SBATCH --nodes=9", "\n#SBATCH --nodes=9\n#BSUB -n 9", "$HOME", "$(HOSTNAME)",
    "$$", "`id`", "back\\slash", "\\'\n", "", "*", "tab\t", "\x1b[0m", "\x85\u2028", "é", "-np", "key: value", "yes", "%j",
]  # fmt: skip
"""Arguments that a shell, YAML, Kubernetes or a scheduler would take for something else."""


Write = Callable[..., str]


@pytest.fixture
def written(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Write:
    """A function that returns what hvdliterun writes to stdout. It fails if hvdliterun begins to start something."""

    def nothing(*arguments: object, **named: object) -> None:
        raise AssertionError("something was started")

    for name in ("launch", "_plan", "own_agent", "find_mpi"):
        monkeypatch.setattr(cli, name, nothing)

    def write(scheduler: str, *words: str) -> str:
        assert main(["--template", scheduler, *words]) == 0
        out, err = capfd.readouterr()
        assert err == ""
        return out

    return write


def lines(script: str) -> list[str]:
    """The lines with which a script asks its scheduler for something."""
    return [line for line in script.splitlines() if line.startswith(tuple(DIRECTIVES.values()))]


def executed(script: str, folder: Path) -> list[str]:
    """The arguments with which a batch script calls hvdliterun. Programs of the cluster are simulated."""
    for name in ("hvdliterun", "squeue", "scontrol"):
        (folder / name).write_text(f"#!/bin/bash\n[ {name} != hvdliterun ] || printf '%s\\0' \"$@\" > {folder}/said\n")
        (folder / name).chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "PBS_O_WORKDIR": str(folder), "SLURM_JOB_ID": "1"}
    (folder / "job.sh").write_bytes(os.fsencode(script))
    subprocess.run(["/bin/bash", str(folder / "job.sh")], env=env, timeout=10, check=True)
    return os.fsdecode((folder / "said").read_bytes()).split("\0")[:-1]


def launcher_command(text: str) -> list[str]:
    """The command of an MPIJob's launcher, as Kubernetes would start it."""
    job = yaml.safe_load(text)
    (container,) = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    assert all(word.replace("$$", "").count("$") == 0 for word in container["command"])
    return [word.replace("$$", "$") for word in container["command"]]


@pytest.mark.parametrize("scheduler", FILES)
def test_the_examples_are_what_the_templates_write(written: Write, scheduler: str) -> None:
    text = (EXAMPLES / FILES[scheduler]).read_text()
    assert written(scheduler, "-np", "8", "python", "train.py") == text
    assert written(scheduler, "-H", "node1:4,node2:4", "python", "train.py") == text
    assert written(scheduler, "python", "train.py") == text
    assert {path.name for path in EXAMPLES.iterdir()} == set(FILES.values())


@pytest.mark.parametrize(("scheduler", "asked"), [
    ("slurm", ["#SBATCH --nodes=3", "#SBATCH --ntasks-per-node=2"]),
    ("pbs", ["#PBS -l select=3:ncpus=2:mpiprocs=2"]),
    ("lsf", ["#BSUB -n 6", '#BSUB -R "span[ptile=2]"']),
    ("flux", ["# flux: -N 3", "# flux: -n 6"]),
])  # fmt: skip
def test_the_job_has_the_ranks_of_the_command_line(written: Write, scheduler: str, asked: list[str]) -> None:
    assert set(asked) <= set(lines(written(scheduler, "-H", "a:2,b:2,c:2", "true")))
    assert set(asked) <= set(lines(written(scheduler, "-np", "6", "-H", "a:2,b:2,c:2,d:2", "true")))


def test_an_mpijob_has_the_ranks_of_the_command_line(written: Write) -> None:
    spec = yaml.safe_load(written("k8s", "-H", "a:2,b:2,c:2", "true"))["spec"]
    worker = spec["mpiReplicaSpecs"]["Worker"]
    assert (spec["slotsPerWorker"], worker["replicas"]) == (2, 3)
    assert worker["template"]["spec"]["containers"][0]["resources"] == {"limits": {"cpu": 2}}


@pytest.mark.parametrize(
    ("ranks", "nodes", "slots"), [(1, 1, 1), (3, 1, 3), (4, 1, 4), (6, 2, 3), (8, 2, 4), (64, 16, 4)]
)
def test_ranks_are_spread_evenly_over_nodes(written: Write, ranks: int, nodes: int, slots: int) -> None:
    asked = lines(written("slurm", "-np", str(ranks), "true"))
    assert f"#SBATCH --nodes={nodes}" in asked and f"#SBATCH --ntasks-per-node={slots}" in asked


@pytest.mark.parametrize("scheduler", BATCH)
def test_a_batch_script_passes_all_arguments_on(written: Write, scheduler: str, tmp_path: Path) -> None:
    flags = ["-x", "A=it's\n#PBS -q b", "-v", "--mpi-args=--mca btl tcp", "--prefix", "none"]
    script = written(scheduler, *flags, "-np", "8", "--", "python", "train.py", *ODD, "\udcff")
    assert lines(script) == lines((EXAMPLES / FILES[scheduler]).read_text())
    subprocess.run(["/bin/bash", "-n"], input=os.fsencode(script), timeout=10, check=True)
    ranks = ["-np", "8"] if scheduler == "flux" else []
    said = executed(script, tmp_path)
    assert sorted(said[: -len(ODD) - 3]) == sorted([*flags, *ranks])
    assert said[-len(ODD) - 3 :] == ["python", "train.py", *ODD, "\udcff"]


def test_an_mpijob_passes_all_arguments_on(written: Write) -> None:
    text = written("k8s", "-x", "A=$(B)", "python", "train.py", *ODD)
    own = ["hvdliterun", "-x", "A=$(B)", "--start-timeout", "60", "--hostfile", "/etc/mpi/hostfile"]
    assert launcher_command(text) == [*own, "python", "train.py", *ODD]
    assert launcher_command(written("k8s", "--start-timeout", "5", "true")).count("--start-timeout") == 1


def test_flags_are_written_anew(written: Write, tmp_path: Path) -> None:
    """All kinds: with a value, without, repeated, of Horovod, and those that undo another."""
    flags = ["-x", "A=1", "-x", "B", "-v", "-p", "22", "--start-timeout", "5", "--tcp", "--mpi", "--summary",
             "--fusion-threshold-mb", "32", "--no-stall-check", "--log-level", "INFO", "--log-with-timestamp"]  # fmt: skip
    said = executed(written("slurm", *flags, "-n2", "true"), tmp_path)
    assert sorted(said) == sorted([*(word if word != "5" else "5.0" for word in flags), "true"])


def test_pbs_is_told_which_variables_to_keep(written: Write) -> None:
    """PBS gives a job none of the variables of the shell that submits it."""
    asked = lines(written("pbs", "-x", "TOKEN", "-x", "A=1", "-x", "B", "true"))
    assert asked == [*lines(written("pbs", "true")), "#PBS -v TOKEN,B"]


@pytest.mark.parametrize(("command", "name"), [
    (["python", "train.py"], "train"),
    (["env", "A=1", "python", "-u", "my dir/Train_Big.py"], "train-big"),
    (["./a.out"], "a"),
    (["python", "3.py"], "job-3"),
    (["python", "a_very_long_name_of_a_script.py"], "a-very-long-nam"),
    (["python", "1_very_long_name.py"], "job-1-very-long"),
    (["___"], "job"),
])  # fmt: skip
def test_job_names_suit_all_schedulers(command: list[str], name: str) -> None:
    assert job_name(command) == name


@pytest.mark.parametrize("name", ["true", "null", "on", "e1"])
def test_a_name_is_text_in_yaml(written: Write, name: str) -> None:
    assert yaml.safe_load(written("k8s", name))["metadata"]["name"] == name


WRONG = [
    (["--template", "sge", "true"], "--template sge: must be one of slurm, pbs, lsf, flux, k8s"),
    (["--template"], "--template: needs a value"),
    (["--template", "slurm", "--check"], "--template: cannot be given together with --check"),
    (["--template", "slurm", "--dry-run", "true"], "--template: cannot be given together with --dry-run"),
    (["--template", "slurm"], "--template slurm: no command given"),
    (["--template", "slurm", "--"], "--template slurm: no command given"),
    (["--template", "slurm", "-np", "0", "true"], "-np 0: needs at least 1 rank"),
    (["--template", "slurm", "-np", "5", "true"], "-np 5: 2 nodes cannot have equally many ranks"),
    (["--template", "slurm", "-H", "a:2,b:1", "true"], "need equally many ranks each"),
    (["--template", "slurm", "-np", "3", "-H", "a:2,b:2", "true"], "need equally many ranks each"),
    (["--template", "slurm", "-np", "5", "-H", "a:2,b:2", "true"], "-np 5: the hosts have slots for 4 only"),
    (["--template", "slurm", "-H", "a:2", "--hostfile", "x", "true"], "either -H or --hostfile"),
    (["--template", "k8s", "-x", "TOKEN", "true"], "-x TOKEN: the pods do not have your variables"),
    (["--template", "k8s", "\udcff"], "YAML takes text only"),
]


@pytest.mark.parametrize(("arguments", "text"), WRONG, ids=[" ".join(map(repr, case[0]))[-40:] for case in WRONG])
def test_wrong_use(capfd: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("hvdliterun: ") and err.count("\n") == 1
    assert text in err


@pytest.mark.parametrize("word", ODD)
def test_a_quoted_word_is_on_one_line(word: str) -> None:
    assert "\n" not in templates.quoted(word)
    if word.isprintable():
        assert templates.quoted(word) == shlex.quote(word)


@pytest.mark.parametrize(("code", "state", "restarts", "again"), [
    (143, "RUNNING", "", True), (143, "RUNNING", "19", True), (143, "RUNNING", "20", False),
    (143, "COMPLETING", "", False), (0, "RUNNING", "", False), (1, "RUNNING", "", False),
])  # fmt: skip
def test_slurms_job_is_queued_again_only_if_sigterm_ended_it(
    written: Write, tmp_path: Path, code: int, state: str, restarts: str, again: bool
) -> None:
    """The script waits for hvdliterun also after a signal, and ends with its exit code."""
    script = written("slurm", "true")
    trap = "trap 'sleep 0.3; exit " + str(code) + "' TERM; kill -TERM $PPID; while :; do sleep 0.05; done"
    programs = {"hvdliterun": trap, "squeue": f"echo {state}", "scontrol": f'echo "$*" > {tmp_path}/asked'}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": restarts}
    (tmp_path / "job.sh").write_text(script)
    assert subprocess.run(["/bin/bash", str(tmp_path / "job.sh")], env=env, timeout=10).returncode == code
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == ("requeue 7\n" if again else "")
