"""Which optimizers a sharded one may cut, and which parameters it refuses, without ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.sharding.kinds import Kind  # noqa: E402
from hvdlite.torch.sharded import division as module  # noqa: E402
from hvdlite.torch.sharded.division import Division, Way  # noqa: E402
from hvdlite.torch.sharded.kinds import kind_of  # noqa: E402


class Steps(torch.optim.Optimizer):  # type: ignore[name-defined]
    """Steps by gradients, after `change` of each."""

    def __init__(self, change: Callable[[dict[str, Any], Any, dict[str, Any]], Any], *groups: dict[str, Any]) -> None:
        new = lambda: torch.nn.Parameter(torch.ones(3))  # noqa: E731
        super().__init__([{"params": [new()], **group} for group in groups or ({},)], {"lr": 0.0})
        self.change = change

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * self.change(group, p, self.state[p]))


def history(_: dict[str, Any], p: Any, state: dict[str, Any]) -> Any:
    state.setdefault("history", []).append(p.grad.clone())
    return sum(state["history"])


def test_kinds() -> None:
    plain = lambda group, p, state: p.grad  # noqa: E731
    by_option = lambda group, p, state: p.grad / (p.grad.norm() if group["whole"] else 1)  # noqa: E731
    matrices = lambda group, p, state: p.grad @ p.grad.mT @ p.grad  # noqa: E731
    assert kind_of(Steps(plain)) is Kind.ELEMENTS
    assert kind_of(Steps(plain, {"lr": 0.1}, {"lr": 0.2})) is Kind.ELEMENTS
    assert kind_of(Steps(history)) is Kind.TENSORS
    assert kind_of(Steps(matrices)) is Kind.TENSORS
    assert kind_of(Steps(by_option, {"whole": False}, {"whole": False, "lr": 1})) is Kind.ELEMENTS
    for order in (False, True), (True, False):
        assert kind_of(Steps(by_option, *({"whole": whole} for whole in order))) is Kind.TENSORS


def test_the_trial_leaves_random_numbers_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of GPUs, which torch.manual_seed would set."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    kind_of(Steps(lambda group, p, state: p.grad))
    assert torch.equal(torch.get_rng_state(), before) and not seeded


def test_parameters_on_the_host_and_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(4))
    monkeypatch.setattr(module, "device_name", lambda p: "cuda" if p is other else "host")
    names = {one: "one", other: "other"}
    its = Division(0, 2, Way(lambda: Kind.ELEMENTS, False, lambda p, otherwise: names[p]))
    its.divide([one])
    with pytest.raises(ValueError, match="one on the host, other on the GPU"):
        its.divide([one, other])
    assert its.parameters == [one]
