"""`DistributedOptimizer(sharded=True)` for Keras on TensorFlow: checks of `backends_sharded` on other numbers of ranks."""

from __future__ import annotations

from tests.parallel.common import at_sizes
from tests.parallel.ranks import backends_sharded

SIZES = (2, 3, 4)


def check_fit_and_checkpoints() -> None:
    backends_sharded.check_fit_and_checkpoints()


@at_sizes(3, 4)
def check_the_same_bits_and_a_part_of_the_state() -> None:
    backends_sharded.check_the_same_bits_and_a_part_of_the_state()


@at_sizes(3, 4)
def check_options() -> None:
    backends_sharded.check_options()


@at_sizes(3)
def check_checkpoints_of_optimizers_of_tensors() -> None:
    backends_sharded.check_checkpoints_of_optimizers_of_tensors()
