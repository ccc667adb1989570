"""The registries of a job: objects that a restart, `join()`, the job's end or a fork must inform.

Attachments, lists of gradients, exchanges and replica checks register here. `elastic`, `ops.join`, `checkpoints` and
`runtime` call the methods of the Protocols below. The registries hold objects weakly: an object that its user drops
leaves them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Protocol

from hvdlite.job.groups import Group
from hvdlite.system.weak_references import Crowd


class Renewable(Protocol):
    """An object that attaches itself again after a restart.

    Attributes:
        group: The ranks that attach it together; None if this process attaches it alone.
        name: Its name, the same on all ranks of the group.
    """

    @property
    def group(self) -> Group | None: ...
    @property
    def name(self) -> str: ...
    def renew(self) -> None:
        """Attach again under the present runtime. Collective over the group."""
        ...


class Compared(Protocol):
    """Values that should be equal on all ranks, and are compared now and then."""

    def expect(self, root: str = ..., fatal: Collection[str] = ...) -> None:
        """Compare with the next round as if training began.

        Args:
            root: The rank that has the right values, in words.
            fatal: The kinds of values that must be equal then.
        """
        ...

    def prepare_last_look(self) -> None:
        """The job ends well on this rank: let the ranks compare once more when all leave. Does not wait."""
        ...


class Joining(Protocol):
    """An object that counts rounds, which ranks may do in different numbers before they call `join()`.

    Attributes:
        alike: Compares its values between ranks; None if it does not compare any.
    """

    @property
    def alike(self) -> Compared | None: ...
    def give_up(self) -> None:
        """This rank is about to join: void a round that was begun and not finished. Does not wait."""
        ...

    def start_over(self) -> None:
        """All ranks have joined: count from 0 again."""
        ...


class Together(Protocol):
    """An optimizer whose weights a strategy keeps together with other ranks'.

    Attributes:
        group: The ranks.
        name: Its name, the same on all ranks.
    """

    @property
    def group(self) -> Group: ...
    @property
    def name(self) -> str: ...
    def prepare(self) -> None:
        """This rank is about to settle: no rank may wait for its next update, or for one that has raised an error."""
        ...

    def settle(self) -> None:
        """Finish what is under way, so that all ranks may read and change weights. Collective; waits for all ranks."""
        ...


class Attached(Protocol):
    """An object that refers to memory which other ranks write to."""

    def let_go(self) -> None:
        """Drop the references to that memory."""
        ...


class Registries:
    """The objects that are registered in one job, each kind in the order of registration.

    Attributes:
        attachments: Objects of an adapter, which only the adapter's own code looks up.
    """

    def __init__(self) -> None:
        self.attachments = Crowd()
        self._renewables = Crowd()
        self._joining = Crowd()
        self._compared = Crowd()
        self._together = Crowd()

    def attach(self, attached: Attached) -> None:
        """Register an attachment."""
        self.attachments.append(attached)

    def renew_later(self, renewable: Renewable) -> None:
        """Register an object that a restart attaches again."""
        self._renewables.append(renewable)

    def count_in_join(self, joining: Joining) -> None:
        """Register an object that `join()` informs."""
        self._joining.append(joining)

    def compare_at_end(self, compared: Compared) -> None:
        """Register values that the ranks compare once more when the job ends."""
        self._compared.append(compared)

    def keep_together(self, together: Together) -> None:
        """Register an optimizer with a strategy."""
        self._together.append(together)

    def forget(self, *members: object) -> None:
        """Remove objects from all registries."""
        for member in members:
            for crowd in (self.attachments, self._renewables, self._joining, self._compared, self._together):
                crowd.remove(member)

    def renewables(self) -> Iterator[Renewable]:
        """The objects that a restart attaches again."""
        return iter(self._renewables)

    def joining(self) -> Iterator[Joining]:
        """The objects that `join()` informs."""
        return iter(self._joining)

    def together(self, group: Group) -> list[Together]:
        """The optimizers with a strategy for these ranks. One that nobody uses may be gone on some ranks."""
        return [each for each in self._together if each.group is group]

    def prepare_last_looks(self) -> None:
        """The job ends well on this rank: let the ranks compare their values once more. Does not wait."""
        compared: Compared
        for compared in self._compared:
            compared.prepare_last_look()

    def let_go(self) -> None:
        """In a forked child: drop the references to memory that other ranks write to."""
        attached: Attached
        for attached in self.attachments:
            attached.let_go()
