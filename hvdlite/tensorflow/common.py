"""What TensorFlow's collectives share: `collective` runs one eagerly or as a node, with a name and a gradient.

Each collective copies its input once per byte; the result becomes a tensor without a copy.

In a graph, an operation without a name gets a name from its input. Ranks match operations by name, whatever the order.
In eager mode unnamed operations are matched by their order.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakValueDictionary

import tensorflow as tf

from hvdlite import ops
from hvdlite.arrays import Array
from hvdlite.gradients.variables import unnumbered
from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.ops import Op
from hvdlite.tensorflow_graph import private_api
from hvdlite.tensorflow_graph.graph import Shape, aligned_copy, call, untouched

_taken: WeakKeyDictionary[tf.Graph, Counter[tuple[int | None, str]]] = WeakKeyDictionary()
"""By graph: how many operations have asked for a name in a process set."""
GRADIENT, KEY = "HvdliteGradient", "_hvdlite_gradient"
_keys = itertools.count()
_gradients: WeakValueDictionary[str, Callable[..., Sequence[tf.Tensor | None]]] = WeakValueDictionary()
"""By key: the gradient functions of operations whose graphs still exist."""


def require_registered(process_set: ProcessSet | None) -> None:
    """Raise an error unless the process set is registered. None means all ranks, which are always registered.

    Collectives call this function when an operation is made, so that a graph fails before it runs.

    Raises:
        ValueError: The process set is not registered.
        TypeError: `process_set` is no process set.
    """
    if process_set is not None and process_set is not global_process_set:
        runtime.current().groups.find(process_set)


def named(
    kind: str, tensors: Sequence[tf.Tensor], name: str | None, ignore_name_scope: bool, process_set: ProcessSet | None
) -> str | None:
    """Return the operation's name, the same on all ranks of its process set; None in eager mode without a name.

    In a graph the name is like a node's, and unique among the operations of the process set. Other sets do not count,
    since ranks may be members of different sets. The name leaves out the numbers that Keras gives layers and models:
    they differ if a rank has built other models before.

    Args:
        kind: The collective: "Allreduce", for example.
        tensors: The operation's inputs, at least one.
        name: The user's name.
        ignore_name_scope: Whether the name leaves out the graph's name scope.
        process_set: The ranks that take part; None for all.
    """
    if tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    # The name of a tensor from outside the function is a number, which differs between ranks.
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
    work: Callable[[Sequence[Array]], Sequence[Array]],
    backward: Callable[..., Sequence[tf.Tensor | None]],
    tensors: Sequence[tf.Tensor],
    name: str | None,
    shape_of: Callable[[tf.Tensor], Shape] = lambda tensor: tensor.shape,
) -> list[tf.Tensor]:
    """Run a collective on the tensors: at once in eager mode, else each time that the graph runs.

    Args:
        work: The collective, called with the list of the tensors as arrays. Returns as many new arrays of the same
            dtypes.
        backward: Called as backward(*gradients of the results). Returns one gradient per tensor.
        tensors: The inputs.
        name: The name from `named`.
        shape_of: Gives the shape of a tensor's result.

    Returns:
        The results as tensors.
    """

    def forward(*inputs: tf.Tensor) -> list[tf.Tensor]:
        dtypes, shapes = [each.dtype for each in inputs], [shape_of(each) for each in inputs]
        return call(lambda *arrays: work(arrays), inputs, dtypes, shapes, name)

    return differentiable(forward, backward, tensors)


def differentiable(
    forward: Callable[..., Sequence[tf.Tensor]],
    backward: Callable[..., Sequence[tf.Tensor | None]],
    tensors: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Return forward(*tensors). The tensors' gradients are backward(*gradients of the results)."""
    forward = untouched(forward)

    @untouched
    def gradients(*grads: tf.Tensor | tf.IndexedSlices) -> list[tf.Tensor | None]:
        return list(backward(*(tf.convert_to_tensor(grad) for grad in grads)))

    if not tf.executing_eagerly():
        return differentiable_in_graph(forward(*tensors), gradients, tensors)
    run = tf.custom_gradient(lambda *inputs: (list(forward(*inputs)), gradients))
    return list(run(*tensors))


def differentiable_in_graph(
    results: Sequence[tf.Tensor], gradients: Callable[..., Sequence[tf.Tensor | None]], tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Return the results. The gradients of the tensors are gradients(*gradients of the results).

    This function replaces tf.custom_gradient, whose registry keeps every graph alive until the process ends. Here
    TensorFlow's registry has one gradient function for all operations. Each operation has a key, and the gradient
    function finds the operation's own function, which the graph keeps alive, by this key.
    """
    given, count, graph = [*results, *tensors], len(results), tf.compat.v1.get_default_graph()

    def of_all(*grads: tf.Tensor | None) -> list[tf.Tensor | None]:
        pairs = zip(results, grads[:count], strict=True)  # tf.gradients gives None for a result of integers
        known = [tf.zeros_like(result) if grad is None else grad for result, grad in pairs]
        return [*[None] * count, *gradients(*known)]

    key = str(next(_keys))
    _gradients[key] = of_all
    setattr(graph, KEY, [*getattr(graph, KEY, ()), of_all])
    attribute = tf.compat.v1.AttrValue(s=key.encode())
    attributes = private_api.ATTRIBUTE_SCOPE.of(graph)({KEY: attribute})
    with graph.gradient_override_map({"IdentityN": GRADIENT}), attributes:
        outputs = tf.identity_n(given)
    private_api.RECORD.get()(GRADIENT, outputs, given, of_all)  # tapes ignore the override
    return list(outputs[:count])


@tf.RegisterGradient(GRADIENT)  # type: ignore[untyped-decorator]
def gradient_of(operation: tf.Operation | None, *grads: tf.Tensor | None) -> Sequence[tf.Tensor | None]:
    """Return the gradients of an operation that `differentiable_in_graph` has made.

    tf.saved_model.save passes None: it traces gradients for other processes, where no collective can run.
    """
    if operation is None:
        return list(grads)
    return _gradients[operation.get_attr(KEY).decode()](*grads)


@dataclass(frozen=True)
class How:
    """The arguments of a reduction, by the names of the arguments in `ops`.

    Attributes:
        op: The operation.
        prescale: The factor before the operation.
        postscale: The factor after the operation.
        process_set: The ranks that take part.
    """

    op: Op
    prescale: float
    postscale: float
    process_set: ProcessSet


def reduced(tensor: tf.Tensor, how: How, name: str | None) -> tf.Tensor:
    """All-reduce a tensor; its gradient is reduced in the same way. name: equal on all ranks."""
    return all_reduction([tensor], how, lambda arrays: [ops.allreduce_(arrays[0], name=name, **vars(how))], name)[0]


def reduced_together(tensors: Sequence[tf.Tensor], how: How, name: str | None) -> list[tf.Tensor]:
    """All-reduce several tensors as one operation; their gradients are reduced in the same way."""
    return all_reduction(tensors, how, lambda arrays: ops.grouped_allreduce_(arrays, name=name, **vars(how)), name)


def all_reduction(
    tensors: Sequence[tf.Tensor], how: How, work: Callable[[list[Array]], Sequence[Array]], name: str | None
) -> list[tf.Tensor]:
    """Run an all-reduction on copies of the tensors; the gradients are reduced as one operation."""

    def backward(*grads: tf.Tensor) -> list[tf.Tensor]:
        same = [tf.cast(grad, tensor.dtype) for grad, tensor in zip(grads, tensors, strict=True)]
        return reduced_together(same, how, named("GroupedAllreduce", same, None, False, how.process_set))

    return collective(lambda arrays: work([*map(aligned_copy, arrays)]), backward, tensors, name)


def averaged(grad: tf.Tensor, process_set: ProcessSet) -> tf.Tensor:
    """Return the average of all ranks' gradients."""
    how = How(ops.Average, 1.0, 1.0, process_set)
    return reduced(grad, how, named("Allreduce", [grad], None, False, process_set))


def dense_tensor(value: object) -> tf.Tensor:
    """Return the value as a tensor. Raises TypeError for a tensor that consists of several tensors."""
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        raise TypeError(
            f"a tf.{type(value).__name__} cannot be sent: send its parts (flat_values and row_lengths(); indices and "
            "values), or a dense tensor (to_tensor(); tf.sparse.to_dense)"
        )
    return tf.convert_to_tensor(value)


def rows_unknown(tensor: tf.Tensor) -> tf.TensorShape:
    """Return the tensor's shape with an unknown number of rows."""
    return tf.TensorShape([None]).concatenate(tensor.shape[1:])


def size_of(process_set: ProcessSet) -> int:
    """Return the number of ranks in the process set."""
    return runtime.group_of(process_set).size
