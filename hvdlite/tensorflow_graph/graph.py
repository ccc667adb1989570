"""Python functions on tensors: called at once in eager mode, and as nodes of TensorFlow's graphs.

TensorFlow reports an exception inside a Python node as UnknownError, and a ValueError as InvalidArgumentError. Users
are promised FailedPreconditionError for what `hvdlite` raises. So a node returns its error's text beside its results,
and a native node raises: writing to the file `/dev/null/TEXT` fails with this class ("not a directory") and quotes the
text. Without an error it writes nothing to `/dev/null`. `tf.debugging.Assert` costs half of that (about 4 us a node
instead of 8), but raises InvalidArgumentError, which users could not tell from their own mistakes. Reading a file is no
way: TensorFlow's optimizer leaves it out, since nobody needs what is read.

NumPy views of a node's inputs share the tensors' memory, and results that lie on 64-byte boundaries become tensors
without a copy. So crossing costs no bytes, only about 0.1 ms a node. Outside of graphs DLPack does the same, in about
2 us. XLA cannot call Python: no node can be made where it compiles.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite.arrays import LINE, Array, bfloat16, is_host, on_boundary
from hvdlite.elastic import retell
from hvdlite.errors import HvdliteError, ShutdownError
from hvdlite.tensorflow_graph import gpu, private_api
from hvdlite.tensorflow_graph.session import apart

LONGEST_TEXT = 3000  # bytes; a path may have 4095


def aligned_copy(array: Array) -> Array:
    """A contiguous copy, on the host one that TensorFlow can take as a tensor as it is. (Of strings, which are Python
    objects, any: they are about to be refused.)"""
    if not is_host(array) or array.dtype.hasobject:
        return array.copy()
    copy = on_boundary(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def to_tensor(array: Array) -> tf.Tensor:
    """A fresh array on the host as an eager tensor, which takes its memory over where it starts a cache line."""
    if array.dtype == bfloat16 or array.ctypes.data % LINE or not array.flags.writeable:
        return tf.convert_to_tensor(array)
    exporter: Any = array
    return tf.experimental.dlpack.from_dlpack(exporter.__dlpack__())


def to_tensors(results: Sequence[Array]) -> list[tf.Tensor]:
    """Fresh arrays as eager tensors, each where it lies."""
    copies = iter(gpu.tensors_of([each for each in results if not is_host(each)]))
    return [to_tensor(each) if is_host(each) else next(copies) for each in results]


@contextlib.contextmanager
def tensorflow_errors() -> Iterator[None]:
    """The core's errors as TensorFlow's, for calls outside graphs."""
    try:
        yield
    except ShutdownError as error:
        retell(error)  # for Keras' fit drops the cause
        raise tf.errors.UnknownError(None, None, str(error)) from error
    except HvdliteError as error:
        retell(error)
        raise tf.errors.FailedPreconditionError(None, None, str(error)) from error
    except ValueError as error:
        raise tf.errors.InvalidArgumentError(None, None, str(error)) from error


def call(
    function: Callable[..., Sequence[Array]],
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    shapes: Sequence[Any],
    name: str | None = None,
) -> list[tf.Tensor]:
    """function(*inputs as arrays), which returns new arrays, as tensors: now, or in a graph at each of its runs."""
    if not tf.executing_eagerly():
        device = gpu.device_for(inputs, dtypes) if in_order() else None
        outputs = [tf.TensorSpec(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        return node(function, inputs, outputs, name, alone=not in_order(), device=device)[0]
    with tensorflow_errors():
        return to_tensors(function(*gpu.arrays_of(inputs)))


def node(
    function: Callable[..., Sequence[Array]],
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tf.TensorSpec] = (),
    name: str | None = None,
    alone: bool = False,
    device: str | None = None,
) -> tuple[list[tf.Tensor], tf.Operation]:
    """A node of a graph that calls a Python function each time that the graph runs.

    Args:
        function: Called with the inputs as arrays; returns new arrays.
        inputs: The node's.
        outputs: Shapes and dtypes of the results.
        name: The node's; letters that a node's name may not have are replaced.
        alone: Whether other nodes that wait for ranks may run at the same time, in another order on other ranks.
        device: One of TensorFlow's GPUs, for arrays there; None: the host.

    Returns:
        The results, and an operation to depend on for "it was called, and all is well". When the graph runs, an
        HvdliteError becomes a FailedPreconditionError.

    Raises:
        RuntimeError: The graph is for XLA.
    """
    refuse_compiled()
    name = name and re.sub(r"[^A-Za-z0-9_.\\/>-]", "_", name)  # what a node may be called
    dtypes = [each.dtype for each in outputs]
    if device is None:
        results, status = host_node(function, inputs, dtypes, name, alone)
    else:
        results, status = gpu.node(function, text_of, inputs, dtypes, device, name)
    checked = tf.raw_ops.WriteFile(filename=tf.strings.join(["/dev/null", status]), contents="")
    with tf.control_dependencies([checked]):
        results = [tf.identity(result) for result in results]
    for result, output in zip(results, outputs, strict=True):
        result.set_shape(output.shape)
    return results, checked


def host_node(
    function: Callable[..., Sequence[Array]], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType], name: str | None,
    alone: bool,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """The results of a node that calls function with arrays on the host, and the text of the error that it raised."""
    numpy_dtypes = [tf.as_dtype(dtype).as_numpy_dtype for dtype in dtypes]

    @untouched
    def called(*arrays: Array) -> list[Any]:
        try:
            return [*function(*map(np.asarray, arrays)), b""]  # scalars come as NumPy's numbers
        except HvdliteError as error:
            return [*(np.zeros(0, dtype) for dtype in numpy_dtypes), text_of(error).encode()]

    run = apart if alone else tf.numpy_function
    *results, status = run(called, list(inputs), [*dtypes, tf.string], name=name)
    status.set_shape(())
    return results, status


def text_of(error: HvdliteError) -> str:
    """What a node gives instead of raising the error, which `elastic` learns of, too. Raises a ShutdownError."""
    retell(error)
    if isinstance(error, ShutdownError):
        raise error.with_traceback(None)  # TensorFlow quotes it all: frames that are none of the user's
    return f"/\n\nhvdlite: {shortened(str(error))}\n\n(what stands around this is TensorFlow's)"


def in_order() -> bool:
    """A session runs a graph's nodes in any order; tf.function keeps that of the program."""
    return tf.executing_eagerly() or isinstance(tf.compat.v1.get_default_graph(), private_api.FUNCTION_GRAPH.get())


def shortened(text: str) -> str:
    """A text as the name of a file, for an error's message; one that is too long goes to stderr in full."""
    encoded = text.replace("/", "\N{DIVISION SLASH}").encode()
    if len(encoded) > LONGEST_TEXT:
        print(text, file=sys.stderr, flush=True)
    return encoded[:LONGEST_TEXT].decode(errors="ignore")


def untouched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, not to be rewritten by AutoGraph."""
    return tf.autograph.experimental.do_not_convert(function)  # type: ignore[no-any-return]


def refuse_compiled() -> None:
    """Raise where the graph under construction is for XLA, which cannot call Python."""
    if not tf.executing_eagerly() and private_api.IN_XLA.get()(tf.compat.v1.get_default_graph()):
        raise RuntimeError(
            "this function is compiled with XLA, in which processes cannot communicate. Use "
            "model.compile(..., jit_compile=False), or tf.function without jit_compile=True; "
            "hvdlite.keras.callbacks.BroadcastGlobalVariablesCallback settles it for model.fit."
        )
