"""N ranks with batches of B train like one process with batches of N*B. All ranks end with the same bits.

The reference runs in this process, on the whole batch, without hvdlite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdlite.torch as hvd
from hvdlite.gradients.reducer import Reducer
from tests.parallel.common import digest, require_same_bits, restart

B, STEPS = 8, 20
Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
}
# The averaged gradient and that of the whole batch are the same sum in another order: they differ by at most
# N*B eps of the terms' magnitude, N*B = 32. Per step errors grow by a factor below 1 + lr * curvature < 1.2 (1.2^20 =
# 38), and 20 such errors add: 32 * 20 * 38 eps = 24e3 eps of the weights. Adam divides by the gradient's size, which
# turns errors relative to the terms into errors relative to their (smaller) sum: ten times more.
BOUND = {torch.float64: 250e3 * 2.0**-53, torch.float32: 250e3 * 2.0**-24}


def build(dtype: torch.dtype = torch.float64, width: int = 30) -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, width), torch.nn.Tanh(),
        torch.nn.Linear(width, 1),
    ).to(dtype)  # fmt: skip


def data(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch, equal on all ranks."""
    generator = torch.Generator().manual_seed(2)  # of the host, wherever tensors are
    x = torch.randn(hvd.size() * B, 6, generator=generator, dtype=torch.float64, device="cpu")
    x = x.to(torch.get_default_device())
    return x.to(dtype), torch.tanh(x[:, :2].sum(1, keepdim=True)).to(dtype)


def mine(whole: torch.Tensor) -> torch.Tensor:
    return whole[hvd.rank() * B : (hvd.rank() + 1) * B]


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> list[torch.Tensor]:
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def require_close(found: list[torch.Tensor], expected: list[torch.Tensor], bound: float) -> None:
    for a, b in zip(found, expected, strict=True):
        error = (a - b).abs().max().item()
        assert error <= bound * max(b.abs().max().item(), 1.0), f"off by {error:.3g}, bound {bound:.3g}"


def compare(make: Make, dtype: torch.dtype, width: int = 30) -> torch.nn.Module:
    x, y = data(dtype)
    reference, model = build(dtype, width), build(dtype, width)
    expected = train(reference, make(list(reference.parameters())), x, y)
    optimizer = hvd.DistributedOptimizer(make(list(model.parameters())), named_parameters=model.named_parameters())
    losses = [hvd.allreduce(loss) for loss in train(model, optimizer, mine(x), mine(y))]
    assert losses[-1] < 0.7 * losses[0], "it does not learn, so it shows nothing"
    require_close(losses, expected, BOUND[dtype])
    require_close(list(model.parameters()), list(reference.parameters()), BOUND[dtype])
    require_same_bits(list(model.parameters()))
    return model


def check_loss_curves() -> None:
    for make in OPTIMIZERS.values():
        for dtype in (torch.float64, torch.float32):
            compare(make, dtype)


def check_a_model_of_more_than_a_megabyte() -> None:
    """In small gradients, which are copied while backward goes on, large ones with the small ones before them; or in
    one that is large, of which each rank copies what others read when backward ends."""
    for width, noted in ((400, False), (360, True)):
        model = compare(OPTIMIZERS["Adam"], torch.float64, width)
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        packing = optimizer._hvdlite.packing if hvd.size() > 1 else None
        if packing and not next(model.parameters()).is_cuda:
            assert packing.at_end != noted and (noted or packing.large), width


def check_every_path_gives_the_curve() -> None:
    """Tiny buckets, overlap, no shared memory, every algorithm."""
    for settings in (dict(BUCKET_MB="0.001"), dict(OVERLAP="1", BUCKET_MB="0.002"), dict(SHARED_MEMORY="0"),
                     dict(ALGORITHM="ring", OVERLAP="1", BUCKET_MB="0.001"), dict(ALGORITHM="halving_doubling"),
                     dict(ALGORITHM="native")):  # fmt: skip
        restart(**settings)
        compare(OPTIMIZERS["momentum"], torch.float64)
    restart()


def check_overlap_gives_the_same_bits() -> None:
    """Buckets that leave during backward are the same buckets, added in the same order."""
    bits = []
    for overlap in ("0", "1", "auto"):
        restart(OVERLAP=overlap, BUCKET_MB="0.001")
        bits.append(digest(list(compare(OPTIMIZERS["Adam"], torch.float32).parameters())))
    restart()
    assert len(set(bits)) == 1, bits


def check_overlap_leaves_early() -> None:
    """With OVERLAP=1 a bucket is on its way before backward has come to the first layer."""
    restart(OVERLAP="1", BUCKET_MB="0.001")
    model: Any = build()
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    sent = []
    model[0].weight.register_hook(
        lambda grad: sent.append(len(optimizer._hvdlite.reducer.progress.sent)) if hvd.size() > 1 else None
    )
    model(mine(data()[0])).sum().backward()
    assert hvd.size() == 1 or 0 < sent[0] < len(optimizer._hvdlite.reducer.plan.buckets), sent
    restart()


def crossed() -> tuple[torch.nn.ModuleList, Callable[[], list[int]]]:
    """Layers used in another order than they were made in, each in a bucket of its own, and a step, which returns the
    order of the buckets after it."""
    restart(OVERLAP="1", BUCKET_MB="0.00001")
    layers = torch.nn.ModuleList([torch.nn.Linear(4, 4, bias=False) for _ in range(4)])
    hvd.broadcast_parameters(layers.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers.parameters(), lr=0.1))

    def step() -> list[int]:
        optimizer.zero_grad()
        x = torch.full((1, 4), hvd.rank() + 1.0)
        layers[1](layers[3](layers[0](layers[2](x)))).square().sum().backward()
        optimizer.step()
        return [bucket.members[0] for bucket in optimizer._hvdlite.reducer.plan.buckets]  # type: ignore[attr-defined]

    return layers, step


def check_overlap_learns_the_order() -> None:
    """From the second step on buckets follow backward."""
    layers, step = crossed()
    if hvd.size() > 1:
        for _ in range(3):
            assert step() == [1, 3, 0, 2]
            require_same_bits([layer.weight for layer in layers])
    restart()


def check_overlap_learns_the_order_of_all_ranks() -> None:
    """Not while some have joined."""
    layers, step = crossed()
    if hvd.size() > 1:
        for _ in range(0 if hvd.rank() == 0 else 2):
            assert step() == [3, 2, 1, 0]
        hvd.join()
        hvd.broadcast_parameters(layers.state_dict(), root_rank=1)
        assert step() == [1, 3, 0, 2]
        require_same_bits([layer.weight for layer in layers])
    restart()


def check_overlap_is_tried_while_all_take_part() -> None:
    """Over a network the first rounds try both ways; those that some ranks miss do not count, so that all decide at
    once."""
    p, r = hvd.size(), hvd.rank()
    if p == 1:
        return
    restart(SHARED_MEMORY="0", BUCKET_MB="0.00001")
    model = build()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    x, y = data()

    def steps(count: int) -> Reducer:
        for _ in range(count):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(mine(x)), mine(y)).backward()
            optimizer.step()
        return optimizer._hvdlite.reducer  # type: ignore[attr-defined]

    assert steps(9 + 2 * r).departure.trial is not None
    hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=p - 1)
    reducer = steps(30)
    assert reducer.departure.trial is None
    assert len(set(hvd.allgather_object(reducer.overlap))) == 1
    require_same_bits(list(model.parameters()))
    restart()


def check_lbfgs() -> None:
    """A closure that is called several times per step: each backward ends with averaged gradients, and so do the
    losses that the closure returns once they are averaged. A quadratic, whose minimum is known."""
    p, r = hvd.size(), hvd.rank()
    w = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS([w], max_iter=10, line_search_fn="strong_wolfe"))
    target = torch.arange(5, dtype=torch.float64) + r

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = ((w - target) ** 2).sum()
        loss.backward()
        return hvd.allreduce(loss.detach())

    for _ in range(5):
        optimizer.step(closure)
    # The mean of (w - i - r)^2 over ranks is least at i + (p-1)/2; LBFGS stops at gradients below 1e-7.
    assert (w.detach() - torch.arange(5) - (p - 1) / 2).abs().max() < 1e-6
    require_same_bits(w)


def check_closure_with_sgd() -> None:
    """step(closure): the gradients that the closure's backward makes are averaged before they are used."""
    p, r = hvd.size(), hvd.rank()
    w = torch.zeros(3, requires_grad=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (w * (r + 1)).sum()
        loss.backward()
        return loss

    for step in range(1, 4):
        optimizer.step(closure)
        assert (w == -step * (p + 1) / 2).all()


def check_data_loader_with_workers() -> None:
    """Forked workers fetch while the ranks communicate; nobody hangs, and the workers may be ended."""
    p = hvd.size()
    x, y = data(torch.float32)
    model = build(torch.float32)
    for overlap in ("0", "1"):
        restart(OVERLAP=overlap)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        batches = 0
        for bx, by in DataLoader(TensorDataset(mine(x), mine(y)), batch_size=2, num_workers=2):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(bx), by).backward()
            optimizer.step()
            batches += 1
        assert batches == B // 2 and hvd.allreduce(torch.ones(1), op=hvd.Sum) == p
        require_same_bits(list(model.parameters()))
    restart()
