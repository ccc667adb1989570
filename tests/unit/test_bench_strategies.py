"""The strategies benchmark: its tables of names, the shares of updates, and the time to a loss."""

from __future__ import annotations

import argparse
from pathlib import Path

import mpi4py
import pytest

from hvdlite.bench import __main__ as command_line

mpi4py.rc.initialize = False  # no test here communicates

from hvdlite.bench.report import significant  # noqa: E402
from hvdlite.bench.strategies import STRATEGIES, WITHOUT_WAITING, Course, Row, Run, conditions, load  # noqa: E402
from hvdlite.errors import HvdliteError  # noqa: E402


def test_the_command_line_names_all_strategies() -> None:
    assert tuple(STRATEGIES) == command_line.STRATEGIES and set(WITHOUT_WAITING) <= set(STRATEGIES)


def test_a_slow_rank_is_a_rank_and_a_factor() -> None:
    assert command_line.slow_rank("3:4.5") == (3, 4.5)
    for wrong in ("3", "3:", "a:2"):
        with pytest.raises(argparse.ArgumentTypeError, match="RANK:FACTOR"):
            command_line.slow_rank(wrong)


def test_a_slow_rank_must_exist() -> None:
    course = Course("digits", [], 1, 1, 0.0, (1, 4.0), "here")
    with pytest.raises(HvdliteError, match="--slow 1:4: there are ranks 0 to 0"):
        course.require_slow_rank(1)


@pytest.mark.parametrize("slow", [None, (3, 4.0), (0, 2.0)])
def test_fast_ranks_make_more_updates_only_if_nobody_waits(slow: tuple[int, float] | None) -> None:
    course = Course("digits", list(STRATEGIES), 1, 240, 0.02, slow, "here")
    assert [course.updates("local", rank, 4) for rank in range(4)] == [240] * 4
    for key in WITHOUT_WAITING:
        updates = [course.updates(key, rank, 4) for rank in range(4)]
        assert sum(updates) == pytest.approx(960, abs=2)
        if slow is not None:
            rank, factor = slow
            assert updates[rank] * factor == pytest.approx(updates[(rank + 1) % 4], rel=0.02)


def run_of(*losses: float) -> Run:
    return Run([float(second) for second in range(len(losses))], list(losses), 0.9, 1.0, 0.0)


def test_the_time_to_the_loss_of_synchronous_training() -> None:
    """The target is the loss after 80 % of the time. Losses are means of the seeds, and one bad loss changes nothing."""
    plain = Row("here", "synchronous", [run_of(*range(20, -1, -1)), run_of(*range(22, 1, -1))])
    assert plain.losses[2:-2] == pytest.approx([*range(19, 2, -1)]) and plain.target == pytest.approx(5)
    assert plain.time_to(plain.target) == pytest.approx(16)
    quick = Row("here", "local", [run_of(*range(20, -1, -2))])
    assert quick.time_to(plain.target) == pytest.approx(7.5)
    scattered = run_of(20, 18, 16, 1, 12, 10, 8, 6, 4, 2, 0)
    assert Row("here", "local", [scattered]).time_to(plain.target) == pytest.approx(7.5)
    assert Row("here", "diloco", [run_of(20, 10, 6, 6, 6)]).time_to(plain.target) is None
    found = conditions([plain, quick, Row("there", "synchronous")])
    assert found["here"] == (plain, [plain, quick]) and list(found) == ["here", "there"]


def test_the_docs_table_has_the_figures_numbers() -> None:
    """docs/howto/strategies.png is drawn from docs/howto/strategies.json."""
    docs = Path(__file__).resolve().parents[2] / "docs/howto"
    text = (docs / "strategies.md").read_text()
    (slow, slow_rows), (fast, fast_rows) = conditions([*load(str(docs / "strategies.json")).values()]).values()
    for one, other in zip(slow_rows, fast_rows, strict=True):
        numbers = []
        for row, plain in ((one, slow), (other, fast)):
            seconds, base = row.time_to(plain.target), plain.time_to(plain.target)
            assert seconds and base
            numbers.append(f"{significant(row.update * 1e3)}, {significant(seconds)}, {base / seconds:.1f}")
        line = f" | {' | '.join(numbers)} | {100 * one.accuracy:.1f} % | {one.wire / 1e3:.0f} |\n"
        assert line in text, f"{one.title}{line}"
