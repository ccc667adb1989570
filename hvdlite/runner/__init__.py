"""`horovod.runner`: `run` under the name of Horovod's module."""

from hvdlite.api.run import run

__all__ = ["run"]
