"""Checksums of tensors depend on the bits of the values alone. A value without readable memory has none."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hvdlite.gradients import replica_check  # noqa: E402
from hvdlite.torch.attach.replica_check import checksum, number_in  # noqa: E402


def test_memory_does_not_matter() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.complex64):
        matrix = torch.arange(15).reshape(3, 5).to(dtype)
        expected = checksum(matrix)
        assert expected
        assert checksum(matrix.t().contiguous().t()) == expected
        padded = torch.cat([matrix.reshape(-1), matrix.reshape(-1)])
        assert checksum(padded[15:].reshape(3, 5)) == expected
        changed = matrix.clone()
        changed[-1, -1] += 1
        assert checksum(changed) != expected


def test_any_tensor_has_one_or_none() -> None:
    ones = torch.ones(3)
    for dtype in (torch.float8_e4m3fn, torch.bool, torch.uint16, torch.complex128, torch.int64):
        assert checksum(torch.ones(3).to(dtype))
    assert checksum(torch.zeros(0)) and checksum(torch.tensor(3.0)) and checksum(ones.expand(4, 3))
    assert checksum(torch._neg_view(ones)) == checksum(-ones)
    assert checksum(torch.ones(3, dtype=torch.complex64).conj()) != checksum(torch.ones(3, dtype=torch.complex64))
    for nothing in (None, 3.0, torch.zeros(3, device="meta"), ones.to_sparse()):
        assert checksum(nothing) is None


def test_what_changes_places_is_seen() -> None:
    """Rows of an embedding in another order; and a tensor's checksum is that of its array."""
    for shape in ((6, 2), (1000, 64), (333, 129)):
        table = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
        assert checksum(table) != checksum(table.flip(0))
        for first, second in ((0, 1), (0, shape[0] - 1), (2, 3)):
            swapped = table.clone()
            swapped[[first, second]] = table[[second, first]]
            assert checksum(swapped) != checksum(table)
        bits = table.reshape(-1).view(torch.uint8)
        assert checksum(table) == replica_check.checksum_of(bits, torch.int64, torch.Tensor.numpy)  # as on a GPU


def test_settings_that_can_be_compared() -> None:
    assert number_in((0.9, 0.999)) == (0.9, 0.999) and number_in(torch.tensor(0.5)) == 0.5 and number_in(True) is True
    assert number_in("amsgrad") is None and number_in(object()) is None and number_in(torch.ones(2)) is None
