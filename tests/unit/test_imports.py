"""The import rules, read from the source; and what a fresh `import hvdlite` does not load."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdlite.api import names
from tests import measures
from tests.measures import modules, room

ROOT = Path(__file__).resolve().parents[2]
ADAPTERS = ("torch", "tensorflow_graph", "tensorflow", "keras", "numpy")
FRAMEWORKS = ("torch", "tensorflow", "keras", "jax", "cupy")


def imports(path: Path, everywhere: bool = True) -> Iterator[str]:
    """The dotted names that a module imports, at its top only or everywhere. `if TYPE_CHECKING` is left out."""
    nodes: list[ast.AST] = list(measures.parsed(path).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif everywhere or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            nodes.extend(ast.iter_child_nodes(node))


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_rooms() -> None:
    """Each module has a room, and imports rooms before its own only, also lazily and under TYPE_CHECKING."""
    assert measures.against_the_order() == []


@pytest.mark.parametrize("package", measures.PACKAGES)
def test_no_circles(package: str) -> None:
    assert measures.circles(measures.graph(package)) == []


OVER_MPI = ("hvdlite.transports.mpi", "hvdlite.transports.mpi_requests")


def test_only_connect_and_the_transport_import_mpi() -> None:
    for module, path in modules().items():
        if module not in ("hvdlite.job.connect", *OVER_MPI) and room(module) != "bench":
            assert not [name for name in imports(path) if within(name, "mpi4py")], module


def test_mpi_is_imported_only_when_called() -> None:
    for module in ("hvdlite.job.connect", "hvdlite.job.runtime", "hvdlite"):
        path = modules()[module]
        assert not [n for n in imports(path, everywhere=False) if within(n, "mpi4py", *OVER_MPI)], module


def test_only_adapters_import_their_framework() -> None:
    """torch/ imports torch, and so on. The core imports no framework, and finds CuPy through its arrays."""
    for module, path in modules().items():
        if room(module) in ("bench", "check"):
            continue
        own = {
            "torch": ("torch",), "tensorflow": ("tensorflow", "keras"), "tensorflow_graph": ("tensorflow",),
            "keras": ("keras", "tensorflow", "torch", "jax"),
        }  # fmt: skip
        foreign = [name for name in FRAMEWORKS if name not in own.get(room(module), ())]
        assert not [name for name in imports(path) if within(name, *foreign)], module


def test_the_core_imports_no_adapter() -> None:
    """`frameworks` finds adapters by name, lazily."""
    packages = [f"hvdlite.{name}" for name in ADAPTERS]
    for module, path in modules().items():
        if room(module) not in (*ADAPTERS, "bench"):
            assert not [name for name in imports(path) if within(name, *packages)], module


def test_only_a_chains_backends_import_a_framework() -> None:
    """The other modules of `keras/chain/` serve Keras on TensorFlow and on PyTorch."""
    for module, path in modules().items():
        if within(module, "hvdlite.keras.chain") and module != "hvdlite.keras.chain.torch_backend":
            foreign = ("torch", "tensorflow", "hvdlite.torch", "hvdlite.tensorflow_graph")
            assert not [name for name in imports(path) if within(name, *foreign)], module


def test_the_benchmarks_need_no_torch() -> None:
    assert python("import sys\nsys.modules['torch'] = None\nimport hvdlite.bench.__main__\nprint('there')") == "there\n"


def test_the_launcher_imports_nothing_of_hvdlite() -> None:
    found = modules("hvdlite_launcher")
    assert found
    for module, path in found.items():
        assert not [name for name in imports(path) if within(name, "hvdlite", "mpi4py", *FRAMEWORKS)], module


def test_the_benchmarks_alone_initialize_no_mpi() -> None:
    """As a singleton, Open MPI would leave a file in shared memory, even for `--help`."""
    python(
        "import hvdlite.bench.__main__\nfrom mpi4py import MPI\nassert not MPI.Is_initialized()\n"
        "import hvdlite\nhvdlite.init()\nassert hvdlite.size() == 1 and not MPI.Is_initialized()"
    )


def python(code: str, env: dict[str, str] | None = None) -> str:
    """What Python prints. env: its environment, if not this process' own."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=env).stdout


def test_import_is_light() -> None:
    """MPI is not initialized, and neither frameworks nor other slow modules are loaded.

    (Importing mpi4py.MPI calls MPI_Init.)
    """
    heavy = ["mpi4py.MPI", "torch", "tensorflow", "keras", "cupy", "rich", "cloudpickle"]
    assert python(f"import hvdlite, sys; print([name for name in {heavy} if name in sys.modules])").strip() == "[]"


def test_import_is_quick(tmp_path: Path) -> None:
    """It takes about as long as NumPy's own import (some 55 ms), once Python has compiled it."""
    code = """if True:
        import time
        began = time.process_time()
        import numpy
        between = time.process_time()
        import hvdlite
        print((time.process_time() - between) / (between - began))
    """
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    assert min(float(python(code, env)) for _ in range(6)) < 1.4


def test_import_for_tensorflow_is_quick() -> None:
    """It takes less than a tenth of TensorFlow's own import."""
    code = """if True:
        import time
        began = time.process_time()
        import tensorflow
        between = time.process_time()
        import hvdlite.tensorflow
        print((time.process_time() - between) / (between - began))
    """
    assert float(python(code)) < 0.1


def test_type_checkers_see_all_names(tmp_path: Path) -> None:
    """mypy sees the names of jobs and ranks, and each module's own. It does not read `*names.__all__` in a list."""
    skipped = "[mypy-torch.*,tensorflow.*,keras.*,numpy.*,mpi4py.*]\nfollow_imports = skip\n"
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nstrict = True\nfollow_imports = silent\nmypy_path = {ROOT}\n{skipped}")
    script = []
    for module in ("hvdlite", *(f"hvdlite.{name}" for name in ("torch", "tensorflow", "keras", "tensorflow.keras"))):
        alias = module.replace(".", "_")
        script += [f"import {module} as {alias}", f"{alias}.DistributedOptimizer, {alias}.broadcast_object"]
        script += [f"{alias}.{name}" for name in [*names.__all__, "print"]]
    (tmp_path / "script.py").write_text("\n".join(script))
    mypy = [sys.executable, "-m", "mypy", "--config-file=mypy.ini", "--cache-dir=cache", "script.py"]
    found = subprocess.run(mypy, capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_job_of_one_needs_no_mpi() -> None:
    """Without a launcher everything works, torch too, and MPI is never touched."""
    code = """
import sys, numpy as np
import hvdlite as hvd
hvd.init()
assert (hvd.rank(), hvd.size(), hvd.local_size()) == (0, 1, 1)
assert hvd.allreduce(np.arange(3.0), op=hvd.Sum).tolist() == [0, 1, 2]
assert hvd.allgather(np.ones((2, 3))).shape == (2, 3) and hvd.broadcast_object("x") == "x"
hvd.barrier(); hvd.shutdown()
print("mpi4py.MPI" in sys.modules)
"""
    assert python(code).strip() == "False"
