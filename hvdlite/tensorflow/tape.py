"""`DistributedGradientTape`: a tape whose `gradient` gives the gradients of all ranks. Attached, not wrapped."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import tensorflow as tf

from hvdlite.gradients.lists import Settings, keep_own, settings_of, shared_gradients
from hvdlite.gradients.variables import is_one_of, is_variable
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.ops import Average, Op
from hvdlite.tensorflow.common import differentiable
from hvdlite.tensorflow_graph import private_api
from hvdlite.tensorflow_graph.compression import Compression
from hvdlite.tensorflow_graph.framework import BORDER
from hvdlite.tensorflow_graph.graph import untouched

TapeT = TypeVar("TapeT", bound=tf.GradientTape)


@untouched
def DistributedGradientTape(
    gradtape: TapeT,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Op | int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    replica_check: str | None = None,
) -> TapeT:
    """Make the tape's `gradient(target, sources)` return gradients reduced over all ranks. Returns the same tape.

    sources: tf.Variables or Keras variables, one or nested, the same on all ranks; gradients that no rank has stay
    None. The tape gains `register_local_source(variable)`, whose gradient stays the rank's own (divided by the number
    of ranks where scale_local_gradients), and `get_local_and_global_gradients`. The other arguments are those of
    DistributedOptimizer. All tapes with the same arguments share one plan per list of variables, so a new tape per
    step costs nothing. Copied per gradient byte: 2. Differentiating the results again raises
    NotImplementedError: for second derivatives take the inner gradients with a plain tape.

    Collective when gradient() is first called; differing variables raise MismatchError with a diff on every rank.
    TypeError for what is no tf.GradientTape.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(
            f"DistributedGradientTape takes a tf.GradientTape first, not a {type(gradtape).__name__}: "
            "DistributedGradientTape(tape)"
        )
    private_api.require_all()
    settings = settings_of(
        op=op, predivide=gradient_predivide_factor, compression=compression,
        sparse_as_dense=sparse_as_dense, num_groups=num_groups, groups=groups, scale_local=scale_local_gradients,
        process_set=process_set,
        replica_check=replica_check,
    )  # fmt: skip
    attachment = Attachment(gradtape, settings)
    vars(gradtape).update(
        gradient=untouched(attachment.gradient),
        register_local_source=partial(keep_own, attachment.local),
        get_local_and_global_gradients=untouched(attachment.local_and_global),
    )
    return gradtape


class Attachment:
    """One tape's gradients, reduced."""

    def __init__(self, tape: Any, settings: Settings) -> None:
        self.tape, self.settings = weakref.ref(tape), settings  # which has this: together they would outlive the step
        self.local: list[Any] = []

    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE, use_generic_names: bool = False,
    ) -> Any:
        """The gradients of target with respect to sources, reduced over all ranks, in sources' structure.

        use_generic_names: accepted for Horovod's sake; variables are matched by their place among the sources. Raises
        TypeError for sources that are no variables.
        """
        tape: Any = self.tape()
        grads = type(tape).gradient(tape, target, sources, output_gradients, unconnected_gradients)
        if self.settings.size == 1:
            return grads
        variables, flat = flattened(sources), flattened(grads)
        if not all(map(is_variable, variables)):
            raise TypeError(
                "hvd.DistributedGradientTape: the sources are to be variables. The gradient of a tensor, which differs "
                "between ranks, is for a plain tf.GradientTape"
            )
        exchange = shared_gradients(self.settings, BORDER, "tape", "DistributedGradientTape")
        reduced = exchange.reduce(flat, variables, self.local)
        if private_api.RECORDS.get()():
            reduced = [constant(result, of) for result, of in zip(reduced, flat, strict=True)]
        return tf.nest.pack_sequence_as(sources, reduced, expand_composites=False)

    def local_and_global(
        self, target: Any, sources: Sequence[Any], output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """(source, gradient) pairs of the local sources, and of the others."""
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients), strict=True))
        local = [pair for pair in pairs if is_one_of(pair[0], self.local)]
        return local, [pair for pair in pairs if not is_one_of(pair[0], self.local)]


def constant(result: Any, gradient: Any) -> Any:
    """The reduced gradient, through which a tape around it finds no way back: it gets an error, not nothing."""
    if not isinstance(result, tf.Tensor) or not isinstance(gradient, tf.Tensor):
        return result

    def refuse(*upstream: Any) -> Any:
        raise NotImplementedError(
            "the results of hvd.DistributedGradientTape cannot be differentiated again: take the inner gradients "
            "with a plain tf.GradientTape, and the outer ones with a distributed tape"
        )

    return differentiable(lambda _: [tf.identity(result)], refuse, [gradient])[0]


def flattened(structure: Any) -> list[Any]:
    return list(tf.nest.flatten(structure, expand_composites=False))


@untouched
def PartialDistributedGradientTape(
    gradtape: TapeT,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Op | int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    replica_check: str | None = None,
) -> TapeT:
    """As DistributedGradientTape; the weights of local_layers (a Keras layer or several) keep this rank's gradients."""
    from hvdlite.keras.optimizer import weights_of

    local = weights_of(local_layers)
    tape: Any = DistributedGradientTape(
        gradtape, device_dense=device_dense, device_sparse=device_sparse, compression=compression,
        sparse_as_dense=sparse_as_dense, op=op, gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups, groups=groups, process_set=process_set, scale_local_gradients=scale_local_gradients,
        replica_check=replica_check,
    )  # fmt: skip
    tape.register_local_source(local)
    return tape  # type: ignore[no-any-return]
