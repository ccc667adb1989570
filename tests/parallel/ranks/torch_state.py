"""Weights, optimizer state and objects of one rank, given to all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import hvdlite
import hvdlite.torch as hvd
from hvdlite.torch import functions
from tests.parallel.common import digest, last, require_error, require_mismatch, require_same_bits
from tests.parallel.ranks.torch_gradients import loss_of


def build(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    net: Any = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(12, 2)
    )
    net[1].num_batches_tracked.fill_(seed)
    return net.to(memory_format=torch.channels_last)


def check_broadcast_parameters() -> None:
    """From every root, given as a state_dict, a generator, a list of tensors or of pairs; integer and scalar buffers
    and other memory orders too."""
    for root in range(hvd.size()):
        for form in ("state_dict", "generator", "pairs", "tensors", "neutral"):
            net, expected = build(hvd.rank()), build(root)
            if form == "state_dict":
                hvd.broadcast_parameters(net.state_dict(), root_rank=root)
            elif form == "generator":
                hvd.broadcast_parameters(net.named_parameters(), root_rank=root)
            elif form == "pairs":
                hvd.broadcast_parameters(list(net.state_dict().items()), root_rank=root)
            elif form == "tensors":
                hvd.broadcast_parameters(list(net.parameters()), root_rank=root)
            else:
                hvdlite.broadcast_variables(net, root_rank=root)
            pairs = zip(net.state_dict().items(), expected.state_dict().values(), strict=True)
            for (name, found), wanted in pairs:
                if form in ("state_dict", "pairs", "neutral") or name in dict(net.named_parameters()):
                    assert torch.equal(found, wanted), (form, name)


def check_broadcast_of_a_dict_in_any_order() -> None:
    """Ranks may have built it in orders of their own."""
    r = hvd.rank()
    named = [("a", torch.tensor([r])), ("b", torch.tensor([r + 10]))]
    given: dict[str, Any] = dict(reversed(named) if r else named)
    hvd.broadcast_parameters(given, root_rank=0)
    assert (given["a"], given["b"]) == (0, 10)


def check_a_dict_of_dicts_is_refused() -> None:
    """Nothing of it would be broadcast; a module's extra state is something else."""
    held = {"model": {"w": torch.zeros(2)}, "_extra_state": {"version": 3}}
    require_error(ValueError, lambda: hvd.broadcast_parameters(held, 0), "'model' is a dict of tensors")


def check_broadcast_parameters_ignores_what_is_no_tensor() -> None:
    held: dict[str, Any] = {"w": torch.full((2,), float(hvd.rank())), "note": f"of rank {hvd.rank()}"}
    hvd.broadcast_parameters(held, root_rank=0)
    assert (held["w"] == 0).all() and held["note"] == f"of rank {hvd.rank()}"


def check_what_cannot_be_overwritten_is_named() -> None:
    """On every rank, before anything moves."""
    sparse, expanded = torch.eye(2).to_sparse(), torch.zeros(1).expand(3)
    for odd, why in ((sparse, "a sparse tensor"), (expanded, "elements share memory")):
        held = {"fine": torch.zeros(2), "odd": odd}
        require_error(ValueError, lambda: hvd.broadcast_parameters(held, 0), "odd: ", why)


def check_models_that_differ() -> None:
    """Another shape, another name, one more: the difference, on every rank, at once."""
    if hvd.size() > 1:
        for odd in ({"w": torch.ones(3)}, {"v": torch.ones(2)}, {"w": torch.ones(2), "x": torch.ones(1)}):
            held = odd if last() else {"w": torch.ones(2)}
            name, value = list(odd.items())[-1]
            require_mismatch(lambda: hvd.broadcast_parameters(held, 0), "parameters differ",
                             f"+++ rank {hvd.size() - 1}", f"+{name}: float32{list(value.shape)} on ")  # fmt: skip


def trained(rank: int, steps: int) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    """A model of its own on each rank, with some Adam steps behind it."""
    torch.manual_seed(rank)
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1 * (rank + 1), weight_decay=0.1)
    for step in range(steps):
        loss_of(list(net.parameters()), float(rank + step + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def require_equal_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for key, state in expected["state"].items():
        assert all(torch.equal(torch.as_tensor(found["state"][key][name]), torch.as_tensor(value))
                   for name, value in state.items())  # fmt: skip


def check_broadcast_optimizer_state() -> None:
    """Every rank gets the root's state and options; the weights do not move (weight decay or not); grads are untouched."""
    for root in range(hvd.size()):
        net, optimizer = trained(hvd.rank(), 3)
        before = digest(list(net.parameters()))
        hvd.broadcast_optimizer_state(optimizer, root_rank=root)
        assert digest(list(net.parameters())) == before
        assert all(p.grad is None for p in net.parameters())
        require_equal_state(optimizer.state_dict(), trained(root, 3)[1].state_dict())


def check_large_tensors_of_a_state_travel_as_they_lie() -> None:
    """In any layout and dtype, beside what is no tensor; what has no memory of its own (expand) is pickled."""
    r, large = hvd.rank(), functions.LARGE_BYTES
    for least in (0, large):
        functions.LARGE_BYTES = least
        plain = torch.arange(2.0 * 3 * 128 * 128).reshape(2, 3, 128, 128) + r
        state: dict[str, Any] = {
            "plain": plain, "last": plain.to(memory_format=torch.channels_last), "turned": plain.transpose(1, 3),
            "half": plain.bfloat16(), "flags": plain > 5, "wide": torch.full((1,), r + 1.0).expand(50000),
            "step": torch.tensor(r + 2.0), "none": torch.ones(0, 3), "count": r + 7, "several": [plain, r],
        }  # fmt: skip
        p = torch.nn.Parameter(torch.zeros(2, 3, 128, 128))
        optimizer = torch.optim.SGD([p], lr=1.0 + r)
        optimizer.state[p] = dict(state) if r == 0 else {}
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        found, first = optimizer.state[p], plain - r
        assert optimizer.param_groups[0]["lr"] == 1.0 and found.keys() == state.keys() and found["count"] == 7
        for name, value in (("plain", first), ("last", first), ("turned", first.transpose(1, 3)), ("half", first)):
            assert torch.equal(found[name], value.bfloat16().float() if name == "half" else value), name
            assert found[name].stride() == state[name].stride()
        assert torch.equal(found["flags"], first > 5) and (found["wide"] == 1).all() and found["step"] == 2
        assert found["none"].shape == (0, 3) and torch.equal(found["several"][0], first) and found["several"][1] == 0
    functions.LARGE_BYTES = large


def check_state_of_another_kind() -> None:
    """Wrappers of optimizers may keep what they like."""

    class Wrapper:
        param_groups: Sequence[Any] = ()

        def __init__(self, held: Any) -> None:
            self.held = held

        def state_dict(self) -> Any:
            return self.held

        def load_state_dict(self, held: Any) -> None:
            self.held = held

    held: Any
    for held in ([torch.ones(3)], {"inner": {"state": {}}}, {"state": [1], "x": torch.ones(2)}):
        wrapper = Wrapper(held if hvd.rank() == 0 else None)
        hvd.broadcast_optimizer_state(wrapper, root_rank=0)  # type: ignore[arg-type]
        assert repr(wrapper.held) == repr(held)


def check_resuming_on_one_rank() -> None:
    """Only the root has loaded a checkpoint; the others have no state yet: afterwards all train on alike."""
    net, optimizer = trained(0, 3) if hvd.rank() == 0 else trained(hvd.rank(), 0)
    before = digest(list(net.parameters()))
    optimizer = hvd.DistributedOptimizer(optimizer)
    hvdlite.broadcast_variables(optimizer, root_rank=0)
    assert digest(list(net.parameters())) == before
    hvdlite.broadcast_variables(net, root_rank=0)
    assert optimizer.state_dict()["state"][0]["step"] == 3
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(list(net.parameters())).backward()
        optimizer.step()
    require_same_bits(list(net.parameters()))
    require_same_bits([state["exp_avg"] for state in optimizer.state.values()])


def check_fresh_optimizers() -> None:
    """Nobody has state: nothing is invented, options are the root's."""
    net, optimizer = trained(hvd.rank(), 0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=hvd.size() - 1)
    assert optimizer.state_dict()["state"] == {} and optimizer.param_groups[0]["lr"] == 0.1 * hvd.size()
    plain = torch.optim.SGD(net.parameters(), lr=hvd.rank() + 1.0)
    hvd.broadcast_optimizer_state(plain, root_rank=0)
    assert plain.param_groups[0]["lr"] == 1.0


def check_state_is_no_longer_shared_with_the_root() -> None:
    """Each rank owns its state: training on after a broadcast moves the weights."""
    net, optimizer = trained(hvd.rank(), 1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    before = digest(list(net.parameters()))
    loss_of(list(net.parameters())).backward()
    optimizer.step()
    assert digest(list(net.parameters())) != before


def check_what_is_no_optimizer_is_refused() -> None:
    net, optimizer = trained(hvd.rank(), 0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, hvd.rank() + 1)
    wrong: Any
    for wrong in (net, schedule):
        require_error(TypeError, lambda: hvd.broadcast_optimizer_state(wrong, 0), f"not {type(wrong).__name__}")
    assert schedule.step_size == hvd.rank() + 1


def check_lbfgs_is_refused() -> None:
    optimizer = torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))])
    require_error(ValueError, lambda: hvd.broadcast_optimizer_state(optimizer, 0), "LBFGS")


def check_objects() -> None:
    r, p = hvd.rank(), hvd.size()
    assert hvd.broadcast_object({"epoch": r, "best": torch.tensor(r)}, root_rank=p - 1) == {
        "epoch": p - 1,
        "best": p - 1,
    }
    assert [item["rank"] for item in hvd.allgather_object({"rank": r, "pad": "x" * 100 * r})] == list(range(p))
    assert hvd.broadcast_object("named" if r == 0 else None, root_rank=0, name="thing") == "named"


def check_what_holds_on_to_an_optimizers_insides_goes_on() -> None:
    """Its groups, its state, a learning rate that is a tensor; and state is float32 where the root's is."""
    r = hvd.rank()
    p, rate = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)), torch.tensor(0.5 + r)
    optimizer = torch.optim.SGD([p], lr=rate)
    groups, group, state = optimizer.param_groups, optimizer.param_groups[0], optimizer.state
    if r == 0:
        state[p]["master"] = torch.full((3,), 1 / 3)
    group["weight_decay"], group[f"of rank {r}"] = float(r), 1
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups is groups and groups[0] is group and optimizer.state is state
    assert group["lr"] is rate and rate == 0.5 and group["weight_decay"] == 0.0
    assert [key for key in group if key.startswith("of rank")] == ["of rank 0"] and group["params"][0] is p
    assert state[p]["master"].dtype == torch.float32 and (state[p]["master"] == torch.full((3,), 1 / 3)).all()


class Wrapper(torch.optim.Optimizer):
    """As SAM and Lookahead are usually written: it shares its groups, and its state, with the one inside."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.inner.param_groups, self.inner.state = self.param_groups, self.state

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.inner.param_groups, self.inner.state = self.param_groups, self.state


class Front(torch.optim.Optimizer):
    """Another way: it has none of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


def check_optimizers_around_another_stay_together() -> None:
    """What a scheduler changes outside is changed inside, on all ranks."""
    for kind in (Wrapper, Front):
        p = torch.nn.Parameter(torch.zeros(3))
        inner = torch.optim.SGD([p], lr=1.0, momentum=0.9)
        optimizer = kind(inner)
        groups, state = optimizer.param_groups, optimizer.state
        if hvd.rank() == 0:
            groups[0]["lr"], state[p]["momentum_buffer"] = 0.5, torch.ones(3)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert optimizer.param_groups is groups and inner.param_groups is groups, kind
        assert optimizer.state is state and inner.state is state, kind
        assert groups[0]["lr"] == 0.5 and (state[p]["momentum_buffer"] == 1).all()
