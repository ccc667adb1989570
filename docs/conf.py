"""How Sphinx builds the documentation: `make docs`."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "launcher")]

from sphinx.application import Sphinx
from sphinx.ext.autodoc.mock import _MockObject, mock

import hvdlite
from docs import docstrings, generate

project = "hvdlite"
author = "the hvdlite developers"
copyright = "2026, the hvdlite developers"
version = release = hvdlite.__version__
extensions = [
    "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_design", "sphinx_copybutton",
]  # fmt: skip
exclude_patterns = ["_build", "packaging"]

smartquotes_action = "D"  # quotes stay as they are: many belong to code
pygments_style, pygments_dark_style = "friendly", "monokai"  # added lines are green, removed ones red
html_theme = "furo"
html_title = f"hvdlite {release}"
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False
html_show_sourcelink = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_heading_slug_func = "docs.generate.anchor"

default_role = "py:obj"  # `name` in a docstring links to the name if it is public, and is code otherwise
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Yields"]
autodoc_member_order = "bysource"
autoclass_content = "both"  # the arguments stand in the docstring of __init__
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
FRAMEWORKS = ["torch", "tensorflow", "keras", "jax", "cupy", "lightning", "mpi4py"]
"""Modules that the build pretends to have, so that it needs none of them, and shows the same pages everywhere."""
autodoc_mock_imports = FRAMEWORKS

if os.environ.get("HVDLITE_DOCS_INTERSPHINX"):  # needs a network
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
    }


def import_all(app: Sphinx) -> None:
    """Import the modules with public names, once, with pretended frameworks. autodoc finds them in `sys.modules`."""

    class Model:
        """Keras' model, whose methods a Chain wraps."""

        def fit(self, *args: object, **kwargs: object) -> None: ...

    for method in ("evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"):
        setattr(Model, method, Model.fit)
    Model.__module__, Model.__qualname__ = "keras", "Model"
    _MockObject.__bool__ = lambda self: True  # `found(name) or missing`
    _MockObject.__int__ = lambda self: 0  # the number of a storage
    pretended = ExitStack()
    pretended.enter_context(mock(FRAMEWORKS))
    app.connect("build-finished", lambda *_: pretended.close())  # until then modules import names at their first use
    keras: Any = importlib.import_module("keras")
    keras.backend = SimpleNamespace(backend=lambda: "tensorflow")
    keras.Model = Model
    generate.homes()


def fill(app: Sphinx, name: str, source: list[str]) -> None:
    """Put generated parts in the places of their marks."""
    source[0] = generate.filled(source[0])


def constructor(app: Sphinx, what: str, name: str, value: Any, *rest: object) -> tuple[str, str] | None:
    """The arguments of a class whose base is pretended: those of its `__init__`. autodoc sees the base's `__new__`."""
    if what != "class" or _MockObject not in getattr(value, "__mro__", ()):
        return None
    for each in value.__mro__:
        if "__init__" in vars(each) and each.__module__.startswith("hvdlite"):
            (function,) = ast.parse(textwrap.dedent(inspect.getsource(each.__init__))).body
            assert isinstance(function, ast.FunctionDef)
            del function.args.args[0]
            return f"({ast.unparse(function.args)})", ""
    return None


def adapt(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Write a docstring's plain text as the reStructuredText that shows it. Runs before napoleon."""
    lines[:] = docstrings.adapted("\n".join(lines))


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    import_all(app)
    app.connect("source-read", fill)
    app.connect("autodoc-process-signature", constructor)
    app.connect("autodoc-process-docstring", adapt, priority=400)
