"""Printed tracebacks of hvdlite's errors show the user's frames and hvdlite's last one. The errors keep all frames."""

from __future__ import annotations

import logging
import traceback

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.errors import HvdliteError
from hvdlite.system import tracebacks


def functions(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def raised(kind: type[Exception] = ValueError) -> BaseException:
    """An error of hvdlite that passes several of its frames."""
    hvd.init()
    try:
        if kind is KeyError:
            raise KeyError("the user's") from raised()
        hvd.allreduce(np.ones(1), op=77)
    except kind as error:
        return error
    finally:
        hvd.shutdown()
    raise AssertionError


def test_the_users_frames_and_the_last_of_ours_are_shown() -> None:
    error = raised()
    whole = functions(error)
    with tracebacks.short(error) as left_out:
        assert functions(error) == ["raised", "op_of"] and left_out == len(whole) - 2 > 0
    assert functions(error) == whole


def test_what_an_error_comes_from_is_short_too() -> None:
    error = raised(KeyError)
    assert error.__cause__ is not None
    with tracebacks.short(error) as left_out:
        assert functions(error) == ["raised"] and functions(error.__cause__) == ["raised", "op_of"] and left_out > 0


def test_an_error_of_the_users_or_of_a_library_is_whole() -> None:
    for kind, call in (
        (TypeError, lambda: np.ones("x")),  # type: ignore[arg-type]
        (HvdliteError, lambda: (_ for _ in ()).throw(HvdliteError("mine"))),
    ):
        with pytest.raises(kind) as caught:
            call()
        with tracebacks.short(caught.value) as left_out:
            assert left_out == 0


def test_whole_at_the_level_that_verbose_sets(capsys: pytest.CaptureFixture[str]) -> None:
    error, log, shown = raised(), logging.getLogger("hvdlite"), list[int]()
    before = log.level
    try:
        for level in (logging.WARNING, logging.INFO, logging.DEBUG):
            log.setLevel(level)
            tracebacks.show(error, lambda: shown.append(len(functions(error))))
    finally:
        log.setLevel(before)
    assert shown == [2, len(functions(error)), len(functions(error))]
    assert capsys.readouterr().err.count("frames inside hvdlite and libraries are left out: hvdliterun -v") == 1
