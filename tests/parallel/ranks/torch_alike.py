"""Ranks that would train different models without a word: it is an error after the first backward, later a warning."""

from __future__ import annotations

from collections.abc import Callable

import torch

import hvdlite.torch as hvd
from hvdlite import alike
from tests.parallel.common import last, logged, require_error, require_mismatch, require_same_bits


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.Flatten(), torch.nn.Linear(5, 3))


def attach(net: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> torch.optim.Optimizer:
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(optimizer, net.named_parameters())


def backward(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.ones(2, 3, 3, 3) * 0.1 * (hvd.rank() + 1)).square().mean().backward()


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(net, optimizer)
    optimizer.step()


def refused(call: Callable[[], None], *words: str) -> None:
    """The call fails on every rank, with the same words; or does not, on a rank that is alone."""
    if hvd.size() == 1:
        call()
    else:
        require_mismatch(call, *words)


def check_broadcast_forgotten() -> None:
    """Told after the first backward, as often as that is tried; after the broadcast training goes on."""
    for layout in (torch.contiguous_format, torch.channels_last):
        net = model(seed=hvd.rank()).to(memory_format=layout)
        optimizer = attach(net)
        for _ in range(2):
            refused(lambda: backward(net, optimizer), "weights: 0.weight and 3 more", "broadcast_parameters")  # noqa: B023
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        for _ in range(2):
            step(net, optimizer)
        require_same_bits(list(net.parameters()))


def check_one_element() -> None:
    """The last element of one tensor on the last rank, of every size and dtype."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64):
        for length in (1, 2, 3, 1001):
            trained, p = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(length, dtype=dtype), False)
            attached = hvd.DistributedOptimizer(torch.optim.SGD([trained, p], lr=1.0), [("trained", trained), ("p", p)])
            with torch.no_grad():
                p[-1] += last()
            refused(lambda: trained.sum().backward(), "p differs between", f"rank {hvd.size() - 1}")  # noqa: B023
            attached.zero_grad()


def check_state_and_settings() -> None:
    """A checkpoint loaded on rank 0 only; a learning rate that is each rank's own."""
    net = model()
    before = attach(net, torch.optim.Adam(net.parameters()))
    step(net, before)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001 if hvd.rank() else 0.5)
    if hvd.rank() == 0:
        state = before.state_dict()
        state["param_groups"][0]["lr"] = 0.5
        optimizer.load_state_dict(state)
    attach(net, optimizer)
    refused(lambda: backward(net, optimizer), "state: step of 0.weight and 11 more differ between rank 0 and",
            "lr of param_groups[0] is 0.5 on rank 0, 0.001 on", "broadcast_optimizer_state")  # fmt: skip
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for _ in range(2):
        step(net, optimizer)
    require_same_bits(list(net.parameters()))


def check_weights_moved_for_a_while() -> None:
    """By each rank's own gradients, as by SAM: they are compared when they are back."""
    for apart in (False, True):
        net = model(seed=hvd.rank() if apart else 0)
        optimizer = attach(net)

        def sharpness_aware() -> None:
            with optimizer.no_sync():  # noqa: B023
                backward(net, optimizer)  # noqa: B023
            here = {p: p.detach().clone() for p in net.parameters()}  # noqa: B023
            for p in here:
                p.data.add_(p.grad, alpha=0.1)
            backward(net, optimizer)  # noqa: B023
            for p, value in here.items():
                p.data.copy_(value)
            optimizer.step()  # noqa: B023

        if apart:
            refused(sharpness_aware, "weights: 0.weight and 3 more", "broadcast_parameters")
        else:
            for _ in range(3):
                sharpness_aware()


def check_later() -> None:
    """A rank whose learning rate changes is told of by rank 0, once, and training goes on."""
    rounds, alike.ROUNDS = alike.ROUNDS, 5
    net = model()
    optimizer = attach(net)
    with logged() as told:
        for _ in range(7):
            step(net, optimizer)
        assert not told
        if last():
            optimizer.param_groups[0]["lr"] = 0.01
        for _ in range(12):
            step(net, optimizer)
    alike.ROUNDS = rounds
    assert len(told) == (hvd.size() > 1 and hvd.rank() == 0), told
    for text in told:
        assert "after 10 rounds" in text and "weights: 0.weight" in text, text
        assert "lr of param_groups[0] is" in text and f"0.01 on rank {hvd.size() - 1}" in text, text


def check_settings_alone() -> None:
    """They may be meant to differ: a warning when training begins. How a step is made may differ without a word."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0 + last(), foreach=last())
    attach(net, optimizer)
    with logged() as told:
        step(net, optimizer)
        step(net, optimizer)
    assert len(told) == (hvd.size() > 1 and hvd.rank() == 0) and all("lr of param_groups[0] is" in text for text in told)
    assert not any("foreach" in text for text in told)


def check_what_cannot_be_read() -> None:
    """On one rank, once: nothing is compared. In kinds of tensors that have no bits to add: those are not."""
    net = model(seed=hvd.rank())
    optimizer = attach(net)
    attachment = optimizer._hvdlite
    readable = attachment.alike.values
    if last():
        attachment.alike.values = lambda: 1 / 0
    step(net, optimizer)
    attachment.alike.values = readable
    strided = torch.nn.Parameter(torch.ones(4, 3)[:, 0])
    odd = [torch.nn.Parameter(torch.ones(3, device="meta"), False), torch.nn.Parameter(torch.ones(1).expand(3), False)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([strided, *odd], lr=1.0))
    strided.sum().backward()


def check_other_optimizers() -> None:
    """The frozen weights of one are compared, too; those combined by Adasum; and those of a set's members only."""
    net = model()
    net[0].requires_grad_(False)
    optimizer = attach(net)
    with torch.no_grad():
        net[0].bias += last()
    refused(lambda: backward(net, optimizer), "weights: 0.bias differs")
    if hvd.size() in (2, 4):
        net = model(seed=hvd.rank())
        combined = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), op=hvd.Adasum)
        backward(net, combined)
        refused(combined.step, "weights: parameter.0 and 3 more")
    if hvd.size() > 2:
        net = model(seed=hvd.rank() > 1)
        members = hvd.ProcessSet([0, 1])
        hvd.shutdown()
        hvd.init(process_sets=[members])
        theirs = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), process_set=members)
        step(net, theirs)
        net = model(seed=hvd.rank())
        theirs = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), process_set=members)
        if members.included():
            require_error(hvd.HorovodInternalError, lambda: step(net, theirs), "between rank 0 and rank 1\n")
        hvd.shutdown()
        hvd.init()
