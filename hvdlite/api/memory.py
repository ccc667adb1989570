"""The table of `memory_report`, the same for all frameworks. Adapters count parameters, gradients and state."""

from __future__ import annotations

from hvdlite.job import runtime
from hvdlite.lanes.calls import calling
from hvdlite.ops.objects import allgather_object
from hvdlite.system.process_memory import proportional_bytes

MB = 1e6
ARENAS = "memfd:hvdlite"
"""The name of hvdlite's shared memory in Linux' list of mappings."""


def report(parameters: float, gradients: float, state: float) -> list[dict[str, float]]:
    """Gather all ranks' rows, and print them on rank 0. Collective; waits for all ranks.

    Args:
        parameters: The bytes of this rank's parameters.
        gradients: The bytes of their gradients.
        state: The bytes of the state of optimizers.

    Returns:
        For each rank the megabytes (10**6 bytes) by column.
    """
    mine = {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer state": state,
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
