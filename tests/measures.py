"""The measures of the house: what a reader may expect of every file. `python -m tests.measures` prints them.

A class has at most 12 attributes, a function at most 6 parameters, an assignment at most two targets in a chain. `Any`
is at most 5 % of the annotations. Every module has a room (`ROOMS`) and imports only rooms above its own. Private names
of frameworks stand in `private_api.py`. The environment is read by `config` and `system/launcher_environment`. What a
process remembers is kept in `job`. A public function has Args where it has parameters, and Returns where it returns
something. `python -m tests.measures torch ops` prints the rows of these rooms alone. `tests/explained.py` names the
exceptions, each with its reason.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from tests.explained import EXPLAINED

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"hvdlite": ROOT, "hvdlite_launcher": ROOT / "launcher"}
ROOMS = (
    "errors", "config", "system", "arrays", "gpu_streams", "transports", "memory", "algorithms", "compression", "lanes", "observers",
    "job", "ops", "gradients", "sharding", "checkpoints", "strategies", "api", "elastic", "numpy",
    "common", "torch", "tensorflow_graph", "keras", "tensorflow", "", "runner", "check", "task", "cuda_trial", "bench",
)  # fmt: skip
"""A room may import only rooms before it. "" is the package itself."""
WINDOWS = (
    "hvdlite", "hvdlite.api.names", "hvdlite.numpy", "hvdlite.elastic", "hvdlite.torch",
    "hvdlite.torch.mpi_ops", "hvdlite.torch.elastic", "hvdlite.keras", "hvdlite.keras.callbacks",
    "hvdlite.keras.elastic", "hvdlite.tensorflow", "hvdlite.tensorflow.mpi_ops", "hvdlite.tensorflow.elastic",
)  # fmt: skip
"""Modules that users import. What they import from hvdlite's modules or name in __all__ is public."""
WITHOUT_SECTIONS: frozenset[str] = frozenset()
"""Public functions that need no sections. This list may only shrink."""
LIBRARIES = {"sys", "threading", "ctx", "mpi4py.rc"}
"""Owners of fields that belong to other libraries, where assigning them is the library's interface."""
READ_THE_ENVIRONMENT = ("hvdlite.config", "hvdlite.system.launcher_environment")
KEEPS_STATE = "job"
MOST_ATTRIBUTES, MOST_PARAMETERS, MOST_CHAINED, MOST_ANY = 12, 6, 2, 0.05


@cache
def modules(package: str = "hvdlite") -> dict[str, Path]:
    """All modules of a package, by dotted name. Nobody may change the answer."""
    base = PACKAGES[package]
    found = {}
    for path in sorted((base / package).rglob("*.py")):
        parts = path.relative_to(base).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room(module: str) -> str:
    """'hvdlite.transports.mpi' lies in 'transports'; 'hvdlite' itself in ''."""
    return [*module.split("."), ""][1]


def imports(path: Path, names: set[str]) -> set[str]:
    """The modules among `names` that a file imports, anywhere in it: lazily and under TYPE_CHECKING, too."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {nearest(alias.name, names) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {nearest(f"{node.module}.{alias.name}", names) for alias in node.names}
    return found - {""}


def nearest(name: str, names: set[str]) -> str:
    """The module that a dotted name lies in: 'hvdlite.arrays' for 'hvdlite.arrays.module'; '' for none of these."""
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name


def graph(package: str = "hvdlite") -> dict[str, set[str]]:
    """For each module those that it imports."""
    found = modules(package)
    return {module: imports(path, set(found)) - {module} for module, path in found.items()}


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, however indirectly (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in arrows[module]:
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            at = stack.index(module)
            if len(stack) > at + 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for module in arrows:
        if module not in index:
            visit(module)
    return found


def against_the_order() -> list[str]:
    """Modules without a room, and imports of a room that comes later."""
    found = [f"{module} has no room" for module in modules() if room(module) not in ROOMS]
    for module, used in graph().items():
        for other in sorted(used):
            if room(module) in ROOMS and ROOMS.index(room(other)) > ROOMS.index(room(module)):
                found.append(f"{module} imports {other}")
    return found


@cache
def parsed(path: Path) -> ast.Module:
    """A file's syntax tree. Nobody may change it."""
    return ast.parse(path.read_text())


def trees() -> Iterator[tuple[str, ast.Module]]:
    """Each module of both packages, parsed."""
    for package in PACKAGES:
        for module, path in modules(package).items():
            yield module, parsed(path)


def large_classes() -> list[str]:
    """Classes with more than MOST_ATTRIBUTES attributes of their own."""
    found = []
    for module, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and len(own := attributes(node)) > MOST_ATTRIBUTES:
                found.append(f"{module}.{node.name}: {len(own)} attributes")
    return found


def attributes(node: ast.ClassDef) -> set[str]:
    """What a class' methods set on self, and what its body annotates."""
    found = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for each in ast.walk(node):
        if isinstance(each, (ast.Assign, ast.AnnAssign)):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            for target in targets:
                for part in ast.walk(target):
                    if (
                        isinstance(part, ast.Attribute)
                        and isinstance(part.value, ast.Name)
                        and part.value.id == "self"
                        and isinstance(part.ctx, ast.Store)
                    ):
                        found.add(part.attr)
    return found


def long_signatures() -> list[str]:
    """Functions with more than MOST_PARAMETERS parameters, `self` not counted. Public ones have Horovod's."""
    found, public = [], {(name.rpartition(".")[0], node.name) for name, node in public_functions()}
    for module, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                count = len([name for name in names if name not in ("self", "cls")])
                if count > MOST_PARAMETERS and (module, node.name) not in public:
                    found.append(f"{module}.{node.name}: {count} parameters")
    return found


def chains() -> list[str]:
    """Statements that assign one value to more than MOST_CHAINED targets."""
    return [
        f"{module}:{node.lineno}"
        for module, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and len(node.targets) > MOST_CHAINED
    ]


def foreign_writes() -> list[str]:
    """Assignments to an attribute of another object than self, where one of our classes has an attribute so named."""
    ours = {
        name
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for name in attributes(node)
    }
    found = []
    for module, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in ours:
                owner = ast.unparse(node.value)
                if owner not in {"self", "cls", *LIBRARIES}:
                    found.append(f"{module}: {owner}.{node.attr}")
    return sorted(set(found))


def reads_of_the_environment() -> list[str]:
    """Modules of hvdlite that read or write the environment, other than READ_THE_ENVIRONMENT."""
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    found = {
        f"{module}: os.{node.attr}"
        for module, tree in trees()
        if module.split(".")[0] == "hvdlite" and module not in READ_THE_ENVIRONMENT
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in names
    }
    return sorted(found)


def state_elsewhere() -> list[str]:
    """Names of modules outside KEEPS_STATE that functions assign by `global`."""
    found = {
        f"{module}: {name}"
        for module, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Global) and room(module) != KEEPS_STATE
        for name in node.names
    }
    return sorted(found)


def public_names() -> set[tuple[str, str]]:
    """Module and name of what users reach through WINDOWS."""
    found = set()
    paths = modules()
    for window in WINDOWS:
        for node in ast.walk(parsed(paths[window])):
            if isinstance(node, ast.ImportFrom) and (window.count(".") < 2 or window.endswith(("mpi_ops", "names"))):
                found |= {(str(node.module), alias.name) for alias in node.names}
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("__all__", "_OWN"):
                texts = [each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
                found |= {(window, text) for text in texts if isinstance(text, str)}
    return found


def public_functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions that users call, and public methods of public classes, by dotted name."""
    public = public_names()
    rooms = ("lanes", "algorithms", "system", "gradients")  # whose functions adapters use, and users do not
    for module, path in modules().items():
        for node in parsed(path).body if room(module) not in rooms else ():
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and (module, node.name) in public:
                inside = node.body if isinstance(node, ast.ClassDef) else ()
                for each in (node, *inside):
                    if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
                        yield f"{module}.{node.name}" + (f".{each.name}" if each is not node else ""), each


def lacking_sections() -> list[str]:
    """Public functions with a docstring that lacks Args though they have parameters, or Returns though they return."""
    found = []
    for name, node in public_functions():
        text = ast.get_docstring(node)
        lacking = missing_sections(node, text) if text else []
        if lacking and name not in WITHOUT_SECTIONS:
            found.append(f"{name}: no {' and no '.join(lacking)}")
    return found


def missing_sections(node: ast.FunctionDef, text: str) -> list[str]:
    """Which of Args and Returns a docstring lacks. A property and a framework's callback need neither, and a fact like
    `rank()` one line."""
    decorators = {ast.unparse(each) for each in node.decorator_list}
    if decorators & {"property", "cached_property", "overload"} or node.name.startswith("on_"):
        return []
    given = node.args
    parameters = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    takes = any(name not in ("self", "cls") for name in parameters) or given.vararg is not None
    returns = node.returns is not None and ast.unparse(node.returns) not in ("None", "NoReturn")
    lines = {line.strip() for line in text.splitlines()}
    lacking = ["Args"] if takes and "Args:" not in lines else []
    if returns and not lines & {"Returns:", "Yields:"} and (takes or len(lines) > 1):
        lacking.append("Returns")
    return lacking


def annotations_of(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = node.args
            for each in (
                *arguments.posonlyargs,
                *arguments.args,
                *arguments.kwonlyargs,
                arguments.vararg,
                arguments.kwarg,
            ):
                if each is not None and each.annotation is not None:
                    yield each.annotation
            if node.returns is not None:
                yield node.returns
        elif isinstance(node, ast.AnnAssign):
            yield node.annotation


def names_for_any() -> set[str]:
    """`Any`, and the aliases that stand for a type which contains it."""
    found = {"Any"}
    while True:
        more = {
            node.target.id
            for _, tree in trees()
            for node in ast.walk(tree)
            if isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and "TypeAlias" in ast.unparse(node.annotation)
            and node.value is not None
            and mentions(node.value, found)
        }
        if more <= found:
            return found
        found |= more


def mentions(node: ast.expr, names: set[str]) -> bool:
    return any(
        (isinstance(part, ast.Name) and part.id in names) or (isinstance(part, ast.Attribute) and part.attr in names)
        for part in ast.walk(node)
    )


def share_of_any(name: str = "hvdlite") -> tuple[int, int]:
    """How many annotations mention Any or an alias of it, and how many there are, in a package or a room."""
    names = names_for_any()
    found = [
        mentions(annotation, names)
        for module, tree in trees()
        if name in (module.split(".")[0], room(module))
        for annotation in annotations_of(tree)
    ]
    return sum(found), len(found)


def all_circles() -> list[str]:
    """Groups of modules that import each other, in both packages."""
    return [" ".join(each) for package in PACKAGES for each in circles(graph(package))]


MEASURES: dict[str, Callable[[], list[str]]] = {
    "import circles": all_circles,
    "imports against the order of rooms": against_the_order,
    f"classes with more than {MOST_ATTRIBUTES} attributes": large_classes,
    f"functions with more than {MOST_PARAMETERS} parameters": long_signatures,
    f"assignments to more than {MOST_CHAINED} targets": chains,
    "writes to another object's fields": foreign_writes,
    "reads of the environment outside config and launcher_environment": reads_of_the_environment,
    f"module-level state outside {KEEPS_STATE}": state_elsewhere,
    "public docstrings without Args or Returns": lacking_sections,
}
"""Each measure's rows, explained or not. `share_of_any` is the one that is a number."""


def main() -> None:
    rooms = sys.argv[1:]
    for title, measure in MEASURES.items():
        found = measure()
        rows = [row for row in found if row not in EXPLAINED and (not rooms or room(row.split(":")[0]) in rooms)]
        print(
            f"{title}: {len(rows)}, and {len([row for row in found if row in EXPLAINED])} explained",
            *rows,
            sep="\n    ",
        )
    for name in rooms or PACKAGES:
        some, all_of_them = share_of_any(name)
        print(f"annotations with Any in {name}: {some} of {all_of_them}, {100 * some / max(1, all_of_them):.1f} %")


if __name__ == "__main__":
    main()
