"""`memory_report`: where each rank's memory goes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hvdlite.job import runtime
from hvdlite.lanes.calls import calling
from hvdlite.ops.objects import allgather_object
from hvdlite.system.process_memory import proportional_bytes
from hvdlite.torch.attach.attachment import Attachment
from hvdlite.torch.attach.parameters import flat

MB = 1e6
ARENAS = "memfd:hvdlite"
"""The name of hvdlite's shared memory in Linux' list of mappings."""


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
    mine = {
        "parameters": nbytes(parameters),
        "gradients": nbytes(p.grad for p in parameters),
        "optimizer state": nbytes(state),
        "arenas": float(proportional_bytes(ARENAS)),
        "scratch": float(scratch_bytes()),
        "process": float(proportional_bytes()),
    }
    with calling("hvd.memory_report()"):
        everyone = allgather_object({name: size / MB for name, size in mine.items()}, name="memory_report")
    if runtime.rank() == 0:
        show(everyone)
    return everyone


def scratch_bytes() -> int:
    """Return the bytes that lanes keep to receive, add and pack in. GPU memory counts, too."""
    hosts = [lane.host for lane in runtime.current().groups.lanes()]
    return sum(at.workspace.scratch_bytes for host in hosts for at in (host, host.gpu) if at)


def nbytes(values: Iterable[object]) -> float:
    """Return the bytes of all tensors among these values."""
    return float(sum(value.nbytes for value in values if isinstance(value, torch.Tensor)))


def show(everyone: list[dict[str, float]]) -> None:
    """Print the table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title="memory in MB", title_justify="left", title_style="", box=box.SIMPLE)
    for heading in ("rank", *everyone[0]):
        table.add_column(heading, justify="right")
    for rank, row in enumerate(everyone):
        table.add_row(str(rank), *(f"{megabytes:,.1f}" for megabytes in row.values()))
    Console(width=100).print(table)
