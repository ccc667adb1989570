"""Names of a framework that it does not promise to keep, each looked up when it is needed and never on import.

An adapter lists all of its private names in one file (`keras/private_api.py`, `tensorflow/private_api.py`). When a
version of the framework lacks a name, `DistributedOptimizer` raises an error that says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hvdlite.errors import HvdliteError


@dataclass(frozen=True)
class PrivateName:
    """One private name: where it is, and what hvdlite uses it for.

    Attributes:
        module: The module to import, such as "tensorflow.python.eager.record".
        path: The attribute in that module, such as "Optimizer._backend_update_step".
        purpose: What hvdlite does with it; ends the sentence "hvdlite uses it to ...".
        since: The oldest version that hvdlite was tested with. All of them have the name.
    """

    module: str
    path: str
    purpose: str
    since: str

    def get(self) -> Any:
        """What the name stands for. Raises HvdliteError when this version of the framework lacks it."""
        try:
            found = importlib.import_module(self.module)
            for part in self.path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise HvdliteError(self.lacking()) from error
        return found

    def of(self, owner: Any) -> Any:
        """The attribute of this name of an object. Raises HvdliteError when the object lacks it."""
        try:
            return getattr(owner, self.attribute)
        except AttributeError as error:
            raise HvdliteError(self.lacking()) from error

    @property
    def attribute(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    def lacking(self, how: str = "is missing") -> str:
        """The error's text. how: what is wrong with the name in this version of the framework."""
        framework = self.module.partition(".")[0]
        version = getattr(importlib.import_module(framework), "__version__", "of an unknown version")
        return (
            f"hvdlite does not work with {framework} {version}: {self.module}.{self.path} {how}. hvdlite uses it to "
            f"{self.purpose}. {framework} {self.since} has it: install one of the versions that hvdlite's README lists "
            "as tested"
        )


def require(names: Iterable[PrivateName]) -> None:
    """Raise HvdliteError when one of the names is missing."""
    for name in names:
        name.get()
