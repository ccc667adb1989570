"""The documentation's pages: the links, the map of pages, the generated reference, and the code blocks."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from hvdlite_launcher import options, tunables

import hvdlite
from docs import docstrings, generate
from docs.blocks import DOCS, FENCE, PYTHON, SHELL, blocks, pages
from hvdlite import config

ROOT = Path(__file__).resolve().parents[2]
PAGES = pages()
NAMES = [str(path.relative_to(DOCS)) for path in PAGES]
BESIDE = ["../README.md", "../CONTRIBUTING.md", "../examples/README.md", "../hvdlite/README.md"]


def entries(page: Path) -> list[Path]:
    """The pages that a page's tables of contents have."""
    lines = [line.strip() for block in blocks(page) if block.kind == "{toctree}" for line in block.text.splitlines()]
    targets = [re.sub(r"^.*<(.*)>$", r"\1", line) for line in lines if line and not line.startswith(":")]
    return [page.parent / (target if target.endswith(".md") else f"{target}.md") for target in targets]


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]+`", "", FENCE.sub("\n", text))


def slugs(text: str) -> set[str]:
    """The anchors of a page: those of its headings, as MyST and GitHub make them, and those that it names itself."""
    text = FENCE.sub("\n", text)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    named = re.findall(r'^<a id="([\w-]+)"></a>$', text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower().strip()).replace(" ", "-") for heading in headings} | {*named}


def test_every_page_is_in_one_table_of_contents() -> None:
    found = [entry.resolve() for page in PAGES for entry in entries(page)]
    assert sorted([*found, DOCS / "index.md"]) == PAGES


@pytest.mark.parametrize("name", [*NAMES, *BESIDE])
def test_links_lead_somewhere(name: str) -> None:
    """Links to pages, to their headings, to pictures and to files of the repository."""
    page = DOCS / name
    for link in re.findall(r"\]\(<?([^)\s>]+)", without_code(page.read_text())):
        path, _, anchor = link.partition("#")
        if not re.match(r"[a-z]+:", link):
            target = (page.parent / path).resolve() if path else page
            assert target.is_relative_to(ROOT) and target.exists(), link
            assert not anchor or anchor in slugs(generate.filled(target.read_text())), link


@pytest.mark.parametrize("name", [*NAMES, *BESIDE])
def test_python_blocks_compile(name: str) -> None:
    """Lines that show output or belong to the reader's script stand in blocks of other kinds."""
    for block in blocks(DOCS / name):
        if block.kind in PYTHON:
            compile("\n" * (block.line - 1) + block.text, str(DOCS / name), "exec")


@pytest.mark.parametrize("name", [*NAMES, *BESIDE])
def test_commands_are_understood(name: str) -> None:
    """hvdliterun takes the options of each of its commands."""
    for block in blocks(DOCS / name):
        for line in block.text.replace("\\\n", " ").splitlines() if block.kind in SHELL else ():
            _, found, arguments = line.partition("hvdliterun ")
            if found:
                options.parse(shlex.split(re.split(r" [|;>] |&&", arguments)[0], comments=True))


@pytest.mark.parametrize(
    "module", [name for page in generate.API_MODULES for name in (page, *generate.SUBMODULES[page])]
)
def test_every_public_name_is_in_the_api(module: str) -> None:
    """Each name is described by autodoc once, on this page or the one that this page's table names."""
    page = next(page for page in generate.API_MODULES if module in (page, *generate.SUBMODULES[page]))
    text, everything = generate.api(page), "\n".join(map(generate.api, generate.API_MODULES))
    home = importlib.import_module(module)
    assert generate.public(home)
    for name in generate.public(home):
        value = getattr(home, name)
        if inspect.ismodule(value):
            assert f".. automodule:: {value.__name__}\n" in everything, name
            continue
        described = generate.homes()[name, id(value)]
        assert len(re.findall(rf"^\.\. (auto\w+|py:data):: {described}(\(|$)", everything, re.MULTILINE)) == 1, name
        assert described == f"{module}.{name}" or f"| `{name}` | {{py:obj}}`{described}` |" in text, name


def test_every_module_with_names_has_a_page() -> None:
    marks = {mark for page in PAGES for mark in generate.MARK.findall(page.read_text())}
    assert marks == {
        ("settings", ""),
        ("command-line", ""),
        ("support", ""),
        *(("api", module) for module in generate.API_MODULES),
    }


def test_every_setting_is_described_once() -> None:
    described = [name for names, _, _ in generate.settings_described() for name in names]
    assert sorted(described) == sorted(config.NAMES)
    headings = re.findall(r"HVDLITE_([A-Z_]+)", "".join(re.findall(r"(?m)^## .*$", generate.settings())))
    assert sorted(headings) == sorted(config.NAMES)


def test_defaults_and_choices_of_settings() -> None:
    found = {name: (text, default) for names, text, default in generate.settings_described() for name in names}
    assert found["OVERLAP"][1] == "`auto`" and found["SHARED_MEMORY"][1] == "`1`"
    assert found["STALL_CHECK_TIME_SECONDS"][1] == "`60`" and found["TIMELINE"][1] == ""
    assert "`error`, `warn`, `off`" in found["REPLICA_CHECK"][0]


def test_horovods_names_of_settings_are_those_that_are_read() -> None:
    """A variable with a bad value is an error where hvdlite reads it."""
    for name in set(config.NAMES) - {"TIMELINE"}:  # any text is a path
        try:
            config.Config.from_env({f"HOROVOD_{name}": "no value of any"})
            read = False
        except ValueError:
            read = True
        assert (name in generate.horovods()) is read, name
    assert "TIMELINE" in generate.horovods()


def test_every_option_is_on_the_page_of_the_command_line() -> None:
    text = generate.command_line()
    for line in options.command_parser().format_help().split("examples:")[0].splitlines():
        for flag in re.findall(r"(?<!\S)(--?[a-z][\w-]*)", line) if line.startswith("  -") else ():
            assert re.search(rf"\.\. option:: (.*, )?{flag}\b", text), flag
    for each in tunables.TUNABLES:
        assert (f"| `{each.flag}` |" in text) is bool(each.no_effect), each.flag
    assert text.count(".. option::") > 30


def test_pages_do_not_skip_levels_of_headings() -> None:
    """Sphinx would refuse them."""
    for page in PAGES:
        text = FENCE.sub("\n", generate.filled(page.read_text()))
        levels = [len(each) for each in re.findall(r"^(#+) ", text, re.MULTILINE)]
        assert levels[0] == 1 and levels.count(1) == 1, page
        assert all(below <= level + 1 for level, below in pairwise(levels)), page


def test_the_readme_is_short_and_names_this_version() -> None:
    readme, badges = (ROOT / "README.md").read_text(), (DOCS / "figures/badges.svg").read_text()
    assert len(readme.splitlines()) <= 160
    short = hvdlite.__version__.rpartition(".")[0]
    assert f">{short}, alpha<" in badges and f"![version {short}, alpha; " in readme
    for command in ("make demo", "make test"):
        assert f"$ {command} " in readme


@pytest.mark.parametrize(("plain", "shown"), [
    ("Example:\n\n    f(1)\n\nEnd.", "Example:\n\n::\n\n    f(1)\n\nEnd."),
    ("Do it.\n\nArgs:\n    a: One.\n\n    b: Two.", "Do it.\n\nArgs:\n    a: One.\n\n    b: Two."),
    ("Some `Variable`s of `f`.", "Some `Variable`\\ s of `f`."),
    ("Args:\n    *args, **kwargs: All.", "Args:\n    *args, \\*\\*kwargs: All."),
    ("Raises, on all ranks:\n    E: No.", "On all ranks:\n\nRaises:\n    E: No."),
    ("Returns:\n    A handle: wait for it.", "Returns:\n    \\\n    A handle: wait for it."),
    ("As hvdliterun's --hosts.", "As hvdliterun's ``--hosts``."),
    ("Names.\n\nIn this room are more.\nNot here.\n\nEnd.", "Names.\n\nEnd."),
    ("|a|b|\n|-|-|\n|c|d|\n||e|\n|f|g|",
     ".. list-table::\n   :header-rows: 1\n\n   * - a\n     - b\n   * - c\n     - d e\n   * - f\n     - g"),
])  # fmt: skip
def test_docstrings_become_restructuredtext(plain: str, shown: str) -> None:
    assert docstrings.adapted(plain) == shown.split("\n")
