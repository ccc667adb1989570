"""What TensorFlow's collectives share: names, gradients, shapes.

Each collective copies its input once per byte; the result becomes a tensor as it lies. An operation without a name
gets, in a graph, that of its input (as a node has), and matches the other ranks' of that name whatever the order;
outside of graphs a number.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import tensorflow as tf

from hvdlite import ops
from hvdlite.arrays import Array
from hvdlite.gradients.variables import unnumbered
from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.ops import Op
from hvdlite.tensorflow_graph import private_api
from hvdlite.tensorflow_graph.graph import aligned_copy, call, untouched

Tensor = Any  # tf.Tensor, or what becomes one


_taken: WeakKeyDictionary[Any, Counter[tuple[int | None, str]]] = WeakKeyDictionary()
"""By graph: how many operations have asked for a name in a process set."""
GRADIENT, KEY = "HvdliteGradient", "_hvdlite_gradient"
_keys = itertools.count()
_gradients: WeakValueDictionary[str, Callable[..., list[Any]]] = WeakValueDictionary()
"""By key: the gradients of operations in graphs that are still there."""


def require_registered(process_set: ProcessSet | None) -> None:
    """Raise ValueError, when an operation is made, for a process set that is not registered; TypeError for what is no
    process set. None stands for all ranks, which need no registration."""
    if process_set is not None and process_set is not global_process_set:
        runtime.current().groups.find(process_set)


def named(
    kind: str, tensors: Sequence[tf.Tensor], name: str | None, ignore_name_scope: bool, process_set: ProcessSet | None
) -> str | None:
    """The operation's name on all ranks of its process set: in a graph as a node's, and unique there among that set's
    operations, since ranks may have others in other sets; None for a number instead.

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
    taken, key = _taken.setdefault(graph, Counter()), ((process_set or global_process_set).process_set_id, chosen)
    taken[key] += 1
    return chosen if taken[key] == 1 else f"{chosen}_{taken[key] - 1}"


def collective(
    work: Callable[[Sequence[Array]], Sequence[Array]], backward: Callable[..., Sequence[Any]],
    tensors: Sequence[tf.Tensor], name: str | None, shape_of: Callable[[tf.Tensor], Any] = lambda tensor: tensor.shape,
) -> list[tf.Tensor]:
    """What work makes of the tensors as arrays: as many, of the same dtypes, and of shape_of each of them; with the
    gradients backward(*gradients of the results)."""

    def forward(*inputs: tf.Tensor) -> list[tf.Tensor]:
        dtypes, shapes = [each.dtype for each in inputs], [shape_of(each) for each in inputs]
        return call(lambda *arrays: work(arrays), inputs, dtypes, shapes, name)

    return differentiable(forward, backward, tensors)


def differentiable(
    forward: Callable[..., Sequence[tf.Tensor]], backward: Callable[..., Sequence[Any]], tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """forward(*tensors), whose gradients are backward(*gradients of the results), one per tensor."""
    forward = untouched(forward)

    @untouched
    def gradients(*grads: Any) -> list[Any]:
        return list(backward(*(tf.convert_to_tensor(grad) for grad in grads)))

    if not tf.executing_eagerly():
        return differentiable_in_graph(forward(*tensors), gradients, tensors)
    run = tf.custom_gradient(lambda *inputs: (list(forward(*inputs)), gradients))
    return list(run(*tensors))


def differentiable_in_graph(
    results: Sequence[tf.Tensor], gradients: Callable[..., list[Any]], tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """The results, whose gradients for the tensors are gradients(*gradients of the results).

    As tf.custom_gradient does it, whose registry keeps each graph's gradients, and with them the graph, for ever. Here
    one gradient is registered for all; its nodes have a key, by which it finds what the graph keeps.
    """
    given, count, graph = [*results, *tensors], len(results), tf.compat.v1.get_default_graph()

    def of_all(*grads: Any) -> list[Any]:
        pairs = zip(results, grads[:count], strict=True)  # where a result is of whole numbers, tf.gradients has None
        known = [tf.zeros_like(result) if grad is None else grad for result, grad in pairs]
        return [*[None] * count, *gradients(*known)]

    key = str(next(_keys))
    _gradients[key] = of_all
    setattr(graph, KEY, [*getattr(graph, KEY, ()), of_all])
    attribute = tf.compat.v1.AttrValue(s=key.encode())
    attributes = private_api.ATTRIBUTE_SCOPE.of(graph)({KEY: attribute})
    with graph.gradient_override_map({"IdentityN": GRADIENT}), attributes:
        outputs = tf.identity_n(given)
    private_api.RECORD.get()(GRADIENT, outputs, given, of_all)  # for tapes, which know nothing of the override
    return list(outputs[:count])


@tf.RegisterGradient(GRADIENT)  # type: ignore[untyped-decorator]
def gradient_of(operation: tf.Operation, *grads: Any) -> list[Any]:
    """The gradients of what `differentiable_in_graph` has made. Without an operation tf.saved_model.save looks for what
    can be run elsewhere, which no collective can."""
    if operation is None:
        return list(grads)
    return _gradients[operation.get_attr(KEY).decode()](*grads)


@dataclass(frozen=True)
class How:
    """A reduction's arithmetic and ranks, by the names of the core's arguments."""

    op: Op
    prescale: float
    postscale: float
    process_set: ProcessSet


def reduced(tensor: tf.Tensor, how: How, name: str | None) -> tf.Tensor:
    """The all-reduction of a tensor, of this name on all ranks; the gradient is the same reduction of the gradient."""
    return all_reduction([tensor], how, lambda arrays: [ops.allreduce_(arrays[0], name=name, **vars(how))], name)[0]


def reduced_together(tensors: Sequence[tf.Tensor], how: How, name: str | None) -> list[tf.Tensor]:
    """The all-reductions of several tensors as one operation; the gradients are reduced alike."""
    return all_reduction(tensors, how, lambda arrays: ops.grouped_allreduce_(arrays, name=name, **vars(how)), name)


def all_reduction(
    tensors: Sequence[tf.Tensor], how: How, work: Callable[[list[Array]], Sequence[Array]], name: str | None
) -> list[tf.Tensor]:
    """The tensors after work on copies of them; the gradients are reduced together."""

    def backward(*grads: tf.Tensor) -> list[tf.Tensor]:
        same = [tf.cast(grad, tensor.dtype) for grad, tensor in zip(grads, tensors, strict=True)]
        return reduced_together(same, how, named("GroupedAllreduce", same, None, False, how.process_set))

    return collective(lambda arrays: work([*map(aligned_copy, arrays)]), backward, tensors, name)


def averaged(grad: tf.Tensor, process_set: ProcessSet) -> tf.Tensor:
    """The average of all ranks' gradients."""
    how = How(ops.Average, 1.0, 1.0, process_set)
    return reduced(grad, how, named("Allreduce", [grad], None, False, process_set))


def dense_tensor(value: Any) -> tf.Tensor:
    """The value as a tensor. Raises TypeError for tensors of several parts."""
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        raise TypeError(
            f"a tf.{type(value).__name__} cannot be sent: send its parts (flat_values and row_lengths(); indices and "
            "values), or a dense tensor (to_tensor(); tf.sparse.to_dense)"
        )
    return tf.convert_to_tensor(value)


def rows_unknown(tensor: tf.Tensor) -> tf.TensorShape:
    """The shape of what has other rows than tensor."""
    return tf.TensorShape([None]).concatenate(tensor.shape[1:])


def size_of(process_set: ProcessSet) -> int:
    return runtime.group_of(process_set).size
