"""Which framework an object belongs to, found from its class without importing any; and that framework's adapter."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

ADAPTERS = {
    "torch": "hvdlite.torch",
    "keras": "hvdlite.keras",
    "tensorflow": "hvdlite.tensorflow",
    "numpy": "hvdlite.numpy",
    "cupy": "hvdlite.numpy",
}


def family(obj: Any) -> str:
    """'torch', 'numpy', ...: the first package in the class's ancestry that there is an adapter for.

    Mappings are judged by their first value, lists and tuples by their last element. Raises TypeError, naming the type,
    for anything else.
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
            f"an empty {type(obj).__name__} tells no framework: call the function of hvdlite.torch, "
            "hvdlite.tensorflow or hvdlite.keras, or none"
        )
    raise TypeError(
        f"hvdlite does not know {type(obj).__module__}.{type(obj).__qualname__}: it serves models, optimizers, "
        "variables and tensors of PyTorch, Keras 3 and TensorFlow, and NumPy and CuPy arrays"
    )


def refuse_legacy(optimizer: Any) -> None:
    """Raise TypeError for one of Keras 2's, with what there is for it."""
    if any(kind.__module__.startswith("tf_keras") for kind in type(optimizer).__mro__):
        raise TypeError(
            f"{type(optimizer).__name__} is of Keras 2 (tf_keras, as with TF_USE_LEGACY_KERAS=1), and "
            "DistributedOptimizer serves Keras 3: unset that variable, or write the training step with "
            "hvdlite.tensorflow.DistributedGradientTape and broadcast_variables, which serve both"
        )


def adapter(obj: Any) -> Any:
    """The module with this object's collectives."""
    return importlib.import_module(ADAPTERS[family(obj)])


def function_of(tensor: object, name: str) -> Callable[..., Any]:
    """The function of this name in the tensor's framework.

    Raises:
        TypeError: The framework is unknown, or has no such function.
    """
    module = adapter(tensor)
    try:
        function: Callable[..., Any] = getattr(module, name)
    except AttributeError:
        raise TypeError(f"{module.__name__} has no {name}()") from None
    return function


def adapter_of(values: Iterable[Any]) -> Any:
    """The module of the framework to which some of these values belong; NumPy's where none does. An object of a user's
    own with a state_dict is PyTorch's."""
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
    """Where torch is in use, let its adapter choose the GPU before the script does."""
    if "torch" in sys.modules:
        importlib.import_module(ADAPTERS["torch"])


def materialized(obj: Any) -> Any:
    """A generator (model.parameters()) as a list, so that it can be looked at; anything else as it is."""
    return list(obj) if isinstance(obj, Iterator) else obj
