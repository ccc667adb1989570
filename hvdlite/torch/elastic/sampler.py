"""A sampler that remembers how much of an epoch is done, and deals out the rest among the present ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sized
from itertools import cycle, islice

from torch.utils.data import Sampler

from hvdlite.job import runtime


class ElasticSampler(Sampler[int]):
    """Each rank's indices of the rest of an epoch. All ranks get as many, so a few indices may occur twice.

        sampler = hvd.elastic.ElasticSampler(data)
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler)
        ...
            state.sampler.record_batch(index, batch_size)     # before each commit
        state.sampler.set_epoch(state.epoch + 1)              # at the end of each epoch

    Attributes:
        dataset: The dataset.
        shuffle: Whether indices are shuffled, in the same way on all ranks.
        seed: The seed of the shuffling, together with the epoch.
        epoch: The epoch.
        processed_num: How many samples of this epoch all ranks together have processed.
        num_replicas: The number of ranks.
        rank: This rank.
        processed_indices: The indices of the processed samples.
        remaining_indices: The indices of the other samples.
        num_samples: The number of this rank's indices.
        total_size: The number of all ranks' indices.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """
        Args:
            dataset: The dataset.
            shuffle: Whether to shuffle indices.
            seed: The seed of the shuffling, equal on all ranks.

        Raises:
            ValueError: `hvd.init()` has not been called.
        """
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Call this at the end of the previous epoch, so that a restart in between does not repeat it.

        Args:
            epoch: The number of the epoch.
        """
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch.

        Args:
            batch_idx: Ignored; accepted for Horovod's sake.
            batch_size: The number of samples in each rank's batch.
        """
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the sampler's state."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Load a state, and deal out the rest of its epoch.

        Args:
            state_dict: A result of `state_dict`.
        """
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal out the samples that are not processed among the present ranks."""
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
