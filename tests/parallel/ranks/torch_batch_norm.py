"""SyncBatchNorm: outputs, gradients and running statistics are those of BatchNorm on the inputs of all ranks."""

from __future__ import annotations

import copy
import pickle
from itertools import accumulate
from typing import Any

import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.torch.sync_batch_norm import combine
from tests.parallel.common import require_error, require_same_bits

SHAPES = {1: (5,), 2: (5, 4, 3), 3: (5, 2, 3, 2)}
"""By BatchNorm's number: what follows the batch dimension."""


def batches(shape: tuple[int, ...], sizes: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Every rank's input, the same on all; off centre, so that naive sums of squares would cancel."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(len(shape))
    return [(torch.randn(n, *shape, generator=generator, dtype=torch.float64) * 3 + 50).to(dtype) for n in sizes]


def compare(dimensions: int, sizes: list[int], dtype: torch.dtype, tolerance: float, **options: Any) -> None:
    """Two steps of both; each rank's part must be its part of the big batch's."""
    shape = SHAPES[dimensions]
    shape = shape if dimensions > 1 else shape[:1]
    big = getattr(nn, f"BatchNorm{dimensions}d")(5, **options).to(torch.float64)
    small = hvd.SyncBatchNorm(5, **options).to(dtype)
    if big.affine:
        for module in (big, small):
            with torch.no_grad():
                module.weight.copy_(torch.arange(1.0, 6.0))
                module.bias.copy_(torch.arange(5.0))
    r = hvd.rank()
    start = [0, *accumulate(sizes)][r]
    for step in range(2):
        everything = [x + step for x in batches(shape, sizes, dtype)]
        mine = everything[r].clone().requires_grad_()
        whole = torch.cat(everything).double().requires_grad_()
        weights = torch.linspace(-1, 1, whole.numel(), dtype=torch.float64).reshape(whole.shape)
        part = slice(start, start + sizes[r])
        small.zero_grad()
        big.zero_grad()
        out, expected = small(mine), big(whole)
        assert out.dtype == dtype
        (out.double() * weights[part]).sum().backward()
        (expected * weights).sum().backward()
        close(out, expected[part], tolerance)
        close(mine.grad, whole.grad[part], tolerance)
        if big.affine:
            for name in ("weight", "bias"):
                grad = getattr(small, name).grad.double()
                close(hvd.allreduce(grad, op=hvd.Sum), getattr(big, name).grad, tolerance)
        if big.track_running_stats:
            close(small.running_mean, big.running_mean, tolerance)
            close(small.running_var, big.running_var, tolerance)
            assert small.num_batches_tracked == big.num_batches_tracked
            require_same_bits([small.running_mean, small.running_var])


def close(found: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float) -> None:
    """Up to `tolerance` of the largest value."""
    assert found is not None and expected is not None and found.shape == expected.shape
    if found.numel():
        assert (found.double() - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))


def sizes(first: int = 3) -> list[int]:
    """Batches of different sizes."""
    return [first + r for r in range(hvd.size())]


def check_one_big_batch() -> None:
    for dimensions in (1, 2, 3):
        compare(dimensions, sizes(), torch.float64, 1e-11)


def check_single_precision() -> None:
    """Inputs of about 50 +- 3: mean and deviations are good to some 50 units in the last place of 50, 2^-24 * 64."""
    compare(2, sizes(), torch.float32, 50 * 64 * 2**-24)


def check_half_precision() -> None:
    """Arithmetic in float32; the outputs are rounded to 8 and 11 bits. Parameters are float32, as in autocast."""
    module = hvd.SyncBatchNorm(5)
    for dtype in (torch.float16, torch.bfloat16):
        mine = batches((5, 4), sizes(), dtype)[hvd.rank()].requires_grad_()
        out = module(mine)
        out.float().sum().backward()
        whole = torch.cat(batches((5, 4), sizes(), dtype)).double()
        expected = nn.BatchNorm1d(5).double()(whole).split(sizes())[hvd.rank()]
        assert out.dtype == dtype and mine.grad.dtype == dtype
        assert (out.double() - expected).abs().max() < 4 * torch.finfo(dtype).eps * 2


def check_options() -> None:
    compare(2, sizes(), torch.float64, 1e-11, affine=False)
    compare(2, sizes(), torch.float64, 1e-11, momentum=None)
    compare(2, sizes(), torch.float64, 1e-11, track_running_stats=False)
    compare(2, sizes(), torch.float64, 1e-11, eps=0.1, momentum=0.7)


def check_an_empty_batch() -> None:
    """The last rank has no data in this step."""
    if hvd.size() > 1:
        compare(2, [*sizes()[:-1], 0], torch.float64, 1e-11)


def check_channels_last_and_strides() -> None:
    whole = batches((5, 4, 3), sizes(), torch.float64)
    plain, other = hvd.SyncBatchNorm(5).double(), hvd.SyncBatchNorm(5).double()
    mine = whole[hvd.rank()]
    assert torch.allclose(plain(mine), other(mine.contiguous(memory_format=torch.channels_last)), atol=1e-12)


def check_counts_beyond_single_precision() -> None:
    """Voxels of large batches."""
    _, _, count = combine(torch.tensor([[2.0**24, 0.0, 0.0], [1.0, 0.0, 0.0]]))
    assert count == 2**24 + 1


def check_evaluation_is_local() -> None:
    """With running statistics nothing is sent: one rank alone may do it. Without, all do it together."""
    module = hvd.SyncBatchNorm(5).eval()
    if hvd.rank() == 0:
        assert torch.allclose(module(torch.ones(2, 5)), torch.ones(2, 5) / (1 + 1e-5) ** 0.5)
    assert module.num_batches_tracked == 0
    compare(1, sizes(), torch.float64, 1e-11, track_running_stats=False)


def check_evaluation_without_running_statistics() -> None:
    """Those of all ranks' batches then, too."""
    p, r = hvd.size(), hvd.rank()
    module = hvd.SyncBatchNorm(1, affine=False, track_running_stats=False).eval()
    expected = (r - (p - 1) / 2) / ((p * p - 1) / 12 + module.eps) ** 0.5
    assert torch.allclose(module(torch.full((2, 1), float(r))), torch.tensor(expected))


def check_errors() -> None:
    module = hvd.SyncBatchNorm(5)
    require_error(ValueError, lambda: module(torch.ones(5)), "dimensions")
    none = torch.ones(1 if hvd.rank() == 0 else 0, 5)
    require_error(ValueError, lambda: module(none), "more than 1 value" if hvd.size() == 1 else "more than one value")


def check_converter() -> None:
    """All batch normalizations below, their very parameters, in the mode that they were in; others stay."""
    inner = nn.BatchNorm2d(4, momentum=0.3).eval()
    model: Any = nn.Sequential(
        nn.Conv2d(3, 4, 1), inner, nn.Sequential(nn.BatchNorm1d(7, affine=False)), nn.InstanceNorm2d(4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    found: Any = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert found is model and [type(m) for m in (model[1], model[2][0])] == [hvd.SyncBatchNorm] * 2
    assert isinstance(model[3], nn.InstanceNorm2d) and isinstance(model[0], nn.Conv2d)
    assert (
        model[1].weight is inner.weight and model[1].momentum == 0.3 and not model[1].training and model[2][0].training
    )
    assert {id(p) for p in model.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert isinstance(hvd.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3)), hvd.SyncBatchNorm)
    again: Any = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    assert isinstance(again[1], hvd.SyncBatchNorm)


def check_one_that_does_more_is_refused() -> None:
    class WithActivation(torch.nn.BatchNorm1d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return torch.relu(super().forward(input))

    net = torch.nn.Sequential(torch.nn.Linear(2, 3), WithActivation(3))
    require_error(ValueError, lambda: hvd.SyncBatchNorm.convert_sync_batchnorm(net), "WithActivation has a forward()")
    assert isinstance(hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.SyncBatchNorm(3)), hvd.SyncBatchNorm)


def check_one_in_several_places() -> None:
    """All of them, by one and the same; also where modules refer to each other."""
    one = nn.BatchNorm1d(4)
    model = nn.Sequential(one, nn.Linear(4, 4), one, nn.ModuleDict({"again": one}))
    model[1].above = model
    found: Any = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert isinstance(found[0], hvd.SyncBatchNorm) and found[0] is found[2] is found[3]["again"]


def check_without_bias() -> None:
    """As BatchNorm(bias=False) makes it where torch has that, and where bias was set to None."""
    plain = nn.BatchNorm1d(5)
    plain.bias = None
    for module in (hvd.SyncBatchNorm(5, bias=False), hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))):
        module(torch.arange(10.0).reshape(2, 5) * (hvd.rank() + 1)).square().sum().backward()
        assert module.bias is None and module.weight.grad is not None


def check_copies_use_the_same_ranks() -> None:
    """A teacher, a whole model saved and loaded."""
    module = hvd.SyncBatchNorm(5)
    x = torch.randn(3, 5, generator=torch.Generator(torch.get_default_device()).manual_seed(hvd.rank()))
    expected = module(x)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert again.process_set is hvd.global_process_set
        assert torch.equal(again(x), expected)


def check_training_equals_one_big_batch() -> None:
    """A small network with an attached optimizer, three steps, beside the same on all data at once."""
    torch.manual_seed(5)
    big = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
    small = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(big))
    mine, whole = torch.optim.SGD(small.parameters(), lr=0.1), torch.optim.SGD(big.parameters(), lr=0.1)
    hvd.DistributedOptimizer(mine, small.named_parameters())
    data = torch.randn(4 * hvd.size(), 6, dtype=torch.float64)
    for _ in range(3):
        for model, optimizer, inputs in ((small, mine, data[hvd.rank() :: hvd.size()]), (big, whole, data)):
            optimizer.zero_grad()
            (model(inputs) ** 2).mean().backward()
            optimizer.step()
    for found, expected in zip(small.state_dict().values(), big.state_dict().values(), strict=True):
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)
    require_same_bits([p.detach() for p in small.parameters()])
