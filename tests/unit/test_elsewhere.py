"""The overlap benchmark's model whose backward is computed elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hvdlite.bench import elsewhere
from hvdlite.bench.step import TASKS


def test_gradients_come_in_order_after_as_long_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    task = TASKS["cnn"]
    count = len(list(task.build().parameters()))
    arrivals = [0.5 * (count - index) for index in range(count)]  # the first parameter's last
    arrivals[3] = 0.25  # and one of the middle's first
    copy = elsewhere.elsewhere(task, arrivals)
    model, (inputs, labels) = copy.build(), copy.batch(2 * task.count)
    seen: list[tuple[str, object]] = []
    monkeypatch.setattr("time.sleep", lambda seconds: seen.append(("wait", seconds)))
    for index, p in enumerate(model.parameters()):
        p.register_post_accumulate_grad_hook(lambda _, index=index: seen.append(("gradient", index)))
    nn.functional.cross_entropy(model(inputs), labels).backward()
    order = sorted(range(count), key=lambda index: arrivals[index])
    assert [what for kind, what in seen if kind == "gradient"] == order
    assert [kind for kind, _ in seen] == ["wait", "gradient"] * count
    waits = torch.tensor([what for kind, what in seen if kind == "wait"])
    expected = 2 * torch.tensor([arrivals[index] for index in order])  # the batch is twice the task's
    torch.testing.assert_close(waits.cumsum(0), expected)
    shapes = [p.shape for p in task.build().parameters()]
    assert [p.shape for p in model.parameters()] == shapes == [p.grad.shape for p in model.parameters()]
