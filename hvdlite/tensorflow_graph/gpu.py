"""TensorFlow's tensors on a GPU: as CuPy arrays of the same memory, and results as tensors, without the host.

    TensorFlow    computes x | waits for it |                                          | goes on with y
    CuPy, lanes                             | read x, communicate, write y | wait for y |

Which stream TensorFlow computes on cannot be known from Python, so nothing can be ordered on the GPU: the host waits,
for streams and events only. `to_dlpack` returns when TensorFlow's compute stream has come to its end, whatever else was
issued there meanwhile: so, unlike in torch, buckets hide little behind the rest of backward. What CuPy and lanes do is
waited for before TensorFlow goes on, which also keeps it from using the memory of x for something else. Results are
copied into memory of TensorFlow's own: it would let go of ours while its stream still reads it. So only tensors cross
by DLPack, never arrays.

Graphs: `tf.py_function` would be put on the host; the node that it makes can run on a GPU, and is put there for dtypes
that it knows. int32 lies in host memory on TensorFlow's GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite import arrays
from hvdlite.arrays import Array
from hvdlite.errors import HvdliteError
from hvdlite.gpu_streams import mark
from hvdlite.lanes.gpu_side import Gpu
from hvdlite.system.user_warnings import say_once
from hvdlite.tensorflow_graph import private_api

DTYPES = frozenset((
    tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int8, tf.int16, tf.int64, tf.uint8, tf.bool,
))  # fmt: skip
"""Those that Python nodes take on GPUs."""
NAMES: dict[int, str] = {}
"""TensorFlow's name for the GPU of a number in CUDA: its own numbers count only those that it may use."""


@cache
def available() -> bool:
    """Whether TensorFlow has a GPU, and CuPy is there; said once where only that is missing."""
    if not tf.config.list_logical_devices("GPU"):
        return False
    try:
        arrays.cupy()
    except HvdliteError as error:
        say_once(f"{error}. Until then TensorFlow's tensors pass through host memory")
        return False
    return True


def is_gpu(device: str) -> bool:
    """Whether this is TensorFlow's name for a GPU."""
    return "GPU" in device


def on_gpu(tensor: tf.Tensor) -> bool:
    """Whether an eager tensor's memory is a GPU's that CuPy reaches."""
    return is_gpu(tensor.backing_device) and available()


@dataclass(frozen=True)
class Export:
    """A tensor as CuPy takes it. TensorFlow waits for its own stream, and knows of no other."""

    tensor: tf.Tensor
    number: int

    def __dlpack__(self, **_: Any) -> Any:
        return tf.experimental.dlpack.to_dlpack(self.tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.number  # a CUDA GPU


@cache
def number_of(device: str) -> int:
    """CUDA's number for the GPU that TensorFlow calls so: asked of a pointer to its memory."""
    xp = arrays.cupy()
    with tf.init_scope():
        probe = unwritten((1,), tf.uint8, device)
    found: int = xp.cuda.runtime.pointerGetAttributes(xp.from_dlpack(Export(probe, 0)).data.ptr).device
    NAMES[found] = device
    return found


def gpu_of(devices: Sequence[str]) -> Gpu | None:
    """The one GPU among TensorFlow's names for devices; None where there is another, or graphs run in sessions."""
    if len(set(devices)) != 1 or not is_gpu(devices[0]) or not tf.compat.v1.executing_eagerly_outside_functions():
        return None
    return Gpu(arrays.cupy(), number_of(devices[0])) if available() else None


def array_of(tensor: tf.Tensor) -> Array:
    """A tensor's memory on its GPU, ready to be read, as a CuPy array that keeps it. It may be overwritten only where
    nobody else has the tensor."""
    xp, number = arrays.cupy(), number_of(tensor.backing_device)
    dtype = np.dtype(tensor.dtype.as_numpy_dtype)
    with xp.cuda.Device(number):
        if 0 in tensor.shape:
            empty: Array = xp.empty(tuple(tensor.shape), dtype)
            return empty
        known = tf.bitcast(tensor, tf.uint16) if tensor.dtype == tf.bfloat16 else tensor
        found = xp.from_dlpack(Export(known, number))
        memory = xp.cuda.UnownedMemory(found.data.ptr, found.nbytes, found, number)
        array: Array = xp.ndarray(tuple(tensor.shape), dtype, xp.cuda.MemoryPointer(memory, 0))
        return array


def arrays_of(tensors: Sequence[tf.Tensor]) -> list[Array]:
    """The tensors' memory, each where it lies."""
    for device in {each.backing_device for each in tensors if on_gpu(each)}:
        wait_for(device)
    return [array_of(each) if on_gpu(each) else on_host(each) for each in tensors]


def on_host(tensor: tf.Tensor) -> Array:
    """The memory of an eager tensor there. (To NumPy a number of bfloat16 gives no array by itself.)"""
    return np.asarray(tensor if tensor.shape.rank else tensor.numpy())


def wait_for(device: str) -> None:
    """Until TensorFlow's compute stream has come to its end. `to_dlpack` waits, too, but keeps other threads, lanes
    among them, from running Python meanwhile."""
    with tf.device(device):
        tf.raw_ops.SyncDevice()


def array_on(gpu: Gpu, tensor: tf.Tensor) -> Array:
    """The tensor as an array on a GPU; copied there where it lies elsewhere."""
    with tf.device(NAMES[gpu.number]):
        return array_of(tensor if on_gpu(tensor) else tf.identity(tensor))


def tensors_of(results: Sequence[Array]) -> list[tf.Tensor]:
    """Copies of arrays on a GPU, in memory of TensorFlow's. Waits until they, and what was issued before, are done."""
    copies = [unwritten(each.shape, tf.as_dtype(each.dtype), NAMES[arrays.device_of(each)]) for each in results]
    for each, copy in zip(results, copies, strict=True):
        with arrays.module(each).cuda.Device(arrays.device_of(each)):
            array_of(copy)[...] = each
    for each in results[-1:]:
        mark(each).wait()
    return copies


def slices(values: tf.Tensor, rows: tf.Tensor, shape: Any) -> tf.IndexedSlices:
    """All ranks' values for their rows. Where there is a GPU, which would add those for one row in any order, so that
    ranks' weights drift apart in their last bits, they are added up here: each row once."""
    if tf.config.list_physical_devices("GPU"):
        with tf.device("CPU:0"):
            rows, places = tf.unique(rows)
            values = tf.math.unsorted_segment_sum(values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, shape)


def unwritten(shape: Sequence[int], dtype: tf.DType, device: str) -> tf.Tensor:
    """A tensor of its own memory: zeros, by the operation, which never gives one that others have, too."""
    with tf.device("CPU:0"):  # where the operation on a GPU wants the shape
        dims = tf.constant(list(shape), tf.int64)
    zero = zero_on(device, dtype)
    with tf.device(device):
        return tf.raw_ops.Fill(dims=dims, value=zero)


@cache
def zero_on(device: str, dtype: tf.DType) -> tf.Tensor:
    with tf.init_scope(), tf.device(device):
        return tf.constant(np.zeros((), dtype.as_numpy_dtype))


def device_for(inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]) -> str | None:
    """Where in a graph a Python node belongs that takes these and gives those: a GPU's name, None for the host."""
    crossing = {tf.as_dtype(dtype) for dtype in (*(tensor.dtype for tensor in inputs), *dtypes)}
    if not inputs or not crossing <= DTYPES or not available():
        return None
    named = {str(tensor.device) for tensor in inputs} - {""}
    if not named:
        return str(tf.config.list_logical_devices("GPU")[0].name)
    return named.pop() if len(named) == 1 and all(map(is_gpu, named)) else None


def node(
    function: Callable[..., Sequence[Array]], text_of: Callable[[HvdliteError], str], inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType], device: str, name: str | None,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """A node on a GPU that calls function with its inputs as arrays there; the results, and text_of the HvdliteError
    that it raised, "" for none."""

    def called(*tensors: tf.Tensor) -> list[tf.Tensor]:
        try:
            return [*tensors_of(function(*arrays_of(tensors))), tf.zeros([0], tf.int64)]
        except HvdliteError as error:
            letters = [ord(letter) for letter in text_of(error)]
            return [*(tf.zeros([0], dtype) for dtype in dtypes), tf.constant(letters, tf.int64)]

    with tf.device(device):
        *results, letters = private_api.GPU_NODE.get()(
            called, list(inputs), [*dtypes, tf.int64], use_eager_py_func=True, name=name
        )
    letters.set_shape([None])
    with tf.device("CPU:0"):
        return results, tf.strings.unicode_encode(tf.cast(letters, tf.int32), "UTF-8")
