"""Weak methods and Crowd do not keep their objects alive."""

from __future__ import annotations

import gc

from hvdlite.system.weak_references import Crowd, weakly


class Member:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def see(self, number: int) -> None:
        self.seen.append(number)


def test_a_crowd_has_its_living_members_in_order() -> None:
    crowd, members = Crowd(), [Member() for _ in range(4)]
    crowd.extend(members)
    crowd.append(members[1])  # a second time: it keeps its place
    assert list(crowd) == members
    crowd.remove(members[2])
    crowd.remove(members[2])
    del members[2]
    assert list(crowd) == members and len(crowd) == 3
    del members[0]
    assert list(crowd) == members and len(crowd) == 2


def test_a_crowd_lets_go_of_cycles() -> None:
    crowd, member = Crowd(), Member()
    crowd.append(member)
    vars(member)["itself"] = member
    del member
    gc.collect()
    assert not list(crowd) and len(crowd) == 0


def test_a_method_of_an_object_that_is_no_more_does_nothing() -> None:
    member = Member()
    see, seen = weakly(member.see), member.seen
    see(1)
    del member
    see(2)
    assert seen == [1]
