"""Batch normalization over the batches of all ranks: equal to one big batch on one process.

Forward, each rank tells the others its count, means and sums of squared deviations, in one all-gather; all combine them
in rank order (Chan, Golub & LeVeque 1979), so they hold the same bits, and nothing cancels as it would in a sum of
squares. Backward takes one all-reduce of two sums per channel. Batches may differ in size, and be empty. Written in
ordinary torch operations, so it runs wherever the collectives do; torch's own needs CUDA and NCCL.

The gradients of weight and bias stay local: the optimizer averages them, as all others.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.lanes.calls import calling
from hvdlite.ops import Sum
from hvdlite.torch.mpi_ops import allgather, allreduce_
from hvdlite.torch.private_api import BatchNorm, children_of


class SyncBatchNorm(BatchNorm):
    """Horovod's module: like torch.nn.BatchNorm1d, 2d and 3d, with the statistics of all ranks' batches.

    In training every rank of the set must call it (and its backward) equally often. Evaluation with running statistics
    communicates nothing. Input: (batch, num_features, ...), two dimensions at least, on any device.
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
        track_running_stats: bool = True, process_set: ProcessSet = global_process_set, device: Any = None,
        dtype: Any = None, bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        if not bias:
            self.register_parameter("bias", None)
        self.process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm needs an input of two dimensions at least, not {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        by_batch = self.training or self.running_mean is None
        if not by_batch or runtime.group_of(self.process_set).size == 1:
            return super().forward(input)
        output, mean, squares, count = Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, self.process_set
        )
        if self.training and self.running_mean is not None:
            self.remember(mean, squares / (count - 1))
        return cast(torch.Tensor, output)

    @torch.no_grad()
    def remember(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Update the running statistics, in place."""
        assert self.num_batches_tracked is not None and self.running_mean is not None and self.running_var is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """The module with each batch normalization in it replaced by one over all ranks that has the same parameters
        and buffers (the very objects). Returns the module itself, or its replacement. Do it before the optimizer is
        attached; the optimizer may exist already. Raises ValueError for one with a `forward` of its own, which would be
        lost (timm's with an activation inside)."""
        return cls.converted(module, process_set, {})

    @classmethod
    def converted(
        cls, module: torch.nn.Module, process_set: ProcessSet, known: dict[torch.nn.Module, torch.nn.Module]
    ) -> torch.nn.Module:
        """The same for one that may be in several places, or in itself. known: what has become of others."""
        if module in known:
            return known[module]
        result: torch.nn.Module = module
        if isinstance(module, BatchNorm) and not isinstance(module, SyncBatchNorm):
            if type(module).forward not in (BatchNorm.forward, torch.nn.SyncBatchNorm.forward):
                raise ValueError(
                    f"convert_sync_batchnorm: {type(module).__name__} has a forward() of its own, which would be lost: "
                    "put an hvd.SyncBatchNorm and what else it does in its place before"
                )
            result = cls(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats,
                         process_set)  # fmt: skip
            for name in ("weight", "bias"):
                result.register_parameter(name, getattr(module, name))
            result.running_mean, result.running_var = module.running_mean, module.running_var
            result.num_batches_tracked = module.num_batches_tracked
            result.train(module.training)
        known[module] = result
        for name, child in children_of(module).items():
            if child is not None:
                setattr(result, name, cls.converted(child, process_set, known))
        return result


class Normalize(torch.autograd.Function):
    """(input - mean) / sqrt(variance + eps) * weight + bias; also mean, sum of squared deviations and count, of all."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float,
        process_set: ProcessSet,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        values = precise(input)
        with calling("hvd.SyncBatchNorm"):
            rows = allgather(local_statistics(values), "sync_batch_norm.statistics", process_set)
        mean, squares, count = combine(rows)
        if count < 2:
            raise ValueError(f"SyncBatchNorm needs more than one value per channel over all ranks, not {count}")
        scale = torch.rsqrt(squares / count + eps)
        ctx.save_for_backward(input, weight, mean, scale)
        ctx.count, ctx.process_set, ctx.biased = count, process_set, bias is not None
        ctx.mark_non_differentiable(mean, squares)
        none = torch.zeros((), dtype=values.dtype, device=values.device)
        gain = scale if weight is None else scale * weight
        offset = (none if bias is None else bias) - mean * gain
        return (values * spread(gain, input) + spread(offset, input)).to(input.dtype), mean, squares, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, scale = ctx.saved_tensors
        slope = precise(grad)
        deviation = (precise(input) - spread(mean, input)) * spread(scale, input)
        sums = torch.stack([total(slope), total(slope * deviation)])
        grad_bias, grad_weight = sums.clone()  # of this rank
        with calling("backward of hvd.SyncBatchNorm"):
            allreduce_(sums, op=Sum, name="sync_batch_norm.sums", process_set=ctx.process_set)
        gain = scale if weight is None else scale * weight
        average, tilt = (spread(each, input) for each in sums / ctx.count)
        grad_input = ((slope - average - deviation * tilt) * spread(gain, input)).to(input.dtype)
        grads = [grad_weight if weight is not None else None, grad_bias if ctx.biased else None]  # autograd casts them
        return grad_input, *grads, None, None


def precise(tensor: torch.Tensor) -> torch.Tensor:
    """In float32, if it is less precise."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def others(tensor: torch.Tensor) -> list[int]:
    """All dimensions but the channels'."""
    return [0, *range(2, tensor.dim())]


def total(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of each channel."""
    return tensor.sum(others(tensor))


def spread(channels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One value per channel, shaped to meet `like`."""
    return channels.reshape(1, -1, *[1] * (like.dim() - 2))


def local_statistics(values: torch.Tensor) -> torch.Tensor:
    """One row: count, means, sums of squared deviations from them. An empty batch has zeros."""
    channels = values.shape[1]
    count = values.numel() // channels if channels else 0
    if count == 0:
        return values.new_zeros(1, 1 + 2 * channels)
    variance, mean = torch.var_mean(values, others(values), correction=0)
    return torch.cat([values.new_full((1,), count), mean, variance * count])[None]


def combine(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Mean, sum of squared deviations and count of all values, from each rank's `local_statistics`."""
    exact = rows.double()  # a float32 holds counts up to 2^24
    counts, (means, squares) = exact[:, :1], exact[:, 1:].chunk(2, dim=1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count.clamp(min=1)
    everything = squares.sum(0) + (counts * (means - mean) ** 2).sum(0)
    return mean.to(rows.dtype), everything.to(rows.dtype), int(count)
