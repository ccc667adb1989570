"""The launcher's waiting times fit together, and fit to those of the ranks."""

from __future__ import annotations

import ast
import inspect
import re

import pytest
from hvdlite_launcher import times

from hvdlite import task
from hvdlite.job import exits, folder

OWN_END = exits.NOTICE + max(exits.GOODBYE, exits.TOGETHER)  # seconds until a failing rank has aborted MPI
LATER_END = exits.NOTICE + exits.PATIENCE / 2  # the same, if another rank was the first to fail

RELATIONS = {
    "a rank that fails may abort MPI before mpirun is told to end": max(OWN_END, LATER_END) < times.FAILURE_GRACE,
    "also one that waits for the rank whose shutdown has stopped it":
        exits.LET_GO + times.LEAVER_FIRST <= times.FAILURE_GRACE + times.MPIRUN_GRACE,
    "a rank waits for the decision which failure was the first": times.OTHER_NEWS + times.LOOP < folder.DECISION,
    "a keeper waits as long for the rank to blame as a rank without hvdliterun": times.LEAVER_FIRST == folder.LEAVER_FIRST,
    "a consequence waits longer for its cause than a failure for an earlier one": times.OTHER_NEWS < times.CAUSE_NEWS,
    "the cause is known before mpirun is told to end": times.CAUSE_NEWS < times.FAILURE_GRACE,
    "keepers outlive all the time that ranks have after a signal":
        times.SIGNAL_GRACE + times.MPIRUN_GRACE + times.FAILURE_GRACE < times.KEEPER_STAYS,
    "hvdliterun's loop looks often enough for each grace": times.LOOP < times.MPIRUN_GRACE < times.FAILURE_GRACE,
    "two signs of life may be lost": 3 * times.BEAT < times.START_HOST_TIMEOUT,
    "a standstill is longer than the pause between signs of life": times.BEAT < times.STANDSTILL,
    "and shorter than any patience": times.STANDSTILL < times.START_HOST_TIMEOUT,
    "an agent that kills all may be silent meanwhile": times.KILLED_ARE_GONE + times.BEAT < times.CLOSING_TIMEOUT,
    "a job of days has more patience": times.START_HOST_TIMEOUT < times.SILENCE_TOLD < times.HOST_TIMEOUT,
    "helpers tidy up after killed processes": times.KILLED_ARE_GONE < times.HELPERS_TIDY,
    "news of all hosts have come when an absence counts": 2 * times.BEAT < times.ABSENCE_SETTLED,
    "and it counts before the patience of others ends": times.ABSENCE_SETTLED < times.INIT_PATIENCE,
    "a pause is announced before agents lose patience": times.PAUSE_SENT + times.BEAT < times.START_HOST_TIMEOUT,
    "MPIs start within the time in which a rank must": times.AFTER_SSH < times.FIRST_RANK * times.START_TIMEOUT,
    "messages of mpirun wait until its end explains them":
        times.FAILURE_GRACE + times.MPIRUN_GRACE < times.MPIS_MESSAGES,
    "the beginning of a line is shown at the next look": times.UNFINISHED_LINE < times.LOOP,
    "looks for shared memory get rarer": times.SEGMENTS_SOON < times.SEGMENTS_SELDOM < times.SEGMENTS_SETTLED,
    "a function may come later than hosts are ready": times.START_TIMEOUT + times.AFTER_SSH < task._PATIENCE,
}  # fmt: skip


@pytest.mark.parametrize("name", RELATIONS)
def test_waiting_times_fit_together(name: str) -> None:
    assert RELATIONS[name]


def test_each_time_is_named_once_and_explained() -> None:
    """In the drawing, or in a comment."""
    source = inspect.getsource(times)
    names = [ast.unparse(node.targets[0]) for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    lines = {match[1]: match[0] for match in re.finditer(r"(?m)^([A-Z_]+) = .*$", source)}
    assert sorted(names) == sorted(lines) and len(set(names)) == len(names)
    assert not [name for name in names if "#" not in lines[name] and name not in (times.__doc__ or "")]
