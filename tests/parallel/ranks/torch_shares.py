"""`hvd.shard`, `hvd.seed` and `hvd.Metric` with PyTorch."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any, assert_type

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import hvdlite.torch as hvd
from tests.parallel.common import require_error, require_same_bits


class Squares(Dataset[int]):
    """The squares of the first numbers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index * index


def epoch_of(loader: Any) -> list[list[int]]:
    """This rank's batches of the roots of the squares."""
    return [[round(square**0.5) for square in batch.tolist()] for batch in loader]


def everyones(batches: list[list[int]]) -> list[int]:
    """All ranks' samples."""
    return [each for several in hvd.allgather_object(batches) for batch in several for each in batch]


def lengths() -> list[int]:
    p = hvd.size()
    return [1, p - 1, p, p + 1, 5 * p + 2]


def check_evaluation_has_every_sample_once() -> None:
    for n in [0, *lengths()]:
        for workers in (0, 1 if n == hvd.size() + 1 else 0):
            loader = hvd.shard(DataLoader(Squares(n), 2, num_workers=workers))
            for _ in range(2):
                mine = epoch_of(loader)
                assert sorted(everyones(mine)) == list(range(n))
                counts = hvd.allgather_object(sum(map(len, mine)))
                assert max(counts) - min(counts) <= 1 and len(loader) == len(mine)


def check_training_has_equal_steps_and_no_sample_twice() -> None:
    p = hvd.size()
    for n in filter(None, lengths()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fewer samples than ranks
            loader = hvd.shard(DataLoader(Squares(n), 2, shuffle=True))
        for _ in range(3):
            mine = epoch_of(loader)
            dealt = everyones(mine)
            assert len(dealt) == len(set(dealt)) == n // p * p and set(dealt) <= set(range(n))
            assert len({str([len(batch) for batch in each]) for each in hvd.allgather_object(mine)}) == 1
            assert len(loader) == len(mine) == -(-(n // p) // 2)


def check_epochs_shuffle_differently_and_alike_on_all_ranks() -> None:
    """The ranks' samples, dealt out in turn, are the permutation of seed + epoch. Workers may persist."""
    p, n = hvd.size(), 12 * hvd.size()
    for workers, persistent in ((0, False), (1, False), (2, True)):
        loader: Any = hvd.shard(
            DataLoader(Squares(n), 4, shuffle=True, num_workers=workers, persistent_workers=persistent), seed=100
        )
        seen = []
        for epoch in range(3):
            mine = [each for batch in epoch_of(loader) for each in batch]
            dealt = np.array(hvd.allgather_object(mine)).T.reshape(-1).tolist()
            assert dealt == torch.randperm(n, generator=torch.Generator().manual_seed(100 + epoch)).tolist()
            seen.append(mine)
        assert seen[0] != seen[1] != seen[2]
        loader.set_epoch(1)
        assert [epoch_of(loader), epoch_of(loader)] == [grouped(seen[1]), grouped(seen[2])]
        loader.sampler.set_epoch(0)
        assert epoch_of(loader) == grouped(seen[0])
        next(iter(loader))  # epoch 1, on all ranks
        assert epoch_of(loader) == grouped(seen[2])
    assert len(seen[0]) == n // p


def grouped(samples: list[int]) -> list[list[int]]:
    return [samples[i : i + 4] for i in range(0, len(samples), 4)]


def check_an_epoch_without_steps_is_a_warning() -> None:
    """Because ranks are more than samples, or a share is less than a batch that drop_last leaves out."""
    p, r = hvd.size(), hvd.rank()
    for n, drop_last, even, words in (
        (p - 1, False, None, f"{p - 1} samples are fewer than {p} ranks"),
        (2 * p, True, None, "drop_last=True"),
        (2 * p, True, False, "drop_last=True"),
        (3 * p, True, None, ""),
        (2 * p, False, None, ""),
    ):
        loader = DataLoader(Squares(n), 3, shuffle=n > 0, drop_last=drop_last)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            share = hvd.shard(loader, even=even)
        assert [words in str(each.message) for each in caught] == [True] * (bool(words) and r == 0 and n > 0), words
        assert len(share) == (1 if not words else 0)


def check_the_keyword_overrides_the_choice() -> None:
    p, r = hvd.size(), hvd.rank()
    n = 3 * p + p - 1
    shuffled = hvd.shard(DataLoader(Squares(n), 2, shuffle=True), even=False)
    first, second = epoch_of(shuffled), epoch_of(shuffled)
    assert sorted(everyones(first)) == sorted(everyones(second)) == list(range(n)) and first != second
    in_order = hvd.shard(DataLoader(Squares(n), 2), even=True)
    steps = n // p
    assert [each for batch in epoch_of(in_order) for each in batch] == [r + p * i for i in range(steps)]


def own_collate(batch: list[int]) -> torch.Tensor:
    return torch.tensor(batch) + 0


def own_start(worker: int) -> None:
    return None


def check_settings_are_kept() -> None:
    generator = torch.Generator().manual_seed(3)
    given: dict[str, Any] = {
        "batch_size": 3, "num_workers": 2, "collate_fn": own_collate, "drop_last": True, "timeout": 50,
        "worker_init_fn": own_start, "generator": generator, "prefetch_factor": 5, "persistent_workers": True,
        "in_order": False,
    }  # fmt: skip
    loader = DataLoader(Squares(20 * hvd.size()), shuffle=True, multiprocessing_context="fork", **given)
    dealt = hvd.shard(loader)
    assert isinstance(dealt, DataLoader) and dealt is not loader and dealt.dataset is loader.dataset
    assert {name: getattr(dealt, name) for name in given} == given
    assert dealt.multiprocessing_context is loader.multiprocessing_context and not dealt.pin_memory
    assert [len(batch) for batch in epoch_of(dealt)] == [3] * 6  # 20 samples each, and the last two are dropped
    single = hvd.shard(DataLoader(Squares(2 * hvd.size()), batch_size=None))
    assert list(single) == [hvd.rank() ** 2, (hvd.rank() + hvd.size()) ** 2]


def check_datasets_and_tensors() -> None:
    p, r = hvd.size(), hvd.rank()
    for n in [0, *lengths()]:
        share = hvd.shard(Squares(n), even=False)
        assert [share[i] for i in range(len(share))] == [i * i for i in range(r, n, p)]
        images, labels = hvd.shard((torch.arange(2.0 * n).reshape(n, 2), torch.arange(n)), even=False)
        assert labels.tolist() == list(range(r, n, p)) and (images[:, 0] == 2 * labels).all()
    part = hvd.shard(TensorDataset(torch.arange(2 * p), torch.arange(2 * p)))
    assert_type(part.dataset, Dataset[tuple[torch.Tensor, ...]])
    assert [int(x) for x, _ in DataLoader(part, 1)] == [r, r + p]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class OwnLoader(DataLoader[int]):
    def __iter__(self) -> Any:
        return super().__iter__()


def check_what_cannot_be_divided() -> None:
    data = Squares(8)
    for wrong, *words in (
        (DataLoader(Stream()), "Stream, an IterableDataset", "itertools.islice", "uneven_inputs"),
        (Stream(), "Stream, an IterableDataset"),
        (DataLoader(data, sampler=WeightedRandomSampler([1.0] * 8, 4)), "WeightedRandomSampler", "DistributedSampler"),
        (DataLoader(data, sampler=DistributedSampler(data, 1, 0)), "DistributedSampler"),
        (hvd.shard(DataLoader(data)), "ShareSampler"),
        (hvd.shard(data, even=True), "this rank's share already"),
        (DataLoader(hvd.shard(data, even=True)), "this rank's share already"),
        (DataLoader(data, sampler=RandomSampler(data, replacement=True)), "replacement="),
        (DataLoader(data, sampler=RandomSampler(data, num_samples=3)), "num_samples="),
        (DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 2, False)), "batch_sampler", "batch_size="),
        (OwnLoader(data), "OwnLoader", "__iter__"),
        (torch.nn.Linear(1, 1), "Linear is no data"),
    ):  # fmt: skip
        require_error(TypeError, lambda: hvd.shard(wrong), "hvd.shard", *words)


class OnGPU(torch.Tensor):
    """A tensor that stands for one on a GPU."""

    is_cpu = False


def unread(value: float) -> torch.Tensor:
    return torch.tensor(value).as_subclass(OnGPU)


def check_a_metric_keeps_tensors_and_their_values() -> None:
    """A tensor that changes later, or needs gradients, is counted as it was. Sums are in float64."""
    p, r = hvd.size(), hvd.rank()
    metric, loss = hvd.Metric(), torch.zeros((), dtype=torch.float64)
    for batch in range(3):
        loss.fill_(r + batch)
        metric.update(loss, torch.tensor(2))
    weight = torch.nn.Parameter(torch.ones(1))
    metric.update(weight * (r + 1), 6)
    loss.fill_(1e9)
    assert isinstance(metric._sum, torch.Tensor) and not metric._sum.requires_grad
    assert metric.compute() == (p - 1) / 2 + 1  # r + 1 on average on each rank
    found = hvd.average_metrics({"m": metric, "t": (torch.tensor(r, dtype=torch.bfloat16), torch.tensor(1)), "n": loss})
    assert found == {"m": (p + 1) / 2, "t": (p - 1) / 2, "n": 1e9}
    exact = hvd.Metric()
    exact.update(torch.tensor(2.0**24), 1)
    exact.update(torch.tensor(1.0), 1)
    assert exact.compute() == (2.0**24 + 1) / 2
    for count in (torch.tensor(0), torch.tensor(0.0), unread(0), unread(0.0)):  # an empty batch
        exact.update(torch.tensor(torch.nan), count)
        exact.update(torch.nan, count)
    assert exact.compute() == (2.0**24 + 1) / 2
    exact.update(torch.tensor(0.0), unread(2))
    assert isinstance(exact._count, torch.Tensor) and exact.compute() == (2.0**24 + 1) / 4
    require_error(ValueError, lambda: metric.update(1.0, torch.tensor(-1)), "not negative")
    require_error(ValueError, lambda: metric.update(torch.ones(2)), "2 elements")
    require_error(ValueError, lambda: hvd.average_metrics({"loss": torch.ones(0)}), "metric loss", "0 elements")


def check_seed() -> None:
    """torch, NumPy and Python are seeded: alike on all ranks, or each rank otherwise."""
    hvd.seed(11)
    drawn = [torch.rand(3), torch.nn.Linear(2, 2).weight.detach()]
    require_same_bits(drawn)
    hvd.seed(11)
    assert torch.equal(torch.rand(3), drawn[0])
    used = hvd.seed(11, per_rank=True)
    mine = (torch.rand(3).tolist(), random.random(), np.random.random())
    assert torch.initial_seed() == used
    assert len(set(map(str, hvd.allgather_object(mine)))) == hvd.size()
