"""What of freed tensors stays in the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hvdlite.heap import keep_freed

STEPS = """
import resource, sys
from hvdlite import heap

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    tensors = [b"x" * (20 << 20) for _ in range(5)]

if "keep" in sys.argv:
    assert heap.keep_freed()
for _ in range(2):
    step()
before = faults()
step()
print(faults() - before)
"""


def faults(*arguments: str) -> int:
    """Page faults of a step that allocates and frees 100 MB as it did before."""
    done = subprocess.run([sys.executable, "-c", STEPS, *arguments], check=True, capture_output=True, text=True)
    return int(done.stdout)


def test_what_is_freed_stays_for_the_next_step() -> None:
    assert faults("keep") < 100
    assert faults() > 1000  # else it would stay anyhow


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_a_user_who_chose_an_allocator_keeps_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "x")
    assert not keep_freed()
