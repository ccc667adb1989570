"""Batch normalization over the batches of all ranks: equal to one process with one large batch.

Forward takes one all-gather of each rank's count, means and sums of squared deviations. All ranks combine these in rank
order (Chan, Golub & LeVeque 1979). The ranks therefore compute the same bits, and no digits cancel as they would in a
sum of squares. Backward takes one all-reduce of two sums per channel. Batches may differ in size, or be empty.

The module uses ordinary torch operations and runs on any device that the collectives know, whereas torch's own needs
CUDA and NCCL. The gradients of weight and bias stay this rank's own, since the optimizer averages them.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch

from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.lanes.calls import calling
from hvdlite.ops import Sum
from hvdlite.torch.mpi_ops import allgather, allreduce_
from hvdlite.torch.private_api import BatchNorm, children_of


class SyncBatchNorm(BatchNorm):
    """Horovod's module: torch.nn.BatchNorm1d, 2d and 3d with the statistics of all ranks' batches.

    In training, every rank of the process set must call the module equally often, forward and backward; each call waits
    for all of them. Evaluation with running statistics communicates nothing.

    Attributes:
        process_set: The ranks whose batches are normalized together.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        bias: bool = True,
    ) -> None:
        """
        Args:
            num_features: The number of channels.
            eps: Added to the variance.
            momentum: The weight of a batch in the running statistics; None: they are plain averages over batches.
            affine: Whether there are a weight and a bias.
            track_running_stats: Whether there are running statistics.
            process_set: The ranks whose batches are normalized together.
            device: The device of parameters and buffers.
            dtype: Their dtype.
            bias: Whether there is a bias.
        """
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        if not bias:
            self.register_parameter("bias", None)
        self.process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm needs an input of two dimensions at least, not {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize a batch. In training this waits for all ranks of the process set.

        Args:
            input: Of shape (batch, num_features, ...), on any device. The batch may be empty.

        Returns:
            A new tensor of the same shape and dtype.

        Raises:
            ValueError: The input has one dimension, or all ranks together have fewer than two values per channel.
        """
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
        """Update the running statistics, in place.

        Args:
            mean: The mean of each channel over all ranks' batches.
            variance: The unbiased variance of each channel.
        """
        assert self.num_batches_tracked is not None and self.running_mean is not None and self.running_var is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """Replace each batch normalization in a module, in place, by one over all ranks.

        The replacements keep the same parameter and buffer objects, so an optimizer may exist already. Call this before
        `hvd.DistributedOptimizer`.

        Args:
            module: The module.
            process_set: The ranks whose batches are normalized together.

        Returns:
            The module itself, or its replacement if it is a batch normalization.

        Raises:
            ValueError: A batch normalization has a `forward` of its own, which would be lost (timm's with an
                activation, say).
        """
        return cls.converted(module, process_set, {})

    @classmethod
    def converted(
        cls, module: torch.nn.Module, process_set: ProcessSet, known: dict[torch.nn.Module, torch.nn.Module]
    ) -> torch.nn.Module:
        """Do `convert_sync_batchnorm` for a module that may occur several times, or in itself.

        Args:
            module: The module.
            process_set: The ranks whose batches are normalized together.
            known: The results for modules that were converted before. The new ones are added.

        Returns:
            The module itself, or its replacement.
        """
        if module in known:
            return known[module]
        result: torch.nn.Module = module
        if isinstance(module, BatchNorm) and not isinstance(module, SyncBatchNorm):
            if type(module).forward not in (BatchNorm.forward, torch.nn.SyncBatchNorm.forward):
                raise ValueError(
                    f"convert_sync_batchnorm: {type(module).__name__} has a forward() of its own, which would be lost: "
                    "replace it by an hvd.SyncBatchNorm and modules for the rest of that forward() first"
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


class Context(Protocol):
    """autograd's context of one normalization."""

    count: int
    process_set: ProcessSet
    biased: bool
    saved_tensors: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...
    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None: ...


class Normalize(torch.autograd.Function):
    """Computes (input - mean) / sqrt(variance + eps) * weight + bias, and the mean, sum of squared deviations and count
    of all ranks' values."""

    @staticmethod
    def forward(
        ctx: Context,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
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
    def backward(ctx: Context, grad: torch.Tensor, *_: object) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, scale = ctx.saved_tensors
        slope = precise(grad)
        deviation = (precise(input) - spread(mean, input)) * spread(scale, input)
        sums = torch.stack([total(slope), total(slope * deviation)])
        grad_bias, grad_weight = sums.clone()  # this rank's own
        with calling("backward of hvd.SyncBatchNorm"):
            allreduce_(sums, op=Sum, name="sync_batch_norm.sums", process_set=ctx.process_set)
        gain = scale if weight is None else scale * weight
        average, tilt = (spread(each, input) for each in sums / ctx.count)
        grad_input = ((slope - average - deviation * tilt) * spread(gain, input)).to(input.dtype)
        grads = [grad_weight if weight is not None else None, grad_bias if ctx.biased else None]  # autograd casts them
        return grad_input, *grads, None, None


def precise(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in float32, unless it is in float64."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def others(tensor: torch.Tensor) -> list[int]:
    """Return all dimensions but the channels'."""
    return [0, *range(2, tensor.dim())]


def total(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of each channel."""
    return tensor.sum(others(tensor))


def spread(channels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return one value per channel in a shape that broadcasts to that of `like`."""
    return channels.reshape(1, -1, *[1] * (like.dim() - 2))


def local_statistics(values: torch.Tensor) -> torch.Tensor:
    """Return one row: the count, the means, and the sums of squared deviations. An empty batch has zeros."""
    channels = values.shape[1]
    count = values.numel() // channels if channels else 0
    if count == 0:
        return values.new_zeros(1, 1 + 2 * channels)
    variance, mean = torch.var_mean(values, others(values), correction=0)
    return torch.cat([values.new_full((1,), count), mean, variance * count])[None]


def combine(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the means, sums of squared deviations and the count of all values, from all ranks' `local_statistics`."""
    exact = rows.double()  # a float32 holds counts up to 2^24
    counts, (means, squares) = exact[:, :1], exact[:, 1:].chunk(2, dim=1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count.clamp(min=1)
    everything = squares.sum(0) + (counts * (means - mean) ** 2).sum(0)
    return mean.to(rows.dtype), everything.to(rows.dtype), int(count)
