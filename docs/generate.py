"""Pages of the reference, made from the code: the public names, the settings, and the command line.

A page of the documentation has a line `<!-- generated: api hvdlite.torch -->`. `conf.py` puts the text of the function
with that name (`api`, `settings`, `command_line`, `support`) in its place while Sphinx reads the page, so no generated
page lies in the repository. Text around the line is written by hand.
"""

from __future__ import annotations

import argparse
import ast
import enum
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from hvdlite_launcher import options, tunables

from hvdlite import config
from hvdlite.ops.common import Collective

API_MODULES = ("hvdlite", "hvdlite.numpy", "hvdlite.torch", "hvdlite.keras", "hvdlite.tensorflow")
"""Modules with a page. An object that several of them have is described on the page of the first one."""
SUBMODULES = {
    "hvdlite": ("hvdlite.elastic",),
    "hvdlite.numpy": (),
    "hvdlite.torch": ("hvdlite.torch.elastic",),
    "hvdlite.keras": ("hvdlite.keras.callbacks", "hvdlite.keras.elastic"),
    "hvdlite.tensorflow": ("hvdlite.tensorflow.elastic",),
}
"""Modules in the `__all__` of a module with a page, which its page describes."""
MARK = re.compile(r"^<!-- generated: (\S+) ?(\S*) -->$", re.MULTILINE)
FLAG = re.compile(r"(?<![\w-])(--?[A-Za-z][\w-]*)")
KINDS = ("Functions", "Classes", "Exceptions", "Constants and objects")


def filled(text: str) -> str:
    """A page's text, with the generated parts in the places of their marks."""
    return MARK.sub(lambda found: PARTS[found[1]](*(found[2],) if found[2] else ()), text)


def anchor(heading: str) -> str:
    """A heading's anchor, as GitHub makes it; `hvd012` for 'HVD012: an error'."""
    code = re.match(r"HVD\d{3}(?=: )", heading)
    return re.sub(r"[^\w\- ]", "", (code[0] if code else heading).lower()).replace(" ", "-")


def public(module: ModuleType) -> list[str]:
    """The names that a module offers: those in `__all__`, and `print`, which star-imports leave alone."""
    return sorted({*module.__all__, *(["print"] if "print" in vars(module) else [])}, key=str.lower)


@cache
def homes() -> dict[tuple[str, int], str]:
    """The dotted name under which each public object is described, by its own name and identity."""
    found: dict[tuple[str, int], str] = {}
    for page in API_MODULES:
        for name in (page, *SUBMODULES[page]):
            module = importlib.import_module(name)
            for each in public(module):
                value = getattr(module, each)
                if not inspect.ismodule(value):
                    found.setdefault((each, id(value)), f"{name}.{each}")
    return found


def api(page: str) -> str:
    """The public names of a module, and of the modules in its `__all__`."""
    return "\n".join([described(page, "##"), *(submodule(name) for name in SUBMODULES[page])])


def submodule(name: str) -> str:
    """The section of a module that another module's page describes."""
    block = ["```{eval-rst}", f".. automodule:: {name}", "   :no-members:", "   :no-index:", "```", ""]
    return "\n".join([f"## {name}", "", *block, described(name, "###")])


def described(name: str, level: str) -> str:
    """The names of one module by kind, and after them a table of those that another page describes."""
    module = importlib.import_module(name)
    kinds: dict[str, list[str]] = {kind: [] for kind in KINDS}
    elsewhere = []
    for each in public(module):
        value = getattr(module, each)
        if inspect.ismodule(value):
            elsewhere.append((each, value.__name__, f"`{value.__name__}`: a module"))
            continue
        home = homes()[each, id(value)]
        if home != f"{name}.{each}":
            elsewhere.append((each, home, f"{{py:obj}}`{home}`"))
        else:
            kinds[kind_of(value)] += directive(home, each, value)
    lines = []
    for kind, found in kinds.items():
        if found:
            lines += [f"{level} {kind}", "", "```{eval-rst}", f".. currentmodule:: {name}", "", *found, "```", ""]
    if elsewhere:
        lines += [f"{level} Names that other pages or sections describe", "", "| name | described as |", "|---|---|"]
        lines += [f"| `{each}` | {text} |" for each, _, text in elsewhere]
    return "\n".join([*lines, ""])


def kind_of(value: object) -> str:
    """The section that an object belongs in."""
    if inspect.isclass(value):
        return "Exceptions" if issubclass(value, BaseException) else "Classes"
    return "Functions" if inspect.isroutine(value) or isinstance(value, Collective) else "Constants and objects"


def directive(home: str, name: str, value: Any) -> list[str]:
    """What autodoc is asked to write about an object."""
    if kind_of(value) == "Constants and objects":
        return [f".. py:data:: {home}", "", f"   {meaning(name, value)}", ""]
    if isinstance(value, Collective):
        parameters = inspect.signature(value.prepare).replace(return_annotation=inspect.Signature.empty)
        return [f".. autofunction:: {home}{parameters}".replace("'", ""), ""]
    if kind_of(value) == "Functions":
        return [f".. autofunction:: {home}", ""]
    if kind_of(value) == "Exceptions":
        return [f".. autoexception:: {home}", ""]
    if name == "Compression":  # its base has the lossy compressors
        simple = [each for each, kept in vars(value).items() if inspect.isclass(kept)]
        options = ["   :members:", "   :inherited-members:", f"   :exclude-members: {', '.join(['Codec', *simple])}"]
        said = f"Compressors without options: {', '.join(f'`{each}`' for each in simple)}."
        return [f".. autoclass:: {home}", *options, "", f"   {said}", ""]
    undocumented = ["   :undoc-members:"] if inspect.isclass(value) and issubclass(value, enum.Enum) else []
    return [f".. autoclass:: {home}", "   :members:", *undocumented, ""]


def meaning(name: str, value: object) -> str:
    """What an object that is neither a function nor a class is: the docstring after its assignment, or its type."""
    if isinstance(value, enum.Enum):
        return f"`{type(value).__name__}.{value.name}`."
    for key, module in list(sys.modules.items()):  # matplotlib keeps objects that are no modules there
        if key.startswith("hvdlite") and vars(module).get(name) is value and module.__file__:
            for each in attribute_docstrings(Path(module.__file__)):
                if each.name == name:
                    return f"{each.text} (`{type(value).__name__}`)"
    return f"An object of the class `{type(value).__name__}`."


@dataclass(frozen=True)
class Documented:
    """An attribute with a docstring below it. owner: its class, or "" for a module's own."""

    owner: str
    name: str
    text: str


def attribute_docstrings(path: Path) -> Iterator[Documented]:
    """The attributes with docstrings in a file."""
    tree = ast.parse(path.read_text())
    owners: list[ast.Module | ast.ClassDef] = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
    for owner in owners:
        for node, after in zip(owner.body, owner.body[1:], strict=False):
            target = node.target if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [None])[0]
            if isinstance(target, ast.Name) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = " ".join(str(after.value.value).split())
                yield Documented(getattr(owner, "name", ""), target.id, text)


def settings() -> str:
    """Every setting, with its meaning, its default and the older name that is read, too."""
    older, lines = horovods(), []
    for names, text, default in sorted(settings_described()):
        lines += [f"(setting-{name.lower().replace('_', '-')})=" for name in names]
        lines += [f"## {', '.join(f'HVDLITE_{name}' for name in names)}", "", text, ""]
        facts = [f"Default: {default}."] if default else []
        if read := [f"`HOROVOD_{name}`" for name in names if name in older]:
            facts.append(f"Horovod's name is read, too: {', '.join(read)}.")
        lines += [" ".join(facts), ""]
    return "\n".join(lines)


def settings_described() -> Iterator[tuple[list[str], str, str]]:
    """For each documented setting its names without HVDLITE_, its meaning, and its default, or "" for none."""
    classes = {"Config": config.Config(), "StallLimits": config.StallLimits()}
    classes |= {"TimelineFile": config.TimelineFile(), "LogStyle": config.LogStyle()}
    for each in attribute_docstrings(Path(str(config.__file__))):
        names = re.findall(r"`(?:HVDLITE|HOROVOD)_([A-Z_]+)", each.text)
        if each.owner in classes and names:
            yield list(dict.fromkeys(names)), chosen(each.text), shown(getattr(classes[each.owner], each.name))
    for name, text in config.READ_ELSEWHERE.items():
        yield [name], text, ""


def chosen(text: str) -> str:
    """A docstring for users: with the values of the constants that list choices, without the variable's own name."""
    for name in ("ALGORITHMS", "REPLICA_CHECKS", "LOG_LEVELS"):
        values = ", ".join(f"`{value}`" for value in getattr(config, name))
        text = text.replace(f"One of {name}", f"One of {values}")
    text = re.sub(r"[.;] `HVDLITE_\w+`(, `(HVDLITE|HOROVOD)_\w+`)*\.", ".", text)  # which the heading says
    ours = "If both are unset, 25 MiB, and less if buckets leave during backward"
    return text.replace("None: `gradients.policy` chooses", ours).replace("None:", "unset:")


def shown(value: object) -> str:
    """A default as a user would write the variable; "" if the variable is unset by default."""
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        value = int(value)
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def horovods() -> set[str]:
    """The settings, without prefix, that are read from HOROVOD_X where HVDLITE_X is unset."""
    found = set()
    for node in ast.walk(ast.parse(Path(str(config.__file__)).read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "read_either":
            name = node.args[1]
            found.add(name.value if isinstance(name, ast.Constant) else getattr(config, ast.unparse(name), ""))
    return {str(name) for name in found} - {""}


def command_line() -> str:
    """The options of `hvdliterun`, as its `--help` has them."""
    parser = options.command_parser()
    lines = [str(parser.description), "", "```text", str(parser.usage), "```", ""]
    for group in parser._action_groups:
        shown_actions = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        flags = [action for action in shown_actions if action.option_strings]
        if flags:
            title = {"options": "The job", "settings of hvdlite": "Settings"}.get(str(group.title), str(group.title))
            lines += [f"## {title[0].upper()}{title[1:]}", "", "```{eval-rst}", ".. program:: hvdliterun", ""]
            for action in flags:
                lines += [f".. option:: {', '.join(spelt(action))}", "", f"   {escaped(str(action.help))}", ""]
            lines += ["```", ""]
    examples, *notes = str(parser.epilog).split("\n\n")
    lines += ["## Examples", "", "```text", re.sub("(?m)^  ", "", examples.removeprefix("examples:\n")), "```", ""]
    lines += ["## Output and exit code", "", "```{eval-rst}", *(f"{escaped(note)}\n" for note in notes), "```", ""]
    without = [tunable for tunable in tunables.TUNABLES if tunable.no_effect]
    lines += ["## Options of horovodrun without an effect", "", "| option | why |", "|---|---|"]
    for each in without:
        reason = FLAG.sub(r"`\1`", str(each.no_effect))
        lines.append(f"| `{each.flag}` | {reason} |")
    return "\n".join([*lines, ""])


def spelt(action: argparse.Action) -> list[str]:
    """The spellings of a flag, each with the name of its value."""
    value = f" {action.metavar or action.dest.upper()}" if action.nargs != 0 else ""
    return [f"{flag}{value}" for flag in action.option_strings]


def escaped(text: str) -> str:
    """A plain text as the reStructuredText that shows it, with flags as code."""
    quoted = re.sub(r"([\\*`|_])", r"\\\1", text).replace("%%", "%")
    return FLAG.sub(r"``\1``", quoted)


def support() -> str:
    """The table that the tests have written."""
    lines = ["| what | with | ranks | passed | when, where |", "|---|---|---|---|---|"]
    area = ""
    for row in json.loads((Path(__file__).parent / "support.json").read_text()):
        passed = f"{row['passed']}, **{row['failed']} failed**" if row["failed"] else row["passed"]
        title = row["area"] if row["area"] != area else ""
        area = row["area"]
        lines.append(f"| {title} | {row['versions']} | {row['ranks']} | {passed} | {row['date']}, {row['where']} |")
    return "\n".join([*lines, ""])


PARTS: dict[str, Callable[..., str]] = {
    "api": api, "settings": settings, "command-line": command_line, "support": support,
}  # fmt: skip
