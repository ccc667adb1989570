"""The process set of this rank's host, for strategies that average gradients within hosts."""

from __future__ import annotations

from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet, global_process_set


def host_set(process_set: ProcessSet) -> ProcessSet | None:
    """Return the process set of this host's ranks; None if no other rank is on this host. Collective over all ranks.

    Raises:
        NotImplementedError: The strategy is for another process set than the global one.
    """
    if process_set is not global_process_set:
        raise NotImplementedError("a strategy that averages within hosts works for all ranks, not for a process_set")
    live = runtime.current()
    if live.topology.one_host:
        return global_process_set
    mine = None
    for ranks in live.topology.hosts:
        if len(ranks) == 1:
            continue
        theirs = ProcessSet(ranks)
        if ranks in live.groups.ranks.values():
            live.groups.find_again([theirs])
        else:
            live.groups.add(theirs)
        mine = theirs if live.topology.rank in ranks else mine
    return mine
