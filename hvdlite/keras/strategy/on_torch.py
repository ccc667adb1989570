"""Variables and gradients as arrays for strategies, on PyTorch. Variables change in place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from hvdlite.arrays import Array
from hvdlite.gradients.tensors import Gradient, Variable
from hvdlite.keras.backend_torch import gpu_of
from hvdlite.torch import cuda
from hvdlite.torch.tensors import in_place, readable


def choose(which: Callable[[], int], branches: Sequence[Callable[[], list[Gradient]]]) -> list[Gradient]:
    """Return the gradients of the branch with the number that `which` returns."""
    return branches[which()]()


@torch.no_grad()
def change(
    due: Callable[[], bool],
    work: Callable[[Sequence[Array]], None],
    variables: Sequence[Variable],
    seen: Sequence[torch.Tensor],
) -> None:
    """If `due`, have `work` change variables in place. Waits for other ranks if `work` does.

    Args:
        due: Returns whether `work` is to be called.
        work: Changes the first of its arrays, which are the variables', in place. The others are those of `seen`.
        variables: The variables, which get the new values.
        seen: Gradients, dense or sparse.
    """
    if not due():
        return
    values: list[torch.Tensor] = [variable.value for variable in variables]  # type: ignore[attr-defined]
    taken = list(map(in_place, values))
    others = [readable(each.to_dense() if each.is_sparse else each) for each in seen]
    gpu = gpu_of(variables) if variables else None  # type: ignore[arg-type]
    with cuda.on_torchs_stream(gpu) if gpu else contextlib.nullcontext():
        work([*(array for array, _ in taken), *others])
    for _, deliver in taken:
        deliver(None)
    torch.autograd.graph.increment_version(values)
