"""Questions and helpers under the name of Horovod's module."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

from hvdlite import build
from hvdlite.build import check_num_rank_power_of_2, split_list


def asked(question: Callable[[], Any]) -> Callable[..., Any]:
    """The question with the argument that it has here, and nothing to tell."""
    return lambda verbose=False: question()


ccl_built, ddl_built, gloo_built = asked(build.ccl_built), asked(build.ddl_built), asked(build.gloo_built)
mpi_built, nccl_built = asked(build.mpi_built), asked(build.nccl_built)
num_rank_is_power_2 = check_num_rank_power_of_2


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework ('torch', 'tensorflow') is there: nothing needs to be built for it."""
    return importlib.util.find_spec(ext_base_name) is not None


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework's tensors may lie on a GPU, and CuPy is there to communicate them."""
    if not build.cuda_built() or not extension_available(ext_base_name):
        return False
    if ext_base_name == "torch":
        return bool(importlib.import_module("torch").cuda.is_available())
    return bool(importlib.import_module("hvdlite.tensorflow").gpu_available())


@contextlib.contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Inside, these environment variables are set; None leaves one as it is."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in variables.items() if value is not None})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def is_iterable(x: Any) -> bool:
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether 'a.b.c' is at least another. Raises ValueError for what is no such text."""
    for each in (ver, target):
        if not isinstance(each, str) or len(each.split(".")) != 3:
            raise ValueError(f"a version is a text of three numbers, such as '2.1.0', not {each!r}")
    numbers = [[int("".join(filter(str.isdigit, part)) or 0) for part in each.split(".")] for each in (ver, target)]
    return numbers[0] >= numbers[1]


__all__ = [
    "ccl_built", "ddl_built", "env", "extension_available", "gloo_built", "gpu_available", "is_iterable",
    "is_version_greater_equal_than", "mpi_built", "nccl_built", "num_rank_is_power_2", "split_list",
]  # fmt: skip
