"""The sdist and the wheel that `python -m build` makes of a clean checkout: their contents, and a job from the wheel."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest

import hvdlite
from tests.launcher.conftest import ROOT, Runner

pytestmark = pytest.mark.full
NAME = f"hvdlite-{hvdlite.__version__}"
LIMIT = 120.0  # seconds; building takes two
JOB = """
import importlib.metadata
import json
import numpy
import hvdlite as hvd
hvd.init()
total = hvd.allreduce(numpy.full(3, hvd.rank() + 1.0), op=hvd.Sum)
if hvd.rank() == 0:
    print(json.dumps([hvd.size(), total.tolist(), hvd.__file__, importlib.metadata.version("hvdlite")]))
"""


@dataclass(frozen=True)
class Built:
    """Both files, and the code that the checkout has: paths below the root, with `launcher/` taken off."""

    sdist: Path
    wheel: Path
    code: set[str]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build from a copy of the files that git tracks."""
    pytest.importorskip("build", reason='no "build" here: pip install build')
    listed = run("git", "-C", str(ROOT), "ls-files", "-z") if shutil.which("git") else None
    if listed is None or listed.returncode:
        pytest.skip("git does not tell which files belong to the sources: this is no checkout")
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    folder = tmp_path_factory.mktemp("built")
    for name in names:
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "source" / name)
    done = run(sys.executable, "-m", "build", "--no-isolation", "-o", str(folder / "dist"), str(folder / "source"))
    assert done.returncode == 0, done.stdout + done.stderr
    sdist, wheel = folder / "dist" / f"{NAME}.tar.gz", folder / "dist" / f"{NAME}-py3-none-any.whl"
    assert {*(folder / "dist").iterdir()} == {sdist, wheel}
    of_packages = [name for name in names if name.startswith(("hvdlite/", "launcher/"))]
    code = {name.removeprefix("launcher/") for name in of_packages if name.endswith((".py", "/py.typed"))}
    return Built(sdist, wheel, code)


def test_the_wheel_has_the_packages_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names, info = {*wheel.namelist()}, f"{NAME}.dist-info"
        tags, entries = (wheel.read(f"{info}/{name}").decode() for name in ("WHEEL", "entry_points.txt"))
        licence = wheel.read(f"{info}/licenses/LICENSE")
    assert {name for name in names if not name.startswith(f"{info}/")} == built.code
    assert {"hvdlite/py.typed", "hvdlite_launcher/py.typed", "hvdlite_torch_plugin/__init__.py"} <= built.code
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert "Root-Is-Purelib: true\n" in tags and "Tag: py3-none-any\n" in tags
    assert "hvdliterun = hvdlite_launcher.cli:main" in entries and "hvdlite = hvdlite_torch_plugin:register" in entries


def test_the_sdist_has_what_building_needs(built: Built) -> None:
    with tarfile.open(built.sdist) as sdist:
        names = {name.removeprefix(f"{NAME}/") for name in sdist.getnames()}
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "PKG-INFO"} <= names
    assert {name if name.startswith("hvdlite/") else f"launcher/{name}" for name in built.code} <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "examples", "."))]


def test_both_have_one_version_and_pass_twines_check(built: Built) -> None:
    pytest.importorskip("twine", reason='no "twine" here: pip install twine')
    with zipfile.ZipFile(built.wheel) as wheel, tarfile.open(built.sdist) as sdist:
        of_sdist = sdist.extractfile(f"{NAME}/PKG-INFO")
        texts = [wheel.read(f"{NAME}.dist-info/METADATA").decode(), of_sdist.read().decode()]
    for metadata in map(Parser().parsestr, texts):
        assert (metadata["Name"], metadata["Version"]) == ("hvdlite", hvdlite.__version__)
        assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
        assert "Typing :: Typed" in metadata.get_all("Classifier")
    done = run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", str(built.wheel), str(built.sdist))
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr


def test_two_ranks_run_from_the_wheel(built: Built, runner: Runner, tmp_path: Path) -> None:
    """The wheel alone lies in a folder before all others on Python's path. Its dependencies are those of the tests."""
    folder, script = tmp_path / "installed", tmp_path / "job.py"
    script.write_text(JOB)
    done = run(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index",
               "--target", str(folder), str(built.wheel))  # fmt: skip
    assert done.returncode == 0, done.stderr
    env = runner.env(PYTHONPATH=str(folder))
    hvdliterun = [sys.executable, str(folder / "bin" / "hvdliterun")]

    def answer(*arguments: str) -> str:
        ended = subprocess.run(
            [*hvdliterun, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    package = folder / "hvdlite"
    (line,) = answer("-np", "2", "--no-prefix", sys.executable, str(script)).splitlines()
    assert json.loads(line) == [2, [3.0] * 3, str(package / "__init__.py"), hvdlite.__version__]
    report = answer("--check").splitlines()
    assert report[0] == f"hvdlite {hvdlite.__version__} ({package})" and report[-1].startswith("ready for: ")
