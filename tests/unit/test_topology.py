"""The neighbours of ranks, on hosts with different numbers of ranks."""

from __future__ import annotations

from hvdlite.job.topology import from_leaders


def test_hosts_of_different_sizes() -> None:
    places = [from_leaders(rank, [4, 4, 7, 5, 4, 5]) for rank in range(6)]
    assert all(place.hosts == ((0, 1, 4), (2,), (3, 5)) for place in places)
    assert [(place.local_rank, place.local_size) for place in places] == [
        (0, 3),
        (1, 3),
        (0, 1),
        (0, 2),
        (2, 3),
        (1, 2),
    ]
    assert [(place.cross_rank, place.cross_size) for place in places] == [
        (0, 3),
        (0, 2),
        (1, 3),
        (2, 3),
        (0, 1),
        (1, 2),
    ]
    assert not any(place.homogeneous or place.one_host for place in places)
    assert from_leaders(1, [3, 3]).homogeneous and from_leaders(1, [3, 3]).one_host
