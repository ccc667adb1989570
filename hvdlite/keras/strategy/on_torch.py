"""Variables and gradients as arrays for strategies, on PyTorch. Variables change in place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from hvdlite.arrays import Array
from hvdlite.gradients.tensors import Gradient, Variable
from hvdlite.keras.backend_torch import gpu_of
from hvdlite.torch import cuda
from hvdlite.torch.tensors import in_place, plain, to_array


def choose(which: Callable[[], int], branches: Sequence[Callable[[], list[Gradient]]]) -> list[Gradient]:
    """Return the gradients of the branch with the number that `which` returns."""
    return branches[which()]()


@torch.no_grad()
def change(
    due: Callable[[], bool],
    work: Callable[[Sequence[Array]], None],
    variables: Sequence[Variable],
    tensors: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """If `due`, have `work` change variables and tensors. Waits for other ranks if `work` does.

    Args:
        due: Returns whether `work` is to be called.
        work: Changes arrays in place: first those of the variables, then those of the tensors.
        variables: The variables, which get the new values.
        tensors: The tensors.

    Returns:
        Tensors with the new values; the same tensors if nothing is due.
    """
    if not due():
        return list(tensors)
    values: list[torch.Tensor] = [variable.value for variable in variables]  # type: ignore[attr-defined]
    taken, copies = list(map(in_place, values)), list(map(plain, tensors))
    gpu = gpu_of(variables) if variables else None  # type: ignore[arg-type]
    with cuda.on_torchs_stream(gpu) if gpu else contextlib.nullcontext():
        work([*(array for array, _ in taken), *map(to_array, copies)])
    for _, deliver in taken:
        deliver(None)
    torch.autograd.graph.increment_version(values)
    return copies
