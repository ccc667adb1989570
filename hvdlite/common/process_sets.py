"""`horovod.common.process_sets`: process sets."""

from hvdlite.api.process_sets import add_process_set, remove_process_set
from hvdlite.job.process_sets import ProcessSet, global_process_set

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
