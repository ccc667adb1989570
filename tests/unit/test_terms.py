"""The arithmetic that a user asks for: operations, factors, passes."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from hvdlite import ops
from hvdlite.errors import ForkedError, HvdliteError, MismatchError, NotInitializedError, RemovedError, ScalarError
from hvdlite.gradients.terms import Terms, passes_of
from hvdlite.ops import Average, Max, Op, Sum, op_of


def test_the_division_comes_before_the_sum() -> None:
    """So sums of half-precision gradients do not overflow."""
    how = Terms(Average, 4).reduction(8)
    assert (how.operation, how.before, how.after, how.divisor) == ("sum", 0.25, 4.0, 8)
    assert Terms(Sum).reduction(8).divisor == 1


class Other:
    """Equals 0, like torch.distributed.ReduceOp.SUM."""

    def __eq__(self, other: object) -> bool:
        return other == 0

    def __hash__(self) -> int:
        return 0


@pytest.mark.parametrize("given", ["sum", True, 1.0, 6, -1, None, Other()])
def test_what_is_no_operation(given: Any) -> None:
    """Python takes some of these values for numbers, and so for other operations."""
    with pytest.raises(ValueError, match="is no reduction: give one of hvd"):
        op_of(given)


def test_operations_by_number() -> None:
    number: Any = np.int64(4)
    assert [op_of(given) for given in (1, number, Max)] == [Sum, Max, Max]
    assert [op_of(int(op)) for op in Op] == list(Op)


@pytest.mark.parametrize("given", [0, -1, 1.5, "2", None])
def test_what_is_no_number_of_passes(given: Any) -> None:
    with pytest.raises(ValueError, match="backward_passes_per_step must be a whole number, at least 1, not"):
        passes_of(given)
    number: Any = np.int64(3)
    assert passes_of(number) == 3


@pytest.mark.parametrize("given", [0, -1, float("inf"), float("nan"), "a", None])
def test_what_is_no_factor(given: Any) -> None:
    with pytest.raises(ValueError, match="gradient_predivide_factor must be a number above 0, not"):
        Terms(Average, given)
    if not isinstance(given, (int, float)):
        with pytest.raises(TypeError, match="both must be numbers"):
            ops.reduction(Sum, 2, prescale=given)


@pytest.mark.parametrize("error", [
    ForkedError(), NotInitializedError(), RemovedError([0, 2]), MismatchError("x"), ScalarError("x"), HvdliteError("x"),
])  # fmt: skip
def test_errors_come_back_from_other_processes_as_they_were(error: HvdliteError) -> None:
    """A pool hangs if a worker's error cannot be unpickled."""
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error) and str(found) == str(error)
