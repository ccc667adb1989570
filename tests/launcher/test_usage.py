"""Wrong use is one clear line and an exit code, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hvdlite_launcher.cli import main
from hvdlite_launcher.options import parse
from hvdlite_launcher.prefixes import Style

WRONG = [
    (["-np", "0", "true"], 2, "-np 0: needs at least 1 rank"),
    (["-np", "-3", "true"], 2, "-np -3: needs at least 1 rank"),
    (["-np", "many", "true"], 2, "-np many: must be a whole number"),
    (["-np", "5", "-H", "localhost:4", "true"], 2, "-np 5: the hosts have slots for 4 only (localhost:4): lower -np"),
    (["-np", "2", "-H", "localhost:x", "true"], 2, "cannot read the host 'localhost:x'"),
    (["-np", "2", "-H", "localhost:1,127.0.0.1:1", "true"], 2, "localhost and 127.0.0.1 are both this machine"),
    (["-np", "2", "-i", "/no/such/key", "true"], 2, "/no/such/key: no such file"),
    (["-np", "2", "--hostfile", "/no/such/file", "true"], 2, "'/no/such/file'"),
    (["-np", "2", "-H", "localhost:2", "--hostfile", "x", "true"], 2, "either -H or --hostfile"),
    (["true"], 2, "say how many ranks"),
    (["-np", "2"], 2, "no command given"),
    (["-np", "2", "--"], 2, "no command given"),
    (["-np", "2", "--unheard-of", "true"], 2, "--unheard-of"),
    (["-np", "2", "--ver", "true"], 2, "--ver: no such option"),
    (["-np", "2", "-x", "HVDLITE_NOT_SET", "true"], 2, "the variable is not set"),
    (["-np", "2", "--mpi-args='", "true"], 2, "--mpi-args"),
    (["-np", "2", "--output-filename", __file__, "true"], 2, f"--output-filename {__file__}/rank.0: Not a directory"),
    (["-np", "2", "--prefix", "/opt/mpi", "true"], 2, '--mpi-args="--prefix /opt/mpi"'),
    (["-np", "2", "--prefix", "tall", "true"], 2, "--prefix tall: must be one of short, full, auto, none"),
    (
        ["-np", "2", "--prefix", "short", "--no-prefix", "true"],
        2,
        "--no-prefix: cannot be given together with --prefix short",
    ),
    (["--check", "--dry-run"], 2, "--dry-run: cannot be given together with --check"),
    (["-np", "2", "no-such-command"], 127, "no-such-command: command not found"),
    (["-np", "2", "-H", "localhost:2", "b:1", "env"], 127, "hosts are listed with commas"),
    (["-np", "2", __file__], 127, f"python {__file__}"),
]


@pytest.mark.parametrize(("arguments", "code", "text"), WRONG, ids=[" ".join(case[0])[-40:] for case in WRONG])
def test_wrong_use(capfd: pytest.CaptureFixture[str], arguments: list[str], code: int, text: str) -> None:
    assert main(arguments) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("hvdliterun: ") and err.count("\n") == 1
    assert text in err


def test_all_behind_the_command_is_its_own() -> None:
    """Also a word that abbreviates several of hvdliterun's flags."""
    command = ["python", "train.py", "-host", "a", "--log", "b", "--ver", "-np", "3", "--config", "c", "-p"]
    found = parse(["-n2", "-xA=1", *command])
    assert (found.ranks, found.env, found.command) == (2, ["A=1"], command)


def test_no_prefix_is_a_style() -> None:
    for flags in (["--no-prefix"], ["--prefix", "none"], ["--prefix=none", "--no-prefix"]):
        assert parse([*flags, "-np", "1", "true"]).prefix is Style.NONE
    assert parse(["-np", "1", "true"]).prefix is None


@pytest.mark.parametrize("path", ["/bin/true", "/no/such/mpirun"])
def test_a_launcher_of_no_mpi(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv("HVDLITE_MPIEXEC", path)
    assert main(["-np", "2", "true"]) == 127
    assert capfd.readouterr().err == (
        f"hvdliterun: {path} is not a launcher of Open MPI, MPICH or Intel MPI: name an mpirun or mpiexec in "
        "HVDLITE_MPIEXEC, or unset it [HVD001]\n"
    )


def test_a_command_of_this_folder_is_named_with_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "train").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    assert main(["-np", "2", "train"]) == 127
    assert "train is not on PATH: did you mean: hvdliterun -np 2 ./train" in capfd.readouterr().err


def test_the_exit_code_needs_no_stderr() -> None:
    with open("/dev/full", "w") as full:
        assert subprocess.call([sys.executable, "-m", "hvdlite_launcher.cli", "-np", "0", "true"], stderr=full) == 2


@pytest.mark.parametrize("text", ["timeline: {filename: 2020-13-45}", "params: [", "- a list", "\x80"])
def test_settings_that_cannot_be_read(capfd: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    (tmp_path / "settings.yaml").write_text(text, encoding="latin-1")
    assert main(["-np", "1", "--config-file", str(tmp_path / "settings.yaml"), "true"]) == 2
    err = capfd.readouterr().err
    assert err.startswith("hvdliterun: cannot read the settings in ") and err.count("\n") == 1


def test_too_few_files() -> None:
    few = f"ulimit -n 64; exec {sys.executable} -m hvdlite_launcher.cli -np 40 true"
    job = subprocess.run(["bash", "-c", few], capture_output=True, text=True)
    assert job.returncode == 1 and "Too many open files: each rank here takes two: raise `ulimit -n`" in job.stderr


def test_no_arguments_show_the_usage(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capfd.readouterr().err.startswith("usage: hvdliterun -np N")


@pytest.mark.parametrize(("option", "text"), [("--help", "examples:"), ("--version", "hvdliterun ")])
def test_help_and_version(capfd: pytest.CaptureFixture[str], option: str, text: str) -> None:
    with pytest.raises(SystemExit) as end:
        main([option])
    assert end.value.code == 0
    assert text in capfd.readouterr().out


def test_no_mpi_anywhere(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "train").touch(mode=0o755)
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("HVDLITE_MPIEXEC", raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert main(["-np", "2", "train"]) == 127
    err = capfd.readouterr().err
    assert "no MPI found" in err and err.count("\n") == 1 and err.endswith("[HVD001]\n")


def test_the_launcher_loads_no_framework_and_no_mpi() -> None:
    code = "import sys, hvdlite_launcher.cli; print(*sys.modules)"
    path = os.pathsep.join(path for path in sys.path if path)
    out = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert not {"mpi4py", "numpy", "torch", "tensorflow", "hvdlite"} & set(out.stdout.split())
