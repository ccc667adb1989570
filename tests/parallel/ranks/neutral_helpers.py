"""The helpers of training scripts, without a framework: print, logger, seed, average_metrics, Metric, shard."""

from __future__ import annotations

import io
import logging
import math
import random
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

import hvdlite as hvd
import hvdlite.numpy
from tests.parallel.common import at_sizes, last, require_error, require_mismatch


class Pair(NamedTuple):
    """A structure of arrays."""

    a: object
    b: object


class Words:
    """What a user's print may write to."""

    text = flushed = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        self.flushed = self.text


class Top(hvd.Metric):
    """A user's metric, with an argument of its own."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k, self.epochs = k, 1

    def reset(self) -> None:
        super().reset()
        self.epochs += 1


class Table:
    """Like pandas' DataFrames and Series: `[]` takes labels, `iloc[]` takes positions."""

    def __init__(self, rows: list[int]) -> None:
        self.rows, self.shape, self.dtype = rows, (len(rows), 1), "int"

    def __getitem__(self, label: object) -> None:
        raise KeyError(label)

    @property
    def iloc(self) -> list[int]:
        return self.rows


def printed(*objects: object, **how: Any) -> str:
    file = io.StringIO()
    hvd.print(*objects, file=file, **how)
    return file.getvalue()


def only_on_rank_0(text: str) -> str:
    return text if hvd.rank() == 0 else ""


def check_print() -> None:
    """Rank 0 prints, as Python's print does, and every rank's lines where it is asked to."""
    p, r = hvd.size(), hvd.rank()
    assert printed("a", 1, sep="-", end="!") == only_on_rank_0("a-1!")
    assert printed() == only_on_rank_0("\n") and printed("a", 1, sep=None) == only_on_rank_0("a 1\n")
    everyones = "".join(f"rank {rank}: r\nrank {rank}: {rank}\n" for rank in range(p))
    assert printed(f"r\n{r}", all=True) == only_on_rank_0(everyones)
    assert printed(all=True, end=";") == only_on_rank_0("".join(f"rank {rank}: ;" for rank in range(p)))
    assert hvdlite.numpy.print is hvd.print
    own = Words()
    hvd.print("a", file=own)
    assert own.flushed == only_on_rank_0("a\n")


def check_print_and_rank_zero_only_after_shutdown() -> None:
    """The rank of the job that has ended decides."""
    text, number = only_on_rank_0("the end\n"), 7 if hvd.rank() == 0 else None
    hvd.shutdown()
    try:
        assert printed("the end") == text and hvd.rank_zero_only(lambda: 7)() == number
        require_error(hvd.NotInitializedError, lambda: printed("the end", all=True), "hvd.init()")
    finally:
        hvd.init()


def check_rank_zero_only() -> None:
    called = []

    @hvd.rank_zero_only
    def save(path: str, *, epoch: int = 0) -> str:
        """Save the model."""
        called.append(path)
        return f"{path}{epoch}"

    assert save("model", epoch=3) == ("model3" if hvd.rank() == 0 else None)
    assert called == ["model"] * (hvd.rank() == 0)
    assert (save.__name__, save.__doc__) == ("save", "Save the model.")


def check_logger() -> None:
    """Rank 0 logs from INFO on, and others from WARNING on. The application's handlers get the lines."""
    log, lines = hvd.logger("neutral.training"), list[str]()
    handler = logging.Handler()
    handler.setFormatter(logging.Formatter("%(rank)s %(levelname)s %(message)s"))
    handler.emit = lambda record: lines.append(handler.format(record))
    log.addHandler(handler)
    try:
        log.debug("x")
        log.info("loss %.1f", 0.5)
        log.warning("slow")
    finally:
        log.removeHandler(handler)
    r = hvd.rank()
    assert lines == ["0 INFO loss 0.5"] * (r == 0) + [f"{r} WARNING slow"]


def check_seed() -> None:
    """Alike on all ranks; or a hash of seed and rank, so that no two ranks of two seeds share one."""
    drawn = []
    for per_rank in (False, True):
        used = hvd.seed(5, per_rank=per_rank)
        mine = (used, random.random(), float(np.random.random()))
        assert mine == (hvd.seed(5, per_rank=per_rank), random.random(), float(np.random.random()))
        drawn.append(mine)
    assert set(hvd.allgather_object(drawn[0])) == {drawn[0]} and drawn[0][0] == 5
    assert len(set(hvd.allgather_object(drawn[1]))) == hvd.size()
    seeds = [hvd.seed(base, per_rank=True) for base in range(200)]
    assert len({each for several in hvd.allgather_object(seeds) for each in several}) == 200 * hvd.size()


def check_average_metrics() -> None:
    """Rank r has r samples with sum r*(r+1): sum of r(r+1) = (p-1)p(p+1)/3, and p(p-1)/2 samples."""
    p, r = hvd.size(), hvd.rank()
    kinds: list[Any] = [float, np.float32, np.array, lambda x: np.array([x])]
    for kind in kinds:
        found = hvd.average_metrics({"z": (kind(r * (r + 1)), kind(r)), "alone": kind(r), "none": (kind(0), 0)})
        assert list(found) == ["z", "alone", "none"] and all(type(each) is float for each in found.values())
        assert math.isclose(found["z"], 2 * (p + 1) / 3) if p > 1 else math.isnan(found["z"])
        assert found["alone"] == (p - 1) / 2 and math.isnan(found["none"])
    assert hvd.average_metrics({}) == {}
    big = hvd.average_metrics({"n": (2.0**40 + r, 1)})["n"]
    assert big == 2.0**40 + (p - 1) / 2  # more digits than float32 has
    assert hvd.average_metrics({"b": 1, "a": 2} if last() else {"a": 2, "b": 1}) == {"a": 2.0, "b": 1.0}


@at_sizes(2, 3, 4)
def check_names_of_metrics_differ() -> None:
    """The error says on every rank which rank lacks what."""
    p = hvd.size()
    mine: Mapping[str, object] = {"loss": 1, "top5": 2} if last() else {"loss": 1, "accuracy": 3, "f1": 4}
    others = "rank 0" if p == 2 else f"ranks 0-{p - 2}"
    text = require_mismatch(lambda: hvd.average_metrics(mine), "hvd.average_metrics: the metrics differ: ")
    assert f"rank {p - 1} lacks accuracy, f1" in text and f"{others} {'lacks' if p == 2 else 'lack'} top5" in text


def check_metric() -> None:
    """Rank r has r + 1 batches of 2 with mean r: 2(r+1) samples. compute() changes nothing, and reset() all."""
    p, r = hvd.size(), hvd.rank()
    metric = hvd.Metric()
    for _ in range(r + 1):
        metric.update(np.float32(r), 2)
        metric.update(math.nan, 0)  # the mean over an empty batch
    count = p * (p + 1) // 2
    expected = sum(rank * (rank + 1) for rank in range(p)) / count
    for found in (metric.compute(), metric.compute(), hvd.average_metrics({"m": metric})["m"]):
        assert math.isclose(found, expected, rel_tol=1e-15)
    metric.reset()
    assert math.isnan(metric.compute())
    top = Top(5)
    top.update(7)
    top.reset()
    assert top.k == 5 and top.epochs == 2 and math.isnan(top.compute())
    metric.update(3)
    assert metric.compute() == 3.0


def check_what_is_no_metric() -> None:
    for wrong in ("3", None, {}, [1, 2, 3], [1, 2], (1, 2, 3)):
        require_error(TypeError, lambda: hvd.average_metrics({"loss": wrong}), "metric loss", "no number")
    require_error(ValueError, lambda: hvd.average_metrics({"loss": np.ones(3)}), "3 elements")
    require_error(ValueError, lambda: hvd.Metric().update(1.0, -1), "not negative")


def check_shares_of_arrays() -> None:
    """Without even=True each sample is on one rank; with it, all ranks have n // p samples."""
    p, r = hvd.size(), hvd.rank()
    for n in (0, 1, p - 1, p, p + 1, 3 * p + 2):
        rows, names = np.arange(2 * n).reshape(n, 2), [f"s{i}" for i in range(n)]
        every: Any = hvd.shard({"x": rows, "y": (names, range(n))}, even=False)
        shares = hvd.allgather_object((every["x"].tolist(), every["y"][0], list(every["y"][1])))
        assert sorted(row for share in shares for row in share[0]) == rows.tolist()
        assert sorted(name for share in shares for name in share[1]) == sorted(names)
        assert all([row[0] // 2 for row in share[0]] == share[2] for share in shares)
        assert max(len(share[1]) for share in shares) - min(len(share[1]) for share in shares) <= 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            even = hvd.allgather_object(hvd.shard(names, even=True))
        assert [len(share) for share in even] == [n // p] * p
        assert len({name for share in even for name in share}) == n // p * p
    pair = hvd.shard(Pair([1] * p, {"b": range(p)}))
    assert type(pair) is Pair and pair == Pair([1], {"b": range(r, p, p)}) and hvd.shard(((),)) == ((),)
    assert hvd.shard(np.arange(3 * p))[1] == p + r and np.shares_memory(hvd.shard(rows, even=False), rows)


def check_shares_of_tables_go_by_position() -> None:
    p, r = hvd.size(), hvd.rank()
    table = Table(list(range(2 * p)))
    assert hvd.shard(table) == [r, r + p]  # type: ignore[comparison-overlap]
    assert hvd.shard({"x": table, "y": [0] * (2 * p)}) == {"x": [r, r + p], "y": [0, 0]}
    del table.dtype  # as a DataFrame, whose columns have types
    assert hvd.shard(table) == [r, r + p]  # type: ignore[comparison-overlap]


def check_uneven_shares_warn_on_rank_0_unless_asked_for() -> None:
    p, r = hvd.size(), hvd.rank()
    for n, even, expected in (
        (p + 1, None, p > 1),
        (2 * p, None, False),
        (p, True, False),
        (p + 1, False, False),
        (p + 1, True, False),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hvd.shard(list(range(n)), even=even)
        texts = [str(each.message) for each in caught]
        assert len(texts) == int(expected and r == 0), texts
        assert not texts or (f"{p + 1} samples on {p} ranks" in texts[0] and caught[0].filename == __file__)


def check_what_cannot_be_divided() -> None:
    require_error(ValueError, lambda: hvd.shard((np.ones(3), np.ones(2))), "[0] has 3, [1] has 2")
    require_error(TypeError, lambda: hvd.shard((1, 2)), "[0] is int", "as a list")
    require_error(TypeError, lambda: hvd.shard(np.float32(1)), "no rows")
    for wrong in ("text", iter([1]), {1, 2}, 5, None):
        require_error(TypeError, lambda: hvd.shard(wrong), "cannot divide builtins.", "list")


@at_sizes(3, 4)
def check_helpers_in_a_process_set() -> None:
    """The last two ranks average and share among themselves."""
    p, r = hvd.size(), hvd.rank()
    hvd.shutdown()
    pair = hvd.ProcessSet([p - 2, p - 1])
    hvd.init(process_sets=[pair])
    if r >= p - 2:
        metric = hvd.Metric()
        metric.update(r)
        assert hvd.average_metrics({"r": r}, process_set=pair) == {"r": p - 1.5}
        assert metric.compute(pair) == p - 1.5
        assert hvd.shard(list(range(4)), process_set=pair) == [r - p + 2, r - p + 4]
    else:
        require_error(ValueError, lambda: hvd.shard([1], process_set=pair), "not a member")
        require_error(ValueError, lambda: hvd.average_metrics({"r": r}, process_set=pair), "not a member")
    unknown = hvd.ProcessSet([0])
    require_error(ValueError, lambda: hvd.shard([1], process_set=unknown), "not registered")
    hvd.shutdown()
    hvd.init()


def check_a_joined_rank_adds_no_samples() -> None:
    """Ranks that have joined count as (0, 0)."""
    if hvd.rank() == 0:
        assert hvd.average_metrics({"loss": (6, 3), "top": 4}) == {"loss": 2.0, "top": 4.0}
    hvd.join()
