"""TensorFlow's tensors on a GPU: as CuPy arrays of the same memory, and results as tensors.

    TensorFlow    computes x | waits for x |                                          | goes on with y
    CuPy, lanes                            | read x, communicate, write y | wait for y |

Python cannot know on which stream TensorFlow computes, so hvdlite cannot order work on the GPU. Instead the host waits
for streams and events. No data goes through the host.

- Before CuPy reads x, `to_dlpack` waits until TensorFlow's compute stream has finished all work issued so far. So,
  unlike in PyTorch, buckets overlap little with the rest of backward.
- Before TensorFlow goes on, the host waits for CuPy and the lanes. So TensorFlow does not reuse the memory of x early.

TensorFlow would free hvdlite's memory while its stream still reads the results. So tensors go to CuPy by DLPack, but
results return as copies in TensorFlow's memory.

In a graph, TensorFlow would place `tf.py_function` on the host. The node inside it can run on a GPU for the dtypes in
DTYPES, so hvdlite places this node there. TensorFlow keeps int32 tensors of a GPU in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

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
"""The dtypes that Python nodes on a GPU support."""
NAMES: dict[int, str] = {}
"""TensorFlow's name of a GPU, by CUDA's number. TensorFlow's own numbers count only the GPUs that it may use."""


@cache
def available() -> bool:
    """Return whether TensorFlow has a GPU and CuPy is installed. If only CuPy is missing, warn once."""
    if not tf.config.list_logical_devices("GPU"):
        return False
    try:
        arrays.cupy()
    except HvdliteError as error:
        say_once(f"{error}. Without CuPy hvdlite copies TensorFlow's tensors through host memory")
        return False
    return True


def is_gpu(device: str) -> bool:
    """Return whether this is TensorFlow's name of a GPU."""
    return "GPU" in device


def on_gpu(tensor: tf.Tensor) -> bool:
    """Return whether an eager tensor lies on a GPU that CuPy reaches."""
    return is_gpu(tensor.backing_device) and available()


@dataclass(frozen=True)
class Export:
    """A tensor with the methods that CuPy's `from_dlpack` calls.

    Attributes:
        tensor: The tensor.
        number: CUDA's number of the GPU.
    """

    tensor: tf.Tensor
    number: int

    def __dlpack__(self, **_: object) -> object:
        """Return the DLPack capsule. TensorFlow waits for its own stream; it ignores the stream that CuPy names."""
        return tf.experimental.dlpack.to_dlpack(self.tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's device type (2 for CUDA) and the GPU's number."""
        return 2, self.number


@cache
def number_of(device: str) -> int:
    """Return CUDA's number of the GPU with this TensorFlow name. CUDA knows it from a pointer to the GPU's memory."""
    xp = arrays.cupy()
    with tf.init_scope():
        probe = unwritten((1,), tf.uint8, device)
    found: int = xp.cuda.runtime.pointerGetAttributes(xp.from_dlpack(Export(probe, 0)).data.ptr).device
    NAMES[found] = device
    return found


def gpu_of(devices: Sequence[str]) -> Gpu | None:
    """Return the GPU that all these TensorFlow device names name; None if there is no such GPU, and in sessions."""
    if len(set(devices)) != 1 or not is_gpu(devices[0]) or not tf.compat.v1.executing_eagerly_outside_functions():
        return None
    return Gpu(arrays.cupy(), number_of(devices[0])) if available() else None


def array_of(tensor: tf.Tensor) -> Array:
    """Return a tensor's memory on its GPU, ready to be read, as a CuPy array that keeps the memory alive.

    Write to the array only if no other code holds the tensor.
    """
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
    """Return the tensors' memory as arrays, each on its own device."""
    for device in {each.backing_device for each in tensors if on_gpu(each)}:
        wait_for(device)
    return [array_of(each) if on_gpu(each) else on_host(each) for each in tensors]


def on_host(tensor: tf.Tensor) -> Array:
    """Return an eager tensor's values as an array on the host. (NumPy makes no array of a bfloat16 scalar tensor.)"""
    return np.asarray(tensor if tensor.shape.rank else tensor.numpy())


def wait_for(device: str) -> None:
    """Wait until TensorFlow's compute stream has finished all work issued so far.

    `to_dlpack` waits, too, but holds Python's interpreter lock, so that lanes could not run meanwhile.
    """
    with tf.device(device):
        tf.raw_ops.SyncDevice()


def array_on(gpu: Gpu, tensor: tf.Tensor) -> Array:
    """Return the tensor as an array on this GPU; copies a tensor that lies elsewhere."""
    with tf.device(NAMES[gpu.number]):
        return array_of(tensor if on_gpu(tensor) else tf.identity(tensor))


def tensors_of(results: Sequence[Array]) -> list[tf.Tensor]:
    """Copy arrays on a GPU into new tensors. Waits until the copies, and all work issued before them, are done."""
    copies = [unwritten(each.shape, tf.as_dtype(each.dtype), NAMES[arrays.device_of(each)]) for each in results]
    for each, copy in zip(results, copies, strict=True):
        with arrays.module(each).cuda.Device(arrays.device_of(each)):
            array_of(copy)[...] = each
    for each in results[-1:]:
        mark(each).wait()
    return copies


def slices(values: tf.Tensor, rows: tf.Tensor, shape: tf.Tensor | None) -> tf.IndexedSlices:
    """Return all ranks' values and rows as tf.IndexedSlices. If there is a GPU, add up the values of equal rows.

    A GPU would add the values of one row in any order, so that ranks' weights would differ in their last bits.
    """
    if tf.config.list_physical_devices("GPU"):
        with tf.device("CPU:0"):
            rows, places = tf.unique(rows)
            values = tf.math.unsorted_segment_sum(values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, shape)


def unwritten(shape: Sequence[int], dtype: tf.DType, device: str) -> tf.Tensor:
    """Return a new tensor of zeros. Fill never returns a tensor that other code holds."""
    with tf.device("CPU:0"):  # Fill on a GPU takes the shape from host memory
        dims = tf.constant(list(shape), tf.int64)
    zero = zero_on(device, dtype)
    with tf.device(device):
        return tf.raw_ops.Fill(dims=dims, value=zero)


@cache
def zero_on(device: str, dtype: tf.DType) -> tf.Tensor:
    """Return a scalar zero on this device."""
    with tf.init_scope(), tf.device(device):
        return tf.constant(np.zeros((), dtype.as_numpy_dtype))


def device_for(inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]) -> str | None:
    """Return the GPU, by TensorFlow's name, for a graph's Python node; None for the host.

    Args:
        inputs: The node's inputs.
        dtypes: The dtypes of the node's results.
    """
    crossing = {tf.as_dtype(dtype) for dtype in (*(tensor.dtype for tensor in inputs), *dtypes)}
    if not inputs or not crossing <= DTYPES or not available():
        return None
    named = {str(tensor.device) for tensor in inputs} - {""}
    if not named:
        return str(tf.config.list_logical_devices("GPU")[0].name)
    return named.pop() if len(named) == 1 and all(map(is_gpu, named)) else None


def node(
    function: Callable[..., Sequence[Array]],
    text_of: Callable[[HvdliteError], str],
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    device: str,
    name: str | None,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Make a node on a GPU that calls a Python function.

    Args:
        function: Called with the inputs as arrays on the GPU; returns new arrays.
        text_of: Turns the HvdliteError that the function raises into a text.
        inputs: The node's inputs.
        dtypes: The dtypes of the results.
        device: TensorFlow's name of the GPU.
        name: The node's name.

    Returns:
        The results, and the text of the function's error ("" for none).
    """

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
