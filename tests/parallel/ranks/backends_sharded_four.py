"""`DistributedOptimizer(sharded=True)` for Keras: checks of `backends_sharded` on four ranks."""

from __future__ import annotations

from tests.parallel.ranks import backends_sharded

SIZES = ()  # test_keras_backends runs this module


def check_the_same_bits_and_a_part_of_the_state() -> None:
    backends_sharded.check_the_same_bits_and_a_part_of_the_state()


def check_optimizers_that_look_at_whole_tensors() -> None:
    backends_sharded.check_optimizers_that_look_at_whole_tensors()


def check_options() -> None:
    backends_sharded.check_options()


def check_checkpoints_of_optimizers_of_tensors() -> None:
    backends_sharded.check_checkpoints_of_optimizers_of_tensors()


def check_process_sets() -> None:
    backends_sharded.check_process_sets()
