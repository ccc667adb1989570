"""A user's settings for `DistributedOptimizer`: groups, and the errors for invalid arguments."""

from __future__ import annotations

import numpy as np
import pytest

from hvdlite.gradients.compression import Compressor, NoneCompressor, caster, unknown
from hvdlite.gradients.groups import Groups, parse_groups
from hvdlite.gradients.registry import Registry
from hvdlite.gradients.sparse import SparseReduction
from hvdlite.gradients.wire import dtype_on_wire
from hvdlite.ops import Average, Min, Sum

fp16 = caster("FP16", "float16", lambda array: array.dtype.kind == "f", lambda array, dtype: array.astype(dtype))


def test_a_number_of_groups_splits_parameters_evenly() -> None:
    for count in range(1, 8):
        numbers = parse_groups(count, id, "parameters").numbers(range(7))
        sizes = [numbers.count(number) for number in range(count)]
        assert sum(sizes) == 7 and max(sizes) - min(sizes) <= 1 and numbers == sorted(numbers, key=int)


def test_lists_of_parameters_are_groups_and_others_travel_anywhere() -> None:
    groups = parse_groups([["a", "c"], ("d",)], str, "parameters")
    assert groups == Groups(members=(("a", "c"), ("d",))) and groups.numbers("abcd") == [0, None, 0, 1]
    assert parse_groups(None, str, "parameters").numbers("ab") == [None, None]


@pytest.mark.parametrize("groups", [0, -1, True, 1.5, "ab", np.ones(2), [np.ones(2)], ["ab"], [1]], ids=repr)
def test_groups_that_cannot_be_are_refused(groups: object) -> None:
    with pytest.raises(ValueError, match="groups must be"):
        parse_groups(groups, id, "parameters")


def test_a_parameter_is_in_one_group() -> None:
    for groups in ([["a", "a"]], [["a"], ["b", "a"]]):
        with pytest.raises(ValueError, match="one of the variables twice"):
            parse_groups(groups, str, "variables")


def test_what_a_caster_sends_comes_back_in_its_own_dtype() -> None:
    for dtype, sent in (("float32", "float16"), ("float64", "float16"), ("int32", "int32")):
        array = np.arange(5).astype(dtype)
        small, context = fp16.compress(array)
        back = fp16.decompress(small, context)
        assert small.dtype == sent == dtype_on_wire(fp16, dtype, array.dtype.kind == "f")
        assert back.dtype == dtype and (back == array).all()


def test_only_a_users_own_compressor_may_do_anything() -> None:
    class Mine(Compressor):
        pass

    assert unknown(Mine) is Mine and unknown(fp16) is None and unknown(NoneCompressor) is None
    with pytest.raises(ValueError, match="compression must be"):
        unknown(object())


def test_sparse_tensors_are_summed_or_averaged() -> None:
    assert SparseReduction(Sum).divisor == 1 and SparseReduction(Average)
    with pytest.raises(NotImplementedError, match="op=Min: only Average and Sum"):
        SparseReduction(Min)


def test_each_count_of_reductions_begins_at_its_own_time() -> None:
    """A second fit() has a count of its own, and a first exchange of its own."""

    class Exchange:
        pass

    registry, one, two = Registry(), Exchange(), Exchange()
    first = registry.count_reductions()
    registry.round_begins(one)
    registry.round_ends()
    second = registry.count_reductions()
    registry.round_begins(two)
    registry.round_ends()
    assert (first.number, second.number) == (2, 1)
    assert first.first is not None and first.first() is one
    assert second.first is not None and second.first() is two
    del first
    assert len(registry.counts) == 1
