"""Process sets: their life, their rules, and collectives within them, by arithmetic from the members' ranks."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import hvdlite as hvd
from hvdlite import ops
from hvdlite.job import runtime
from tests.parallel.common import require_error, require_mismatch


def restart(comm: Any = None, process_sets: Any = None) -> None:
    hvd.shutdown()
    os.environ.pop("HOROVOD_DYNAMIC_PROCESS_SETS", None)
    hvd.init(comm, process_sets)


def total(process_set: hvd.ProcessSet, **how: object) -> float:
    return float(hvd.allreduce(np.array([float(hvd.rank())]), op=hvd.Sum, process_set=process_set, **how)[0])


def lists(*given: Sequence[int]) -> list[hvd.ProcessSet]:
    """Sets of the existing ones among these ranks, if that gives a new set."""
    found: list[list[int]] = [list(range(hvd.size()))]
    for ranks in given:
        kept = [rank for rank in ranks if rank < hvd.size()]
        if kept and kept not in found:
            found.append(kept)
    return [hvd.ProcessSet(ranks) for ranks in found[1:]]


def check_static_sets() -> None:
    """Sets are numbered from 1 and may overlap.

    Each gives its members' sum. A call of another rank fails at once, and affects no rank.
    """
    sets = lists([0], [1, 2], [0, 2, 3], [3])
    restart(process_sets=sets)
    r = hvd.rank()
    assert [s.process_set_id for s in sets] == list(range(1, len(sets) + 1))
    for s in sets:
        assert (s.size(), s.included()) == (len(s.ranks), r in s.ranks)
        if r in s.ranks:
            assert s.rank() == s.ranks.index(r) and total(s) == sum(s.ranks)
        else:
            require_error(ValueError, s.rank, f"rank {r} is not a member")
            for call in (
                lambda: total(s),
                lambda: hvd.barrier(s),
                lambda: hvd.broadcast(np.ones(1), s.ranks[0], process_set=s),
            ):
                require_error(ValueError, call, f"rank {r} is not a member")
    hvd.barrier()
    hvd.shutdown()
    assert all(s.process_set_id is None and s.size() is None and s.rank() is None for s in sets)
    hvd.init()


def check_every_collective_in_a_set() -> None:
    """Results are in the order of the set. Roots are global ranks. Average divides by the set's size."""
    p, r = hvd.size(), hvd.rank()
    members = list(range(1, p)) or [0]
    restart(process_sets=[] if p == 1 else [hvd.ProcessSet(members)])
    s = hvd.global_process_set if p == 1 else runtime.current().groups.registered[1][0]
    if r in members:
        n, place = len(members), members.index(r)
        mine = np.array([float(r)])
        assert hvd.allreduce(mine, process_set=s) == sum(members) / n
        assert hvd.allreduce(mine, op=hvd.Max, process_set=s) == p - 1
        assert hvd.allgather(mine, process_set=s).tolist() == members
        assert all(hvd.broadcast(mine, root, process_set=s) == root for root in members)
        require_error(ValueError, lambda: hvd.broadcast(mine, p, process_set=s), "root_rank")
        if p > 1:
            require_error(ValueError, lambda: hvd.broadcast(mine, 0, process_set=s), "root_rank=0")
        rows, received = ops.alltoall(np.full(n, r), process_set=s)
        assert rows.tolist() == members and received.tolist() == [1] * n
        require_error(
            ValueError, lambda: ops.alltoall(np.full(n, r), [1] * (n + 1), process_set=s), f"{n} whole numbers"
        )
        assert ops.reducescatter(np.arange(n), ops.Sum, process_set=s).tolist() == [place * n]
        assert ops.grouped_allreduce_([mine.copy()], ops.Sum, process_set=s)[0] == sum(members)
        assert hvd.allgather_object(r, process_set=s) == members
        assert hvd.broadcast_object(r, p - 1, process_set=s) == p - 1
        hvd.barrier(s)
    hvd.barrier()
    restart()


def check_names_are_per_set_and_unnamed_calls_too() -> None:
    """The same name is in flight in two sets at once; a set's unnamed calls do not shift the numbers of others."""
    sets = lists([0], [0, 1])
    restart(process_sets=sets)
    mine = [s for s in [*sets, hvd.global_process_set] if s.included()]
    handles = [ops.allreduce_.start(np.array(1), ops.Sum, "x", process_set=s) for s in mine]
    assert [handle.wait().item() for handle in handles] == [len(s.ranks) for s in mine]
    for turn, s in enumerate(sets):
        for _ in range(turn + 1 if s in mine else 0):
            assert total(s) == sum(s.ranks)
    assert total(hvd.global_process_set) == hvd.size() * (hvd.size() - 1) / 2
    restart()


def check_mismatch_in_a_set() -> None:
    """The members get the error with their global ranks. Other ranks notice nothing."""
    p, r = hvd.size(), hvd.rank()
    if p < 3:
        return
    s = hvd.ProcessSet([1, p - 1])
    restart(process_sets=[s])
    if r in s.ranks:
        for turn in range(2):
            mine = np.ones(1 + (r == 1))
            text = require_error(hvd.MismatchError, lambda: hvd.allreduce(mine, name="loss", process_set=s), "'loss'")
            assert "rank 1 has (2,)" in text and f"rank {p - 1} has (1,)" in text, turn
            assert total(s) == p
    assert total(hvd.global_process_set) == p * (p - 1) / 2
    restart()


def check_disjoint_sets_run_at_the_same_time() -> None:
    """While the members of one set wait for a late one, the other set finishes its calls."""
    p, r = hvd.size(), hvd.rank()
    if p < 3:
        return
    slow, quick = hvd.ProcessSet([0, 1]), hvd.ProcessSet(range(2, p))
    restart(process_sets=[slow, quick])
    hvd.barrier()
    began = time.monotonic()
    if r == 0:
        time.sleep(1.0)
    for _ in range(10):
        total(slow if r < 2 else quick)
    took = time.monotonic() - began
    assert took > 0.9 if r < 2 else took < 0.7, (r, took)
    hvd.barrier()
    restart()


def check_overlapping_sets_from_threads() -> None:
    """Each rank calls in all its sets at once, from one thread for each set."""
    sets = lists([0, 1], [1, 2], [0, 2], [0, 1, 2], [1, 3])
    restart(process_sets=sets)
    found: dict[int, list[float]] = {}

    def work(s: hvd.ProcessSet) -> None:
        found[s.process_set_id] = [total(s, name=f"turn {turn}") for turn in range(10)]

    mine = [s for s in [*sets, hvd.global_process_set] if s.included()]
    threads = [threading.Thread(target=work, args=(s,)) for s in (mine if hvd.rank() % 2 else reversed(mine))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {s.process_set_id: [sum(s.ranks)] * 10 for s in mine}
    restart()


def check_adding_and_removing() -> None:
    """Numbers of removed sets are used again. A removed set is refused, and can be added again."""
    p, r = hvd.size(), hvd.rank()
    restart(process_sets="dynamic")
    assert runtime.current().dynamic and "HOROVOD_DYNAMIC_PROCESS_SETS" not in os.environ
    require_error(ValueError, lambda: hvd.add_process_set(range(p)), "already")
    for bad in ([], [p], [-1, 0], [0, 0]):
        require_error(ValueError, lambda: hvd.add_process_set(bad), "each once")
    require_error(ValueError, lambda: hvd.add_process_set(["0"]), "integers")  # type: ignore[list-item]
    assert hvd.remove_process_set(hvd.global_process_set) is False
    assert hvd.remove_process_set(hvd.ProcessSet([0])) is False
    for _ in range(3 if p > 1 else 0):
        first, last = hvd.add_process_set([0]), hvd.add_process_set(hvd.ProcessSet([p - 1, 0]) if p > 2 else [1])
        assert (first.process_set_id, last.process_set_id) == (1, 2) and first.ranks == [0]
        require_error(ValueError, lambda: hvd.add_process_set(last), "already")
        require_error(ValueError, lambda: hvd.add_process_set([0]), "already")
        for s in (first, last):
            assert r not in s.ranks or total(s) == sum(s.ranks)
        assert hvd.remove_process_set(first) is True and first.process_set_id is None
        assert hvd.remove_process_set(first) is False
        require_error(ValueError, lambda: total(first), "ranks=[0]", "not registered", "hvd.add_process_set()")
        assert r not in last.ranks or total(last) == sum(last.ranks)
        again = hvd.add_process_set(first)
        assert again is first and first.process_set_id == 1 and (r != 0 or total(first) == 0)
        hvd.remove_process_set(first)
        hvd.remove_process_set(last)
    assert total(hvd.global_process_set) == p * (p - 1) / 2
    restart()
    assert hvd.remove_process_set(hvd.global_process_set) is False  # sets may still change, as with Horovod


def check_removal_fails_what_is_pending() -> None:
    p, r = hvd.size(), hvd.rank()
    if p == 1:
        return
    restart(process_sets="dynamic")
    s = hvd.add_process_set([0, 1] if p > 2 else [1])
    handle = None
    if p > 2 and r == 0:
        handle = ops.allreduce_.start(np.ones(1), name="pending", process_set=s)
    hvd.remove_process_set(s)
    if handle is not None:
        require_error(hvd.HvdliteError, handle.wait, "allreduce 'pending'", "rank 1")
    assert total(hvd.global_process_set) == p * (p - 1) / 2
    restart()


def check_ranks_that_add_different_sets() -> None:
    p, r = hvd.size(), hvd.rank()
    if p == 1:
        return
    restart(process_sets="dynamic")
    wanted = hvd.ProcessSet([1] if r == p - 1 else [0])
    require_mismatch(lambda: hvd.add_process_set(wanted), "add_process_set", f"rank {p - 1} has (1,)", "(0,)")
    assert wanted.process_set_id is None
    s = hvd.add_process_set([0])
    call = (lambda: hvd.remove_process_set(s)) if r == 0 else (lambda: hvd.add_process_set([1]))
    require_mismatch(call, "kind differs", "rank 0 has remove_process_set")
    assert s.process_set_id == 1
    restart()


def check_sets_that_init_refuses() -> None:
    """Every rank gets the error, and afterwards init() works."""
    p, r = hvd.size(), hvd.rank()
    bad = [[hvd.ProcessSet(range(p))], [hvd.ProcessSet([p])], [hvd.ProcessSet([0, 0])], [hvd.ProcessSet([])]]
    if p > 1:
        bad += [[hvd.ProcessSet([0]), hvd.ProcessSet([1]), hvd.ProcessSet([0])], [hvd.ProcessSet([min(r, 1)])]]
    for sets in bad:
        hvd.shutdown()
        require_error(ValueError, lambda: hvd.init(process_sets=sets), f"item {len(sets) - 1}")
        assert not hvd.is_initialized() and sets[-1].process_set_id is None
    if p > 1:
        sets = [hvd.ProcessSet([0])] * (1 + (r == 0))
        require_error(ValueError, lambda: hvd.init(process_sets=sets), "differs between ranks")
    require_error(ValueError, lambda: hvd.init(process_sets=[[0]]), "ProcessSet")  # type: ignore[list-item]
    require_error(ValueError, lambda: hvd.init(process_sets=7), "ProcessSet", "not 7")  # type: ignore[arg-type]
    require_error(ValueError, lambda: hvd.init(process_sets="static"), "'dynamic'")
    words: Any
    for words in ("text", 5, [0.5], None):
        require_error(ValueError, lambda: hvd.ProcessSet(words), "integers")
    hvd.init()
    assert total(hvd.global_process_set) == p * (p - 1) / 2


def check_init_again_finds_the_sets() -> None:
    p = hvd.size()
    sets = [hvd.ProcessSet([0])] if p > 1 else []
    restart(process_sets=sets)
    again = [hvd.ProcessSet([0])] if p > 1 else []
    hvd.init(process_sets=again)
    assert [s.process_set_id for s in again] == [s.process_set_id for s in sets]
    require_error(KeyError, lambda: hvd.init(process_sets=[hvd.ProcessSet([p])]), "no process set")
    restart()


def check_sets_of_communicators() -> None:
    """Each rank gives its own half of a split; all halves are registered everywhere."""
    from mpi4py import MPI

    p, r = hvd.size(), hvd.rank()
    hvd.shutdown()
    half = MPI.COMM_WORLD.Split(r % 2, r)
    s = hvd.ProcessSet(half)
    require_error(NotImplementedError, lambda: hvd.init(process_sets=[s]), "communicator")
    if p > 1:
        hvd.init(MPI.COMM_WORLD, [s])
        mine = list(range(r % 2, p, 2))
        assert s.ranks == mine and s.process_set_id == r % 2 + 1 and total(s) == sum(mine)
        assert sorted(runtime.current().groups.ranks) == [0, 1, 2]
        assert hvd.global_process_set.mpi_comm is MPI.COMM_WORLD
        hvd.shutdown()
    if p > 2 and r < 2:  # on one rank: a communicator with ranks outside the job
        pair = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl([0, 1]))
        wrong = hvd.ProcessSet(pair if r else MPI.COMM_WORLD)
        require_error(ValueError, lambda: hvd.init(pair, [wrong]), "{0: ", "members that are not of the job's")
        pair.Free()
    assert hvd.global_process_set.mpi_comm is None
    half.Free()
    hvd.init()
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    require_error(NotImplementedError, lambda: hvd.add_process_set(hvd.ProcessSet(MPI.COMM_WORLD)), "init")
    del os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"]


def check_a_job_of_some_of_the_ranks() -> None:
    """The listed ranks call init(comm=[...]), in their order. Another rank gets an error, and can wait elsewhere."""
    from mpi4py import MPI

    p, r = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
    hvd.shutdown()
    some = list(range(p - 1, 0, -1)) or [0]
    bad: Any
    for bad in ([p], [0, 0], [0, "1"]):
        require_error(ValueError, lambda: hvd.init(comm=bad), "each once")
    if r in some:
        hvd.init(comm=some)
        assert (hvd.rank(), hvd.size()) == (some.index(r), len(some))
        assert total(hvd.global_process_set) == len(some) * (len(some) - 1) / 2
        world: Any = runtime.current().world
        made = world.comm
        hvd.shutdown()
        assert made == MPI.COMM_NULL  # MPIs have 2,000 communicators
    else:
        require_error(ValueError, lambda: hvd.init(comm=some), f"world rank {r} is not in")
    MPI.COMM_WORLD.Barrier()
    hvd.init(comm=[])
    assert hvd.size() == p


def check_copies_of_a_set() -> None:
    """A copied set, or a pickled one found by its ranks, is the same set."""
    first = hvd.ProcessSet([0])
    restart(process_sets=[first] if hvd.size() > 1 else [])
    for each in ([first] if hvd.size() > 1 else []) + [hvd.global_process_set]:
        assert copy.deepcopy(each) is each and pickle.loads(pickle.dumps(each)) is each
    other = pickle.loads(pickle.dumps(hvd.ProcessSet(range(hvd.size()))))
    assert other is not hvd.global_process_set and other.process_set_id is None


def check_words_of_a_set() -> None:
    s = hvd.ProcessSet([2, 0])
    assert str(s) == repr(s) == "ProcessSet(process_set_id=None, ranks=[0, 2], mpi_comm=None)"
    assert s.included() == (hvd.rank() in (0, 2)) and s.size() is None and s.rank() is None


def check_sets_made_after_some_were_refused() -> None:
    """Joined ranks have not seen the refused sets. All ranks go on with the same numbers."""
    restart(process_sets="dynamic")
    if hvd.size() > 1:
        if hvd.rank() == 0:
            require_error(hvd.MismatchError, lambda: hvd.add_process_set([0]), "joined")
        hvd.join()
        assert hvd.remove_process_set(hvd.add_process_set([0]))
    restart()


def check_lanes_are_used_again_but_never_by_two() -> None:
    group = runtime.current().everyone
    users = [lambda: None for _ in range(2)]
    lanes = [group.new_lane("user", user) for user in users]
    users.pop(0)
    again, more = lambda: None, lambda: None
    assert group.new_lane("user", again) is lanes[0]
    assert group.new_lane("user", more) not in lanes


def check_numbers_and_ranks_the_horovod_way() -> None:
    from hvdlite.torch import mpi_ops

    everyone = list(range(hvd.size()))
    assert mpi_ops._basics._get_process_set_ids_and_ranks()[0] == everyone
    assert (mpi_ops._basics.rank(), mpi_ops._basics.size()) == (hvd.rank(), hvd.size())
