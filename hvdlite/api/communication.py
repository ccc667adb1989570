"""`communication_stats`: the bytes that gradients and weights take between hosts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from hvdlite.job import runtime

if TYPE_CHECKING:
    from hvdlite.gradients.reducer import Reducer
    from hvdlite.gradients.traffic import Traffic


@runtime_checkable
class Reducing(Protocol):
    """An optimizer's attachment, or a tape's lists of gradients."""

    @property
    def reducers(self) -> Iterable[Reducer]: ...


@runtime_checkable
class Strategic(Protocol):
    """An optimizer's attachment with a strategy."""

    @property
    def sent_per_step(self) -> float: ...


@dataclass(frozen=True)
class CommunicationStats:
    """The traffic of all optimizers and tapes, by name. `print` shows a table, and `as_dict` is for loggers.

    Attributes:
        traffic: For each optimizer or tape the traffic of one step.
    """

    traffic: dict[str, Traffic]

    def as_dict(self) -> dict[str, float]:
        """Numbers for a logger.

        Returns:
            For each optimizer or tape: "NAME/bytes_per_step", "NAME/bytes_per_step/exact", "NAME/bytes_per_step/HOW"
            with the compressor's name, and "NAME/unsent" (norm of residuals over norm of gradients). With a lossy
            compressor or "auto" also "NAME/ratio": bytes without compression over bytes.
        """
        found: dict[str, float] = {}
        for name, each in self.traffic.items():
            found[f"{name}/bytes_per_step"] = each.exact + each.lossy
            found[f"{name}/bytes_per_step/exact"] = each.exact
            if each.how:
                found[f"{name}/ratio"] = ratio(each)
                found[f"{name}/bytes_per_step/{each.how.partition('(')[0]}"] = each.lossy
            if each.unsent is not None:
                found[f"{name}/unsent"] = each.unsent
        return found

    def __str__(self) -> str:
        lines = []
        for name, each in self.traffic.items():
            line = f"{name}: {each.exact + each.lossy:,.0f} bytes per step to other hosts"
            if each.how:
                line += (
                    f" ({each.exact:,.0f} exact, {each.lossy:,.0f} by {each.how}), "
                    f"{ratio(each):.1f} times fewer than without compression"
                )
            elif each.dtypes:
                line += f", as {each.dtypes}"
            lines.append(line if each.unsent is None else f"{line}; unsent: {each.unsent:.2f} of a step's gradient")
        return "\n".join(lines) or "no optimizer or tape has reduced gradients"


def communication_stats() -> CommunicationStats:
    """Return how many bytes of gradients and weights this rank sends to other hosts in a step. Waits for nobody.

    Bytes of compressed gradients are counted. Bytes of exact ones follow from the all-reduce's price. Ranks of one host
    exchange gradients in memory, and send nothing. A strategy's bytes are a mean over all steps. Call it between steps.

    Returns:
        The statistics: `print` them, or log `as_dict()`.

    Raises:
        NotInitializedError: `init()` has not been called.
    """
    from hvdlite.gradients.traffic import Traffic, traffic_of  # not with `import hvdlite`: that takes 30 ms

    found: dict[str, Traffic] = {}
    for each in runtime.current().registries.renewables():
        for reducer in each.reducers if isinstance(each, Reducing) else ():
            name = reducer.lane.user or reducer.name
            found[name if name not in found else f"{name} {len(found)}"] = traffic_of(reducer)
        if isinstance(each, Strategic):
            found[f"{each.name} weights"] = Traffic(each.sent_per_step, 0.0, 0.0, "", None)
    return CommunicationStats(found)


def ratio(traffic: Traffic) -> float:
    """The bytes without compression, divided by the bytes with it."""
    with_it = traffic.exact + traffic.lossy
    return (traffic.exact + traffic.plain) / with_it if with_it else 1.0
