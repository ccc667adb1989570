"""`DistributedGradientTape`: a tape whose `gradient` gives the gradients of all ranks. Attached, not wrapped."""

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

    The tape gains `register_local_source(variable)`, whose gradient stays the rank's own, and
    `get_local_and_global_gradients`. All tapes with the same arguments share one plan per list of variables, so a new
    tape per step costs nothing. Copied per gradient byte: 2. For second derivatives take the inner gradients with a
    plain tape: differentiating the results again raises NotImplementedError.

    `gradient` takes tf.Variables or Keras variables, one or nested, the same on all ranks, and waits for all ranks;
    gradients that no rank has stay None. Its first call is collective, and raises MismatchError with a diff on every
    rank when the ranks' variables differ.

    Args:
        gradtape: A tf.GradientTape. Its methods are replaced on this object.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.

    The other arguments are those of `DistributedOptimizer`.

    Returns:
        The same tape.

    Raises:
        TypeError: `gradtape` is no tf.GradientTape.
        ValueError: An argument cannot be right.
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
    """What is attached to a tape: its gradients are reduced.

    Attributes:
        tape: The tape, held weakly: the tape holds this, and together they would outlive the step.
        settings: What the user asked for.
        local: Variables whose gradients stay this rank's own.
    """

    def __init__(self, tape: tf.GradientTape, settings: Settings) -> None:
        self.tape = weakref.ref(tape)
        self.settings = settings
        self.local: list[Variable] = []

    def gradient(
        self, target: object, sources: object, output_gradients: object = None,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE, use_generic_names: bool = False,
    ) -> object:
        """The gradients of target with respect to sources, reduced over all ranks. Waits for all ranks.

        Args:
            target: As for tf.GradientTape, like the two arguments after `sources`.
            sources: Variables, one or nested, the same on all ranks.
            use_generic_names: Accepted for Horovod's sake; variables are matched by their place among the sources.

        Returns:
            The gradients, nested as the sources.

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
                "hvd.DistributedGradientTape: the sources are to be variables. The gradient of a tensor, which differs "
                "between ranks, is for a plain tf.GradientTape"
            )
        exchange = shared.get(self.settings, FRAMEWORK, "tape", "DistributedGradientTape")
        reduced = exchange.reduce(flat, variables, self.local)
        if private_api.RECORDS.get()():
            reduced = [constant(result, of) for result, of in zip(reduced, flat, strict=True)]
        return tf.nest.pack_sequence_as(sources, reduced, expand_composites=False)

    def local_and_global(
        self, target: object, sources: Sequence[Variable], output_gradients: object = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Variable, Gradient]], list[tuple[Variable, Gradient]]]:
        """(source, gradient) pairs of the local sources, and of the others."""
        grads = flattened(self.gradient(target, sources, output_gradients))
        pairs = list(zip(sources, grads, strict=True))
        local = [pair for pair in pairs if is_one_of(pair[0], self.local)]
        return local, [pair for pair in pairs if not is_one_of(pair[0], self.local)]


def constant(result: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
    """The reduced gradient, so that differentiating it raises an error instead of giving nothing."""
    if not isinstance(result, tf.Tensor) or not isinstance(gradient, tf.Tensor):
        return result

    def refuse(*upstream: tf.Tensor) -> list[tf.Tensor]:
        raise NotImplementedError(
            "the results of hvd.DistributedGradientTape cannot be differentiated again: take the inner gradients "
            "with a plain tf.GradientTape, and the outer ones with a distributed tape"
        )

    return differentiable(lambda _: [tf.identity(result)], refuse, [gradient])[0]


def flattened(structure: object) -> list[tf.Tensor]:
    """The tensors or variables in a nested structure; sparse ones are not taken apart."""
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
    """`DistributedGradientTape` for a model of which some layers stay each rank's own.

    Args:
        local_layers: A Keras layer or several; their weights keep this rank's gradients.

    The other arguments, the result and the errors are those of `DistributedGradientTape`.
    """
    from hvdlite.keras.optimizer import weights_of

    local = weights_of(local_layers)
    tape: TapeT = DistributedGradientTape(
        gradtape, device_dense=device_dense, device_sparse=device_sparse, compression=compression,
        sparse_as_dense=sparse_as_dense, op=op, gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups, groups=groups, process_set=process_set, scale_local_gradients=scale_local_gradients,
        replica_check=replica_check,
    )  # fmt: skip
    vars(tape)["register_local_source"](local)
    return tape
