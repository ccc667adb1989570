"""Lightning, accelerate and transformers train over the backend "hvdlite", without a line for it but its name."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest

from tests.parallel import jobs


@pytest.mark.full
@pytest.mark.parametrize("library", ["lightning", "accelerate", "transformers"])
def test_train_with(library: str) -> None:
    """Both ranks end with the same weights. HVDLITE_AS_MPI is for the libraries that choose the backend themselves."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"NOT RUN: {library} is not installed (pip install 'hvdlite[libraries]')")
    extra = {"PYTHONWARNINGS": "ignore", "HVDLITE_AS_MPI": str(int(library != "lightning"))}
    environ = jobs.environment(extra)
    environ["PYTHONPATH"] += f":{jobs.ROOT / 'launcher'}"
    hvdliterun = [sys.executable, "-m", "hvdlite_launcher.cli", "-np", "2"]
    script = jobs.ROOT / f"tests/parallel/libraries/with_{library}.py"
    result = jobs.finished([*hvdliterun, sys.executable, str(script)], environ, 200)
    weights = re.findall(r"<stdout>:(trained .*)", result.output)
    assert result.code == 0 and len(weights) == 2 and weights[0] == weights[1], result.output
