"""TensorFlow, as Keras' `Chain` uses it: a `hvdlite.keras.chain.backend.Backend`, eagerly and in tf.function.

In tf.function, TensorFlow runs the Python nodes of a step one after another, in the order of the calls (automatic
control dependencies). So all ranks have their operations in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import tensorflow as tf

from hvdlite.arrays import Array
from hvdlite.gradients.tensors import Variable
from hvdlite.tensorflow_graph import graph

unrecorded = nullcontext  # the step's tape has ended


class Tape:
    """Takes gradients from a persistent tf.GradientTape."""

    def __init__(self, tape: tf.GradientTape) -> None:
        self.tape = tape

    def leaf(self, tensor: tf.Tensor) -> tf.Tensor:
        leaf = tf.stop_gradient(tensor)
        if leaf.dtype.is_floating:
            self.tape.watch(leaf)
        return leaf

    def pull(
        self, target: tf.Tensor, gradient: tf.Tensor | None, sources: Sequence[tf.Tensor | Variable]
    ) -> list[tf.Tensor | None]:
        return list(self.tape.gradient(target, list(sources), output_gradients=gradient))


@contextmanager
def record() -> Iterator[Tape]:
    with tf.GradientTape(persistent=True) as tape:
        yield Tape(tape)


def call(
    work: Callable[..., Sequence[Array]], tensors: Sequence[tf.Tensor], results: Sequence[tuple[graph.Shape, str]]
) -> list[tf.Tensor]:
    shapes, dtypes = [shape for shape, _ in results], [tf.as_dtype(dtype) for _, dtype in results]
    return graph.call(work, list(map(tf.stop_gradient, tensors)), dtypes, shapes, "HvdliteChain")
