"""`run` under the name of Horovod's module, and what else scripts import from there."""

from hvdlite.api.run import run

__all__ = ["run"]
