"""Finds the framework of an object from its class, and imports that framework's adapter alone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

ADAPTERS = {
    "torch": "hvdlite.torch",
    "keras": "hvdlite.keras",
    "tensorflow": "hvdlite.tensorflow",
    "numpy": "hvdlite.numpy",
    "cupy": "hvdlite.numpy",
}

SHARES = {"torch": "hvdlite.torch.shares", "tensorflow": "hvdlite.tensorflow.shares"}
"""By framework, the module that divides its data among ranks (`hvd.shard`)."""


def family(obj: object) -> str:
    """Return the framework of an object: 'torch', 'numpy', ...

    It is the first package among the object's class and base classes that `ADAPTERS` names. The first value stands for
    a mapping, and the last item for a list or tuple.

    Raises:
        TypeError: The object belongs to none of these frameworks.
    """
    for kind in type(obj).__mro__:
        root = kind.__module__.partition(".")[0]
        if root in ADAPTERS:
            return root
    if isinstance(obj, Mapping) and obj:
        return family(next(iter(obj.values())))
    if isinstance(obj, (list, tuple)) and obj:
        return family(obj[-1])
    if isinstance(obj, (int, float, complex, bool)):
        return "numpy"
    if isinstance(obj, (Mapping, list, tuple)):
        raise TypeError(
            f"an empty {type(obj).__name__} belongs to no framework: call the function of hvdlite.torch, "
            "hvdlite.tensorflow, hvdlite.keras or hvdlite.numpy"
        )
    raise TypeError(
        f"hvdlite does not know {type(obj).__module__}.{type(obj).__qualname__}: it serves models, optimizers, "
        "variables and tensors of PyTorch, Keras 3 and TensorFlow, and NumPy and CuPy arrays"
    )


def refuse_legacy(optimizer: object) -> None:
    """Raise TypeError for an optimizer of Keras 2."""
    if any(kind.__module__.startswith("tf_keras") for kind in type(optimizer).__mro__):
        raise TypeError(
            f"{type(optimizer).__name__} is of Keras 2 (tf_keras, as with TF_USE_LEGACY_KERAS=1), and "
            "DistributedOptimizer serves Keras 3: unset that variable, or write the training step with "
            "hvdlite.tensorflow.DistributedGradientTape and broadcast_variables, which serve both [HVD315]"
        )


def adapter(obj: object) -> ModuleType:
    """Return the module with the collectives of the object's framework. Raises TypeError if that is unknown."""
    return importlib.import_module(ADAPTERS[family(obj)])


def function_of(tensor: object, name: str) -> Callable[..., Any]:
    """Find the function of a framework.

    Args:
        tensor: A tensor or another object of the framework.
        name: The function's name.

    Returns:
        The function.

    Raises:
        TypeError: The framework is unknown, or has no such function.
    """
    module = adapter(tensor)
    try:
        function: Callable[..., Any] = getattr(module, name)
    except AttributeError:
        raise TypeError(f"{module.__name__} has no {name}()") from None
    return function


def shares_of(data: object) -> Callable[..., object]:
    """Return the function of the data's framework that divides them among ranks.

    Raises:
        TypeError: The framework has no such function, or is unknown.
    """
    root = next((root for kind in type(data).__mro__ if (root := kind.__module__.partition(".")[0]) in SHARES), None)
    if root is None:
        raise TypeError(
            f"hvd.shard cannot divide {type(data).__module__}.{type(data).__qualname__}: give arrays, tensors, a list, "
            "a tuple or dict of arrays, a tf.data.Dataset, or a torch Dataset or DataLoader. Make a list of an "
            "iterator. If a function makes the batches, let it use data[hvd.rank() :: hvd.size()] [HVD317]"
        )
    function: Callable[..., object] = importlib.import_module(SHARES[root]).share
    return function


def adapter_of(values: Iterable[object]) -> ModuleType:
    """Return the adapter of the first value that belongs to a framework; NumPy's adapter if no value does.

    An object of an unknown class with `load_state_dict` counts as PyTorch's.
    """
    found = "numpy"
    for value in values:
        try:
            found = family(value)
        except TypeError:
            found = "torch" if hasattr(value, "load_state_dict") else "numpy"
        if found not in ("numpy", "cupy"):
            break
    return importlib.import_module(ADAPTERS[found])


def prepare_torch(local_rank: int) -> None:
    """If torch is imported, import its adapter, which then chooses the GPU before the script does."""
    if "torch" in sys.modules:
        importlib.import_module(ADAPTERS["torch"])


def peak_gpu_bytes() -> int:
    """Return the largest amount of GPU memory that PyTorch has used in this process; 0 without PyTorch or a GPU."""
    if "hvdlite.torch" not in sys.modules:
        return 0
    return int(importlib.import_module("hvdlite.torch.memory").peak_gpu_bytes())


def materialized(obj: object) -> object:
    """Return an iterator (model.parameters()) as a list, and any other object as it is."""
    return list(obj) if isinstance(obj, Iterator) else obj
