"""The PyTorch backend of Keras, as a chain uses it: a `backend.Backend`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import keras
import torch

from hvdlite.keras.backend_torch import TorchVariable
from hvdlite.keras.chain.backend import Work
from hvdlite.torch.tensors import to_array, to_tensor

unrecorded = torch.no_grad


class Tape:
    """Takes gradients from autograd's graph."""

    def leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(tensor.is_floating_point() and torch.is_grad_enabled())

    def pull(
        self, target: torch.Tensor, gradient: torch.Tensor | None, sources: Sequence[torch.Tensor | TorchVariable]
    ) -> list[torch.Tensor | None]:
        if not target.requires_grad:  # nothing in this part is trained
            return [None] * len(sources)
        tensors = [source if isinstance(source, torch.Tensor) else source.value for source in sources]
        return list(torch.autograd.grad(target, tensors, gradient, retain_graph=True, allow_unused=True))


def record() -> nullcontext[Tape]:
    return nullcontext(Tape())


def call(work: Work, tensors: Sequence[torch.Tensor], results: object) -> list[torch.Tensor]:
    found = work(*(to_array(tensor.detach().cpu().contiguous()) for tensor in tensors))
    return [keras.ops.convert_to_tensor(to_tensor(each)) for each in found]  # on Keras' device
