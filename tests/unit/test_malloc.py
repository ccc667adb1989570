"""The freed memory that stays in the process."""

from __future__ import annotations

import os
import subprocess
import sys

STEPS = """
import resource, sys
from hvdlite.system import malloc

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    tensors = [b"x" * (20 << 20) for _ in range(5)]

if "keep" in sys.argv:
    malloc.keep_freed()
for _ in range(2):
    step()
before = faults()
step()
print(faults() - before)
"""


def faults(*arguments: str, **environ: str) -> int:
    """The page faults of a step that allocates and frees 100 MB, like the step before."""
    command, env = [sys.executable, "-c", STEPS, *arguments], os.environ | environ
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout)


def test_what_is_freed_stays_for_the_next_step() -> None:
    assert faults("keep") < 100
    assert faults() > 1000  # otherwise the memory would stay in any case


def test_a_user_who_chose_an_allocator_keeps_it() -> None:
    assert faults("keep", MALLOC_ARENA_MAX="2") > 1000
    assert faults("keep", GLIBC_TUNABLES="glibc.malloc.arena_max=2") > 1000
