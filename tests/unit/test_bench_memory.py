"""The memory benchmark: its model and its contenders."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import torch

from hvdlite.bench import __main__ as command_line
from hvdlite.bench import memory
from hvdlite.system.process_memory import data_bytes, proportional_bytes, reset_peak, resident_bytes


def test_the_command_line_names_all_contenders() -> None:
    assert tuple(memory.CONTENDERS) == command_line.IN_MEMORY


def test_the_model_has_the_parameters_of_gpt2() -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in memory.model_of(memory.GPT2, 0.0).parameters()) == 124_439_808


def test_gradients_are_parameters_plus_a_number() -> None:
    model = memory.model_of(memory.TINY, 0.5)
    model(torch.zeros((), requires_grad=True)).backward()
    for p in model.parameters():
        assert p.grad is not None and p.grad.equal(p.detach() + 0.5)


def test_the_peak_is_of_the_time_since_it_was_reset() -> None:
    """Linux counts pages with an error of some hundred KiB."""
    megabyte = 1 << 20
    with mmap.mmap(-1, 64 * megabyte) as memory_in_use:
        memory_in_use.write(b"x" * (64 * megabyte))
    assert reset_peak()
    start, peak = resident_bytes()
    assert start > 0 and peak - start < 8 * megabyte
    with mmap.mmap(-1, 64 * megabyte) as memory_in_use:
        for _ in range(64):
            memory_in_use.write(b"x" * megabyte)
    now, peak = resident_bytes()
    assert 60 * megabyte < peak - start < 72 * megabyte and now - start < 8 * megabyte


def test_memory_without_pages_of_files(tmp_path: Path) -> None:
    """Arrays and shared memory count; what is read from a mapped file does not."""
    many = 64 << 20
    path = tmp_path / "file"
    np.zeros(many, np.uint8).tofile(path)
    before, of_all = data_bytes(), proportional_bytes()
    mapped = np.memmap(path, np.uint8, "r")
    assert mapped.sum() == 0 and proportional_bytes() - of_all > many * 0.9 and data_bytes() - before < many * 0.1
    shared, array = mmap.mmap(-1, many), np.ones(many, np.uint8)
    shared.write(array.tobytes())
    assert abs(data_bytes() - before - 2 * many) < many * 0.1
