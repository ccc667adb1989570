"""The private names of Keras, and of JAX under Keras, that hvdlite uses. See `hvdlite.system.private_names`.

`DistributedOptimizer` calls `require_all`. GUARDED are the methods of an attached optimizer that refuse gradients that
were not reduced over the ranks: so no rank trains alone without an error. Every training step of Keras must call these
methods. Therefore `require_all` does not only look for their names: it has a small optimizer take a step.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from functools import cache

import keras
import numpy as np

from hvdlite.errors import HvdliteError
from hvdlite.gradients.tensors import Tensor, Variable
from hvdlite.system.private_names import PrivateName, require

SINCE = "3.6"
GUARD = "refuse a training step whose gradients were not reduced over the ranks"

APPLY_GRADIENTS = PrivateName("keras", "optimizers.Optimizer._backend_apply_gradients", GUARD, SINCE)
UPDATE_STEP = PrivateName("keras", "optimizers.Optimizer._backend_update_step", GUARD, SINCE)
PARALLEL_UPDATE_STEP = PrivateName("keras", "optimizers.Optimizer._parallel_update_step", GUARD, SINCE)
"""A method of the built-in optimizers on PyTorch only, where UPDATE_STEP calls it."""
GUARDED = (APPLY_GRADIENTS, UPDATE_STEP)
"""`apply` calls the first, which decays weights and calls the second, which updates them."""
TRAINABLE_VARIABLES = PrivateName(
    "keras", "optimizers.Optimizer._trainable_variables",
    "find the variables of gradients that are applied without them, as on JAX", SINCE,
)  # fmt: skip
CLIP_GRADIENTS = PrivateName(
    "keras", "optimizers.Optimizer._clip_gradients", "clip whole gradients (sharded=True)", SINCE
)  # fmt: skip
USE_WEIGHT_DECAY = PrivateName(
    "keras", "optimizers.Optimizer._use_weight_decay",
    "decay a part of a variable exactly if Keras would decay the variable (sharded=True)", SINCE,
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
    """Check that Keras and the backend have the private names that an attached optimizer needs.

    Raises:
        HvdliteError: A name is missing, or a training step does not call GUARDED.
    """
    for name in GUARDED:
        name.of(type(optimizer))
    backend = keras.backend.backend()
    if backend == "tensorflow":
        importlib.import_module("hvdlite.tensorflow_graph.private_api").require_all()
    if backend == "jax":
        require([STATE_SYNC, RUNTIME_TOKENS])
    require_guarded_step()


def own_method(optimizer: keras.optimizers.Optimizer, name: str) -> Callable[..., object]:
    """Return the class's present method of this name, bound to the optimizer."""
    return getattr(type(optimizer), name).__get__(optimizer)  # type: ignore[no-any-return]


def clip_gradients(optimizer: keras.optimizers.Optimizer, gradients: list[Tensor]) -> list[Tensor]:
    """Clip gradients in the class's way, by the optimizer's options."""
    clip = CLIP_GRADIENTS.of(type(optimizer))
    return list(clip(optimizer, gradients))


def use_weight_decay(optimizer: keras.optimizers.Optimizer, variable: Variable) -> bool:
    """Return whether the class would decay the variable."""
    return bool(USE_WEIGHT_DECAY.of(type(optimizer))(optimizer, variable))


def guards(optimizer: keras.optimizers.Optimizer) -> list[str]:
    """Return the names of this optimizer's methods that update variables: the attachment guards them."""
    names = (*(name.attribute for name in (*GUARDED, PARALLEL_UPDATE_STEP)), "update_step")
    return [name for name in names if hasattr(type(optimizer), name)]


@cache
def require_guarded_step() -> None:
    """Take a step with a small optimizer, and check that Keras calls GUARDED. Takes 0.04 s, on JAX 0.3 s, once.

    Raises:
        HvdliteError: Keras does not call one of them.
    """
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
        as_replica(lambda: optimizer.apply([keras.ops.zeros((1,), "float32")], [variable]))
        TRAINABLE_VARIABLES.of(optimizer)
    for name in GUARDED:
        if name not in reached:
            raise HvdliteError(name.lacking("is not called by apply()"))


def outside_of_graphs() -> contextlib.AbstractContextManager[object]:
    """Return a context in which operations run at once, also while TensorFlow traces a function."""
    if keras.backend.backend() != "tensorflow":
        return contextlib.nullcontext()
    scope: contextlib.AbstractContextManager[object] = importlib.import_module("tensorflow").init_scope()
    return scope


def as_replica(step: Callable[[], object]) -> None:
    """Run a step as Keras runs it in fit(): within the scope of a tf.distribute strategy, as one of its replicas."""
    if keras.backend.backend() == "tensorflow":
        importlib.import_module("tensorflow").distribute.get_strategy().run(step)
    else:
        step()


def trainable_variables(optimizer: keras.optimizers.Optimizer) -> list[Variable]:
    """Return the variables that the optimizer was built for."""
    return list(TRAINABLE_VARIABLES.of(optimizer))


def momentum_buffers(optimizer: keras.optimizers.Optimizer) -> list[Variable | None]:
    """Return the momentum of an SGD or RMSprop, by variable; None for a variable without. Empty before build()."""
    if not optimizer.built:
        return []
    return list(optimizer.momentums if hasattr(optimizer, "momentums") else MOMENTUMS.of(optimizer))


def up_to_date(model: keras.Model) -> keras.Model:
    """Return the model, with present values in its variables. On JAX, fit() keeps them outside of variables."""
    if keras.backend.backend() == "jax" and hasattr(model, STATE_SYNC.attribute):
        STATE_SYNC.of(model)()
    return model


def mask_of(tensor: Tensor) -> Tensor | None:
    """Return the mask that a Keras layer has attached to its output; None for an output without."""
    mask: Tensor | None = getattr(tensor, "_keras_mask", None)
    return mask
