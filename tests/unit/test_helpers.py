"""The helpers of training scripts, on one rank: where their names are, the logger's manners, seeds, shares by
arithmetic."""

from __future__ import annotations

import builtins
import importlib
import inspect
import logging
import random
from collections.abc import Iterator

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.api import training_log
from hvdlite.api.seeds import seed_of
from hvdlite.api.shares import Share
from hvdlite.job import facts
from hvdlite.lanes.matching import lacking
from hvdlite.system import launcher_environment

MODULES = [
    "hvdlite",
    "hvdlite.numpy",
    "hvdlite.torch",
    "hvdlite.tensorflow",
    "hvdlite.keras",
    "hvdlite.tensorflow.keras",
]
HELPERS = ["Metric", "average_metrics", "logger", "rank_zero_only", "seed", "shard"]


@pytest.mark.parametrize("name", MODULES)
def test_every_adapter_has_the_helpers_and_hides_no_print(name: str) -> None:
    module = importlib.import_module(name)
    assert all(getattr(module, helper) is getattr(hvd, helper) for helper in [*HELPERS, "print"])
    assert set(HELPERS) <= set(module.__all__) and "print" not in module.__all__
    scope: dict[str, object] = {}
    exec(f"from {name} import *", scope)
    assert "print" not in scope and "shard" in scope


def test_print_has_pythons_arguments() -> None:
    ours, pythons = inspect.signature(hvd.print).parameters, inspect.signature(builtins.print).parameters
    assert [name for name in ours if name not in ("objects", "all")] == [name for name in pythons if name != "args"]


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    name = "test_helpers"
    yield hvd.logger(name)
    for each in (name, f"{name}.data", f"{name}.plain"):
        found = logging.getLogger(each)
        found.handlers, found.filters, found.level = [], [], logging.NOTSET


def on_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Set the rank, and take pytest's handlers away."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(facts, "presumed_rank", lambda: rank)


def test_a_line_has_time_and_rank_once(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However often the logger is asked for, and though there is one above it."""
    assert hvd.logger(log.name) is log and len(log.handlers) == 1
    on_rank(monkeypatch, 0)
    log.info("epoch %d", 3)
    line = capsys.readouterr().err
    assert line.startswith("[20") and line.endswith("] rank 0 INFO: epoch 3\n")
    hvd.logger(f"{log.name}.data").info("x")
    logging.getLogger(f"{log.name}.plain").info("y")
    assert [each[each.index("]") :] for each in capsys.readouterr().err.splitlines()] == [
        "] rank 0 INFO: x",
        "] rank 0 INFO: y",
    ]


def test_other_ranks_log_warnings_alone(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_rank(monkeypatch, 3)
    log.info("nothing")
    logging.getLogger(f"{log.name}.plain").info("nothing")
    log.warning("slow")
    assert capsys.readouterr().err.partition("] ")[2] == "rank 3 WARNING: slow\n"


def test_the_applications_handlers_get_the_lines_instead(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A root handler that is added later, and one of the logger's own."""
    on_rank(monkeypatch, 0)
    logging.basicConfig(format="%(name)s %(rank)s %(message)s")
    log.info("hello")
    assert capsys.readouterr().err == f"{log.name} 0 hello\n"
    logging.getLogger().handlers = []
    own = logging.StreamHandler()
    log.addHandler(own)
    log.info("again")
    assert capsys.readouterr().err == "again\n"


def test_handlers_above_a_logger_that_does_not_propagate_do_not_count(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_rank(monkeypatch, 0)
    monkeypatch.setattr(log, "propagate", False)
    logging.basicConfig()
    log.info("hello")
    assert capsys.readouterr().err.endswith("rank 0 INFO: hello\n")


def test_a_null_handler_takes_no_lines(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Packages give one to their logger."""
    on_rank(monkeypatch, 0)
    log.addHandler(logging.NullHandler())
    log.handlers.reverse()
    logging.getLogger().addHandler(logging.NullHandler())
    log.info("hello")
    assert capsys.readouterr().err.endswith("rank 0 INFO: hello\n")


def test_the_applications_level_is_kept(log: logging.Logger) -> None:
    assert log.level == logging.INFO
    log.setLevel(logging.DEBUG)
    assert hvd.logger(log.name).level == logging.DEBUG


@pytest.mark.parametrize("name", ["", "root", "hvdlite", "hvdlite.mine"])
def test_the_root_and_hvdlites_own_log_are_left_alone(name: str) -> None:
    with pytest.raises(ValueError, match=r"hvd\.logger"):
        hvd.logger(name)
    assert not any(isinstance(each, training_log.Lines) for each in logging.getLogger(name).handlers)


@pytest.mark.parametrize(
    ("env", "rank"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_RANK": "3"}, 3),
        ({"PMI_RANK": "2"}, 2),
        ({"SLURM_PROCID": "5"}, None),  # in a batch script, which srun has not started
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8"}, 5),
        ({"HVDLITE_JOB_RANK": "1", "PMI_RANK": "0"}, 1),
        ({"PMIX_RANK": ""}, None),
    ],
)
def test_the_rank_that_a_launcher_announces(env: dict[str, str], rank: int | None) -> None:
    assert launcher_environment.announced_rank(env) == rank


def test_before_init(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Helpers that need a rank say so; the logger takes the launcher's."""
    hvd.shutdown()  # other tests of this process may have called init()
    monkeypatch.setattr(facts, "_last_rank", None)
    for name in launcher_environment.ANNOUNCED_RANK:  # an MPI that has started here has set some
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    assert facts.presumed_rank() == 2
    for call in (
        lambda: hvd.print("x"), hvd.rank_zero_only(lambda: 1), lambda: hvd.seed(1, per_rank=True),
        lambda: hvd.shard([1]), lambda: hvd.average_metrics({"x": 1}),
    ):  # fmt: skip
        with pytest.raises(hvd.NotInitializedError):
            call()


def test_seeds() -> None:
    """The rule is NumPy's for spawned generators. Seeds are deterministic, and do not need init()."""
    assert hvd.seed(7) == 7 == hvd.seed(np.int64(7))
    assert random.random() == random.Random(7).random()
    assert np.random.random() == np.random.RandomState(7).random_sample()
    children = np.random.SeedSequence(7).spawn(3)
    assert [seed_of(7, rank) for rank in range(3)] == [child.generate_state(1)[0] for child in children]
    assert hvd.seed(2**32 - 1) == 2**32 - 1
    for wrong in (-1, 2**32):
        with pytest.raises(ValueError, match="from 0 to"):
            hvd.seed(wrong)
    with pytest.raises(TypeError):
        hvd.seed(1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", range(11))
def test_shares_partition_the_data(size: int, length: int) -> None:
    """Without even=True all samples, once. With it as many as size divides, equally many on each rank."""
    for even, dealt in ((False, length), (True, length - length % size)):
        shares = [list(range(length))[Share(rank, size, even, 0).rows(length)] for rank in range(1, size)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hvdlite.api.shares.warn", lambda text: None)
            shares.insert(0, list(range(length))[Share(0, size, even, 0).rows(length)])
        assert sorted(each for share in shares for each in share) == list(range(dealt))
        counts = [len(share) for share in shares]
        assert max(counts) - min(counts) <= (0 if even else 1)


def test_fewer_samples_than_ranks_are_a_warning() -> None:
    with pytest.warns(UserWarning, match="2 samples are fewer than 3 ranks"):
        Share(0, 3, True, 0).rows(2)


def test_lacking_names_each_side() -> None:
    assert lacking([("a", "b"), ("a",), ("a", "b")], [0, 2, 5]) == "rank 2 lacks b"
    assert lacking([("a",), ("b", "c"), ("b", "c")], [0, 1, 2]) == "rank 0 lacks b, c, ranks 1-2 lack a"


def test_rank_zero_only_keeps_types(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(x: int, *, y: str = "") -> str:
        """Say it twice."""
        return y * x

    decorated = hvd.rank_zero_only(twice)
    assert inspect.signature(decorated) == inspect.signature(twice) and decorated.__doc__ == twice.__doc__
    monkeypatch.setattr(facts, "_here", None)
    monkeypatch.setattr(facts, "_last_rank", 1)
    assert decorated(2, y="a") is None
    monkeypatch.setattr(facts, "_last_rank", 0)
    assert decorated(2, y="a") == "aa"
