"""The overlap benchmark's model, which sleeps during backward."""

from __future__ import annotations

import pytest
from torch import nn

from hvdlite.bench import elsewhere
from hvdlite.bench.tasks import TASKS


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_gradients_come_in_order_after_as_long_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    task = TASKS["cnn"]
    count = len(list(task.build().parameters()))
    arrivals = [0.5 * (count - index) for index in range(count)]  # the first parameter's gradient comes last
    arrivals[3] = 0.25  # and a gradient in the middle comes first
    copy = elsewhere.elsewhere(task, arrivals)
    model, (inputs, labels) = copy.build(), copy.batch(2 * task.count)
    seen: list[tuple[int, float]] = []
    clock = Clock()
    monkeypatch.setattr(elsewhere, "time", clock)
    for index, p in enumerate(model.parameters()):
        p.register_post_accumulate_grad_hook(lambda _, index=index: seen.append((index, clock.now)))
    nn.functional.cross_entropy(model(inputs), labels).backward()
    order = sorted(range(count), key=lambda index: arrivals[index])
    assert [index for index, _ in seen] == order
    assert [time for _, time in seen] == pytest.approx(
        [2 * arrivals[index] for index in order]
    )  # the batch is twice as large
    shapes = [p.shape for p in task.build().parameters()]
    assert [p.shape for p in model.parameters()] == shapes == [p.grad.shape for p in model.parameters()]
