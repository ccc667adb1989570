"""Has Keras compile a model's training step so that ranks can communicate in it."""

from __future__ import annotations

import keras

from hvdlite.job import runtime
from hvdlite.keras.attachment import KerasAttachment

STEP_OF = "_hvdlite_step"
"""An attribute of models: the attachment that the training step was compiled with."""


def without_xla(model: keras.Model) -> None:
    """Have the step compiled without XLA on TensorFlow, where XLA cannot call Python. JAX calls back from XLA."""
    if keras.backend.backend() == "tensorflow" and getattr(model, "jit_compile", False):
        model.jit_compile = False
        compile_anew(model)
        if runtime.rank() == 0:
            print("hvdlite: the training step is compiled without XLA, in which ranks cannot communicate")


def with_attachment(model: keras.Model, attachment: KerasAttachment | None) -> None:
    """Have a step compiled anew that was compiled before the optimizer was attached."""
    if model.__dict__.get(STEP_OF) is not attachment:
        compile_anew(model)
        model.__dict__[STEP_OF] = attachment  # past __setattr__, with which Keras keeps account of parts


def compile_anew(model: keras.Model) -> None:
    """Forget the compiled step: fit() compiles another when it begins."""
    model.train_function = None


def compile_now(model: keras.Model) -> None:
    """Compile everything anew within fit(), which had the step compiled before training began."""
    model.make_train_function(force=True)
    model.test_function = None
    model.predict_function = None
