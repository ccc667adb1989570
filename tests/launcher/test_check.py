"""`hvdliterun --check` reports what is installed."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hvdlite_launcher.checks import merge
from hvdlite_launcher.readiness import verdict

import hvdlite
from hvdlite import check
from hvdlite.check import Finding, State
from tests.launcher.conftest import Runner

FIELDS = {"ready", "verdict", "ready_for", "not_ready", "hosts", "findings"}
OF_A_HOST = {"host", "own_name", "ready", "problem", "hvdlite", "python", "mpi"}
SAME_VERSIONS = ": install the same versions on all hosts [HVD016]"
OF_A_FINDING = {"host", "section", "name", "state", "text", "version"}


def test_the_report_says_what_is_there(runner: Runner) -> None:
    job = runner.run("--check", limit=60)
    assert job.returncode == 0 and not job.stderr, job.stderr
    lines = job.stdout.splitlines()
    assert lines[0] == f"hvdlite {hvdlite.__version__} ({Path(hvdlite.__file__).parent})"
    for title in ("Frameworks:", "MPI:", "GPUs:", "This host:", "Schedulers:", "Libraries:"):
        assert title in lines
    assert f"    [X] launcher: {runner.mpi}" in lines
    assert any(line.startswith(f"    [X] library: {runner.library}") for line in lines), job.stdout
    assert "    [X] MPI_THREAD_MULTIPLE" in lines
    assert f"    [X] numpy {metadata.version('numpy')}" in lines
    assert any("CUDA-aware: " in line for line in lines)
    assert "    [?] not tried: other hosts: name them, --check -H hosta:1,hostb:1" in lines
    assert lines[-1].startswith("ready for: ") and ", 1 host" in lines[-1]


def test_json_says_the_same_to_programs(runner: Runner) -> None:
    job = runner.run("--check", "--json", limit=60)
    said = json.loads(job.stdout)
    assert (job.returncode, job.stderr) == (0, "")
    assert said.keys() == FIELDS and said["hosts"][0].keys() == OF_A_HOST
    assert all(each.keys() == OF_A_FINDING for each in said["findings"])
    assert said["ready"] and said["verdict"].startswith("ready for: ") and said["ready_for"]
    assert said["hosts"][0]["mpi"].startswith(runner.library)
    found = {each["name"]: each for each in said["findings"]}
    assert (found["numpy"]["state"], found["numpy"]["version"]) == ("ok", metadata.version("numpy"))
    assert found["other hosts"]["state"] == "not tried"
    assert found["Flux"]["state"] == ("ok" if shutil.which("flux") else "optional")


def test_horovodruns_flag_does_the_same_and_leaves_nothing(runner: Runner) -> None:
    before = left_segments()
    assert runner.run("-cb", limit=60).stdout.startswith("hvdlite ")
    assert left_segments() <= before


def left_segments() -> set[str]:
    """Open MPI's shared memory that no process has mapped."""
    found = {str(path) for name in ("sm_segment.*", "vader_segment.*") for path in Path("/dev/shm").glob(name)}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has ended
            found -= {line.split()[5] for line in maps.read_text().splitlines() if "/dev/shm/" in line}
    return found


def test_a_broken_mpi_is_told(runner: Runner) -> None:
    env = {**runner.env(), "MPI4PY_LIBMPI": "/no/such/libmpi.so"}
    command = [sys.executable, "-m", "hvdlite.check"]
    job = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert job.returncode == 1
    assert "    [ ] broken: library: " in job.stdout and "/no/such/libmpi.so" in job.stdout, job.stdout
    assert "    [?] not tried: MPI_THREAD_MULTIPLE: no MPI could be loaded" in job.stdout
    last = job.stdout.splitlines()[-1]
    assert last.startswith("ready for: nothing, 1 host; not ready: library: ") and "MPI4PY_LIBMPI" in last


def found(*missing: str, more: Sequence[Finding] = ()) -> list[Finding]:
    """A host that lacks only these."""
    names = {"Frameworks": ("PyTorch", "Keras"), "MPI": ("launcher", "library"), "GPUs": ("GPU", "CuPy"),
             "This host": ("ssh",), "Libraries": ("numpy",)}  # fmt: skip
    states = {"MPI": State.BROKEN, "Libraries": State.ABSENT}
    return [
        Finding(section, name, states.get(section, State.OPTIONAL) if name in missing else State.OK, name)
        for section, each in names.items()
        for name in each
    ] + list(more)


@pytest.mark.parametrize(("missing", "good", "bad"), [
    (["GPU", "CuPy"], ["torch on CPU", "keras on CPU"], []),
    (["GPU", "CuPy", "PyTorch"], ["NumPy arrays on CPU"], ["keras (it needs TensorFlow, PyTorch or JAX)"]),
    (["GPU", "PyTorch", "Keras"], ["NumPy arrays on CPU"], []),
    (["GPU", "ssh"], ["torch on CPU", "keras on CPU"], ["several hosts (no ssh here)"]),
    (["GPU", "numpy"], [], ["numpy (absent)"]),
    (["GPU", "library"], [], ["library"]),
    (["Keras"], ["torch on CPU", "torch on GPUs"], []),
    (["Keras", "CuPy"], ["torch on CPU"], ["torch on GPUs (CuPy is absent: pip install 'hvdlite[cuda12]' or [cuda13])"]),
])  # fmt: skip
def test_what_is_ready(monkeypatch: pytest.MonkeyPatch, missing: list[str], good: list[str], bad: list[str]) -> None:
    monkeypatch.setattr(check, "installed", lambda name: "2.13.0")
    assert check.readiness(found(*missing)) == (good, bad)


def test_a_framework_for_cpus_does_not_use_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "installed", lambda name: "2.13.0+cpu")
    assert check.readiness(found("Keras")) == (["torch on CPU"], ["torch on GPUs (this PyTorch was built for CPUs)"])


def test_a_warning_keeps_nothing_from_being_ready() -> None:
    warning = Finding("This host", "shared memory", State.WARNING, "little")
    assert check.readiness(found("GPU", more=[warning]))[0] == ["torch on CPU", "keras on CPU"]
    said = check.report(found("GPU", more=[warning]), "a")
    assert said["verdict"] == "ready for: torch, keras on CPU, 1 host; warnings: shared memory"


def test_the_verdict_is_one_sentence() -> None:
    assert verdict([], ["x"], [], 2) == "ready for: nothing, 2 hosts; not ready: x"
    both = ["torch on CPU", "keras on CPU", "torch on GPUs"]
    assert verdict(both, [], [], 1) == "ready for: torch, keras on CPU, torch on GPUs, 1 host"


def test_an_mpi_without_threads_is_refused_now_rather_than_later() -> None:
    assert check.threads({"library": "MPI", "threads": True}, "").state is State.OK
    without = check.threads({"library": "MPI", "threads": False}, "")
    assert without.state is State.BROKEN and "load another MPI" in without.text
    assert check.readiness([without]) == ([], [without.text])
    assert check.threads({}, "").state is State.NOT_TRIED
    assert "MPI cannot be initialized: boom" in check.threads({"library": "MPI"}, "boom").text


CRAY = {"library": "MPI VERSION : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)"}


@pytest.mark.parametrize(("said", "enabled", "warned"), [
    ({**CRAY, "gtl": False}, "1", True), ({**CRAY, "gtl": True}, "1", False), ({**CRAY, "gtl": False}, "0", False),
    ({"library": "MPICH Version: 4.2", "gtl": False}, "1", False),
])  # fmt: skip
def test_crays_library_for_gpus_is_missed_in_time(said: dict[str, object], enabled: str, warned: bool) -> None:
    found = list(check.gpu_transport(said, {"MPICH_GPU_SUPPORT_ENABLED": enabled}))
    assert bool(found) == warned
    assert all(each.state is State.WARNING and "LD_PRELOAD" in each.text for each in found)


@pytest.mark.parametrize(("family", "library", "warned"), [
    ("Open MPI", "Open MPI v5.0.11", False), ("Open MPI", "MPICH Version: 5.0", True),
    ("MPICH", "Open MPI v4.1.4", True), ("MPICH", "Intel(R) MPI Library 2021.17", False),
])  # fmt: skip
def test_two_mpis_that_do_not_understand_each_other(family: str, library: str, warned: bool) -> None:
    found = list(check.mixed(family, library))
    assert [each.state for each in found] == [State.WARNING] * warned
    assert all(each.text.endswith("HVDLITE_MPIEXEC or MPI4PY_LIBMPI [HVD102]") for each in found)


@pytest.mark.parametrize(("room", "state"), [(64 << 20, State.WARNING), (8 << 30, State.OK)])
def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch, room: int, state: State) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=room))
    found = check.shared_memory()
    assert found.state is state and ("--shm-size=8g" in found.text) == (state is State.WARNING)


def test_a_scheduler_starts_ranks_where_no_launcher_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For example on a Cray."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HVDLITE_MPIEXEC", "/no/such/mpirun")
    assert next(check.mpi()).state is State.ABSENT
    (tmp_path / "srun").touch(mode=0o755)
    launcher = next(check.mpi())
    assert launcher.state is State.OPTIONAL and launcher.text.endswith("(or start ranks with srun)")


def of_host(name: str, own_name: str = "", torch: str = "2.13", **versions: str) -> dict[str, Any]:
    """What `--json` says on one host."""
    own = {"own_name": own_name or name, "hvdlite": "0.1", "python": "3.11", "mpi": "Open MPI v5", **versions}
    state = {"section": "Frameworks", "name": "PyTorch", "state": "ok", "text": "PyTorch", "version": torch}
    good = ["torch on CPU"] + ["torch on GPUs"] * (name == "gpu")
    bad = [] if name == "gpu" else ["torch on GPUs (CuPy is absent)"]
    hosts = [{"host": name, "ready": True, "problem": None, **own}]
    return {"ready_for": good, "not_ready": bad, "hosts": hosts, "findings": [{"host": name, **state}]}


def test_hosts_are_ready_for_what_all_are_ready_for() -> None:
    said = merge([of_host("gpu"), of_host("a")])
    assert said.keys() == FIELDS
    assert (said["ready"], said["ready_for"]) == (True, ["torch on CPU"])
    assert said["verdict"] == "ready for: torch on CPU, 2 hosts; not ready: torch on GPUs (CuPy is absent) on a"
    assert merge([of_host("a"), of_host("b")])["not_ready"] == ["torch on GPUs (CuPy is absent) on a, b"]


@pytest.mark.parametrize(("other", "problem"), [
    (of_host("b", python="3.13"), f"differs: Python 3.13, others have 3.11{SAME_VERSIONS}"),
    (of_host("b", mpi="MPICH 5"), f"differs: MPICH 5, others have Open MPI v5{SAME_VERSIONS}"),
    (of_host("b", own_name="a.site"),
     "two hosts call themselves a: rename one, or name it once with all its slots [HVD017]"),
])  # fmt: skip
def test_hosts_that_hvdliterun_would_refuse_are_not_ready(other: dict[str, Any], problem: str) -> None:
    said = merge([of_host("a"), other])
    assert (said["ready"], said["ready_for"], said["not_ready"][0]) == (False, [], f"b ({problem})")
    assert said["hosts"][1]["problem"] == problem and not said["hosts"][1]["ready"]


def test_a_framework_that_one_host_lacks_is_named() -> None:
    """The host itself gives no reason."""
    other = {**of_host("b"), "ready_for": ["keras on CPU"], "not_ready": []}
    said = merge([of_host("a"), other])
    assert (said["ready"], said["ready_for"]) == (False, [])
    assert "torch on CPU (not there) on b" in said["not_ready"] and "keras on CPU (not there) on a" in said["not_ready"]


def test_another_version_of_a_framework_is_a_warning() -> None:
    said = merge([of_host("a"), of_host("b", torch="2.8")])
    assert said["ready"] and said["verdict"].endswith("; warnings: versions on b")
    assert said["findings"][-1]["text"] == f"differs: PyTorch 2.8, others have 2.13{SAME_VERSIONS}"


def test_what_is_not_installed_has_no_version() -> None:
    assert check.installed("no_such_module") is None
    assert check.installed("numpy") == metadata.version("numpy")
