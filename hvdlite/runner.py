"""`run` under the name of Horovod's module."""

from hvdlite.launch import run

__all__ = ["run"]
