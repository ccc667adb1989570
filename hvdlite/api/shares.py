"""`hvd.shard`: each rank's share of the data.

Sample i belongs to rank i % size, as in torch's DistributedSampler and tf.data's `shard`. So a share of sorted data has
samples of every class. What the adapters of frameworks do stands in their `shares.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard, TypeVar, cast

from hvdlite.api import frameworks
from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.system.user_warnings import warn

T = TypeVar("T")


class Rows(Protocol):
    """An array, a sequence of samples, or the `iloc` of a DataFrame."""

    def __getitem__(self, rows: slice) -> object: ...


@dataclass(frozen=True)
class Share:
    """How data are divided.

    Attributes:
        rank: This rank's place in the process set.
        size: The number of ranks.
        even: The user's choice; None for the default of the kind of data.
        seed: The seed of the shuffling, equal on all ranks.
    """

    rank: int
    size: int
    even: bool | None
    seed: int

    def rows(self, length: int) -> slice:
        """Return this rank's part of so many samples."""
        return slice(self.rank, self.end(length), self.size)

    def end(self, length: int) -> int:
        """Return how many of the samples are dealt out. Warns if ranks get different numbers, unless the user says so.

        Args:
            length: The number of samples.
        """
        rest = length % self.size
        if self.even is None and rest and self.rank == 0:
            self.warn(f"{length} samples on {self.size} ranks: some ranks get one sample more than others.")
        if self.even and length < self.size and self.rank == 0 and length:
            warn(f"hvd.shard(even=True): {length} samples are fewer than {self.size} ranks, so no rank gets any")
        return length - rest if self.even else length

    def warn(self, what: str) -> None:
        """Warn that ranks may get different numbers of samples."""
        warn(
            f"hvd.shard: {what} For training give even=True, which leaves out the last ones: otherwise a rank may "
            "have a step more, in which it waits for the others. For evaluation give even=False"
        )


def shard(data: T, *, even: bool | None = None, seed: int = 0, process_set: ProcessSet | None = None) -> T:
    """Return this rank's share of data that all ranks have alike. Not collective.

        train = hvd.shard(DataLoader(train_set, 32, shuffle=True, num_workers=2))
        test = hvd.shard(DataLoader(test_set, 500))
        images, labels = hvd.shard((images, labels), even=True)

    | data                                                | returns                            | even by default |
    |-----------------------------------------------------|------------------------------------|-----------------|
    | torch DataLoader with shuffle=True (training)       | a new DataLoader, shuffled anew in | True            |
    |                                                     | each epoch, alike on all ranks     |                 |
    | torch DataLoader without shuffle (evaluation)       | a new DataLoader                   | False           |
    | torch Dataset with a length                         | a Subset                           | False, warns    |
    | tf.data.Dataset                                     | a tf.data.Dataset                  | False, warns    |
    | array, tensor, DataFrame, list or other sequence    | every size-th row                  | False, warns    |
    | tuple or dict of equally long arrays, also nested   | the same tuple or dict of shares   | False, warns    |

    With even=True all ranks get equally many samples, and so take equally many steps: up to size - 1 samples are left
    out. With even=False every sample goes to exactly one rank, and numbers of samples may differ by one. No sample is
    given out twice. Sample i goes to rank i % size; in a shuffled DataLoader, i counts in the epoch's order. Without
    `even=`, "warns" gives a warning on rank 0 if the ranks' numbers of samples may differ.

    A DataLoader keeps its settings; batch_size is that of each rank. A shuffled one begins a new epoch, with another
    permutation, each time it is iterated over. `loader.set_epoch(n)` chooses the next epoch's number, for resuming. A
    new share begins with epoch 0: make it once, before the loop over epochs. All ranks must iterate equally often: if
    one rank alone looks at a batch, let it call `loader.set_epoch` afterwards. A DataLoader's `generator`, and
    `hvd.seed`, do not change that permutation: `seed` does.

    For tf.data, shard before you shuffle and batch: `hvd.shard(dataset, even=True).shuffle(2000).batch(32)`. If ranks
    shuffle before, each in another order, some samples go to several ranks, and some to none.

    Args:
        data: As in the table, equal on all ranks, and in the same order.
        even: Whether all ranks get equally many samples.
        seed: The seed of a DataLoader's shuffling, equal on all ranks; the epoch is added.
        process_set: The ranks that share the data. Default: all ranks.

    Returns:
        This rank's share, as in the table. It shares memory with NumPy arrays and torch tensors.

    Raises:
        NotInitializedError: `hvd.init()` has not been called.
        TypeError: The data cannot be divided: an iterator, a DataLoader with a sampler of its own, ...
        ValueError: Arrays of one tuple or dict differ in length, or this rank is no member of the process set.
    """
    mine = Share(*place_in(process_set), even, seed)
    if isinstance(data, (tuple, Mapping)):
        found = list(leaves(data, ""))
        lengths = {path: length_of(leaf, path) for path, leaf in found}
        if len(set(lengths.values())) > 1:
            said = ", ".join(f"{path} has {length}" for path, length in lengths.items())
            raise ValueError(f"hvd.shard: the arrays differ in length: {said}. Each must have one row for each sample")
        return cast(T, divided(data, mine.rows(next(iter(lengths.values()), 0))))
    if is_rows(data):
        return cast(T, divided(data, mine.rows(length_of(data, "the data"))))
    return cast(T, frameworks.shares_of(data)(data, mine))


def place_in(process_set: ProcessSet | None) -> tuple[int, int]:
    """Return this rank's place in a process set, and the set's size.

    Raises:
        ValueError: The set is not registered, or this rank is no member.
    """
    if process_set is None or process_set is global_process_set:
        return runtime.rank(), runtime.size()
    rank, size = process_set.rank(), process_set.size()
    if rank is None or size is None:
        raise ValueError(f"{process_set} is not registered: give it to hvd.init or hvd.add_process_set first")
    return rank, size


def is_rows(data: object) -> TypeGuard[Rows]:
    """Whether it is an array, a tensor, a DataFrame, or a sequence of samples other than a text."""
    array = hasattr(data, "shape") and hasattr(data, "dtype") and hasattr(data, "__getitem__")
    return array or hasattr(data, "iloc") or (isinstance(data, Sequence) and not isinstance(data, (str, bytes)))


def length_of(rows: object, path: str) -> int:
    """Return the number of samples. Raises TypeError if the object has no rows."""
    shape = getattr(rows, "shape", None)
    if not is_rows(rows) or (shape is not None and len(shape) == 0):
        raise TypeError(
            f"hvd.shard: {path} is {type(rows).__name__}, which has no rows. Tuples and dicts hold arrays or lists "
            "with one row for each sample; give a tuple of samples as a list"
        )
    return int(shape[0]) if shape is not None else len(cast("Sequence[object]", rows))


def leaves(data: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield the arrays in nested tuples and dicts, each with its path."""
    items = data.items() if isinstance(data, Mapping) else enumerate(data) if isinstance(data, tuple) else None
    if items is None:
        yield path, data
    else:
        for key, value in items:
            yield from leaves(value, f"{path}[{key!r}]")


def divided(data: object, rows: slice) -> object:
    """Return nested tuples and dicts with these rows of each array."""
    if isinstance(data, Mapping):
        return {key: divided(value, rows) for key, value in data.items()}
    if isinstance(data, tuple):
        parts = tuple(divided(value, rows) for value in data)
        return data._make(parts) if hasattr(data, "_make") else parts
    return cast(Rows, getattr(data, "iloc", data))[rows]  # [] of a Series may take labels
