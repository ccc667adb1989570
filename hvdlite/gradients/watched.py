"""The variables of one exchange: compares them between ranks, and knows whether they still exist.

Each `exchange` has one `WatchedVariables`. At the end of a round the exchange calls `round_ends`, which compares the
ranks through `replica_check.Alike`. The exchange also asks whether the variables are gone, to free its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from weakref import finalize, ref

from hvdlite.arrays import Array
from hvdlite.gradients.plan import Spec
from hvdlite.gradients.registry import registry
from hvdlite.gradients.replica_check import Alike, Values, checksum
from hvdlite.gradients.settings import Settings
from hvdlite.gradients.tensors import Variable
from hvdlite.gradients.variables import is_one_of, name_in_layer
from hvdlite.job.process_sets import global_process_set
from hvdlite.lanes.lane import Lane
from hvdlite.system.weak_references import Crowd, weakly

CURES = {
    "weights": (
        "hvd.broadcast_variables(model, root_rank={root}) (in fit(), "
        "callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback({root})])"
    )
}
CURES_IN_SESSIONS = {
    "weights": (
        "session.run(hvd.broadcast_global_variables({root})) (with MonitoredTrainingSession, "
        "hvd.BroadcastGlobalVariablesHook({root}) as the last of the hooks)"
    )
}
CALLERS = {"tape": "hvd.DistributedGradientTape", "optimizer": "hvd.DistributedOptimizer"}
BEGIN = 100  # Horovod's scripts broadcast after the first batch, which may be several rounds
# A sharded optimizer's first step mixes the ranks' weights. So they are compared in its first round, before the step.

ValuesOf = Callable[[Sequence[Variable]], Sequence[int] | None]
"""Returns a checksum of each variable; None if they cannot be read."""


class WatchedVariables:
    """Compares the variables of one exchange between ranks, and knows when all of them are gone.

    Attributes:
        specs: The exchange's variables, as the plan sees them.
        settings: The user's settings.
        variables: The compared variables, held weakly; empty once the exchange has seen two lists of variables.
        lists: The first variable of each list that the exchange has seen. Once all are gone, no list will come again.
        alike: The comparison; None before the first list.
        in_session: Whether only a run of the graph can read the variables.
    """

    def __init__(self, specs: Sequence[Spec], settings: Settings) -> None:
        self.specs = specs
        self.settings = settings
        self.variables: list[ref[Variable]] = []
        self.lists = Crowd()
        self.alike: Alike | None = None
        self.in_session = False

    def watch(
        self, variables: Sequence[Variable], values_of: ValuesOf, in_session: bool, lane: Lane, name: str
    ) -> None:
        """Compare these variables from round BEGIN on, unless a callback compares them.

        Two models with the same names share an exchange, and a rank may trace its step more often than others. So no
        variables are compared once there is a second list.

        Args:
            variables: The variables of the round that is about to begin.
            values_of: Reads checksums.
            in_session: Whether only a run of the graph can read the variables. If `Exchange.finish` returns True, the
                graph reads `present()` and gives the values to `compare`.
            lane: The exchange's lane.
            name: The exchange's name, such as 'tape.0'.
        """
        self.lists.extend(variables[:1])
        if self.alike is None:
            self.begin(variables, values_of, in_session, lane, name)
        elif any(known() is not variable for known, variable in zip(self.variables, variables, strict=False)):
            self.variables = []

    def begin(
        self, variables: Sequence[Variable], values_of: ValuesOf, in_session: bool, lane: Lane, name: str
    ) -> None:
        """Begin to compare the first list of variables."""
        cures, kind = CURES_IN_SESSIONS if in_session else CURES, name.partition(".")[0]
        self.alike = Alike(
            lambda begins: self.values(values_of),
            cures,
            CALLERS[kind],
            self.settings.replica_check,
            1 if self.settings.sharded else BEGIN,
        )
        self.alike.enter(lane, name)
        self.in_session = in_session
        self.variables = [ref(variable) for variable in variables]
        if self.settings.process_set is not global_process_set:
            registry.in_process_sets.extend(variables)

    def enter(self, lane: Lane, name: str) -> None:
        """Go on over another lane after a restart, when rank 0 has the right weights."""
        if self.alike is not None:
            self.alike.expect("0", ("weights",))
            self.alike.enter(lane, name)

    def start_over(self) -> None:
        """Training begins again: all ranks have joined."""
        if self.alike is not None:
            self.alike.expect()

    def round_ends(self) -> bool:
        """Compare the ranks if it is time. Collective. Returns whether the graph is to call `compare`.

        Raises:
            MismatchError: Variables differ when training begins. Every rank raises it.
        """
        if self.alike is None:
            return False
        if self.in_session:
            return self.alike.due()
        self.alike.look()
        return False

    def compare(self, values: Mapping[int, Array]) -> None:
        """Compare the ranks by values that the graph has read. Collective, after `round_ends` has returned True.

        Args:
            values: The values of the present variables, by number.

        Raises:
            MismatchError: As for `round_ends`.
        """
        assert self.alike is not None
        self.alike.compare(self.by_name({number: checksum(value) for number, value in values.items()}) or None)

    def values(self, values_of: ValuesOf) -> Values | None:
        """Checksums of the present variables; None if there are none, or if a callback compares them."""
        present = {} if self.in_session else self.present()
        if not present or (registry.is_compared(present[min(present)]) and not self.settings.sharded):
            return None
        found = values_of(list(present.values()))
        return None if found is None else self.by_name(dict(zip(present, found, strict=True)))

    def present(self) -> dict[int, Variable]:
        """The variables that must be the same on all ranks, by number; empty if any variable is gone."""
        alive = [variable for known in self.variables if (variable := known()) is not None]
        if len(alive) < len(self.specs):
            return {}
        own = list(registry.own)
        return {number: variable for number, variable in enumerate(alive) if not is_one_of(variable, own)}

    def by_name(self, checksums: Mapping[int, int]) -> Values:
        """Checksums by the variables' names in messages."""
        names = {number: f"{name_in_layer(self.specs[number].name)} (variable {number})" for number in checksums}
        return {("weights", names[number]): value for number, value in checksums.items()}

    @property
    def gone(self) -> bool:
        """Whether the variables of every list are gone."""
        return self.alike is not None and not list(self.lists)

    def when_gone(self, method: Callable[[], None]) -> None:
        """Call a bound method each time the variables of a list are gone. Its object is held weakly."""
        for variable in self.lists:
            finalize(variable, weakly(method)).atexit = False

    def forget(self) -> None:
        """Stop comparing variables."""
        self.variables = []
