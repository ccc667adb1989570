"""What TensorFlow's collectives share: names, gradients, shapes.

Each collective copies its input once per byte; the result becomes a tensor as it lies. An operation without a name
gets, in a graph, that of its input (as a node has), and matches the other ranks' of that name whatever the order;
outside of graphs a number.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from hvdlite import runtime
from hvdlite.process_sets import ProcessSet
from hvdlite.tensorflow._graph import untouched
from hvdlite.variables import unnumbered

Tensor = Any  # tf.Tensor, or what becomes one


_taken: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
"""By graph: how many operations have asked for a name."""


def named(kind: str, tensors: Sequence[tf.Tensor], name: str | None, ignore_name_scope: bool) -> str | None:
    """The operation's name on all ranks: in a graph that of a node, so unique there; None for a number instead.

    Numbers that Keras gives layers and models are left out: they differ where a rank has built others before.
    """
    if tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    # A tensor from outside of a function is named by a number that differs between ranks.
    captured = {id(tensor) for tensor in getattr(graph, "internal_captures", ())}
    names = ["captured" if id(tensor) in captured else tensor.name for tensor in tensors]
    ends = dict.fromkeys(unnumbered(end) for end in (names[0], names[-1]))
    chosen = name or f"Horovod{kind}_" + "_".join(re.sub(r"[^A-Za-z0-9_]", "_", end) for end in ends)
    scope = graph.get_name_scope()
    if scope and not ignore_name_scope:
        chosen = f"{unnumbered(scope)}/{chosen}"
    taken = _taken.setdefault(graph, Counter())
    taken[chosen] += 1
    return chosen if taken[chosen] == 1 else f"{chosen}_{taken[chosen] - 1}"


def differentiable(
    forward: Callable[..., Sequence[tf.Tensor]], backward: Callable[..., Sequence[Any]], tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """forward(*tensors), whose gradients are backward(*gradients of the results), one per tensor."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    @untouched
    def run(*inputs: tf.Tensor) -> Any:
        def gradients(*grads: Any) -> list[Any]:
            given = [tf.convert_to_tensor(grad) for grad in grads]
            return list(backward(*given))

        return list(forward(*inputs)), untouched(gradients)

    return list(run(*tensors))


def rows_unknown(tensor: tf.Tensor) -> tf.TensorShape:
    """The shape of what has other rows than tensor."""
    return tf.TensorShape([None]).concatenate(tensor.shape[1:])


def size_of(process_set: ProcessSet) -> int:
    return runtime.group_of(process_set).size
