"""`hvd.shard` of torch's DataLoaders and Datasets."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast, overload

from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)
from torch.utils.data.distributed import DistributedSampler

from hvdlite.api import shares
from hvdlite.api.shares import Share
from hvdlite.job.process_sets import ProcessSet
from hvdlite.system.user_warnings import warn

T = TypeVar("T")
D = TypeVar("D")
KEPT = (
    "batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn",
    "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip
"""The settings of a DataLoader that its share has, too."""
YOURSELF = "give the DataLoader this rank's own sampler, such as torch's DistributedSampler, and leave hvd.shard out"


class ShareSampler(DistributedSampler[Any]):
    """A rank's indices. Each iteration has the number of the previous one plus one, unless `set_epoch` chooses it.

    With drop_last=False torch's sampler gives the first indices out twice, so that all ranks get equally many. This one
    does not.
    """

    def __init__(self, dataset: Dataset[Any], share: Share, shuffle: bool) -> None:
        """
        Args:
            dataset: A dataset with a length.
            share: How samples are divided. Its `even` is True or False.
            shuffle: Whether samples are shuffled, alike on all ranks.
        """
        super().__init__(dataset, share.size, share.rank, shuffle=shuffle, seed=share.seed, drop_last=bool(share.even))
        self.total_size = share.end(len(cast(Sized, dataset)))
        self.num_samples = len(range(share.rank, self.total_size, share.size))

    def __iter__(self) -> Any:
        indices = super().__iter__()
        self.set_epoch(self.epoch + 1)
        return indices


class ShareLoader(DataLoader[T]):
    """A DataLoader of a rank's share. Its sampler counts epochs."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the number of the next epoch, and so its permutation.

        Args:
            epoch: The number, equal on all ranks. The epoch after that has the next number.
        """
        cast(ShareSampler, self.sampler).set_epoch(epoch)


class ShareSubset(Subset[T]):
    """A rank's share of a Dataset. It is not divided again."""


class Shard(Protocol):
    """The type of `hvd.shard` here: a DataLoader's share has `set_epoch`, and a Dataset's share is a Subset."""

    @overload
    def __call__(
        self, data: DataLoader[T], *, even: bool | None = None, seed: int = 0, process_set: ProcessSet | None = None
    ) -> ShareLoader[T]: ...
    @overload
    def __call__(
        self, data: Dataset[T], *, even: bool | None = None, seed: int = 0, process_set: ProcessSet | None = None
    ) -> ShareSubset[T]: ...
    @overload
    def __call__(
        self, data: D, *, even: bool | None = None, seed: int = 0, process_set: ProcessSet | None = None
    ) -> D: ...


shard = cast(Shard, shares.shard)


def share(data: object, mine: Share) -> object:
    """Return this rank's share of a DataLoader or a Dataset.

    Args:
        data: The DataLoader or Dataset.
        mine: How samples are divided.

    Raises:
        TypeError: It is another object, has no length or a sampler of its own, or is a share already.
    """
    if isinstance(data, DataLoader):
        return share_of_loader(data, mine)
    if not isinstance(data, Dataset):
        raise TypeError(f"hvd.shard: {type(data).__name__} is no data: give a DataLoader, a Dataset or a tensor")
    require_length(data)
    rows = mine.rows(len(cast(Sized, data)))
    return ShareSubset(data, range(rows.start, rows.stop, rows.step))


def share_of_loader(loader: DataLoader[T], mine: Share) -> ShareLoader[T]:
    """Return a new DataLoader of this rank's share, with the same settings."""
    require_length(loader.dataset)
    shuffle = type(loader.sampler) is RandomSampler
    if not shuffle and type(loader.sampler) is not SequentialSampler:
        raise TypeError(
            f"hvd.shard takes a DataLoader with shuffle=True or shuffle=False; this one has a sampler of its own, "
            f"{type(loader.sampler).__name__}. Leave the sampler out, or {YOURSELF} [HVD317]"
        )
    sampler = cast(RandomSampler, loader.sampler)
    if shuffle and (sampler.replacement or sampler.num_samples != len(cast(Sized, loader.dataset))):
        raise TypeError(
            f"hvd.shard takes a RandomSampler that draws each sample once; this one has replacement= or num_samples=. "
            f"Give shuffle=True in its place, or {YOURSELF} [HVD317]"
        )
    if loader.batch_size is None and loader.batch_sampler is not None:
        raise TypeError(
            f"hvd.shard cannot divide the batches of a batch_sampler. Give batch_size=, or {YOURSELF} [HVD317]"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise TypeError(f"hvd.shard would lose what {type(loader).__name__} does in __iter__: {YOURSELF} [HVD317]")
    mine = replace(mine, even=shuffle) if mine.even is None else mine
    dealt = ShareSampler(loader.dataset, mine, shuffle)
    settings = {name: getattr(loader, name) for name in KEPT}
    found = ShareLoader(loader.dataset, sampler=dealt, **settings)
    if mine.rank == 0 and len(dealt) > 0 and len(found) == 0:
        warn(
            f"hvd.shard: each epoch has no steps. drop_last=True leaves out incomplete batches, and a rank's "
            f"{len(dealt)} samples are fewer than batch_size={loader.batch_size}, which counts for each rank"
        )
    return found


def require_length(data: Dataset[Any]) -> None:
    """Raise TypeError for a Dataset that cannot be indexed, has no length, or is a share already."""
    if isinstance(data, ShareSubset):
        raise TypeError("hvd.shard: the Dataset is this rank's share already. Shard the Dataset or its DataLoader once")
    if isinstance(data, IterableDataset):
        raise TypeError(
            f"hvd.shard cannot divide {type(data).__name__}, an IterableDataset: let its __iter__ yield this rank's "
            "samples, as in itertools.islice(samples, hvd.rank(), None, hvd.size()). If ranks then have different "
            "numbers of batches, train within hvd.uneven_inputs(model, optimizer) [HVD317]"
        )
    if not hasattr(data, "__len__"):
        raise TypeError(f"hvd.shard cannot divide {type(data).__name__}: the Dataset has no __len__ [HVD317]")
