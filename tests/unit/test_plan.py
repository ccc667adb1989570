"""The bucket plan keeps its rules for any list of parameters."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hvdlite.algorithms import Place
from hvdlite.arrays import LINE
from hvdlite.config import Config
from hvdlite.gradients.plan import BucketPlan, Spec, plan
from hvdlite.gradients.policy import USUAL_BUCKET, planned

KB = 1024


def specs(seed: int, count: int = 60, groups: bool = False, devices: bool = False) -> list[Spec]:
    """Parameters of all kinds and sizes: scalars, empty ones, and some larger than a bucket."""
    rng = random.Random(seed)
    shapes = [(), (0,), (3, 0), (1,), (7,), (16, 16), (100, 3), (64, 64), (200, 50)]
    return [
        Spec(
            f"p{i}", rng.choice(shapes), rng.choice(["float32", "float32", "float16", "bfloat16", "float64"]),
            rng.choice(["host", "cuda:0"]) if devices else "host", rng.choice([None, 0, 1, 2]) if groups else None,
        )
        for i in range(count)
    ]  # fmt: skip


def variants() -> list[tuple[int, bool, bool]]:
    return [(seed, groups, devices) for seed in range(4) for groups in (False, True) for devices in (False, True)]


def size_of(made: BucketPlan, number: int) -> int:
    return made.buckets[number].length * made.buckets[number].dtype.itemsize


@pytest.mark.parametrize(("seed", "groups", "devices"), variants())
def test_every_parameter_has_one_slot(seed: int, groups: bool, devices: bool) -> None:
    given = specs(seed, groups=groups, devices=devices)
    made = plan(given, 8 * KB, 1 * KB)
    members = [index for bucket in made.buckets for index in bucket.members]
    assert sorted(members) == list(range(len(given)))
    assert made.specs == tuple(given) and len(made.slots) == len(given)
    for index, (spec, slot) in enumerate(zip(given, made.slots, strict=True)):
        assert index in made.buckets[slot.bucket].members
        assert slot.length == int(np.prod(spec.shape))


def test_buckets_follow_a_given_order() -> None:
    order = random.Random(0).sample(range(60), 60)
    made = plan([Spec(f"p{i}", (100,), "float32") for i in range(60)], 8 * KB, 1 * KB, order=order)
    assert [index for bucket in made.buckets for index in bucket.members] == order
    assert made.lines == plan(made.specs, 8 * KB, 1 * KB).lines


@pytest.mark.parametrize(("seed", "groups", "devices"), variants())
def test_slots_are_aligned_and_do_not_overlap(seed: int, groups: bool, devices: bool) -> None:
    made = plan(specs(seed, groups=groups, devices=devices), 8 * KB, 1 * KB)
    for bucket in made.buckets:
        assert bucket.start % LINE == 0
        end = 0
        for slot in sorted((made.slots[i] for i in bucket.members), key=lambda slot: (slot.offset, slot.length)):
            assert slot.offset >= end and slot.offset * bucket.dtype.itemsize % LINE == 0
            end = slot.offset + slot.length
        assert end <= bucket.length
    for device in made.devices:
        end = 0
        for bucket in sorted((b for b in made.buckets if b.device == device), key=lambda b: b.start):
            assert bucket.start >= end
            end = bucket.start + bucket.length * bucket.dtype.itemsize
        assert made.nbytes(device) == end


@pytest.mark.parametrize(("seed", "groups", "devices"), variants())
def test_a_bucket_has_one_dtype_and_device(seed: int, groups: bool, devices: bool) -> None:
    made = plan(specs(seed, groups=groups, devices=devices), 8 * KB, 1 * KB)
    for bucket in made.buckets:
        for index in bucket.members:
            assert (np.dtype(made.specs[index].dtype), made.specs[index].device) == (bucket.dtype, bucket.device)


@pytest.mark.parametrize("seed", range(4))
def test_last_parameters_come_first(seed: int) -> None:
    """Members of a bucket go from the last parameter to the first, and so do the buckets of one kind."""
    made = plan(specs(seed), 8 * KB, 1 * KB)
    for kind in {bucket.dtype for bucket in made.buckets}:
        members = [index for bucket in made.buckets if bucket.dtype == kind for index in bucket.members]
        assert members == sorted(members, reverse=True)
    firsts = [bucket.members[0] for bucket in made.buckets]
    assert firsts == sorted(firsts, reverse=True)  # buckets are sent in the order in which they begin to fill
    for bucket in made.buckets:
        offsets = [made.slots[index].offset for index in bucket.members]
        assert offsets == sorted(offsets)


@pytest.mark.parametrize("last_bytes", [0, 2 * KB])
@pytest.mark.parametrize("seed", range(4))
def test_sizes(seed: int, last_bytes: int) -> None:
    """The parameter that fills a bucket closes it.

    It stays open only for a remainder below twice the last bucket's bytes. The first bucket of each dtype is small, and
    the last as short as possible.
    """
    made = plan(specs(seed), 8 * KB, 1 * KB, last_bytes)
    for kind in {bucket.dtype for bucket in made.buckets}:
        numbers = [number for number, bucket in enumerate(made.buckets) if bucket.dtype == kind]
        if last_bytes:
            last = made.buckets[numbers.pop()]
            offsets = [made.slots[index].offset * kind.itemsize for index in last.members]
            needed = [offset for offset in offsets if last.length * kind.itemsize - offset >= last_bytes]
            assert max(needed) <= last_bytes / 4 or not numbers
        for number in numbers:
            enough = 1 * KB if number == numbers[0] else 8 * KB
            offsets = [made.slots[index].offset * kind.itemsize for index in made.buckets[number].members]
            needless = [offset for offset in offsets if offset >= enough]
            assert not needless or (number == numbers[-1] and size_of(made, number) - needless[0] < 2 * last_bytes)
            assert size_of(made, number) >= enough or number == numbers[-1]


def test_small_ones_leave_with_the_large_one_behind_them() -> None:
    """A linear layer's bias and the short layer after it need no request of their own."""
    shapes = [(2048, 1024), (2048,), (2048, 2048), (2048,), (10, 2048), (10,)]
    made = plan([Spec(f"p{i}", shape, "float32") for i, shape in enumerate(shapes)], 1024 * KB, 512 * KB)
    assert [bucket.members for bucket in made.buckets] == [(5, 4, 3, 2), (1, 0)]


def test_the_first_bucket_is_small_and_the_rest_are_full() -> None:
    """40 parameters of 1 KB: a first bucket of 2, then buckets of 8."""
    made = plan([Spec(f"p{i}", (256,), "float32") for i in range(40)], 8 * KB, 2 * KB)
    assert [len(bucket.members) for bucket in made.buckets] == [2, 8, 8, 8, 8, 6]


def test_groups_travel_together() -> None:
    """That holds if the members lie far apart, and if together they are larger than a bucket."""
    given = [Spec(f"p{i}", (256,), "float32", group=0 if i in (0, 7, 19) else 1 if i % 2 else None) for i in range(20)]
    made = plan(given, 4 * KB, 1 * KB)
    for group in (0, 1):
        assert len({made.slots[i].bucket for i, spec in enumerate(given) if spec.group == group}) == 1


def test_a_group_of_two_dtypes_is_split_by_dtype() -> None:
    given = [
        Spec("a", (4,), "float32", group=0),
        Spec("b", (4,), "float16", group=0),
        Spec("c", (4,), "float32", group=0),
    ]
    made = plan(given, 8 * KB, 1 * KB)
    assert made.slots[0].bucket == made.slots[2].bucket != made.slots[1].bucket


@pytest.mark.parametrize("seed", range(4))
def test_equal_input_gives_equal_plans(seed: int) -> None:
    """That holds for an iterator too. Another shape, dtype or name gives other lines."""
    given = specs(seed, groups=True)
    assert plan(iter(given), 8 * KB, 1 * KB) == plan(list(given), 8 * KB, 1 * KB)
    lines = plan(given, 8 * KB, 1 * KB).lines
    assert len(lines) == len(given)
    for change in (
        Spec("p5", (9, 9), "float32"),
        Spec("p5", given[5].shape, "int8"),
        Spec("x", given[5].shape, given[5].dtype),
    ):
        other = plan([*given[:5], change, *given[6:]], 8 * KB, 1 * KB).lines
        assert [a != b for a, b in zip(lines, other, strict=True)] == [i == 5 for i in range(len(given))]


def test_nothing_to_plan() -> None:
    made = plan([], 8 * KB, 1 * KB)
    assert made.buckets == () and made.slots == () and made.lines == () and made.nbytes("host") == 0


def test_only_empty_parameters() -> None:
    made = plan([Spec("a", (0,), "float32"), Spec("b", (2, 0), "float32")], 8 * KB, 1 * KB)
    assert [slot.length for slot in made.slots] == [0, 0] and made.nbytes("host") == 0


def test_buckets_that_leave_during_backward_are_short() -> None:
    """Little is left when backward ends, unless the user has set a size."""
    layers = [Spec(f"p{i}", (1024, 1024), "float32") for i in range(16)]  # 4 MB each
    network, host = Place(4, True, hosts=((0, 1), (2, 3))), Place(4, True)
    made, overlap = planned(layers, Config(), network)
    assert overlap is None and len(made.buckets) == 16
    made, overlap = planned(layers, Config(), host)
    assert overlap is False and [len(bucket.members) for bucket in made.buckets] == [1, 7, 7, 1]
    made, overlap = planned(layers, Config(bucket_bytes=USUAL_BUCKET), network)
    assert overlap is None and [len(bucket.members) for bucket in made.buckets] == [1, 7, 7, 1]
    small = [Spec(f"p{i}", (64, 64), "float32") for i in range(64)]  # 16 KB each, 1 MB in all
    lengths = [len(bucket.members) for bucket in planned(small, Config(), network)[0].buckets]
    assert lengths == [24, 24, 11, 5]  # all but the last bucket have at least SHORTEST_BUCKET bytes
    assert [len(bucket.members) for bucket in planned(small[:34], Config(), network)[0].buckets] == [29, 5]
    assert [len(bucket.members) for bucket in planned(small[:20], Config(), network)[0].buckets] == [20]
    assert [len(bucket.members) for bucket in planned(small, Config(overlap="0"), network)[0].buckets] == [64]
    biased = [Spec(f"p{i}", shape, "float32") for i, shape in enumerate([(1024, 2048), (2048,)] * 3)]
    assert [bucket.members for bucket in planned(biased, Config(), network)[0].buckets] == [(5, 4), (3, 2), (1, 0)]
    given = Config(bucket_bytes=32 * KB)
    assert {len(bucket.members) for bucket in planned(small, given, network)[0].buckets} == {2}  # and so has the first
    first, *_, last = planned([*small] * 10, Config(), host)[0].buckets
    assert len(first.members) == 64 and len(last.members) == 576


def test_compressed_gradients_have_buckets_of_their_own() -> None:
    """Also those of one group. Ranks compare whether a gradient is compressed; the name for it is a host's own."""
    given = [Spec(f"p{i}", (16, 16), "float32", group=0 if i < 4 else None, lossy=f"n{i}" * (i % 3 == 0)) for i in range(12)]  # fmt: skip
    made = plan(given, 8 * KB, 1 * KB)
    for bucket in made.buckets:
        assert {bool(given[index].lossy) for index in bucket.members} == {bucket.lossy}
    assert {bucket.lossy for bucket in made.buckets} == {True, False}
    assert [", compressed" in line for line in made.lines] == [i % 3 == 0 for i in range(12)]
    (together,) = {made.slots[index].bucket for index in (0, 3)}
    assert {made.slots[index].bucket for index in (1, 2)} not in ({together}, set())
