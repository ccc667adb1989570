"""The names of the package `hvdlite` that serve every framework.

`hvdlite` imports this module when the first of these names is used, because scripts need them from `init()` on. The
import takes several times as long as the rest of `import hvdlite`.
"""

from __future__ import annotations

from hvdlite.api.collectives import *  # noqa: F403
from hvdlite.api.collectives import __all__ as _collectives
from hvdlite.api.names import *  # noqa: F403
from hvdlite.api.names import __all__ as _names
from hvdlite.api.run import run
from hvdlite.errors import (
    HorovodInternalError,
    HvdliteError,
    MismatchError,
    NotInitializedError,
    ShutdownError,
    StallError,
)
from hvdlite.ops import Op, barrier
from hvdlite.ops.join import join
from hvdlite.ops.objects import allgather_object, broadcast_object

__all__ = [
    *_collectives, *_names, "HorovodInternalError", "HvdliteError", "MismatchError", "NotInitializedError", "Op",
    "ShutdownError", "StallError", "allgather_object", "barrier", "broadcast_object", "join", "run",
]  # fmt: skip
