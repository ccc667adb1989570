"""The plug-in that makes torch.distributed know hvdlite: `import torch` is never broken or slower by it; ranks' places."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from hvdlite_torch_plugin.backend import announce
from hvdlite_torch_plugin.places import Place, place_in, variables

ROOT = Path(__file__).parents[2]
KEPT = ("PATH", "HOME", "VIRTUAL_ENV", "LANG", "TMPDIR", "LD_LIBRARY_PATH")
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def python(
    code: str, extra: Mapping[str, str] | None = None, first: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """The end of a program in an environment without launchers. first: a folder before all others on Python's path."""
    path = os.pathsep.join(map(str, [*([first] if first else []), ROOT, ROOT / "launcher"]))
    env = {name: os.environ[name] for name in KEPT if name in os.environ}
    return subprocess.run([sys.executable, "-c", code], env={**env, "PYTHONPATH": path, **(extra or {})}, cwd="/",
                          capture_output=True, text=True, timeout=120)  # fmt: skip


def answer(code: str, extra: Mapping[str, str] | None = None) -> Any:
    """What a program prints, as JSON."""
    done = python(code, extra)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


MODULES = "import json, sys, torch; print(json.dumps(sorted(sys.modules)))"


def test_import_torch_imports_nothing_more_than_the_plug_in() -> None:
    """Not hvdlite, nor another package, nor a part of torch that torch does not import itself."""
    with_plug_in, without = (set(answer(MODULES, {"TORCH_DEVICE_BACKEND_AUTOLOAD": to})) for to in "10")
    found = with_plug_in - without
    assert {"hvdlite_torch_plugin", "hvdlite_torch_plugin.places"} <= found
    more = {name for name in found if not name.startswith("hvdlite_torch_plugin")}
    assert {name.partition(".")[0] for name in more} <= sys.stdlib_module_names, more
    assert len(more) < 30, more


def test_torch_knows_the_backend_when_it_is_imported() -> None:
    code = """
import json, torch
import torch.distributed as dist
print(json.dumps([dist.is_backend_available("hvdlite"), dist.Backend("HVDLITE"), dist.is_mpi_available()]))
"""
    assert answer(code) == [True, "hvdlite", False]


def test_a_broken_hvdlite_does_not_break_import_torch(tmp_path: Path) -> None:
    """Its error comes when a process group is made."""
    (tmp_path / "hvdlite").mkdir()
    (tmp_path / "hvdlite" / "__init__.py").write_text("raise RuntimeError('broken on purpose')")
    done = python("import torch; print(torch.ones(2).sum().item())", first=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2.0\n", "")
    done = python(
        "import torch.distributed as dist; dist.init_process_group('hvdlite', init_method='mpi://')", first=tmp_path
    )
    assert done.returncode == 1 and "broken on purpose" in done.stderr


@pytest.mark.parametrize("broken", ["places.py", "backend.py"])
def test_a_broken_plug_in_does_not_break_import_torch(broken: str, tmp_path: Path) -> None:
    """It is a warning that names hvdlite."""
    folder = tmp_path / "hvdlite_torch_plugin"
    shutil.copytree(ROOT / "launcher" / "hvdlite_torch_plugin", folder, ignore=shutil.ignore_patterns("__pycache__"))
    if broken == "backend.py":
        text = (folder / broken).read_text()
        assert "_rendezvous_handlers," in text
        (folder / broken).write_text(text.replace("_rendezvous_handlers,", "_name_of_another_torch,"))
    else:
        (folder / broken).write_text("raise RuntimeError('broken on purpose')")
    done = python("import torch; print(torch.ones(2).sum().item())", first=tmp_path)
    assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr
    assert "hvdlite cannot be a backend of torch.distributed" in done.stderr


ENVIRONMENT = f"import json, os, torch; print(json.dumps({{n: os.environ.get(n) for n in {TORCHRUN}}}))"
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip


def test_the_variables_of_an_mpi_rank() -> None:
    assert answer(ENVIRONMENT, OPEN_MPI) == dict(zip(TORCHRUN, ("3", "8", "1", "2"), strict=True))


def announced(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """torchrun's variables after the plug-in has set them in this environment."""
    monkeypatch.setattr(os, "environ", env)
    announce()
    return {name: env.get(name) for name in TORCHRUN}


def test_the_environment_of_other_processes_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert announced({}, monkeypatch) == dict.fromkeys(TORCHRUN)
    assert announced({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, monkeypatch) == dict.fromkeys(TORCHRUN)


def test_torchruns_variables_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "8"}
    assert announced({**OPEN_MPI, **ours}, monkeypatch) == ours


@pytest.mark.parametrize("name", TORCHRUN)
def test_a_variable_that_is_set_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert announced({**OPEN_MPI, name: "77"}, monkeypatch)[name] == "77"


def test_mpi_means_hvdlite_only_on_request() -> None:
    code = """
import json, torch
import torch.distributed as dist
try:
    name = dist.Backend("mpi")
except ValueError as error:
    name = "none"
print(json.dumps([dist.is_mpi_available(), name, dist.Backend("gloo")]))
"""
    assert answer(code, {"HVDLITE_AS_MPI": "1"}) == [True, "hvdlite", "gloo"]
    assert answer(code)[::2] == answer(code, {"HVDLITE_AS_MPI": "0"})[::2] == [False, "gloo"]


SLURM = {"SLURM_LOCALID": "1", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        (OPEN_MPI, Place(3, 8, 1, 2)),
        ({"PMI_RANK": "2", "PMI_SIZE": "4"}, Place(2, 4)),
        ({"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, Place(2, 4, 0, 2)),
        ({"PMI_RANK": "5", "PMI_SIZE": "8", **SLURM}, Place(5, 8, 1)),
        ({"PMI_RANK": "5", "PMI_SIZE": "8", **SLURM, "SLURM_NTASKS_PER_NODE": "4"}, Place(5, 8, 1, 4)),
        ({"PMIX_RANK": "5", **SLURM}, Place(5, 8, 1)),
        ({"PMIX_RANK": "5"}, None),
        (SLURM, None),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "1",
          "MV2_COMM_WORLD_LOCAL_SIZE": "2"}, Place(1, 2, 1, 2)),
        ({"PALS_RANKID": "1", "PALS_SIZE": "2", "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "1"}, Place(1, 2, 0, 1)),
        ({"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1"}, Place(3, 4, 1)),
        ({"OMPI_COMM_WORLD_RANK": "", "OMPI_COMM_WORLD_SIZE": "8"}, None),
        ({"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": "8"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, None),
    ],
)  # fmt: skip
def test_places(environment: dict[str, str], place: Place | None) -> None:
    assert place_in(environment) == place


def test_mpirun_within_an_allocation_of_slurm() -> None:
    """Slurm's variables of the batch script are those of the step that runs mpirun, not of its ranks."""
    assert place_in({**OPEN_MPI, **SLURM, "PMIX_RANK": "3"}) == Place(3, 8, 1, 2)


def test_the_variables_of_a_place() -> None:
    assert variables(Place(3, 8, 1, 2)) == dict(zip(TORCHRUN, ("3", "8", "1", "2"), strict=True))
    assert variables(Place(3, 8)) == {"RANK": "3", "WORLD_SIZE": "8"}
