"""Adasum's arithmetic has the same bits on all machines."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from hvdlite.algorithms.adasum import combine, products

SCRIPT = """
import numpy as np
from hvdlite.algorithms.adasum import products
a, b = np.random.default_rng(1).standard_normal((2, 1 << 18))
print(*products(a, b))
"""


def rule(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b


@pytest.mark.parametrize(("dtype", "error"), [("float64", 1e-12), ("float32", 1e-6), ("float16", 2e-3)])
def test_the_rule(dtype: str, error: float) -> None:
    a, b = (array.astype(dtype) for array in np.random.default_rng(0).standard_normal((2, 200_000)))
    expected, one, other = rule(a.astype(np.float64), b.astype(np.float64)), a.copy(), b.copy()
    combine(one, b)
    combine(other, a)
    np.testing.assert_allclose(one.astype(np.float64), expected, rtol=error, atol=error)
    assert one.tobytes() == other.tobytes()


def test_products_do_not_depend_on_threads() -> None:
    """A BLAS gives other bits with other numbers of threads, and so on hosts with other numbers of ranks."""
    said = {
        subprocess.run([sys.executable, "-c", SCRIPT], env={**os.environ, "OPENBLAS_NUM_THREADS": threads}, check=True,
                       capture_output=True, text=True).stdout
        for threads in ("1", "2")
    }  # fmt: skip
    assert len(said) == 1


def test_products_of_nothing() -> None:
    assert products(np.zeros(0), np.zeros(0)) == (0.0, 0.0, 0.0)
