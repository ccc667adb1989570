"""A sampler that knows how much of an epoch is done, and deals out the rest among however many ranks there are."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from itertools import cycle, islice
from typing import Any

from torch.utils.data import Sampler

from hvdlite.job import runtime


class ElasticSampler(Sampler[int]):
    """Each rank's indices of the rest of the epoch, shuffled alike on all ranks; some twice, so that all have as many.

        sampler = hvd.elastic.ElasticSampler(data)
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler)
        ...
            state.sampler.record_batch(index, batch_size)     # before each commit
        state.sampler.set_epoch(state.epoch + 1)              # at the end of each epoch

    shuffle: by `seed` and epoch. Raises ValueError before `init()`.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_num = 0
        """Samples that all ranks together have processed in this epoch."""
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Call it at the end of the one before, so that a restart in between does not repeat it."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has processed a batch of this size."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal out what is not processed yet among the present ranks."""
        self.num_replicas, self.rank = runtime.size(), runtime.rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.processed_indices = indices[: self.processed_num]
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return islice(cycle(self.remaining_indices), self.rank, self.total_size, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples
