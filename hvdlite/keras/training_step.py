"""Makes Keras compile a model's training step so that ranks can communicate in it.

On TensorFlow the step must not use XLA. Keras must compile again if the optimizer was attached after the last
compilation.
"""

from __future__ import annotations

import keras

from hvdlite.job import runtime
from hvdlite.keras.attachment import KerasAttachment

STEP_OF = "_hvdlite_step"
"""An attribute of models: the attachment of the optimizer when Keras compiled the training step."""


def without_xla(model: keras.Model) -> None:
    """On TensorFlow, have Keras compile the step without XLA: there, XLA cannot call Python. On JAX it can."""
    if keras.backend.backend() == "tensorflow" and getattr(model, "jit_compile", False):
        model.jit_compile = False
        compile_later(model)
        if runtime.rank() == 0:
            print("hvdlite: Keras compiles the training step without XLA, because ranks cannot communicate in XLA")


def with_attachment(model: keras.Model, attachment: KerasAttachment | None) -> None:
    """Have Keras compile the step again if the optimizer had another attachment, or none, when Keras compiled it."""
    if model.__dict__.get(STEP_OF) is not attachment:
        compile_later(model)
        model.__dict__[STEP_OF] = attachment  # not by __setattr__, with which Keras tracks a model's parts


def compile_later(model: keras.Model) -> None:
    """Drop the compiled step: fit() compiles another when it begins."""
    model.train_function = None


def compile_now(model: keras.Model) -> None:
    """Compile the step again within fit(), and have evaluate() and predict() compile theirs again."""
    model.make_train_function(force=True)
    model.test_function = None
    model.predict_function = None
