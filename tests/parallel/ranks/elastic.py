"""Elastic states of plain objects: `run` handles errors and changes of hosts on all ranks together."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import hvdlite as hvd
from hvdlite import elastic
from hvdlite.elastic import HostUpdateResult, ObjectState
from hvdlite.errors import HorovodInternalError, HostsUpdatedInterrupt
from hvdlite.job import runtime
from tests.parallel.common import last, require_error


def state_of(**values: Any) -> ObjectState:
    return ObjectState(hvd.broadcast_object, hvd.rank, **values)


def total() -> int:
    return int(hvd.allreduce(np.array([1]), op=hvd.Sum)[0])


def check_a_run_begins_with_rank_0s_state() -> None:
    @elastic.run
    def train(state: ObjectState, more: int, *, less: int) -> tuple[int, int]:
        """Train as `run` would call it."""
        return state.x + more - less, state.where["rank"]

    assert train.__name__ == "train" and train.__doc__ == "Train as `run` would call it."
    assert train(state_of(x=hvd.rank() + 5, where={"rank": hvd.rank()}), 3, less=1) == (7, 0)


def check_commit_and_restore() -> None:
    """Objects that were changed in place are restored too."""
    state = state_of(step=1, history=[1])
    state.step, state.other = 2, 3
    state.history.append(2)
    state.commit()
    state.step, state.other = 9, 9
    state.history.append(9)
    state.restore()
    assert (state.step, state.history, state.other) == (2, [1, 2], 9)  # `other` is not tracked
    state.history.append(9)
    state.restore()
    assert state.history == [1, 2]


def check_an_error_takes_all_back_to_the_last_commit() -> None:
    """One rank raises while the others are in a collective, or all raise. Communication is new afterwards."""
    for everywhere in (False, True):
        state, seen, before = state_of(step=0), list[int](), runtime.current()

        @elastic.run
        def train(state: ObjectState, everywhere: bool = everywhere, seen: list[int] = seen) -> int:
            while state.step < 6:
                seen.append(state.step)
                if seen.count(4) == 1 and state.step == 4 and (everywhere or last() or hvd.size() == 1):
                    raise HorovodInternalError("as if something had failed")
                assert total() == hvd.size()
                state.step += 1
                if state.step % 2 == 1:
                    state.commit()
            return state.step

        assert train(state) == 6 and seen == [0, 1, 2, 3, 4, 3, 4, 5]
        assert runtime.current() is not before and total() == hvd.size()


def check_an_error_at_the_very_end_takes_all_back() -> None:
    """The last rank raises when the others have finished."""
    runs: list[int] = []

    @elastic.run
    def train(state: ObjectState) -> int:
        runs.append(state.step)
        while state.step < 2:
            state.step += total() // hvd.size()
            state.commit()
        if len(runs) == 1 and last():
            raise HorovodInternalError("the model does not pass the check")
        return int(state.step)

    assert train(state_of(step=0)) == 2
    assert runs == ([0, 2] if hvd.size() > 1 else [0])


def check_a_mismatch_is_survived_too() -> None:
    """All ranks get it and go back. The second time the ranks agree."""
    lengths = iter([4 if last() else 3, 3])

    @elastic.run
    def train(state: ObjectState) -> float:
        return float(hvd.allreduce(np.ones(next(lengths)), name="loss").sum())

    assert train(state_of(x=0)) == 3.0


def check_the_same_error_again_and_again_is_raised() -> None:
    calls: list[int] = []

    @elastic.run
    def train(state: ObjectState) -> None:
        calls.append(1)
        raise HorovodInternalError("always")

    require_error(HorovodInternalError, lambda: train(state_of(x=0)), "always")
    assert len(calls) == elastic.MOST_REPETITIONS
    assert total() == hvd.size()


def check_errors_of_any_kind_without_end_are_raised() -> None:
    usual, elastic.MOST_RESTARTS = elastic.MOST_RESTARTS, 5
    seen: list[int] = []

    @elastic.run
    def train(state: ObjectState) -> None:
        seen.append(1)
        raise HorovodInternalError(f"number {len(seen)}")

    try:
        require_error(HorovodInternalError, lambda: train(state_of(x=1)), "number 5")
    finally:
        elastic.MOST_RESTARTS = usual


def check_a_graph_may_tell_any_of_several_errors() -> None:
    told = type("UnknownError", (Exception,), {"__module__": "tensorflow.python"})
    for number in range(3):
        elastic.retell(HorovodInternalError(f"allreduce 's{number}': rank 1 left"))
    for number in range(3):
        assert str(elastic.origin_of(told(f"in a graph: allreduce 's{number}': rank 1 left"))).startswith(
            f"allreduce 's{number}'"
        )
    assert elastic.origin_of(told("something else")) is None


def check_present_attributes_are_given_to_all() -> None:
    """Attributes set since the last commit, or before the first call, also if a rank lacks one."""
    state, seen = state_of(x=0, **({} if hvd.rank() else {"y": 1})), []

    @elastic.run
    def train(state: ObjectState) -> None:
        seen.append(state.x)
        if len(seen) == 1:
            state.x += 2
            raise HostsUpdatedInterrupt(skip_sync=False)

    state.x = 5 + hvd.rank()
    train(state)
    assert seen == [5, 7] and state.y == 1
    empty = state_of(**({"z": 3} if hvd.rank() else {}))
    empty.sync()
    assert hvd.broadcast_object(hvd.rank(), 0) == 0


def check_the_same_error_with_commits_in_between_is_survived() -> None:
    """A subclass's own commit counts as a commit too."""

    class Checked(ObjectState):
        def commit(self) -> None:
            self.save()
            self.check_host_updates()

    @elastic.run
    def train(state: ObjectState) -> int:
        state.step += 1
        state.commit()
        if state.step <= 2 * elastic.MOST_REPETITIONS:
            raise HorovodInternalError("now and then")
        return state.step

    for state in (state_of(step=0), Checked(hvd.broadcast_object, hvd.rank, step=0)):
        assert train(state) == 2 * elastic.MOST_REPETITIONS + 1


def check_other_errors_pass() -> None:
    @elastic.run
    def train(state: ObjectState) -> None:
        raise KeyError("mine")

    require_error(KeyError, lambda: train(state_of(x=0)), "mine")
    assert total() == hvd.size()


def check_changed_hosts_interrupt_all_ranks_at_the_same_commit() -> None:
    """The ranks do not go back.

    They get rank 0's state, unless hosts were only removed. Only rank 0's message counts.
    """
    for change, synced in (
        (HostUpdateResult.removed, False),
        (HostUpdateResult.added, True),
        (HostUpdateResult.mixed, True),
    ):
        order: list[str] = []
        state = state_of(step=0, mine=hvd.rank())
        state.register_reset_callbacks([partial(order.append, "first"), partial(order.append, "second")])

        @elastic.run
        def train(state: ObjectState, change: HostUpdateResult = change, order: list[str] = order) -> int:
            order.append(f"step {state.step}")
            if state.step == 0:
                state.mine = hvd.rank()
                if last() or hvd.size() == 1:
                    state.on_hosts_updated(5.0, change)
                if hvd.rank() == 0:
                    state.on_hosts_updated(7.0, change)
                state.step = 1
                state.commit()
                raise AssertionError("not interrupted")
            return state.mine

        assert train(state) == (0 if synced else hvd.rank())
        assert order == ["step 0", "first", "second", "step 1"]
        state.check_host_updates()  # once is enough


def check_an_interrupt_of_one_rank_alone() -> None:
    """The other ranks get an error in their operation, go back, and wait for that rank in sync."""
    for who in (0, hvd.size() - 1):
        calls: list[int] = []

        @elastic.run
        def train(state: ObjectState, who: int = who, calls: list[int] = calls) -> int:
            calls.append(1)
            while state.step < 4:
                if len(calls) == 1 and state.step == 2 and hvd.rank() == who:
                    raise HostsUpdatedInterrupt(skip_sync=True)
                state.step += total() // hvd.size()
            return state.step

        assert train(state_of(step=0)) == 4 and len(calls) == 2


def check_an_error_after_a_removal_gives_all_rank_0s_state() -> None:
    calls: list[int] = []

    @elastic.run
    def train(state: ObjectState) -> int:
        calls.append(1)
        if len(calls) == 1:
            state.mine = hvd.rank()
            state.on_hosts_updated(5.0, HostUpdateResult.removed)
            state.commit()
        if len(calls) == 2:
            raise HorovodInternalError("as if something had failed")
        return state.mine

    assert train(state_of(mine=0)) == 0 and len(calls) == 3


def check_a_job_of_a_communicator_starts_anew_as_it_was() -> None:
    p, r = hvd.size(), hvd.rank()
    hvd.shutdown()
    hvd.init(comm=list(range(p))[::-1])
    elastic.start_again()
    assert hvd.rank() == p - 1 - r and total() == p
    hvd.shutdown()
    hvd.init()


def check_process_sets_are_there_again() -> None:
    """They are the same objects, for the same ranks."""
    p, r = hvd.size(), hvd.rank()
    if p < 3:
        return
    hvd.shutdown()
    pair, rest = hvd.ProcessSet([0, 1]), hvd.ProcessSet(range(1, p))
    hvd.init(process_sets=[pair, rest])
    before = runtime.current()
    elastic.start_again()
    assert runtime.current() is not before and (pair.process_set_id, rest.process_set_id) == (1, 2)
    if r <= 1:
        assert hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=pair)[0] == 2
    if r >= 1:
        assert hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=rest)[0] == p - 1
    hvd.shutdown()
    hvd.init()


def check_sets_may_still_be_added() -> None:
    """After a new start, and after init() without "dynamic"."""
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    elastic.start_again()
    if hvd.size() > 1:
        assert hvd.add_process_set([0]).process_set_id == 1
    hvd.shutdown()
    hvd.init()
    if hvd.size() > 1:
        assert hvd.add_process_set([0]).process_set_id == 1
    hvd.shutdown()
    hvd.init()


def check_sets_of_communicators_are_there_again() -> None:
    """This holds also if a rank is in no set, or not in the first."""
    p, r = hvd.size(), hvd.rank()
    if p < 3:
        return
    from mpi4py import MPI

    hvd.shutdown()
    world = MPI.COMM_WORLD
    pair, parity = world.Split(0 if r < 2 else MPI.UNDEFINED), world.Split(r % 2)
    sets = [hvd.ProcessSet(pair), hvd.ProcessSet(parity)]
    hvd.init(comm=world, process_sets=sets)
    for _ in range(2):
        elastic.start_again()
        if r < 2:
            assert hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=sets[0])[0] == 2
        assert hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=sets[1])[0] == len(range(r % 2, p, 2))
    hvd.shutdown()
    hvd.init()


def check_names() -> None:
    assert HorovodInternalError is hvd.HvdliteError and issubclass(HorovodInternalError, RuntimeError)
    assert HostsUpdatedInterrupt(True).skip_sync and not HostsUpdatedInterrupt().skip_sync
    from hvdlite.common import elastic as theirs
    from hvdlite.common import exceptions, process_sets, util

    assert exceptions.HorovodInternalError is HorovodInternalError and theirs.State is elastic.State
    assert process_sets.ProcessSet is hvd.ProcessSet and util.mpi_built() and not util.gloo_built()
