"""`memory_report`: where each rank's memory goes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hvdlite.api.memory import report
from hvdlite.job import runtime
from hvdlite.torch.attach.attachment import Attachment
from hvdlite.torch.attach.parameters import flat


def memory_report() -> list[dict[str, float]]:
    """Print how much memory each rank uses, as a table on rank 0. Collective; waits for all ranks.

    Parameters, gradients and state are those of attached optimizers. Gradients lie in the arenas, which ranks of a
    host share: the table has each rank's part. Scratch is what operations receive, add and pack in. `process` is all
    memory of the process on the host.

    Returns:
        For each rank the megabytes (10**6 bytes) by column: "parameters", "gradients", "optimizer state", "arenas",
        "scratch", "process".
    """
    attachments = (each for each in runtime.current().registries.renewables() if isinstance(each, Attachment))
    optimizers = [optimizer for each in attachments if (optimizer := each.reference())]
    parameters = list({id(p): p for optimizer in optimizers for p in flat(optimizer.param_groups)}.values())
    state = (value for optimizer in optimizers for its in optimizer.state.values() for value in its.values())
    return report(nbytes(parameters), nbytes(p.grad for p in parameters), nbytes(state))


def peak_gpu_bytes() -> int:
    """Return the largest amount of memory that torch has used on this process' GPU; 0 if it uses none."""
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.max_memory_allocated() if started else 0


def nbytes(values: Iterable[object]) -> float:
    """Return the bytes of all tensors among these values."""
    return float(sum(value.nbytes for value in values if isinstance(value, torch.Tensor)))
