"""`DistributedGradientTape`: a tf.GradientTape that returns gradients reduced over all ranks.

hvdlite replaces methods on the user's tape; there is no wrapper.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import tensorflow as tf

from hvdlite.gradients.lists import keep_own, shared
from hvdlite.gradients.settings import Arguments, Settings, settings_of
from hvdlite.gradients.tensors import Gradient, Variable
from hvdlite.gradients.variables import is_one_of, is_variable
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.ops import Average, Op
from hvdlite.tensorflow.common import differentiable
from hvdlite.tensorflow_graph import private_api
from hvdlite.tensorflow_graph.compression import Compression
from hvdlite.tensorflow_graph.framework import FRAMEWORK
from hvdlite.tensorflow_graph.graph import untouched

TapeT = TypeVar("TapeT", bound=tf.GradientTape)


@untouched
def DistributedGradientTape(
    gradtape: TapeT,
    device_dense: str = "",
    device_sparse: str = "",
    compression: object = Compression.none,
    sparse_as_dense: bool = False,
    op: Op | int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: object = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    replica_check: str | None = None,
) -> TapeT:
    """Make the tape's `gradient(target, sources)` return gradients reduced over all ranks.

    `gradient` takes tf.Variables or Keras variables, one or nested, the same on all ranks, and waits for all ranks. A
    gradient that no rank has stays None. If the ranks' variables differ, the first call raises MismatchError with a
    diff on every rank. Each gradient byte is copied twice.

    The tape gains two methods. `register_local_source(variable)` keeps the variable's gradient this rank's own.
    `get_local_and_global_gradients` returns local and reduced gradients apart.

    All tapes with the same arguments share one plan per list of variables, so a new tape per step costs nothing.

    For second derivatives, take the inner gradients with a plain tape. To differentiate the results again raises
    NotImplementedError.

    Args:
        gradtape: A tf.GradientTape. Its methods are replaced on this object.
        device_dense: Accepted for Horovod's sake.
        device_sparse: Accepted for Horovod's sake.
        compression: `hvd.Compression.none`, `.fp16` or `.bf16`: the dtype in which gradients travel.
            Or a lossy compressor between hosts: `hvd.Compression.topk(ratio=0.01)`, `randomk`, `int8`, `onebit`,
            `powersgd`, or your own `Codec`, the same object for all tapes. Under loss
            scaling, use `hvd.DistributedOptimizer`, which knows the scale.
        sparse_as_dense: Whether sparse gradients (embeddings) travel dense.
        op: Average or Sum.
        gradient_predivide_factor: Divides gradients before the sum, and multiplies the sum. With Average only.
        num_groups: Deprecated: a number for `groups`.
        groups: A number of groups, or lists of variables that travel together.
        process_set: The ranks that reduce together.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.
        replica_check: The reaction to ranks that train with different weights: "error", "warn" or "off". None: the
            setting HVDLITE_REPLICA_CHECK, else "error".

    Returns:
        The same tape.

    Raises:
        TypeError: `gradtape` is no tf.GradientTape.
        ValueError: An argument cannot be right, before init(), or the process set is not registered.
        NotImplementedError: `op` is Adasum.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(
            f"DistributedGradientTape takes a tf.GradientTape first, not a {type(gradtape).__name__}: "
            "DistributedGradientTape(tape)"
        )
    private_api.require_all()
    settings = settings_of(Arguments(
        compression=compression, sparse_as_dense=sparse_as_dense, op=op,
        gradient_predivide_factor=gradient_predivide_factor, num_groups=num_groups, groups=groups,
        process_set=process_set, scale_local_gradients=scale_local_gradients, replica_check=replica_check,
    ))  # fmt: skip
    attachment = TapeAttachment(gradtape, settings)
    vars(gradtape).update(
        gradient=untouched(attachment.gradient),
        register_local_source=partial(keep_own, attachment.local),
        get_local_and_global_gradients=untouched(attachment.local_and_global),
    )
    return gradtape


class TapeAttachment:
    """The methods that hvdlite puts on a tape, and their state.

    Attributes:
        tape: A weak reference to the tape. The tape holds this object, and a reference cycle would outlive the step.
        settings: The user's arguments, checked.
        local: The variables whose gradients stay this rank's own.
    """

    def __init__(self, tape: tf.GradientTape, settings: Settings) -> None:
        self.tape = weakref.ref(tape)
        self.settings = settings
        self.local: list[Variable] = []

    def gradient(
        self,
        target: object,
        sources: object,
        output_gradients: object = None,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> object:
        """Return the gradients of the target with respect to the sources, reduced over all ranks. Waits for all ranks.

        Args:
            target: As for tf.GradientTape.gradient.
            sources: Variables, one or nested, the same on all ranks.
            output_gradients: As for tf.GradientTape.gradient.
            unconnected_gradients: As for tf.GradientTape.gradient.
            use_generic_names: Accepted for Horovod's sake; ranks match variables by their place among the sources.

        Returns:
            The gradients, nested like the sources.

        Raises:
            TypeError: A source is no variable.
        """
        tape = self.tape()
        assert tape is not None
        grads = type(tape).gradient(tape, target, sources, output_gradients, unconnected_gradients)
        if self.settings.size == 1:
            return grads
        variables, flat = flattened(sources), flattened(grads)
        if not all(map(is_variable, variables)):
            raise TypeError(
                "hvd.DistributedGradientTape: every source must be a variable. A tensor differs between ranks: take "
                "its gradient with a plain tf.GradientTape"
            )
        exchange = shared.get(self.settings, FRAMEWORK, "tape", "DistributedGradientTape")
        reduced = exchange.reduce(flat, variables, self.local)
        if private_api.RECORDS.get()():
            reduced = [constant(result, of) for result, of in zip(reduced, flat, strict=True)]
        return tf.nest.pack_sequence_as(sources, reduced, expand_composites=False)

    def local_and_global(
        self,
        target: object,
        sources: Sequence[Variable],
        output_gradients: object = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Variable, Gradient]], list[tuple[Variable, Gradient]]]:
        """Return two lists of (source, gradient) pairs: of the local sources, and of the other sources."""
        grads = flattened(self.gradient(target, sources, output_gradients))
        pairs = list(zip(sources, grads, strict=True))
        local = [pair for pair in pairs if is_one_of(pair[0], self.local)]
        return local, [pair for pair in pairs if not is_one_of(pair[0], self.local)]


def constant(result: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
    """Return the reduced gradient, made so that differentiating it raises an error instead of giving None."""
    if not isinstance(result, tf.Tensor) or not isinstance(gradient, tf.Tensor):
        return result

    def refuse(*upstream: tf.Tensor) -> list[tf.Tensor]:
        raise NotImplementedError(
            "the results of hvd.DistributedGradientTape cannot be differentiated again: take the inner gradients "
            "with a plain tf.GradientTape, and the outer ones with a distributed tape"
        )

    return differentiable(lambda _: [tf.identity(result)], refuse, [gradient])[0]


def flattened(structure: object) -> list[tf.Tensor]:
    """Return the tensors or variables in a nested structure; a sparse tensor remains one object."""
    return list(tf.nest.flatten(structure, expand_composites=False))


@untouched
def PartialDistributedGradientTape(
    gradtape: TapeT,
    device_dense: str = "",
    device_sparse: str = "",
    compression: object = Compression.none,
    sparse_as_dense: bool = False,
    op: Op | int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: object = None,
    process_set: ProcessSet = global_process_set,
    local_layers: object = None,
    scale_local_gradients: bool = True,
    replica_check: str | None = None,
) -> TapeT:
    """Make a tape distributed, as `DistributedGradientTape`, for a model with layers that stay each rank's own.

    Args:
        gradtape: A tf.GradientTape. Its methods are replaced on this object.
        device_dense: Accepted for Horovod's sake.
        device_sparse: Accepted for Horovod's sake.
        compression: `hvd.Compression.none`, `.fp16` or `.bf16`: the dtype in which gradients travel.
            Or a lossy compressor between hosts: `hvd.Compression.topk(ratio=0.01)`, `randomk`, `int8`, `onebit`,
            `powersgd`, or your own `Codec`, the same object for all tapes. Under loss
            scaling, use `hvd.DistributedOptimizer`, which knows the scale.
        sparse_as_dense: Whether sparse gradients (embeddings) travel dense.
        op: Average or Sum.
        gradient_predivide_factor: Divides gradients before the sum, and multiplies the sum. With Average only.
        num_groups: Deprecated: a number for `groups`.
        groups: A number of groups, or lists of variables that travel together.
        process_set: The ranks that reduce together.
        local_layers: A Keras layer or several; their weights keep this rank's gradients.
        scale_local_gradients: Whether gradients of these weights are divided by the number of ranks.
        replica_check: The reaction to ranks that train with different weights: "error", "warn" or "off". None: the
            setting HVDLITE_REPLICA_CHECK, else "error".

    Returns:
        The same tape.

    Raises:
        TypeError: `gradtape` is no tf.GradientTape.
        ValueError: An argument cannot be right, before init(), or the process set is not registered.
        NotImplementedError: `op` is Adasum.
    """
    from hvdlite.keras.optimizer import weights_of

    local = weights_of(local_layers)
    tape = DistributedGradientTape(
        gradtape, device_dense=device_dense, device_sparse=device_sparse, compression=compression,
        sparse_as_dense=sparse_as_dense, op=op, gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups, groups=groups, process_set=process_set, scale_local_gradients=scale_local_gradients,
        replica_check=replica_check,
    )  # fmt: skip
    vars(tape)["register_local_source"](local)
    return tape
