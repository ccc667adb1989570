"""Questions and helpers under the name of Horovod's module."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from hvdlite.api import build
from hvdlite.api.build import check_num_rank_power_of_2, split_list


def asked(question: Callable[[], Any]) -> Callable[..., Any]:
    """The question with the argument that it has here, and nothing to tell."""
    return lambda verbose=False: question()


ccl_built, ddl_built, gloo_built = asked(build.ccl_built), asked(build.ddl_built), asked(build.gloo_built)
mpi_built, nccl_built = asked(build.mpi_built), asked(build.nccl_built)
num_rank_is_power_2 = check_num_rank_power_of_2
VERSION = re.compile(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?(?P<early>[-_.]?(?:a|b|c|rc|alpha|beta|pre|preview|dev)(?![a-z]))?")


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
    """Inside, these environment variables are set; None leaves one as it is. What else is set there stays."""
    given = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def is_iterable(x: Any) -> bool:
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether a version ('2.4', '2.12.0rc1', '2.13.0+cpu') is at least a target of three numbers; what comes before a
    release (rc1, a0, .dev20261101) is less than that, and all of it alike. Raises ValueError for no such texts."""
    found = [VERSION.match(each) if isinstance(each, str) else None for each in (ver, target)]
    if found[0] is None or found[1] is None or found[1][3] is None:
        raise ValueError(f"versions are texts, the target of three numbers, such as '2.1.0', not {ver!r}, {target!r}")
    mine, least = (([int(each[part] or 0) for part in (1, 2, 3)], each["early"] is None) for each in found if each)
    return mine >= least


__all__ = [
    "ccl_built", "ddl_built", "env", "extension_available", "gloo_built", "gpu_available", "is_iterable",
    "is_version_greater_equal_than", "mpi_built", "nccl_built", "num_rank_is_power_2", "split_list",
]  # fmt: skip
