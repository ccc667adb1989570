"""How parameters are divided among ranks, and how all ranks get all pieces."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from hvdlite.algorithms import Place
from hvdlite.arrays import LINE
from hvdlite.lanes.workplace import HostWorkplace
from hvdlite.sharding import gather
from hvdlite.sharding.cuts import SHORT, Cuts, Parameter, cut, cut_each
from hvdlite.sharding.gather import Gather, Span
from hvdlite.sharding.moves import Move, moves
from hvdlite.transports.threads import ThreadTransport, run_ranks

LENGTHS = {
    "one": [100_000],
    "many": [7, 0, 30_000, 1, 211 * 30, 64_000, 5, 5, 3_000, 0],
    "short": [1, 2, 3],
    "none": [],
}


CUTS = (cut, cut_each)


def divided(
    name: str, size: int, itemsize: int = 4, cuttable: bool = True, how: Callable[..., Cuts] = cut
) -> tuple[list[Parameter], Cuts]:
    parameters = [Parameter(length, itemsize, cuttable) for length in LENGTHS[name]]
    return parameters, how(parameters, size)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("itemsize", [2, 4, 16])
@pytest.mark.parametrize("how", CUTS)
def test_each_element_has_one_owner(name: str, size: int, itemsize: int, how: Callable[..., Cuts]) -> None:
    parameters, cuts = divided(name, size, itemsize, how=how)
    for index, parameter in enumerate(parameters):
        pieces = [cuts.piece(index, rank) for rank in range(size)]
        assert pieces[0][0] == 0 and pieces[-1][1] == parameter.length
        assert all(one[1] == other[0] for one, other in pairwise(pieces))
        for start, _ in pieces:
            assert start * itemsize % LINE == 0 or start == parameter.length
            assert start in (0, parameter.length) or parameter.nbytes >= SHORT


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("how", CUTS)
def test_pieces_are_equally_large(size: int, how: Callable[..., Cuts]) -> None:
    parameters, cuts = divided("many", size, itemsize=40, how=how)
    total = sum(parameter.nbytes for parameter in parameters)
    for rank in range(size):
        mine = sum(40 * (stop - start) for start, stop in (cuts.piece(i, rank) for i in range(len(parameters))))
        assert abs(mine - total / size) <= SHORT


def test_each_long_parameter_is_cut_into_equal_pieces() -> None:
    parameters, cuts = divided("many", 3, how=cut_each)
    for index, parameter in enumerate(parameters):
        lengths = [stop - start for start, stop in pairwise(cuts.borders[index])]
        assert (
            max(lengths) - min(lengths) <= 2 * LINE if parameter.nbytes >= SHORT else max(lengths) == parameter.length
        )


@pytest.mark.parametrize("how", CUTS)
def test_whole_parameters_stay_whole(how: Callable[..., Cuts]) -> None:
    parameters, cuts = divided("many", 3, cuttable=False, how=how)
    for index, parameter in enumerate(parameters):
        assert {*cuts.borders[index]} <= {0, parameter.length}


def test_later_parameters_leave_the_earlier_ones_where_they_are() -> None:
    _, cuts = divided("many", 3)
    _, later = divided("one", 3)
    assert (cuts + later).borders[: len(cuts.borders)] == cuts.borders


def test_messages_of_large_and_small_pieces() -> None:
    long = gather.LONGEST + 1
    assert gather.divided([Span(1, 0, long)]) == [Span(1, 0, gather.LONGEST), Span(1, gather.LONGEST, long)]
    small = [Span(0, 0, 10), Span(2, 0, gather.LARGE - 10), Span(3, 4, 5), Span(4, 0, 1)]
    assert gather.packed(small) == [small[:2], small[2:]]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("hosts", [1, 2])
def test_all_ranks_get_all_pieces(name: str, size: int, hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank begins with its number everywhere, and ends with the owners' numbers. Twice, as in two steps."""
    monkeypatch.setattr(gather, "LONGEST", gather.LARGE)
    monkeypatch.setattr(gather, "AT_ONCE", 2)
    place = Place(size, False, hosts=((0,), tuple(range(1, size))) if hosts == 2 else ())
    parameters, cuts = divided(name, size)
    owners = [np.repeat(np.arange(size), np.diff(borders)) for borders in cuts.borders]

    def rank_main(transport: ThreadTransport) -> bool:
        at, work = HostWorkplace(transport, place, range(size)), Gather(cuts, [4] * len(parameters), size)
        equal = True
        for step in range(2):
            values = [np.full(each.length, 10 * step + transport.rank, np.int32) for each in parameters]
            work.run(at, [each.view(np.uint8) for each in values])
            equal &= all((mine == 10 * step + his).all() for mine, his in zip(values, owners, strict=True))
        return equal

    assert all(run_ranks(size, rank_main))


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (3, 3), (1, 5), (5, 1)])
@pytest.mark.parametrize("name", ["one", "many"])
def test_moves_fill_the_new_pieces_from_the_old_ones(name: str, sizes: tuple[int, int]) -> None:
    """Each element moves once, from its old owner to its new one; in order."""
    (parameters, old), (_, new) = (divided(name, size) for size in sizes)
    for parameter, before, after in zip(parameters, old.borders, new.borders, strict=True):
        found = list(moves(before, after))
        assert [each for move in found for each in range(move.start, move.stop)] == list(range(parameter.length))
        for move in found:
            assert before[move.source] <= move.start < move.stop <= before[move.source + 1]
            assert after[move.target] <= move.start and move.stop <= after[move.target + 1]
        assert len(found) < sum(sizes)


def test_moves_of_empty_pieces() -> None:
    assert list(moves((0, 0, 4, 4, 6), (0, 3, 3, 6))) == [Move(1, 0, 0, 3), Move(1, 2, 3, 4), Move(3, 2, 4, 6)]
    assert list(moves((0, 0, 0), (0, 0))) == []
