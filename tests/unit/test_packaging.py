"""The recipes in docs/packaging ask for what pyproject.toml asks for, are of hvdlite's version, and can be parsed."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import hvdlite

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "packaging"
CONDA = FOLDER / "conda" / "recipe.yaml"
SPACK_REPOSITORY = FOLDER / "spack" / "spack_repo" / "hvdlite"
SPACK = SPACK_REPOSITORY / "packages" / "py_hvdlite" / "package.py"
EASYBUILD = FOLDER / "easybuild" / f"hvdlite-{hvdlite.__version__}-foss-2025b.eb"
LMOD = FOLDER / "lmod" / "hvdlite" / f"{hvdlite.__version__}.lua"
DOCKER, APPTAINER = FOLDER / "Dockerfile", FOLDER / "hvdlite.def"
FILES = [CONDA, SPACK_REPOSITORY / "repo.yaml", SPACK, EASYBUILD, LMOD, DOCKER, APPTAINER]
LINES = 50
WHEEL = f"hvdlite-{hvdlite.__version__}-py3-none-any.whl"

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PYTHON = SpecifierSet(PROJECT["requires-python"])


def bounds(requirements: Iterable[str]) -> dict[str, str]:
    """Names and their specifiers, as text: {'numpy': '>=1.26'}."""
    parsed = map(Requirement, requirements)
    return {canonicalize_name(requirement.name): str(requirement.specifier) for requirement in parsed}


NEEDED = bounds(PROJECT["dependencies"])
FRAMEWORKS = bounds(PROJECT["optional-dependencies"]["torch"] + PROJECT["optional-dependencies"]["tensorflow"])
BACKEND = bounds(PYPROJECT["build-system"]["requires"])


def spack_dependencies() -> dict[str, dict[str, str]]:
    """The bounds of Spack's depends_on, by their `type`."""
    found: dict[str, dict[str, str]] = {"build": {}, "run": {}, "both": {}}

    def collect(nodes: Iterable[ast.stmt], kind: str) -> None:
        for node in nodes:
            if isinstance(node, ast.With):
                call = node.items[0].context_expr
                assert isinstance(call, ast.Call)
                given = ast.literal_eval(call.keywords[0].value)
                collect(node.body, "both" if given == ("build", "run") else given)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                call = node.value
                if isinstance(call.func, ast.Name) and call.func.id == "depends_on":
                    named = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
                    match = re.fullmatch(r"(?:py-)?([a-z0-9-]+)@([\d.]+):", ast.literal_eval(call.args[0]))
                    assert match, ast.unparse(call)
                    found[named.get("type", kind)][match[1]] = f">={match[2]}"

    (package,) = (node for node in ast.parse(SPACK.read_text()).body if isinstance(node, ast.ClassDef))
    collect(package.body, "")
    return found


def easyconfig() -> dict[str, Any]:
    """The literal values that the easyconfig assigns."""
    values = {}
    for node in ast.parse(EASYBUILD.read_text()).body:
        assert isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if node.targets[0].id != "exts_list":  # which uses other variables
            values[node.targets[0].id] = ast.literal_eval(node.value)
    return values


def sections() -> dict[str, str]:
    """The sections of the Apptainer definition, and its header under ''."""
    parts = re.split(r"^%(\w+)\n", APPTAINER.read_text(), flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_recipe_is_short_and_names_its_conventions(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < LINES and "Conventions: " in text


def test_the_readme_names_every_recipe() -> None:
    """Its links exist, and lead to each file or to a folder around it."""
    linked = [FOLDER / target for target in re.findall(r"\]\(([^)#]+)\)", (FOLDER / "README.md").read_text())]
    assert linked and all(target.exists() for target in linked)
    found = {path for path in FOLDER.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert found == {*FILES, FOLDER / "README.md"}
    assert [path for path in FILES if not any(path.is_relative_to(target) for target in linked)] == []


def test_one_version_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == hvdlite.__version__ and citation["license"] == PROJECT["license"]
    assert "version" in PROJECT["dynamic"]
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "hvdlite.__version__"}
    assert yaml.safe_load(CONDA.read_text())["context"]["version"] == hvdlite.__version__
    assert re.findall(r'version\("(.+?)"\)', SPACK.read_text()) == [hvdlite.__version__]
    assert f"/hvdlite-{hvdlite.__version__}.tar.gz" in SPACK.read_text()
    config = easyconfig()
    assert config["version"] == hvdlite.__version__
    assert EASYBUILD.stem == "-".join((config["name"], config["version"], *config["toolchain"].values()))
    for path in (DOCKER, APPTAINER):
        assert {*re.findall(r"hvdlite-[\w.-]+\.whl", path.read_text())} == {WHEEL}
    assert sections()["labels"].split() == ["Version", hvdlite.__version__]


def test_conda_asks_for_the_same() -> None:
    recipe = yaml.safe_load(CONDA.read_text())
    asked = recipe["requirements"]
    python = recipe["context"]["python_min"]
    assert f">={python}" == str(PYTHON) and asked["run"][0] == "python >=${{ python_min }}"
    assert bounds(asked["run"][1:]) == NEEDED
    limited = bounds(asked["run_constraints"])
    assert {"torch" if name == "pytorch" else name: bound for name, bound in limited.items()} == FRAMEWORKS
    assert bounds(asked["host"][2:]) == BACKEND and asked["host"][1] == "pip"
    assert recipe["build"]["noarch"] == "python" and recipe["about"]["license"] == PROJECT["license"]
    assert (CONDA.parent / recipe["source"]["path"]).resolve() == ROOT


def test_spack_asks_for_the_same() -> None:
    compile(SPACK.read_text(), str(SPACK), "exec")
    asked = spack_dependencies()
    assert asked["both"] == {"python": str(PYTHON), **NEEDED}
    assert (asked["run"], asked["build"]) == (FRAMEWORKS, BACKEND)
    assert f'license("{PROJECT["license"]}")' in SPACK.read_text()
    assert yaml.safe_load((SPACK_REPOSITORY / "repo.yaml").read_text())["repo"]["namespace"] == SPACK_REPOSITORY.name


def test_easybuilds_modules_have_what_is_needed() -> None:
    """The comment beside a dependency names what it brings. Each version satisfies pyproject.toml."""
    compile(EASYBUILD.read_text(), str(EASYBUILD), "exec")
    modules = dict(easyconfig()["dependencies"])
    assert PYTHON.contains(modules["Python"])
    brought = {}
    for module, version, comment in re.findall(
        r"^    \('(.+)', '(.+)'\),  # (.+)$", EASYBUILD.read_text(), re.MULTILINE
    ):
        pins = {canonicalize_name(name): pin for name, pin in (each.split() for each in comment.split(", "))}
        assert pins.get(canonicalize_name(module), version) == version
        brought.update(pins)
    assert brought.keys() == NEEDED.keys()
    assert [name for name, pin in brought.items() if not SpecifierSet(NEEDED[name]).contains(pin)] == []


def test_the_modulefile_asks_for_the_same_python() -> None:
    text = LMOD.read_text()
    assert re.findall(r'atleast\("python", "([\d.]+)"\)', text) == [str(PYTHON).removeprefix(">=")]
    assert [PYTHON.contains(python) for python in re.findall(r'^local python = "(.+)"', text, re.MULTILINE)] == [True]
    assert f"License: {PROJECT['license']}" in text


def test_images_name_extras_and_files_that_exist() -> None:
    docker, apptainer = DOCKER.read_text(), APPTAINER.read_text()
    assert PYTHON.contains(*re.findall(r"^ARG PYTHON=(.+)$", docker, re.MULTILINE))
    assert PYTHON.contains(*re.findall(r"^From: docker\.io/library/python:(.+)-slim$", apptainer, re.MULTILINE))
    for extras in re.findall(r"EXTRAS=(\S+)", docker + apptainer + (FOLDER / "README.md").read_text()):
        assert PROJECT["optional-dependencies"].keys() >= {*extras.split(",")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", docker, re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert {"pyproject.toml", "setup.py", "hvdlite", "launcher", PROJECT["readme"], *PROJECT["license-files"]} == names
    assert all((ROOT / name).exists() for name in names)


def test_apptainers_sections_are_shell_scripts() -> None:
    parts = sections()
    assert next(line for line in parts[""].splitlines() if not line.startswith("#")) == "Bootstrap: docker"
    for name in ("post", "environment", "test", "runscript"):
        subprocess.run(["sh", "-n"], input=parts[name], text=True, check=True)
