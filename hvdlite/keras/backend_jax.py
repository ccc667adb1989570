"""Gradients across the border between Keras on JAX and the core.

Keras compiles its step with XLA, which calls back to the host, in order, for the reduction: the callback gets all
gradients at once when the last is computed, so nothing overlaps. Copied per gradient byte: 2, besides what XLA copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from hvdlite.elastic import retell
from hvdlite.errors import HvdliteError
from hvdlite.gradients.accumulator import Accumulator
from hvdlite.gradients.compression import NoneCompressor, caster
from hvdlite.gradients.exchange import Exchange, reduce_now
from hvdlite.gradients.use import Use
from hvdlite.keras import private_api
from hvdlite.keras.backend_common import divided, in_order, in_session, refuse_replicas, use_of, using

__all__ = ["divided", "in_order", "in_session", "refuse_replicas", "untouched", "use_of", "using"]


def untouched(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def is_floating(tensor: Any) -> bool:
    return bool(jax.numpy.issubdtype(tensor.dtype, jax.numpy.floating))


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = caster("FP16Compressor", "float16", is_floating, jax.numpy.astype)
    bf16 = caster("BF16Compressor", "bfloat16", is_floating, jax.numpy.astype)


def dtype_of(gradient: Any) -> str:
    return str(gradient.dtype)


def zeros(shape: Sequence[int], dtype: str) -> Any:
    return jax.numpy.zeros(shape, dtype)


def densified(gradient: Any) -> Any:
    return gradient


def gpu_of(variables: Sequence[Any]) -> None:
    """Gradients pass through the host: XLA's callbacks bring them there."""


def values_of(variables: Sequence[Any]) -> None:
    """Keras gives variables their values after many steps only."""


def traced(gradients: Sequence[Any]) -> bool:
    return any(isinstance(gradient, jax.core.Tracer) for gradient in gradients)


def wait() -> None:
    """Steps run asynchronously; this waits for their callbacks. Where one has failed it raises that, once."""
    try:
        jax.effects_barrier()
    except Exception:
        forget_failure()
        raise


def forget_failure() -> None:
    """On a GPU JAX tells a failure to all callbacks behind it, for good: they wait for each other by tokens."""
    private_api.RUNTIME_TOKENS.get().clear()


def reduce(exchange: Exchange, gradients: Sequence[Any], borrow: bool = False) -> list[Any]:
    """The gradients reduced over all ranks; None where no rank has any."""
    if not traced(gradients):
        return reduce_now(exchange, gradients, np.asarray, copies)
    given = [index for index, gradient in enumerate(gradients) if gradient is not None]
    used = [index for index in exchange.division.dense if exchange.division.uses[index] is Use.DENSE]

    def call(*arrays: Any) -> list[Any]:
        by_index = dict(zip(given, arrays, strict=True))
        mine = [by_index.get(index) for index in range(len(gradients))]
        try:
            found = reduce_now(exchange, mine, np.asarray, lambda views: [view.copy() for view in views], Use.DENSE)
        except HvdliteError as error:  # XLA tells it in words of its own
            retell(error)
            raise
        return [found[index] for index in used]

    shapes = [jax.ShapeDtypeStruct(exchange.contents.specs[i].shape, exchange.contents.specs[i].dtype) for i in used]
    outputs = io_callback(call, shapes, *(gradients[index] for index in given), ordered=True)
    results: list[Any] = [None] * len(gradients)
    for index, output in zip(used, outputs, strict=True):
        results[index] = output
    return results


def copies(arrays: Sequence[Any]) -> list[Any]:
    return [jax.numpy.array(array, copy=True) for array in arrays]


def accumulate(accumulator: Accumulator, gradients: Mapping[int, Any]) -> bool:
    """Add to the sums of earlier passes; whether this was the last. Raises NotImplementedError in compiled steps."""
    if traced(list(gradients.values())):
        raise NotImplementedError(
            "backward_passes_per_step on JAX: use the optimizer's own gradient_accumulation_steps, which does the same"
        )
    return accumulator.add({i: np.asarray(gradient) for i, gradient in gradients.items()})


def accumulated(accumulator: Accumulator, gradients: Mapping[int, Any]) -> dict[int, Any]:
    """The sums."""
    totals = accumulator.take()
    return dict(zip(totals, copies(list(totals.values())), strict=True))
