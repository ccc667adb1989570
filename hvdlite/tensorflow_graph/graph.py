"""Python functions on tensors: called at once in eager mode, and as nodes of TensorFlow's graphs.

TensorFlow reports an exception inside a Python node as UnknownError, and a ValueError as InvalidArgumentError. hvdlite
promises FailedPreconditionError for its own errors. So the Python node returns the error's text with its results, and a
native node raises the error. The native node writes nothing to a file named `/dev/null` plus the text. With a text
(`/dev/null/TEXT`) the write fails with FailedPreconditionError ("not a directory") and TensorFlow quotes the file name.

Two alternatives were rejected. `tf.debugging.Assert` costs half as much (about 4 us a node instead of 8), but raises
InvalidArgumentError, like a mistake in the user's program. A node that reads a file does not run: TensorFlow's
optimizer removes it, since no other node uses the result.

NumPy views of a node's inputs share the tensors' memory, and results that start on a 64-byte boundary become tensors
without a copy. So a node copies no bytes; it costs about 0.1 ms. In eager mode DLPack shares memory in about 2 us. XLA
cannot call Python, so a graph for XLA cannot have such a node.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf

from hvdlite.arrays import LINE, Array, bfloat16, is_host, on_boundary
from hvdlite.elastic import retell
from hvdlite.errors import HvdliteError, ShutdownError
from hvdlite.tensorflow_graph import gpu, private_api
from hvdlite.tensorflow_graph.session import apart

P = ParamSpec("P")
R = TypeVar("R")
Shape: TypeAlias = "tf.TensorShape | Sequence[int | None]"
"""A tensor's shape as far as it is known when a graph is made."""
LONGEST_TEXT = 3000  # bytes of UTF-8; Linux allows a path of 4095


def aligned_copy(array: Array) -> Array:
    """Return a contiguous copy. On the host it starts a cache line, so that TensorFlow can take over its memory.

    An array of Python objects (strings) gets an ordinary copy: the collective is about to refuse it.
    """
    if not is_host(array) or array.dtype.hasobject:
        return array.copy()
    copy = on_boundary(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def to_tensor(array: Array) -> tf.Tensor:
    """Return a new array on the host as an eager tensor, which shares the memory if the array starts a cache line."""
    if array.dtype == bfloat16 or array.ctypes.data % LINE or not array.flags.writeable:
        return tf.convert_to_tensor(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())  # type: ignore[attr-defined]  # NumPy's


def to_tensors(results: Sequence[Array]) -> list[tf.Tensor]:
    """Return new arrays as eager tensors, each on its own device."""
    copies = iter(gpu.tensors_of([each for each in results if not is_host(each)]))
    return [to_tensor(each) if is_host(each) else next(copies) for each in results]


@contextlib.contextmanager
def tensorflow_errors() -> Iterator[None]:
    """Convert hvdlite's errors to TensorFlow's, for calls in eager mode."""
    try:
        yield
    except ShutdownError as error:
        retell(error)  # since Keras' fit drops the cause
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
    shapes: Sequence[Shape],
    name: str | None = None,
) -> list[tf.Tensor]:
    """Call a function on arrays: at once in eager mode, else each time that the graph runs.

    Args:
        function: Called with the inputs as arrays; returns new arrays.
        inputs: The tensors.
        dtypes: The dtypes of the results.
        shapes: The shapes of the results; eager mode does not need them.
        name: The name of the graph's node.

    Returns:
        The results as tensors.
    """
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
    """Make a node of a graph that calls a Python function each time that the graph runs.

    When the graph runs, an HvdliteError in the function becomes a FailedPreconditionError.

    Args:
        function: Called with the inputs as arrays; returns new arrays.
        inputs: The node's inputs.
        outputs: Shapes and dtypes of the results.
        name: The node's name. A letter that TensorFlow does not allow in a name becomes "_".
        alone: Whether the node needs a thread outside the session, since the session orders nodes freely.
        device: TensorFlow's name of the GPU that the arrays are on; None for the host.

    Returns:
        The results, and an operation that succeeds after the function has returned without an error.

    Raises:
        RuntimeError: The graph is for XLA.
    """
    refuse_compiled()
    name = name and re.sub(r"[^A-Za-z0-9_.\\/>-]", "_", name)
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
    function: Callable[..., Sequence[Array]],
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    name: str | None,
    alone: bool,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Make the Python node on the host. Returns its results, and the text of the function's error ("" for none)."""
    numpy_dtypes = [tf.as_dtype(dtype).as_numpy_dtype for dtype in dtypes]

    @untouched
    def called(*arrays: Array) -> list[object]:
        try:
            return [*function(*map(np.asarray, arrays)), b""]  # asarray: TensorFlow passes scalars as NumPy's numbers
        except HvdliteError as error:
            return [*(np.zeros(0, dtype) for dtype in numpy_dtypes), text_of(error).encode()]

    run = apart if alone else tf.numpy_function
    *results, status = run(called, list(inputs), [*dtypes, tf.string], name=name)
    status.set_shape(())
    return results, status


def text_of(error: HvdliteError) -> str:
    """Return the text that a node returns instead of raising the error, and report the error to `elastic`.

    Raises:
        ShutdownError: `error` is one.
    """
    retell(error)
    if isinstance(error, ShutdownError):
        raise error.with_traceback(None)  # TensorFlow would quote the traceback, which has no frame of the user's
    return f"/\n\nhvdlite: {shortened(str(error))}\n\n(TensorFlow adds the text around this message)"


def in_order() -> bool:
    """Return whether collectives run in the program's order: eagerly and in tf.function, but not in a TF1 session."""
    return tf.executing_eagerly() or isinstance(tf.compat.v1.get_default_graph(), private_api.FUNCTION_GRAPH.get())


def shortened(text: str) -> str:
    """Return an error's text as a file name. If it is too long, cut it, and print the whole text to stderr."""
    encoded = text.replace("/", "\N{DIVISION SLASH}").encode()
    if len(encoded) > LONGEST_TEXT:
        print(text, file=sys.stderr, flush=True)
    return encoded[:LONGEST_TEXT].decode(errors="ignore")


def untouched(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, marked so that AutoGraph does not rewrite it."""
    return tf.autograph.experimental.do_not_convert(function)  # type: ignore[no-any-return]


def refuse_compiled() -> None:
    """Raise RuntimeError if the graph under construction is for XLA, which cannot call Python."""
    if not tf.executing_eagerly() and private_api.IN_XLA.get()(tf.compat.v1.get_default_graph()):
        raise RuntimeError(
            "XLA compiles this function, and compiled code cannot communicate with other ranks. Use "
            "model.compile(..., jit_compile=False), or tf.function without jit_compile=True. In model.fit, "
            "hvdlite.keras.callbacks.BroadcastGlobalVariablesCallback turns jit_compile off. [HVD313]"
        )
