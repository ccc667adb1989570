"""Bluefog's averages among neighbours, of torch tensors. They are not differentiable."""

from __future__ import annotations

import torch

from hvdlite.api import neighbors
from hvdlite.api.neighbors import Dests, Weights
from hvdlite.arrays import Array
from hvdlite.torch.tensors import laid_out, readable, to_tensor


def neighbor_allreduce(
    tensor: torch.Tensor,
    *,
    self_weight: float | None = None,
    src_weights: Weights | None = None,
    dst_weights: Dests | None = None,
    enable_topo_check: bool = True,
    name: str | None = None,
) -> torch.Tensor:
    """Average a tensor with those of neighbours: self_weight * own + sum of src_weights[j] * rank j's. Waits for these.

    Without weights, the job's topology (`set_topology`) says who sends to whom, and the weights. All ranks make the
    same calls in the same order. 16-bit floats are added in float32. Not differentiable.

    Args:
        tensor: Of a floating-point dtype; of the same shape and dtype on neighbours. It keeps its values.
        self_weight: The weight of this rank's tensor. Give it with `src_weights`.
        src_weights: By rank, the weight of what it sends. Without `dst_weights`: in-neighbours of the job's topology,
            and those left out have the weight 0.
        dst_weights: The ranks to send to in this call, instead of those of the topology: a list, or a dict of factors
            by which the tensor is multiplied for each. Then `src_weights` names the ranks to receive from in this call.
        enable_topo_check: Whether calls with `dst_weights` compare all ranks' lists first. That waits for all ranks.
        name: The call's name in messages; equal on neighbours.

    Returns:
        The average, as a new tensor on the same device.

    Raises:
        MismatchError: Neighbours' names, shapes, dtypes or ranks differ; on both.
        ShutdownError: A neighbour has shut down.
        TypeError: The dtype is not a floating-point dtype.
        ValueError: Some of the weights are missing, or are for impossible ranks.
    """
    found = neighbors.neighbor_allreduce(
        readable(tensor), self_weight=self_weight, src_weights=src_weights, dst_weights=dst_weights,
        enable_topo_check=enable_topo_check, name=name,
    )  # fmt: skip
    return like(tensor, found)


def hierarchical_neighbor_allreduce(
    tensor: torch.Tensor,
    *,
    self_weight: float | None = None,
    src_machine_weights: Weights | None = None,
    dst_machine_weights: Dests | None = None,
    enable_topo_check: bool = False,
    name: str | None = None,
) -> torch.Tensor:
    """Average a tensor within each host, then with the averages of neighbouring hosts. Waits for these hosts.

    The first rank of each host exchanges its host's average. Hosts are numbered by their lowest ranks. Not
    differentiable.

    Args:
        tensor: Of a floating-point dtype; of the same shape and dtype on all ranks. It keeps its values.
        self_weight: The weight of this host's average. Give all three weights, or none: then hosts form an
            exponential-2 graph with equal weights.
        src_machine_weights: By host, the weight of its average. Equal on all ranks of a host, as are the others.
        dst_machine_weights: The hosts to send to, or a dict of factors, as in `neighbor_allreduce`.
        enable_topo_check: Whether to compare all hosts' lists first. That waits for all ranks.
        name: The call's name in messages; equal on all ranks.

    Returns:
        The average, as a new tensor on the same device.

    Raises:
        MismatchError: Ranks' names, shapes, dtypes or hosts differ; on both.
        ShutdownError: A rank that this one waits for has shut down.
        TypeError: The dtype is not a floating-point dtype.
        ValueError: Some of the weights are missing, or are for impossible hosts.
    """
    found = neighbors.hierarchical_neighbor_allreduce(
        readable(tensor), self_weight=self_weight, src_machine_weights=src_machine_weights,
        dst_machine_weights=dst_machine_weights, enable_topo_check=enable_topo_check, name=name,
    )  # fmt: skip
    return like(tensor, found)


def like(tensor: torch.Tensor, found: Array) -> torch.Tensor:
    """Return a result as a tensor on the device of `tensor`, and in its layout."""
    return laid_out(to_tensor(found).to(tensor.device), tensor)
