"""`hvd.shard` of tf.data.Datasets."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdlite.api.shares import Share


def share(data: Any, mine: Share) -> Any:
    """Return this rank's share of a tf.data.Dataset.

    Args:
        data: The dataset.
        mine: How elements are divided.

    Raises:
        TypeError: It is no dataset.
    """
    if not isinstance(data, tf.data.Dataset):
        raise TypeError(f"hvd.shard: {type(data).__name__} is no data: give a tf.data.Dataset, an array or a tensor")
    length = int(data.cardinality())
    if length >= 0:
        return data.take(mine.end(length)).shard(mine.size, mine.rank)
    unknown = length == tf.data.UNKNOWN_CARDINALITY
    if unknown and mine.even:
        return complete_groups(data, mine)
    if unknown and mine.even is None and mine.size > 1 and mine.rank == 0:
        mine.warn("the tf.data.Dataset does not know its length (its cardinality).")
    return data.shard(mine.size, mine.rank)


def complete_groups(data: Any, mine: Share) -> Any:
    """Return this rank's element of each group of as many elements as ranks, without an incomplete last group.

    Elements are not stacked, so their shapes may differ.
    """
    is_tuple = type(data.element_spec) is tuple  # flat_map unpacks no named tuple

    def own(*group: Any) -> Any:
        return tf.data.Dataset.zip(group if is_tuple else group[0]).skip(mine.rank).take(1)

    return data.window(mine.size, drop_remainder=True).flat_map(own)
