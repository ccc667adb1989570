"""Gradients in every precision and memory layout, and compressed on the way."""

from __future__ import annotations

import itertools
from typing import Any

import torch

import hvdlite.torch as hvd
from hvdlite.torch.compression import Compressor
from tests.parallel.common import require_error, require_same_bits, restart
from tests.parallel.ranks.torch_gradients import attach, average, loss_of, require_grads, weights

EPSILON = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}


def gradient(rank: int, length: int = 1000) -> torch.Tensor:
    """Rank's gradient, in double: known to all ranks."""
    generator = torch.Generator().manual_seed(rank)  # of the host, wherever tensors are
    whole = torch.rand(length, generator=generator, dtype=torch.float64, device="cpu") * 2 - 1
    return whole.to(torch.get_default_device())


def require_average(grad: torch.Tensor, wire: torch.dtype, own: torch.dtype) -> None:
    """The average of all ranks' gradients as rounded to the wire, within the bound of p-1 roundings of partial sums,
    which are float32 for 16 bits, one of the scaling and one into the parameter's own dtype."""
    p = hvd.size()
    everyone = torch.stack([gradient(r).to(own).to(wire).double() for r in range(p)])
    exact, magnitude = everyone.mean(0), everyone.abs().sum(0)
    partial = min(EPSILON[wire], EPSILON[torch.float32])
    bound = (
        (partial * magnitude * (p - 1) / p + EPSILON[wire] * exact.abs()) * 1.01 + EPSILON[own] * exact.abs() + 2.0**-24
    )
    error = (grad.double() - exact).abs()
    assert (error <= bound).all(), (error / bound).max()


def run(own: torch.dtype, compression: type = hvd.Compression.none, wire: torch.dtype | None = None) -> None:
    w = torch.nn.Parameter(torch.zeros(1000, dtype=own))
    optimizer = attach([w], compression=compression)
    for _ in range(2):
        optimizer.zero_grad()
        w.backward(gradient(hvd.rank()).to(own))
        assert w.grad.dtype == own
        require_average(w.grad, (wire or own) if hvd.size() > 1 else own, own)
        require_same_bits(w.grad)
        optimizer.step()


def check_every_precision() -> None:
    for settings in ({}, {"SHARED_MEMORY": "0"}, {"ALGORITHM": "ring"}):
        restart(**settings)
        for dtype in EPSILON:
            run(dtype)
    restart()


def check_compression() -> None:
    """float16 or bfloat16 on the wire: p.grad keeps its dtype."""
    for compression, wire in ((hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)):
        for dtype in (torch.float32, torch.float64):
            run(dtype, compression, wire)
        params = weights()
        optimizer = attach(params, compression=compression)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(params).backward()
            require_grads(params, average())
            optimizer.step()
    require_error(ValueError, lambda: attach(weights(), compression="fp16"), "(hvd.Compression.fp16, ...), not 'fp16'")


class Scaled(Compressor):
    """Whole numbers of 1/1024, and what is left over is each rank's own."""

    calls = 0

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:  # type: ignore[override]
        Scaled.calls += 1
        return (tensor * 1024).to(torch.int64), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:  # type: ignore[override]
        return tensor.to(ctx) / 1024


class Halved:
    """A compressor that is no subclass, and keeps dtype and shape."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, float]:
        return tensor / 2, 2.0

    def decompress(self, tensor: torch.Tensor, ctx: float) -> torch.Tensor:
        return tensor.mul_(ctx)


def check_compressors_of_ones_own() -> None:
    """compress() before the reduction, decompress() behind it, also of what some ranks, or all, have no gradient for,
    of gradients that are kept, summed up, or leave during backward."""
    p, r = hvd.size(), hvd.rank()
    for compression, overlap in itertools.product((Scaled, Halved()), "01"):
        restart(OVERLAP=overlap, BUCKET_MB="0.0001")
        both, mine, none = params = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((30, 3), (50,), (2,))]
        optimizer = attach(params, op=hvd.Sum, compression=compression)
        optimizer.param_groups[0]["lr"] = 0.0
        for step in range(4):
            kept = [each.grad for each in params]
            optimizer.zero_grad(set_to_none=step != 2)
            loss = both.sum() * (r + 1 + step + 2.0**-10)
            (loss if r else loss + mine.sum() * 3).backward()
            total = sum(range(1, p + 1)) + p * (step + 2.0**-10)
            assert (both.grad == total).all() and both.grad.dtype == torch.float32
            assert step != 1 or (kept[0] == total - p).all(), "a result that is kept has changed"
            assert (mine.grad == 3).all() and (none.grad is None or not none.grad.any())
            assert step != 2 or (kept[0] is both.grad and kept[0] is not None)
            optimizer.step()
    assert Scaled.calls > 0 or p == 1
    restart()
    w = torch.nn.Parameter(torch.zeros(3))
    optimizer = attach([w], compression=Scaled, backward_passes_per_step=2)
    for _ in range(2):
        (w.sum() * (r + 1)).backward()
    assert (w.grad == 2 * average()).all() if p % 2 else (w.grad == int(1024 * 2 * average()) / 1024).all()
    if p > 1:
        short: Any = Compressor()
        short.compress = lambda tensor: (tensor.reshape(-1)[:1], None)
        require_error(
            ValueError, lambda: attach([torch.nn.Parameter(torch.zeros(3))], compression=short), "(1,)", "(3,)"
        )


def check_mixed_precisions() -> None:
    """One model in four dtypes: each has buckets of its own."""
    params = [torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in enumerate(list(EPSILON) * 2, 1)]
    optimizer = attach(params)
    for _ in range(3):
        optimizer.zero_grad()
        (sum(p.double().sum() for p in params) * (hvd.rank() + 1)).backward()
        require_grads(params, average())
        assert all(p.grad.dtype == p.dtype for p in params)
        optimizer.step()


def check_autocast() -> None:
    """bfloat16 activations, float32 weights and gradients."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = attach(list(model.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.full((2, 4), hvd.rank() + 1.0)).sum()
        loss.backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        require_same_bits([p.grad for p in model.parameters()])
        optimizer.step()
    require_same_bits(list(model.parameters()))


def check_gradients_of_another_dtype() -> None:
    """bfloat16 weights whose gradients are to be float32 (where torch has that): neither sent nor given back in less."""
    p, exact = hvd.size(), 1 + sum(range(hvd.size())) / hvd.size() / 128  # bfloat16 has no half of 1/128 beside 1
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        w = torch.nn.Parameter(torch.zeros(100, dtype=torch.bfloat16))
        if not hasattr(w, "grad_dtype"):
            return
        w.grad_dtype = torch.float32
        optimizer = attach([w], compression=compression)
        for _ in range(2):
            optimizer.zero_grad()
            w.backward(torch.full((100,), 1 + hvd.rank() / 128))
            error = (w.grad - exact).abs().max()
            assert w.grad.dtype == torch.float32 and error <= p * 2.0 ** (
                -24 if compression is hvd.Compression.none else -11
            )
            optimizer.step()


def check_channels_last() -> None:
    """Weights in another memory order: the gradient's numbers are at the right places."""
    p, r = hvd.size(), hvd.rank()
    plain = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    w = torch.nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    optimizer = attach([w])
    for step in (1, 2):
        optimizer.zero_grad(set_to_none=step == 2)
        (w * plain * (r + 1)).sum().backward()
        assert torch.equal(w.grad.contiguous(), plain * average())
        optimizer.step()
        assert torch.equal(w.detach().contiguous(), -step * plain * average())
    slots = optimizer._hvdlite.gradients.slots if p > 1 else None
    assert slots is None or (w.grad is slots.aliases[0] and not slots.own)  # nobody else has it: nothing is copied back
    conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    hvd.broadcast_parameters(conv.state_dict(), 0)
    optimizer = attach(list(conv.parameters()))
    whole = torch.randn(2 * p, 3, 8, 8, generator=torch.Generator().manual_seed(0), device="cpu")
    whole = whole.to(torch.get_default_device())
    conv(whole[2 * r : 2 * r + 2].to(memory_format=torch.channels_last)).pow(2).mean().backward()
    reference = torch.nn.Conv2d(3, 4, 3)
    reference.load_state_dict(conv.state_dict())
    reference(whole).pow(2).mean().backward()
    # Sums of 2p * 36 terms of size below 1, in another order.
    assert (conv.weight.grad - reference.weight.grad).abs().max() < 72 * p * 2.0**-24
    require_same_bits(conv.weight.grad)


def check_fused_optimizers() -> None:
    """They take it that a gradient's elements lie in memory as the parameter's do."""
    for make in (torch.optim.Adam, torch.optim.SGD):
        nets = []
        for attached in (True, False):
            torch.manual_seed(1)
            net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 4, 3))
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            optimizer = make(net.parameters(), lr=0.1, fused=True)
            if attached:
                hvd.DistributedOptimizer(optimizer)
            for _ in range(3):
                optimizer.zero_grad()
                (net(torch.arange(108.0).reshape(1, 3, 6, 6) / 108) ** 2).mean().backward()
                assert all(p.grad.stride() == p.stride() for p in net.parameters())
                optimizer.step()
            nets.append(net)
        for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-6), (make, (a - b).abs().max())


def check_transposed_parameter() -> None:
    """A parameter that is not contiguous at all."""
    plain = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    w = torch.nn.Parameter(torch.zeros(4, 3).t())
    assert not w.is_contiguous()
    optimizer = attach([w])
    for step in (1, 2):
        optimizer.zero_grad()
        (w * plain * (hvd.rank() + 1)).sum().backward()
        assert torch.equal(w.grad, plain * average())
        optimizer.step()
        assert torch.equal(w.detach(), -step * plain * average())


def check_complex_numbers() -> None:
    """Collectives, also of conjugates, whose memory holds other values; parameters; buffers that are broadcast."""
    p, r = hvd.size(), hvd.rank()
    mine, total = torch.full((3,), complex(r, 1)), torch.full((3,), complex(p * (p - 1) / 2, p))
    assert torch.equal(hvd.allreduce(mine, op=hvd.Sum), total)
    assert torch.equal(hvd.allreduce(mine.conj(), op=hvd.Sum), total.conj())
    assert torch.equal(hvd.allreduce(mine.conj().imag, op=hvd.Sum), -total.imag)
    conjugate = mine.clone().conj()
    assert hvd.allreduce_(conjugate, op=hvd.Sum) is conjugate and torch.equal(conjugate, total.conj())
    for how in ({}, {"op": hvd.Sum}, {"compression": hvd.Compression.fp16}, {"gradient_predivide_factor": 2.0}):
        param = torch.nn.Parameter(torch.zeros(4, 5, dtype=torch.complex64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), **how)
        (param.real * r + param.imag).sum().backward()
        assert (param.grad == total[0] / (1 if "op" in how else p)).all(), param.grad
        optimizer.step()
    state = {"c": mine, "conj": mine.clone().conj(), "u": torch.full((2,), r, dtype=torch.uint16)}
    hvd.broadcast_parameters(state, p - 1)
    assert (state["c"] == complex(p - 1, 1)).all() and (state["conj"] == complex(p - 1, -1)).all()
    assert state["u"].tolist() == [p - 1] * 2


def check_a_dtype_that_cannot_be_communicated_is_named() -> None:
    state = {"fine": torch.zeros(2), "scale": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    require_error(ValueError, lambda: hvd.broadcast_parameters(state, 0), "scale: ", "float8_e4m3fn")
    params = [(name, torch.nn.Parameter(tensor)) for name, tensor in state.items()]
    if hvd.size() > 1:
        plain = torch.optim.SGD([p for _, p in params], lr=1.0)
        require_error(ValueError, lambda: hvd.DistributedOptimizer(plain, params), "scale: ", "float8_e4m3fn")


def check_conjugates_by_hand() -> None:
    """A gradient that is a view of another one's memory stays the user's, also where that holds its conjugates."""
    z = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([z], lr=1.0))
    gradient = torch.full((3,), complex(1, hvd.rank() + 1))
    z.grad = gradient.conj()
    optimizer.step()
    assert torch.equal(z.detach(), torch.full((3,), complex(0, (hvd.size() + 1) / 2))), z
