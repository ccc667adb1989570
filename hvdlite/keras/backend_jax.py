"""The JAX backend of Keras, as `gradients/` uses it.

Keras compiles its step with XLA. XLA calls back to the host, in order, for the reduction. The callback gets all
gradients at once, when the last one is computed, so nothing overlaps. Each gradient byte is copied twice here, besides
XLA's own copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

import jax
import numpy as np
from jax.experimental import io_callback

from hvdlite.arrays import Array
from hvdlite.elastic import retell
from hvdlite.errors import HvdliteError
from hvdlite.gradients.accumulator import Accumulator
from hvdlite.gradients.compression import LossyChoices, NoneCompressor, caster
from hvdlite.gradients.exchange import Exchange, reduce_now
from hvdlite.gradients.tensors import Variable
from hvdlite.gradients.use import Use
from hvdlite.keras import private_api
from hvdlite.keras.backend_common import divided, in_order, in_session, refuse_replicas, use_of, using

__all__ = ["divided", "in_order", "in_session", "refuse_replicas", "untouched", "use_of", "using"]

P = ParamSpec("P")
R = TypeVar("R")


def untouched(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function itself: JAX traces it, and the reduction becomes a callback."""
    return function


def is_floating(tensor: jax.Array) -> bool:
    return bool(jax.numpy.issubdtype(tensor.dtype, jax.numpy.floating))


class Compression(LossyChoices):
    """The compressors for JAX arrays."""

    none = NoneCompressor
    fp16 = caster("FP16Compressor", "float16", is_floating, jax.numpy.astype)
    bf16 = caster("BF16Compressor", "bfloat16", is_floating, jax.numpy.astype)


def dtype_of(gradient: jax.Array) -> str:
    return str(gradient.dtype)


def zeros(shape: Sequence[int], dtype: str) -> jax.Array:
    return jax.numpy.zeros(shape, dtype)


def densified(gradient: jax.Array | None) -> jax.Array | None:
    """Return the gradient itself: Keras on JAX has no sparse gradients."""
    return gradient


def gpu_of(variables: Sequence[Variable]) -> None:
    """Return None: XLA's callbacks bring gradients to the host."""


def values_of(variables: Sequence[Variable]) -> None:
    """Return None: within fit(), Keras on JAX stores values in the variables only after many steps."""


def traced(gradients: Sequence[jax.Array | None]) -> bool:
    return any(isinstance(gradient, jax.core.Tracer) for gradient in gradients)


def wait() -> None:
    """Wait for the callbacks of all steps that have been started. If one has failed, raise its error, once."""
    try:
        jax.effects_barrier()
    except Exception:
        forget_failure()
        raise


def forget_failure() -> None:
    """Drop the tokens by which JAX orders callbacks: on a GPU, a failure would fail every later callback, too."""
    private_api.RUNTIME_TOKENS.get().clear()


def reduce(exchange: Exchange, gradients: Sequence[jax.Array | None], borrow: bool = False) -> list[jax.Array | None]:
    """Reduce gradients over all ranks. Waits for all ranks, now or when the compiled step runs.

    Args:
        exchange: The exchange of these gradients' variables.
        gradients: This rank's, in the exchange's order.
        borrow: Has no effect: results are copies.

    Returns:
        The reduced gradients, in the same order; None where no rank has any.
    """
    if not traced(gradients):
        return reduce_now(exchange, gradients, np.asarray, copies)
    given = [index for index, gradient in enumerate(gradients) if gradient is not None]
    # The step has no result for a variable that no rank uses, so what a lossy compressor has kept must not be sent.
    absent = Use.UNUSED if exchange.contents.store else Use.DENSE
    used = [index for index in exchange.division.dense if exchange.division.uses[index] is Use.DENSE]

    def call(*arrays: jax.Array) -> list[Array | None]:
        by_index = dict(zip(given, arrays, strict=True))
        mine = [by_index.get(index) for index in range(len(gradients))]
        try:
            found = reduce_now(exchange, mine, np.asarray, lambda views: [view.copy() for view in views], absent)
        except HvdliteError as error:  # XLA raises an error of its own, which quotes this one
            retell(error)
            raise
        return [found[index] for index in used]

    shapes = [jax.ShapeDtypeStruct(exchange.contents.specs[i].shape, exchange.contents.specs[i].dtype) for i in used]
    outputs = io_callback(call, shapes, *(gradients[index] for index in given), ordered=True)
    results: list[jax.Array | None] = [None] * len(gradients)
    for index, output in zip(used, outputs, strict=True):
        results[index] = output
    return results


def noted(
    note: Callable[[float], None], value: jax.Array, gradients: Sequence[jax.Array | None]
) -> list[jax.Array | None]:
    """Call `note` with a number before the next round; in a compiled step, each time that it runs.

    Args:
        note: The function.
        value: The number.
        gradients: The gradients of the round.

    Returns:
        The gradients.
    """

    def call(value: jax.Array) -> None:
        note(float(value))

    if traced([value, *gradients]):
        io_callback(call, None, value, ordered=True)
    else:
        call(value)
    return list(gradients)


def copies(arrays: Sequence[Array]) -> list[jax.Array]:
    return [jax.numpy.array(array, copy=True) for array in arrays]


def accumulate(accumulator: Accumulator, gradients: Mapping[int, jax.Array]) -> bool:
    """Add gradients to the sums of earlier passes, by index.

    Returns:
        Whether this was the last pass before a step.

    Raises:
        NotImplementedError: The step is being compiled.
    """
    if traced(list(gradients.values())):
        raise NotImplementedError(
            "backward_passes_per_step on JAX: use the optimizer's own gradient_accumulation_steps, which does the same"
        )
    return accumulator.add({i: np.asarray(gradient) for i, gradient in gradients.items()})


def accumulated(accumulator: Accumulator, gradients: Mapping[int, jax.Array]) -> dict[int, jax.Array]:
    """Return the sums of all passes, by index."""
    totals = accumulator.take()
    return dict(zip(totals, copies(list(totals.values())), strict=True))
