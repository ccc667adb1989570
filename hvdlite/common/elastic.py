"""`horovod.common.elastic`: states and `run_fn`."""

from hvdlite.elastic import ObjectState, State, run_fn

__all__ = ["ObjectState", "State", "run_fn"]
