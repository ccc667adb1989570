"""Makes process groups. Only a group's members take part, in any order of calls.

The members first meet in torch's store. There each tells its number in the MPI job, since torch's ranks may have
another order, and which groups of the same ranks are idle here. A group that was destroyed on all its members is used
again, since MPIs have about 2,000 communicators only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hvdlite.errors import HvdliteError
from hvdlite.job import runtime
from hvdlite.job.groups import Group
from hvdlite.system import launcher_environment
from hvdlite.torch.distributed.limits import refuse_builtin_compression
from hvdlite.torch.distributed.process_group import MpiProcessGroup


class Options(Protocol):
    """What torch tells the creator of a process group."""

    store: Store
    group_rank: int
    group_size: int
    group_id: str
    timeout: timedelta
    global_ranks_in_group: list[int]


def create(options: Options) -> dist.ProcessGroup:
    """Make a process group. Collective over its ranks; waits for all of them.

    Begins the job if `hvd.init()` has not. The job then lasts until the process ends.

    Raises:
        HvdliteError: This process cannot be a rank, the group has more ranks than the job, or its ranks are not all
            ranks of a job not begun yet.
    """
    begin(options.group_size)
    job = runtime.current().groups.size
    if options.group_size > job:
        raise HvdliteError(
            f"this group has {options.group_size} ranks, but the MPI job of this process has {job}: start the script "
            "with hvdliterun, mpirun or srun, and not with torchrun or without a launcher [HVD504]"
        )
    refuse_builtin_compression()
    group = opened(options)
    return MpiProcessGroup(options.store, options.group_id, options.group_rank, group, options.timeout)


def begin(size: int) -> None:
    """Begin the job, if there is none. Collective over all ranks of the job."""
    if runtime.is_initialized():
        return
    launched = launcher_environment.launcher()
    if launched and launched.size not in (None, size):
        raise HvdliteError(
            f"this group has {size} of the MPI job's {launched.size} ranks, and hvdlite starts on all ranks at once: "
            'call hvd.init() on every rank first, or init_process_group("hvdlite") [HVD501]'
        )
    runtime.init()


def opened(options: Options) -> Group:
    """The group of these ranks. Collective over them."""
    live = runtime.current()
    ranks = tuple(map(int, everyones(options, "rank", str(live.topology.rank))))
    same = live.groups.private.get(ranks, [])
    mine = {number: counts(group) for number, group in enumerate(same) if group.idle}
    said = [json.loads(text) for text in everyones(options, "idle", json.dumps(mine))]
    common = [number for number in map(str, mine) if all(number in theirs for theirs in said)]
    free = (int(number) for number in common if all_received([theirs[number] for theirs in said]))
    group = live.groups.open_private(ranks, next(free, len(same)))
    group.take()
    return group


def counts(group: Group) -> list[list[int]]:
    """The numbers of messages that this rank has sent to each rank of the group, and received from each."""
    return [[counted[rank] for rank in range(group.size)] for counted in (group.post.sent, group.post.received)]


def all_received(everyones: Sequence[list[list[int]]]) -> bool:
    """Whether no message of a group is under way. everyones: the `counts` of its ranks."""
    sent, received = zip(*everyones, strict=True)
    return list(map(list, zip(*sent, strict=True))) == list(received)


def everyones(options: Options, what: str, mine: str) -> list[str]:
    """Each rank's text, in the order of the group's ranks. Waits for all of them, at most for the group's timeout."""
    keys = [f"{what} {rank}" for rank in range(options.group_size)]
    options.store.set(keys[options.group_rank], mine)
    options.store.wait(keys, options.timeout)
    return [said.decode() for said in options.store.multi_get(keys)]
