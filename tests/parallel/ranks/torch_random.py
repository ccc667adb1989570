"""Random training programs: weights have the same bits on every rank and in every setting, and are those of averaging by
hand. Data and the used branches of the model differ between ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import hvdlite.torch as hvd
from hvdlite.torch.attach import packing
from tests.parallel.common import digest, require_same_bits, restart

PROGRAMS, LR = 24, 0.1
BOUND = 1e-5  # of weights of about 1, after at most 5 steps, in float32
STEPS = ["plain", "plain", "twice", "no_sync", "clip", "synchronize", "by hand"]


class Net(torch.nn.Module):
    """Branches that a step may leave out, a weight that they share, an embedding."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        width, dtype = rng.choice([3, 8]), rng.choice([torch.float32, torch.float64])
        self.first = torch.nn.Linear(5, width)
        self.branches = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(rng.randint(1, 3))])
        self.shared = torch.nn.Linear(width, width)
        self.table = torch.nn.Embedding(7, width, sparse=rng.random() < 0.5)
        self.unused = torch.nn.Parameter(torch.ones(2))
        self.to(dtype)
        self.reentrant: bool | None = rng.choice([True, False, None])

    def forward(self, x: torch.Tensor, rows: torch.Tensor, used: list[bool]) -> torch.Tensor:
        x = torch.tanh(self.first(x.to(self.unused.dtype)))
        if used[0]:
            x = x + self.table(rows)
        for branch, use in zip(self.branches, used[1:], strict=True):
            part = partial(self.part, branch)
            if use:
                x = x + (part(x) if self.reentrant is None else checkpoint(part, x, use_reentrant=self.reentrant))
        return x.float().pow(2).mean()

    def part(self, branch: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.shared(branch(x)))


class Program:
    """The same at each `run`, but for who averages."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.reentrant = self.net().reentrant

    def net(self) -> Net:
        self.rng, self.own = random.Random(self.seed), random.Random(1000 * self.seed + hvd.rank())
        torch.manual_seed(self.seed)
        return Net(self.rng)

    def run(self, by_hand: bool) -> list[torch.Tensor]:
        """The weights at the end."""
        net = self.net()
        params, rng = list(net.parameters()), self.rng
        dense = [p for p in params if p is not net.table.weight]
        optimizer: Any = torch.optim.SGD(params, lr=LR)
        self.op, passes = rng.choice([hvd.Average, hvd.Average, hvd.Sum]), rng.choice([1, 1, 2])
        keep, sparse_as_dense = rng.random() < 0.5, rng.random() < 0.5
        scaled = rng.choice(dense)
        if rng.random() < 0.5:
            scaled.register_post_accumulate_grad_hook(halve)
        if not by_hand:
            hvd.DistributedOptimizer(
                optimizer, op=self.op, backward_passes_per_step=passes, sparse_as_dense=sparse_as_dense
            )
        average = partial(self.average, params) if by_hand else lambda: None
        kept: list[Any] = []
        for _ in range(rng.randint(2, 5)):
            if self.op is hvd.Sum or rng.random() < 0.8:
                optimizer.zero_grad(set_to_none=rng.random() < 0.7)
            kind = rng.choice(STEPS)
            if kind == "no_sync":
                with nullcontext() if by_hand else optimizer.no_sync():
                    self.loss(net).backward()
            if kind == "twice" and passes == 1 and self.op is hvd.Average:
                self.loss(net).backward()
                average()
            if kind == "by hand":
                optimizer.zero_grad()
                for p in dense[:3]:
                    p.grad = torch.full_like(p, hvd.rank() + 1.0)
            else:
                for _ in range(passes):
                    self.loss(net).backward()
            average()
            if kind == "clip":
                torch.nn.utils.clip_grad_norm_(dense, 0.5)
            if kind == "synchronize" and not by_hand:
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            kept = [p.grad for p in params] if keep else []
        del kept
        return [p.detach() for p in params]

    def loss(self, net: Net) -> torch.Tensor:
        used = [self.own.random() < 0.7 for _ in range(1 + len(net.branches))]
        x = torch.randn(
            4, 5, generator=torch.Generator(torch.get_default_device()).manual_seed(self.own.randrange(10**6))
        )
        return net(x, torch.tensor([self.own.randrange(7) for _ in range(4)]), used)

    def average(self, params: Iterable[torch.Tensor]) -> None:
        """What any rank has a gradient of."""
        for p in params:
            if hvd.allreduce(torch.tensor(p.grad is not None, dtype=torch.uint8), op=hvd.Max):
                mine = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
                p.grad = hvd.allreduce(mine, op=self.op)


def halve(p: torch.Tensor) -> None:
    p.grad.mul_(0.5)


def ways() -> dict[str, Callable[[], None]]:
    """Settings under which gradients are copied when backward ends, or then but for what is lent, while it goes on, and
    leave then."""
    return {
        "at the end": restart,
        "lent": lambda: settings(LENT_BYTES=1),
        "early": lambda: settings(PACK_BYTES=8, AT_END_BYTES=0),
        "overlapping": lambda: restart(OVERLAP="1", BUCKET_MB="0.0002"),
    }


def settings(**values: int) -> None:
    vars(packing).update(values)


def check_random_programs() -> None:
    usual = {name: value for name, value in vars(packing).items() if name.endswith("_BYTES")}
    for seed in range(PROGRAMS):
        program, found = Program(seed), {}
        for way, begin in ways().items():
            if not (way == "overlapping" and program.reentrant):  # an error: gradients would change after they left
                begin()
                weights = program.run(by_hand=False)
                require_same_bits(weights)
                found[way] = digest(weights)
            settings(**usual)
        assert len(set(found.values())) == 1, (seed, found)
        for ours, expected in zip(weights, program.run(by_hand=True), strict=True):
            error = (ours - expected).abs().max()
            assert error <= BOUND * max(1.0, float(expected.abs().max())), (seed, error)
    restart()
