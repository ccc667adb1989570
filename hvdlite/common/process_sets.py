"""Process sets under the name of Horovod's module."""

from hvdlite.membership import add_process_set, remove_process_set
from hvdlite.process_sets import ProcessSet, global_process_set

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
