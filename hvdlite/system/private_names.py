"""Private names of a framework, which its next version may lack. Each is looked up when it is needed, never on import.

The adapters for Keras and TensorFlow list their names in `keras/private_api.py` and `tensorflow_graph/private_api.py`.
If a name that all optimizers or tapes need is missing, attaching one raises an error that says so. For other names the
first use raises it. torch has its own list (`torch/private_api.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hvdlite.errors import HvdliteError


@dataclass(frozen=True)
class PrivateName:
    """One private name, and its use.

    Attributes:
        module: The module to import, such as "tensorflow.python.eager.record".
        path: The attribute in that module, such as "Optimizer._backend_update_step".
        purpose: The end of the sentence "hvdlite uses it to ...".
        since: The oldest version of the framework that hvdlite was tested with, which has the name.
    """

    module: str
    path: str
    purpose: str
    since: str

    def get(self) -> Any:
        """The object of this name. Raises HvdliteError if this version of the framework lacks the name."""
        try:
            found = importlib.import_module(self.module)
            for part in self.path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise HvdliteError(self.lacking()) from error
        return found

    def of(self, owner: object) -> Any:
        """The attribute of `owner` with this name. Raises HvdliteError if `owner` lacks it."""
        try:
            return getattr(owner, self.attribute)
        except AttributeError as error:
            raise HvdliteError(self.lacking()) from error

    @property
    def attribute(self) -> str:
        """The last part of `path`."""
        return self.path.rpartition(".")[2]

    def lacking(self, how: str = "is missing") -> str:
        """The error's text. how: the difference in this version of the framework, such as "is missing"."""
        framework = self.module.partition(".")[0]
        version = getattr(importlib.import_module(framework), "__version__", "of an unknown version")
        return (
            f"hvdlite does not work with {framework} {version}: {self.module}.{self.path} {how}. hvdlite uses it to "
            f"{self.purpose}. {framework} {self.since} has it: install one of the versions that hvdlite's "
            "documentation lists as tested [HVD114]"
        )


def require(names: Iterable[PrivateName]) -> None:
    """Raise HvdliteError if one of the names is missing."""
    for name in names:
        name.get()
