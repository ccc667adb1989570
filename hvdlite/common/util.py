"""`horovod.common.util`: questions about the build, and helpers."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from hvdlite.api import build
from hvdlite.api.build import check_num_rank_power_of_2, split_list

T_co = TypeVar("T_co", covariant=True)


class Question(Protocol[T_co]):
    """A question about the build, with the argument that it has in Horovod's module."""

    def __call__(self, verbose: bool = False) -> T_co: ...


def asked(question: Callable[[], T_co]) -> Question[T_co]:
    """Return the question with an argument `verbose`, which is ignored."""
    return lambda verbose=False: question()


ccl_built, ddl_built, gloo_built = asked(build.ccl_built), asked(build.ddl_built), asked(build.gloo_built)
mpi_built, nccl_built = asked(build.mpi_built), asked(build.nccl_built)
num_rank_is_power_2 = check_num_rank_power_of_2
VERSION = re.compile(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?(?P<early>[-_.]?(?:a|b|c|rc|alpha|beta|pre|preview|dev)(?![a-z]))?")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework ('torch', 'tensorflow') is installed: hvdlite needs no extension for it."""
    return importlib.util.find_spec(ext_base_name) is not None


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether the framework sees a GPU and CuPy is installed, which tensors on GPUs need."""
    if not build.cuda_built() or not extension_available(ext_base_name):
        return False
    if ext_base_name == "torch":
        return bool(importlib.import_module("torch").cuda.is_available())
    return bool(importlib.import_module("hvdlite.tensorflow").gpu_available())


@contextlib.contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set these environment variables inside the context. None leaves a variable as it is."""
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


def is_iterable(x: object) -> bool:
    """Return whether `iter(x)` is possible."""
    try:
        iter(x)  # type: ignore[call-overload]  # which is the question
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether a version is at least the target.

    All versions before a release (rc1, a0, .dev20261101) are equal to each other and less than the release.

    Args:
        ver: A version, such as '2.4', '2.12.0rc1' or '2.13.0+cpu'.
        target: A version of three numbers.

    Returns:
        Whether `ver` is the target or a later version.

    Raises:
        ValueError: `ver` or `target` is not such a text.
    """
    found = [VERSION.match(each) if isinstance(each, str) else None for each in (ver, target)]
    if found[0] is None or found[1] is None or found[1][3] is None:
        raise ValueError(f"versions are texts, and the target has three numbers ('2.1.0'), not {ver!r}, {target!r}")
    mine, least = (([int(each[part] or 0) for part in (1, 2, 3)], each["early"] is None) for each in found if each)
    return mine >= least


__all__ = [
    "ccl_built", "ddl_built", "env", "extension_available", "gloo_built", "gpu_available", "is_iterable",
    "is_version_greater_equal_than", "mpi_built", "nccl_built", "num_rank_is_power_2", "split_list",
]  # fmt: skip
