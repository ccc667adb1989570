"""Everything private of Keras, and of JAX under Keras, that hvdlite uses. See `hvdlite.system.private_names`.

`DistributedOptimizer` calls `require_all`. What rests on GUARDED is the promise that no step trains a rank alone in
silence: an attached optimizer refuses gradients that have not been reduced over the ranks. Every step of Keras' has to
come through these methods, so `require_all` does not only look for their names: it has a small optimizer take a step.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from functools import cache

import keras
import numpy as np

from hvdlite.errors import HvdliteError
from hvdlite.gradients.tensors import Variable
from hvdlite.system.private_names import PrivateName, require

SINCE = "3.6"
GUARD = "refuse a training step whose gradients were not reduced over the ranks"

APPLY_GRADIENTS = PrivateName("keras", "optimizers.Optimizer._backend_apply_gradients", GUARD, SINCE)
UPDATE_STEP = PrivateName("keras", "optimizers.Optimizer._backend_update_step", GUARD, SINCE)
PARALLEL_UPDATE_STEP = PrivateName("keras", "optimizers.Optimizer._parallel_update_step", GUARD, SINCE)
"""Of the built-in optimizers on PyTorch alone, where UPDATE_STEP calls it."""
GUARDED = (APPLY_GRADIENTS, UPDATE_STEP)
"""The first decays weights, the second moves them; `apply` calls the first, which calls the second."""
TRAINABLE_VARIABLES = PrivateName(
    "keras", "optimizers.Optimizer._trainable_variables",
    "find the variables of gradients that are applied without them, as on JAX", SINCE,
)  # fmt: skip
MOMENTUMS = PrivateName(
    "keras", "optimizers.RMSprop._momentums", "correct the momentum when the learning rate changes", SINCE
)  # fmt: skip
MOMENTS = PrivateName(
    "keras", "layers.BatchNormalization._moments", "normalize by all ranks' batches (SyncBatchNormalization)", SINCE
)  # fmt: skip
STATE_SYNC = PrivateName(
    "keras", "Model.jax_state_sync", "read a model's weights within fit() on JAX, for elastic states", SINCE
)  # fmt: skip
RUNTIME_TOKENS = PrivateName(
    "jax._src.dispatch", "runtime_tokens", "go on after a step that has failed on a GPU", "0.6"
)  # fmt: skip


def require_all(optimizer: keras.optimizers.Optimizer) -> None:
    """Raise HvdliteError when Keras, or the backend, lacks what an attached optimizer rests on."""
    for name in GUARDED:
        name.of(type(optimizer))
    backend = keras.backend.backend()
    if backend == "tensorflow":
        importlib.import_module("hvdlite.tensorflow_graph.private_api").require_all()
    if backend == "jax":
        require([STATE_SYNC, RUNTIME_TOKENS])
    require_guarded_step()


def guards(optimizer: keras.optimizers.Optimizer) -> list[str]:
    """The methods that update variables, to be guarded: all that this optimizer has."""
    names = (*(name.attribute for name in (*GUARDED, PARALLEL_UPDATE_STEP)), "update_step")
    return [name for name in names if hasattr(type(optimizer), name)]


@cache
def require_guarded_step() -> None:
    """Raise HvdliteError unless a step of Keras' comes through GUARDED. Once per process:
    the step takes 0.04 s, on JAX 0.3 s."""
    reached: list[PrivateName] = []

    def noting(name: PrivateName, method: Callable[..., object]) -> Callable[..., object]:
        def noted(*args: object, **kwargs: object) -> object:
            reached.append(name)
            return method(*args, **kwargs)

        return noted

    with outside_of_graphs():
        optimizer = keras.optimizers.SGD(0.0, name="hvdlite")
        variable = keras.Variable(np.zeros(1, "float32"), name="hvdlite")
        optimizer.__dict__.update({name.attribute: noting(name, name.of(optimizer)) for name in GUARDED})
        optimizer.apply([keras.ops.zeros((1,), "float32")], [variable])
        TRAINABLE_VARIABLES.of(optimizer)
    for name in GUARDED:
        if name not in reached:
            raise HvdliteError(name.lacking("is not called by apply()"))


def outside_of_graphs() -> contextlib.AbstractContextManager[object]:
    """Where operations run at once, though TensorFlow may be tracing a function."""
    if keras.backend.backend() != "tensorflow":
        return contextlib.nullcontext()
    scope: contextlib.AbstractContextManager[object] = importlib.import_module("tensorflow").init_scope()
    return scope


def trainable_variables(optimizer: keras.optimizers.Optimizer) -> list[Variable]:
    """The variables that the optimizer was built for."""
    return list(TRAINABLE_VARIABLES.of(optimizer))


def momentum_buffers(optimizer: keras.optimizers.Optimizer) -> list[Variable | None]:
    """The momentum of a built SGD or RMSprop, by variable; None where a variable has none."""
    if not optimizer.built:
        return []
    return list(optimizer.momentums if hasattr(optimizer, "momentums") else MOMENTUMS.of(optimizer))


def up_to_date(model: keras.Model) -> keras.Model:
    """The model with its present values, which Keras on JAX keeps elsewhere within fit()."""
    if keras.backend.backend() == "jax" and hasattr(model, STATE_SYNC.attribute):
        STATE_SYNC.of(model)()
    return model
