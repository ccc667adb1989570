"""Groups: parameters that travel together in one bucket, from the user's `groups=`.

`settings` parses the argument. Before a plan is made, each parameter gets the number of its group (`plan.Spec.group`),
and `plan.units` keeps a group in one bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from hvdlite.system.user_warnings import deprecated

MEMBERS = "groups must be a number or lists of {}"


@dataclass(frozen=True)
class Groups:
    """The user's groups. By default there are none, and each parameter travels in any bucket.

    Attributes:
        count: The number of groups, each of neighbours and of about the same size; None: `members` has the groups.
        members: The keys of each group's parameters.
    """

    count: int | None = None
    members: tuple[tuple[Hashable, ...], ...] = ()

    def numbers(self, keys: Sequence[Hashable]) -> list[int | None]:
        """The number of each parameter's group; None for a parameter in no group. keys: of all parameters."""
        if self.count is not None:
            return [index * self.count // len(keys) for index in range(len(keys))]
        known = {key: number for number, group in enumerate(self.members) for key in group}
        return [known.get(key) for key in keys]

    def among(self, keys: Sequence[Hashable]) -> Groups:
        """These groups as lists of keys, for these parameters alone: parameters that come later join no group."""
        members: dict[int, list[Hashable]] = {}
        for key, number in zip(keys, self.numbers(keys), strict=True):
            if number is not None:
                members.setdefault(number, []).append(key)
        return Groups(members=tuple(map(tuple, members.values())))


def parse_groups(groups: object, key: Callable[[object], Hashable], what: str) -> Groups:
    """Parse the user's `groups=`.

    Args:
        groups: None, the number of groups, or lists of parameters.
        key: Returns the key of a parameter. Raises ValueError for another object.
        what: 'parameters' or 'variables', for messages.

    Raises:
        ValueError: The number is below 1, or `groups` is neither a number nor lists of parameters, or names a parameter
            twice.
    """
    if groups is None:
        return Groups()
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 1:
            raise ValueError(f"groups must be at least 1, not {groups}")
        return Groups(count=groups)
    several: list[object] = list(groups) if isinstance(groups, Iterable) and is_list(groups) else [groups]
    members = [list(group) for group in several if isinstance(group, Iterable) and is_list(group)]
    if len(members) < len(several):
        raise ValueError(MEMBERS.format(what) + f", not {groups!r}")
    given = [id(each) for group in members for each in group]
    if len(set(given)) < len(given):
        raise ValueError(f"groups names one of the {what} twice")
    return Groups(members=tuple(tuple(map(key, group)) for group in members))


def is_list(found: object) -> bool:
    """Whether an object is a list or another collection. Tensors and text do not count."""
    return isinstance(found, Iterable) and not isinstance(found, str) and not hasattr(found, "shape")


def groups_given(groups: object, num_groups: int) -> object:
    """The user's groups, from `groups=` or from Horovod's older `num_groups=`, which is deprecated."""
    if not num_groups:
        return groups
    deprecated("num_groups is deprecated: use groups")
    return num_groups if groups is None else groups
