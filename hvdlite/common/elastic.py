"""States and `run_fn` under the name of Horovod's module."""

from hvdlite.elastic import ObjectState, State, run_fn

__all__ = ["ObjectState", "State", "run_fn"]
