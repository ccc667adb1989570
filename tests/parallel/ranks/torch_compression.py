"""Lossy compression of an attached optimizer: nothing is lost, and all ranks have the same bits.

Each rank counts as a host. In every round the sum of all results is the sum of all gradients, but for what is kept:

    results * ranks + residuals of all ranks = gradients of all ranks
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn, optim

import hvdlite.torch as hvd
from hvdlite.compression.store import Store
from hvdlite.errors import VoidError
from hvdlite.gradients.lossy import LossyRounds
from tests.parallel.common import at_sizes, last, require_error, require_mismatch, require_same_bits, restart

SIZES = (2, 3)


class SignsAndMean(hvd.Compression.Codec):
    """A user's own: signs and the mean magnitude. Padding of zeros gets a sign, too."""

    def encode(self, values: np.ndarray) -> Sequence[np.ndarray]:
        return np.packbits(values >= 0), np.abs(values).mean(keepdims=True)

    def decode(self, code: Sequence[np.ndarray], length: int) -> np.ndarray:
        bits, scale = code
        return np.where(np.unpackbits(bits, count=length), scale, -scale)


TOPK = hvd.Compression.topk(0.05)
COMPRESSORS: tuple[Any, ...] = (
    TOPK, hvd.Compression.topk(0.1, clip=100.0, warmup_rounds=3), hvd.Compression.randomk(0.1), hvd.Compression.int8(),
    hvd.Compression.int8(bits=4), hvd.Compression.onebit(), hvd.Compression.powersgd(1, start_step=2), SignsAndMean(),
)  # fmt: skip


@contextmanager
def within_host(**settings: str) -> Iterator[None]:
    """A context in which each rank counts as a host."""
    restart(COMPRESS_WITHIN_HOST="1", **settings)
    try:
        yield
    finally:
        restart()


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two weights that are compressed, and other parameters that travel exactly."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(31, 67), nn.Tanh(), nn.Linear(67, 53), nn.Tanh(), nn.Linear(53, 3)).to(dtype)


def loss_of(net: nn.Module, step: int, scale: float = 1.0) -> torch.Tensor:
    """A loss of other data on each rank."""
    x = torch.randn(5, 31, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))
    loss: torch.Tensor = net(x.to(next(net.parameters()).dtype)).square().mean() * (hvd.rank() + 1) * scale
    return loss


def attach(net: nn.Module, compression: Any, **options: Any) -> optim.Optimizer:
    return hvd.DistributedOptimizer(
        optim.SGD(net.parameters(), lr=0.02), net.named_parameters(), compression=compression, **options
    )


def store_of(optimizer: optim.Optimizer) -> Store:
    found = optimizer._hvdlite.gradients.store  # type: ignore[attr-defined]
    assert isinstance(found, Store)
    return found


def rounds_of(optimizer: optim.Optimizer) -> LossyRounds:
    found = optimizer._hvdlite.reducer.lossy  # type: ignore[attr-defined]
    assert isinstance(found, LossyRounds)
    return found


def residual(optimizer: optim.Optimizer, name: str) -> torch.Tensor:
    """A copy of this rank's residual."""
    return torch.tensor(store_of(optimizer).before(name).residual)


def summed(value: torch.Tensor) -> torch.Tensor:
    """The sum over ranks, in double precision."""
    return hvd.allreduce(value.double(), op=hvd.Sum)


class Ledger:
    """What all ranks have computed and got since the beginning, for each parameter.

    Attributes:
        net: The model.
        optimizer: Its optimizer.
        divisor: What the sum of gradients is divided by in a result.
        computed: The sums of all ranks' gradients, by name.
        given: The sums of results times the divisor, by name.
    """

    def __init__(self, net: nn.Module, optimizer: optim.Optimizer, divisor: float | None = None) -> None:
        self.net, self.optimizer = net, optimizer
        self.divisor = hvd.size() if divisor is None else divisor
        self.computed: dict[str, torch.Tensor] = {}
        self.given: dict[str, torch.Tensor] = {}

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.net.named_parameters() if p.requires_grad}

    def compute(self, loss: torch.Tensor, factor: float = 1.0) -> None:
        """Add this rank's gradients of a loss, and those of the others. factor: the loss scale."""
        trained = self.trained()
        grads = torch.autograd.grad(loss, list(trained.values()), retain_graph=True, allow_unused=True)
        for (name, p), grad in zip(trained.items(), grads, strict=True):
            mine = torch.zeros_like(p) if grad is None else grad.detach()
            self.computed[name] = self.computed.get(name, 0) + summed(mine).double() / factor

    def backward(self, loss: torch.Tensor, factor: float = 1.0) -> None:
        """A backward() that counts."""
        self.compute(loss, factor)
        loss.backward()
        self.receive(factor)

    def receive(self, factor: float = 1.0) -> None:
        """Add the results in p.grad."""
        for name, p in self.trained().items():
            if p.grad is not None:
                self.given[name] = self.given.get(name, 0) + p.grad.double() * self.divisor / factor

    def step(self, number: int) -> None:
        """One step of training."""
        self.optimizer.zero_grad()
        self.backward(loss_of(self.net, number))
        self.optimizer.step()

    def require_nothing_lost(self, tolerance: float = 1e-6) -> None:
        """Check the sums of all parameters, and that all ranks have the same weights."""
        entries = store_of(self.optimizer).entries
        assert entries
        for name, computed in self.computed.items():
            kept = torch.zeros(())
            if name in entries:
                kept = summed(residual(self.optimizer, name)).view_as(computed)
            off = (self.given[name] + kept - computed).norm() / computed.norm()
            assert off <= tolerance, f"{name}: {off:.1e}"
        require_same_bits([p.detach() for p in self.net.parameters()])


def check_nothing_is_lost() -> None:
    """With buckets at the end of backward, and during it. Compressed weights have residuals."""
    for settings in ({}, {"OVERLAP": "1", "BUCKET_MB": "0.005"}, {"SHARED_MEMORY": "0"}):
        with within_host(**settings):
            for compression in COMPRESSORS:
                net = model()
                ledger = Ledger(net, attach(net, compression))
                for number in range(6):
                    ledger.step(number)
                ledger.require_nothing_lost()
                store = store_of(ledger.optimizer)
                assert (
                    {"0.weight", "2.weight"} <= {*store.entries} and "0.bias" not in store.entries and store.rounds == 6
                )
                assert all(residual(ledger.optimizer, name).norm() > 0 for name in store.entries)


def check_padding_stays_zero() -> None:
    """A user's codec makes signs of zeros. What lies between parameters must not grow, nor count."""
    with within_host():
        net = model()
        optimizer = attach(net, SignsAndMean())
        for number in range(3):
            optimizer.zero_grad()
            loss_of(net, number).backward()
            reducer = optimizer._hvdlite.reducer  # type: ignore[attr-defined]
            for bucket in rounds_of(optimizer).buckets.values():
                covered = np.zeros(bucket.planned.length, bool)
                for index in bucket.planned.members:
                    slot = reducer.plan.slots[index]
                    covered[slot.offset : slot.offset + slot.length] = True
                buffer = reducer.buckets[reducer.plan.slots[bucket.planned.members[0]].bucket].buffer
                assert not covered.all() and not buffer[~covered].any()


def check_all_elements_are_as_without_compression() -> None:
    with within_host():
        plain, net = model(), model()
        optimizers = [attach(plain, hvd.Compression.none), attach(net, hvd.Compression.topk(1.0))]
        for number in range(4):
            for each, optimizer in zip((plain, net), optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(each, number).backward()
                optimizer.step()
        for p, q in zip(plain.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(q, p, rtol=1e-6, atol=1e-7)
        assert not residual(optimizers[1], "0.weight").any()


def check_momentum_and_no_error_feedback() -> None:
    """Elements that have not been sent are in the velocity, or are lost: all ranks have the same weights anyway."""
    with within_host():
        for compression in (
            hvd.Compression.topk(0.1, momentum=0.9),
            hvd.Compression.randomk(0.1, error_feedback=False),
        ):
            net = model()
            optimizer = attach(net, compression)
            for number in range(3):
                optimizer.zero_grad()
                loss_of(net, number).backward()
                optimizer.step()
            require_same_bits([p.detach() for p in net.parameters()])
            kept = store_of(optimizer).before("0.weight")
            assert bool(kept.velocity.any()) == bool(kept.residual.any()) == ("momentum" in repr(compression))


def scaled_step(ledger: Ledger, scaler: torch.amp.GradScaler, number: int, spoil: Callable[[], None] | None) -> None:
    """A step with a GradScaler. spoil: changes p.grad's way so that some gradient is infinite."""
    ledger.optimizer.zero_grad()
    loss = scaler.scale(loss_of(ledger.net, number))
    if spoil:
        spoil()
        loss.backward()
    else:
        ledger.backward(loss, scaler.get_scale())
    scaler.step(ledger.optimizer)
    scaler.update()


def spoiler(net: nn.Module, name: str, value: float) -> Callable[[], None]:
    """Make this rank's next gradient of a parameter contain this value, if this rank is the last one."""

    def spoil() -> None:
        p = net.get_parameter(name)

        def change(grad: torch.Tensor) -> torch.Tensor:
            handle.remove()
            changed = grad.clone()
            changed.view(-1)[-1] = value
            return changed

        if last():
            handle = p.register_hook(change)

    return spoil


def check_overflow_leaves_everything_as_it_was() -> None:
    """One rank's gradient is infinite, of a compressed parameter or an exact one: all ranks leave out the step."""
    for settings in ({}, {"OVERLAP": "1", "BUCKET_MB": "0.005"}):
        with within_host(**settings):
            for compression in COMPRESSORS:
                net = model()
                scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
                ledger = Ledger(net, attach(net, compression, grad_scaler=scaler))
                store, scales = store_of(ledger.optimizer), set()
                for number in range(9):
                    where = {2: "0.weight", 4: "4.bias", 7: "2.weight"}.get(number)
                    kept = {name: residual(ledger.optimizer, name) for name in store.entries} if number else {}
                    weights, rounds = [p.detach().clone() for p in net.parameters()], store.rounds
                    spoil = spoiler(net, where, [torch.inf, torch.nan][number % 2]) if where else None
                    scales.add(scaler.get_scale())
                    scaled_step(ledger, scaler, number, spoil)
                    if where:
                        assert store.rounds == rounds
                        assert all(
                            torch.equal(before, residual(ledger.optimizer, name)) for name, before in kept.items()
                        )
                        assert all(map(torch.equal, weights, net.parameters()))
                assert store.rounds == 6 and 2.0**10 in scales and len(scales) >= 3
                ledger.require_nothing_lost()


def check_the_sum_of_finite_gradients_overflows() -> None:
    """Each rank's gradient is finite, but not their sum in float16."""
    with within_host():
        net = model(torch.float16)
        optimizer = attach(net, TOPK, op=hvd.Sum)
        for p in net.parameters():
            p.grad = torch.full_like(p, 40000.0)
        optimizer.synchronize()  # type: ignore[attr-defined]
        grad = net.get_parameter("0.weight").grad
        assert grad is not None and not grad.isfinite().any()
        assert store_of(optimizer).rounds == 0 and not residual(optimizer, "0.weight").any()


def check_an_unknown_scaler_is_refused() -> None:
    with within_host():
        net = model()
        optimizer = attach(net, TOPK, grad_scaler=torch.amp.GradScaler("cpu"))
        for scaler, fine in ((torch.amp.GradScaler("cpu"), False), (torch.amp.GradScaler("cpu", enabled=False), True)):
            optimizer.zero_grad()
            scaler.scale(loss_of(net, 0)).backward()
            if fine:
                scaler.step(optimizer)
            else:
                require_error(ValueError, partial(scaler.step, optimizer), "grad_scaler=scaler", "topk(ratio=0.05)")
        net = model()
        optimizer = attach(net, hvd.Compression.fp16)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(net, 0)).backward()
        scaler.step(optimizer)


def check_an_optimizer_is_attached_again_with_another_scaler() -> None:
    """After shutdown() and init(). The first scaler is forgotten."""
    with within_host():
        net = model()
        plain = optim.SGD(net.parameters(), lr=0.02)
        for _ in range(2):
            scaler = torch.amp.GradScaler("cpu")
            optimizer = hvd.DistributedOptimizer(plain, compression=TOPK, grad_scaler=scaler)
            assert optimizer is plain
            scaler.scale(loss_of(net, 0)).backward()
            scaler.step(optimizer)
            scaler.update()
            restart(COMPRESS_WITHIN_HOST="1")


def check_frozen_layers() -> None:
    """A frozen layer's residual waits, under the same name, also if the names are the parameters' places."""
    for named in (True, False):
        for settings in ({}, {"OVERLAP": "1", "BUCKET_MB": "0.005"}):
            with within_host(**settings):
                for compression in (TOPK, hvd.Compression.powersgd(1, start_step=1)):
                    freeze_and_unfreeze(compression, named)


def freeze_and_unfreeze(compression: Any, named: bool) -> None:
    net = model()
    options: dict[str, Any] = {"named_parameters": net.named_parameters()} if named else {}
    optimizer = hvd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.02), compression=compression, **options)
    ledger, frozen = Ledger(net, optimizer), net.get_parameter("0.weight")
    first, second = ("0.weight", "2.weight") if named else ("parameter.0", "parameter.2")
    for number in range(3):
        ledger.step(number)
    store, kept, count = store_of(optimizer), residual(optimizer, first), store_of(optimizer).rounds
    frozen.requires_grad_(False)
    for number in range(3, 6):
        ledger.step(number)
    assert torch.equal(residual(optimizer, first), kept) and kept.any() and store.rounds == count + 3
    frozen.requires_grad_(True)
    for number in range(6, 9):
        ledger.step(number)
    assert {first, second} <= {*store.entries} and not torch.equal(residual(optimizer, first), kept)
    if named:
        ledger.require_nothing_lost()
    else:
        total = summed(residual(optimizer, first)).view_as(frozen) + ledger.given["0.weight"]
        torch.testing.assert_close(total, ledger.computed["0.weight"], rtol=1e-5, atol=1e-5)
    require_same_bits([p.detach() for p in net.parameters()])


def check_accumulation() -> None:
    """`no_sync()` and several backward() calls for one step."""
    with within_host():
        net = model()
        ledger = Ledger(net, attach(net, TOPK))
        for number in range(3):
            ledger.optimizer.zero_grad()
            with ledger.optimizer.no_sync():  # type: ignore[attr-defined]
                loss = loss_of(net, 10 + number)
                ledger.compute(loss)
                loss.backward()
            ledger.backward(loss_of(net, number))
            ledger.optimizer.step()
        ledger.require_nothing_lost()
        assert store_of(ledger.optimizer).rounds == 3

        net = model()
        ledger = Ledger(net, attach(net, TOPK, backward_passes_per_step=2))
        for number in range(3):
            ledger.optimizer.zero_grad()
            for half in range(2):
                loss = loss_of(net, 10 * half + number)
                ledger.compute(loss)
                loss.backward()
            ledger.receive()
            ledger.optimizer.step()
        ledger.require_nothing_lost()
        assert store_of(ledger.optimizer).rounds == 3


class TwoHeads(nn.Module):
    """A model with a weight that some losses do not reach."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body, self.one, self.two = nn.Linear(31, 64), nn.Linear(64, 33), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        body: torch.Tensor = self.body(x).tanh()
        found: torch.Tensor = self.one(body).mean(1)
        return found + self.two(body).mean(1) if self.uses_two else found

    uses_two = True


def check_unused_parameters() -> None:
    """A parameter without a gradient on any rank waits. If one rank has a gradient, the result counts."""
    for settings in ({}, {"OVERLAP": "1", "BUCKET_MB": "0.005"}):
        for compression in (TOPK, hvd.Compression.powersgd(1, start_step=1), hvd.Compression.int8()):
            with within_host(**settings):
                net = TwoHeads()
                ledger = Ledger(net, attach(net, compression))
                for number, used_by in enumerate(("all", "all", "none", "none", "last", "none", "all")):
                    net.uses_two = used_by == "all" or (used_by == "last" and last())
                    before = {} if not number else residual(ledger.optimizer, "two.weight")
                    ledger.step(number)
                    if used_by == "none":
                        assert net.two.weight.grad is None
                        assert torch.equal(before, residual(ledger.optimizer, "two.weight"))  # type: ignore[arg-type]
                    else:
                        assert net.two.weight.grad is not None
                ledger.require_nothing_lost()
                assert store_of(ledger.optimizer).rounds == 7


def check_sparse_gradients() -> None:
    """An embedding's sparse gradient is left alone, or is compressed as a dense one."""
    with within_host():
        for dense in (False, True):
            torch.manual_seed(3)
            first = nn.Embedding(90, 16, sparse=True)
            net = nn.Sequential(first, nn.Flatten(), nn.Linear(16 * 5, 40))
            optimizer = attach(net, TOPK, sparse_as_dense=dense)
            embedding, computed, given = first.weight, torch.zeros(90, 16).double(), torch.zeros(90, 16).double()
            for number in range(4):
                optimizer.zero_grad()
                x = torch.randint(90, (3, 5), generator=torch.Generator().manual_seed(10 * number + hvd.rank()))
                loss = net(x).square().mean()
                (mine,) = torch.autograd.grad(loss, [embedding], retain_graph=True)
                computed += summed(mine.to_dense())
                loss.backward()
                assert embedding.grad is not None and embedding.grad.is_sparse
                given += embedding.grad.to_dense().double() * hvd.size()
                optimizer.step()
            if dense:
                given += summed(residual(optimizer, "0.weight")).view(90, 16)
                assert residual(optimizer, "0.weight").any()
            torch.testing.assert_close(given, computed, rtol=1e-6, atol=1e-6)
            require_same_bits([p.detach() for p in net.parameters()])


def check_an_infinite_sparse_gradient_changes_nothing() -> None:
    """GradScaler leaves the step out, so what the dense gradients have sent does not count."""
    with within_host():
        torch.manual_seed(3)
        net = nn.Sequential(nn.Embedding(90, 16, sparse=True), nn.Flatten(), nn.Linear(16 * 5, 40))
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        optimizer = attach(net, TOPK, grad_scaler=scaler)
        for number, infinite in enumerate((False, False, True, True, False)):
            before, rounds = {} if not number else residual(optimizer, "2.weight"), store_of(optimizer).rounds
            weights = [p.detach().clone() for p in net.parameters()]
            optimizer.zero_grad()
            hidden = net[0](
                torch.randint(90, (3, 5), generator=torch.Generator().manual_seed(10 * number + hvd.rank()))
            )
            if infinite and last():
                hidden.register_hook(lambda grad: grad * torch.inf)
            scaler.scale(net[2](net[1](hidden)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert store_of(optimizer).rounds == rounds + (not infinite)
            if infinite:
                assert torch.equal(before, residual(optimizer, "2.weight"))  # type: ignore[arg-type]
                assert all(map(torch.equal, weights, net.parameters()))
        require_same_bits([p.detach() for p in net.parameters()])


def check_join_with_uneven_data() -> None:
    """Rounds in which a rank has joined are exact, and count on no rank. Then all go on with equal round numbers."""
    for settings in ({}, {"OVERLAP": "1", "BUCKET_MB": "0.005"}):
        with within_host(**settings):
            for compression in COMPRESSORS:
                net = model()
                ledger = Ledger(net, attach(net, compression))
                for epoch in range(3):
                    for number in range(2):
                        ledger.step(10 * epoch + number)
                    more = hvd.rank() if epoch % 2 else hvd.size() - 1 - hvd.rank()
                    kept = residual(ledger.optimizer, "0.weight")
                    for number in range(more):
                        ledger.optimizer.zero_grad()
                        loss_of(net, 100 * epoch + number).backward()
                        ledger.optimizer.step()
                    hvd.join()
                    hvd.broadcast_parameters(net.state_dict(), 0 if epoch % 2 == 0 else hvd.size() - 1)
                    store = store_of(ledger.optimizer)
                    assert len({*hvd.allgather_object(store.rounds)}) == 1
                    assert torch.equal(kept, residual(ledger.optimizer, "0.weight"))
                ledger.require_nothing_lost()


@at_sizes(3)
def check_process_sets() -> None:
    with within_host(DYNAMIC_PROCESS_SETS="1"):
        two = hvd.add_process_set([0, 2])
        for compression in COMPRESSORS:
            net = model()
            optimizer = attach(net, compression, process_set=two)
            computed, given = torch.zeros(67, 31).double(), torch.zeros(67, 31).double()
            for number in range(4):
                optimizer.zero_grad()
                loss = loss_of(net, number)
                (mine,) = torch.autograd.grad(loss, [net.get_parameter("0.weight")], retain_graph=True)
                loss.backward()
                if two.included():
                    computed += hvd.allreduce(mine.double(), op=hvd.Sum, process_set=two)
                    result = net.get_parameter("0.weight").grad
                    assert result is not None
                    given += 2 * result.double()
                optimizer.step()
            if two.included():
                kept = hvd.allreduce(residual(optimizer, "0.weight").double(), op=hvd.Sum, process_set=two)
                torch.testing.assert_close(given + kept.view_as(computed), computed, rtol=1e-5, atol=1e-6)
                weights = hvd.allgather_object([p.detach() for p in net.parameters()], process_set=two)
                assert all(map(torch.equal, *weights))
        hvd.remove_process_set(two)


def check_options() -> None:
    """Groups, sums, dividing before the sum, and a sharded optimizer."""
    options: tuple[tuple[dict[str, Any], float | None], ...] = (
        ({"num_groups": 2}, None), ({"groups": 1}, None), ({"op": hvd.Sum}, 1.0), ({"sharded": True}, None),
        ({"gradient_predivide_factor": 4.0}, None),
    )  # fmt: skip
    with within_host():
        for compression in (TOPK, hvd.Compression.int8(), hvd.Compression.powersgd(1, start_step=1)):
            for chosen, divisor in options:
                net = model()
                ledger = Ledger(net, attach(net, compression, **chosen), divisor)
                for number in range(4):
                    ledger.step(number)
                ledger.require_nothing_lost()


def check_sharded_gradients() -> None:
    """As with whole gradients. An infinite gradient of an exact parameter is seen by all ranks."""
    with within_host():
        for compression in (TOPK, hvd.Compression.powersgd(1, start_step=1), SignsAndMean()):
            nets = []
            for sharded in (False, "gradients"):
                net = model()
                scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
                optimizer = attach(net, compression, sharded=sharded, grad_scaler=scaler)
                for number in range(5):
                    optimizer.zero_grad()
                    if number == 3:
                        spoiler(net, "2.bias", torch.inf)()
                    scaler.scale(loss_of(net, number)).backward()
                    scaler.step(optimizer)
                    scaler.update()
                assert hvd.allgather_object(store_of(optimizer).rounds) == [4] * hvd.size()
                nets.append([p.detach() for p in net.parameters()])
            for p, q in zip(*nets, strict=True):
                torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
            require_same_bits(nets[1])


def check_dtypes() -> None:
    """float64 residuals are float64. Those of 16-bit parameters are float32, and only results are rounded."""
    with within_host():
        for compression in COMPRESSORS:
            for dtype, tolerance in ((torch.float64, 1e-13), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
                net = model(dtype)
                ledger = Ledger(net, attach(net, compression))
                for number in range(4):
                    ledger.step(number)
                ledger.require_nothing_lost(tolerance)
                kept = residual(ledger.optimizer, "0.weight").dtype
                assert kept == (torch.float64 if dtype == torch.float64 else torch.float32)


def check_a_model_that_is_cast() -> None:
    """The residuals of float32 weights are those of float64 weights afterwards."""
    with within_host():
        net = model()
        ledger = Ledger(net, attach(net, TOPK))
        for number in range(6):
            if number == 3:
                net.double()
            ledger.step(number)
        ledger.require_nothing_lost()
        assert residual(ledger.optimizer, "0.weight").dtype == torch.float64


def check_channels_last_and_transposed() -> None:
    """Residuals lie in the order of memory. PowerSGD sends sums of rank 1 exactly, however a matrix lies in memory."""
    with within_host():
        for compression in COMPRESSORS:
            torch.manual_seed(1)
            net = nn.Sequential(nn.Unflatten(1, (1, 1, 31)), nn.Conv2d(1, 24, (1, 3)), nn.Conv2d(24, 18, (1, 4)))
            net.append(nn.Flatten()).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            ledger = Ledger(net, attach(net, compression))
            for number in range(4):
                ledger.step(number)
            weight = net.get_parameter("2.weight")
            in_memory = weight.permute(0, 2, 3, 1)
            assert in_memory.is_contiguous() and not weight.is_contiguous()
            kept = summed(residual(ledger.optimizer, "2.weight")).view(in_memory.shape).permute(0, 3, 1, 2)
            total, wanted = ledger.given["2.weight"] + kept, ledger.computed["2.weight"]
            assert (total - wanted).norm() <= 1e-6 * wanted.norm()

        p = nn.Parameter(torch.zeros(50, 40).t())
        optimizer = hvd.DistributedOptimizer(
            optim.SGD([p], lr=1.0), compression=hvd.Compression.powersgd(1, start_step=0)
        )
        rows, columns = torch.arange(40.0) - 3, torch.arange(50.0) - 20
        (p * rows[:, None] * columns * (hvd.rank() + 1)).sum().backward()
        wanted = rows[:, None] * columns * (hvd.size() + 1) / 2
        assert optimizer is not None and p.grad is not None
        assert (p.grad - wanted).norm() < 1e-5 * wanted.norm()


def check_two_optimizers() -> None:
    """Parameters of the same name have residuals of their own."""
    with within_host():
        nets = [model(), model()]
        ledgers = [Ledger(net, attach(net, how)) for net, how in zip(nets, (TOPK, hvd.Compression.int8()), strict=True)]
        for number in range(4):
            for ledger in ledgers:
                ledger.optimizer.zero_grad()
            losses = [loss_of(net, number + 10 * i) for i, net in enumerate(nets)]
            for ledger, loss in zip(ledgers, losses, strict=True):
                ledger.compute(loss)
            (losses[0] + losses[1]).backward()
            for ledger in ledgers:
                ledger.receive()
                ledger.optimizer.step()
        for ledger in ledgers:
            ledger.require_nothing_lost()


def check_a_backward_that_raises() -> None:
    """On one rank, in the middle, after some buckets have left: the round counts nowhere."""
    for settings in ({"OVERLAP": "1", "BUCKET_MB": "0.005"}, {}):
        with within_host(**settings):
            for compression in COMPRESSORS:
                net = model()
                ledger = Ledger(net, attach(net, compression))
                for number in range(2):
                    ledger.step(number)
                kept, rounds = residual(ledger.optimizer, "2.weight"), store_of(ledger.optimizer).rounds

                def fail(grad: torch.Tensor) -> None:
                    raise ArithmeticError

                ledger.optimizer.zero_grad()
                next_loss = loss_of(net, 3)
                ledger.compute(next_loss)
                if last():
                    handle = net.get_parameter("0.weight").register_hook(fail)
                    require_error(ArithmeticError, loss_of(net, 2).backward)
                    handle.remove()
                elif settings:  # without overlap nothing has left, and these ranks would wait for the next backward
                    require_error(VoidError, loss_of(net, 2).backward, "raised after some of its gradients had left")
                assert torch.equal(kept, residual(ledger.optimizer, "2.weight"))
                assert store_of(ledger.optimizer).rounds == rounds
                ledger.optimizer.zero_grad()
                next_loss.backward()
                ledger.receive()
                ledger.optimizer.step()
                for number in range(4, 6):
                    ledger.step(number)
                ledger.require_nothing_lost()


def check_different_compressors() -> None:
    with within_host():
        for mine, other in ((TOPK, hvd.Compression.topk(0.06)), (TOPK, hvd.Compression.none), (TOPK, SignsAndMean())):
            net = model()
            require_mismatch(partial(attach, net, other if last() else mine), "compress")


def check_what_is_refused() -> None:
    net = model()
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        if op is not hvd.Adasum or hvd.size() == 2:
            require_error(ValueError, partial(attach, net, TOPK, op=op), "op=hvd.Average or hvd.Sum", op.name)
    require_error(ValueError, partial(attach, net, SignsAndMean), "SignsAndMean()")
    for compression in (TOPK, SignsAndMean()):
        for call in (hvd.allreduce, hvd.grouped_allreduce):
            given: Any = torch.ones(3) if call is hvd.allreduce else [torch.ones(3)]
            refused: Any = compression
            require_error(ValueError, partial(call, given, compression=refused), "hvd.DistributedOptimizer")
    require_error(TypeError, partial(attach, net, TOPK, grad_scaler=8.0), "grad_scaler")
    assert (hvd.allreduce(torch.ones(3), op=hvd.Sum) == hvd.size()).all()


def check_two_momenta_are_a_warning() -> None:
    compression = hvd.Compression.topk(0.1, momentum=0.9)
    for make, warned in (
        (partial(optim.SGD, lr=0.1), False),
        (partial(optim.SGD, lr=0.1, momentum=0.9), True),
        (optim.Adam, True),
    ):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            hvd.DistributedOptimizer(make(model().parameters()), compression=compression)
        assert any("adds another one: use SGD without momentum" in str(each.message) for each in found) is warned, make


def check_one_host() -> None:
    """Nothing is compressed, kept or looked at."""
    net = model()
    ledger = Ledger(net, attach(net, TOPK))
    plain = model()
    optimizer = attach(plain, hvd.Compression.none)
    for number in range(3):
        ledger.step(number)
        optimizer.zero_grad()
        loss_of(plain, number).backward()
        optimizer.step()
    assert all(map(torch.equal, net.parameters(), plain.parameters()))
    assert not store_of(ledger.optimizer).entries and store_of(ledger.optimizer).rounds == 0
    assert not rounds_of(ledger.optimizer).buckets


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def shared_files() -> int:
    """The number of memory files that this process has mapped."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        return sum("memfd:hvdlite" in line for line in maps)


def check_no_memory_is_left() -> None:
    """Neither of an optimizer that is gone, nor after shutdown()."""
    hvd.allreduce(torch.ones(1))
    files, mapped = open_files(), shared_files()
    with within_host():
        for _ in range(3):
            net = model()
            ledger = Ledger(net, attach(net, TOPK))
            ledger.step(0)
            assert shared_files() > mapped
            net[0].requires_grad_(False)
            ledger.step(1)
            del net, ledger
    hvd.allreduce(torch.ones(1))
    assert open_files() <= files and shared_files() <= mapped, (open_files(), files, shared_files(), mapped)


def check_elastic() -> None:
    """The attached optimizer goes on after an error; residuals begin anew."""
    restart(COMPRESS_WITHIN_HOST="1")
    net = model()
    optimizer, failed = attach(net, TOPK), list[int]()

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.number < 6:
            if state.number == 4 and not failed:
                failed.append(1)
                raise hvd.HorovodInternalError("as if something had failed")
            optimizer.zero_grad()
            loss_of(net, state.number).backward()
            optimizer.step()
            state.number += 1
            if state.number == 3:
                state.commit()

    train(hvd.elastic.TorchState(net, optimizer, number=0))
    assert failed and store_of(optimizer).rounds in (3, 6) and residual(optimizer, "0.weight").any()
    require_same_bits([p.detach() for p in net.parameters()])
    restart()
