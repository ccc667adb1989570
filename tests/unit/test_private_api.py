"""Private names of TensorFlow and Keras: each exists, and its absence has a clear error.

`tests/parallel/ranks/backends_guards` tests the names that guard training, on every backend.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite.keras as keras_hvd
import hvdlite.tensorflow as hvd
from hvdlite.errors import HvdliteError
from hvdlite.keras import private_api as of_keras
from hvdlite.system.private_names import PrivateName
from hvdlite.tensorflow_graph import private_api as of_tensorflow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def a_job() -> Iterator[None]:
    of_tensorflow.require_all.cache_clear()
    of_keras.require_guarded_step.cache_clear()
    hvd.init()
    yield
    hvd.shutdown()
    of_tensorflow.require_all.cache_clear()
    of_keras.require_guarded_step.cache_clear()


def without(name: PrivateName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have hvdlite look for another name, because TensorFlow and Keras need this one themselves."""
    gone = replace(name, path=f"{name.path}_gone")
    for module in (of_keras, of_tensorflow):
        for key, found in list(vars(module).items()):
            if found == name:
                monkeypatch.setattr(module, key, gone)
            elif isinstance(found, tuple) and name in found:
                monkeypatch.setattr(module, key, tuple(gone if each == name else each for each in found))
    of_tensorflow.require_all.cache_clear()


def built(optimizer: Any) -> Any:
    optimizer.build([keras.Variable(np.zeros(2, "float32"))])
    return optimizer


def in_a_graph() -> Any:
    return tf.function(lambda: hvd.allreduce(tf.ones(2)), autograph=False)()


def in_a_session() -> Any:
    with tf.Graph().as_default():
        return hvd.allreduce(tf.ones(2))


def by_keras() -> Any:
    return keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))


def sharded() -> Any:
    return keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), sharded=True)


def by_tf1() -> Any:
    return hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))


def by_tape() -> Any:
    return hvd.DistributedGradientTape(tf.GradientTape())


ATTACHING = (by_keras, by_tf1, by_tape)
MEETS: list[tuple[PrivateName, tuple[Callable[[], Any], ...]]] = [
    (of_tensorflow.FUNCTION_GRAPH, (*ATTACHING, in_a_graph)),
    (of_tensorflow.IN_XLA, (*ATTACHING, in_a_graph)),
    (of_tensorflow.RECORD, (*ATTACHING, in_a_graph)),
    (of_tensorflow.RECORDS, ATTACHING),
    (of_tensorflow.ATTRIBUTE_SCOPE, (*ATTACHING, in_a_graph)),
    (of_tensorflow.SESSION_DATASET, (in_a_session,)),
    (of_tensorflow.GPU_NODE, (lambda: of_tensorflow.GPU_NODE.get(),)),
    (of_keras.APPLY_GRADIENTS, (by_keras,)),
    (of_keras.UPDATE_STEP, (by_keras,)),
    (of_keras.CLIP_GRADIENTS, (sharded,)),
    (of_keras.USE_WEIGHT_DECAY, (sharded,)),
    (of_keras.MOMENTS, (keras_hvd.SyncBatchNormalization,)),
]
"""Names of classes and modules, and the calls that need them."""


@pytest.mark.parametrize(("name", "users"), MEETS, ids=[f"{n.module}.{n.path}" for n, _ in MEETS])
def test_a_name(name: PrivateName, users: tuple[Callable[[], Any], ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The name exists, and all works. Without it the error names the symbol, its purpose, and the version."""
    assert name.get() is not None
    for use in users:
        use()
    without(name, monkeypatch)
    version = keras.__version__ if name.module == "keras" else tf.__version__
    for use in users:
        with pytest.raises(HvdliteError) as told:
            use()
        for word in (f"{name.path}_gone is missing", name.purpose, version, name.since):
            assert word in str(told.value), (use, word)


def test_variables_that_are_a_sessions() -> None:
    assert not of_tensorflow.in_session(tf.Variable(1.0))
    with tf.Graph().as_default():
        for resource in (False, True):
            assert of_tensorflow.in_session(tf.compat.v1.get_variable(f"v{resource}", [1], use_resource=resource))
    assert of_tensorflow.in_session(tf.constant(1.0))


def test_variables_that_do_not_say_whether_they_are_a_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    without(of_tensorflow.IN_GRAPH_MODE, monkeypatch)
    with pytest.raises(HvdliteError, match="_in_graph_mode_gone is missing"):
        of_tensorflow.in_session(tf.Variable(1.0))
    for attach in ATTACHING:
        with pytest.raises(HvdliteError, match="_in_graph_mode_gone is missing"):
            attach()


def test_trainable_variables() -> None:
    optimizer = built(keras.optimizers.SGD(0.1))
    assert len(of_keras.trainable_variables(optimizer)) == 1
    with pytest.raises(HvdliteError, match=r"Optimizer\._trainable_variables is missing"):
        of_keras.trainable_variables(object())


def test_momentum_buffers() -> None:
    assert of_keras.momentum_buffers(keras.optimizers.RMSprop(0.1, momentum=0.9)) == []  # it has not been built
    for kind in (keras.optimizers.SGD, keras.optimizers.RMSprop):
        assert len(of_keras.momentum_buffers(built(kind(0.1, momentum=0.9)))) == 1
    other = type("Other", (), {"built": True})()
    with pytest.raises(HvdliteError, match=r"RMSprop\._momentums is missing"):
        of_keras.momentum_buffers(other)


def test_the_names_of_jax() -> None:
    assert of_keras.RUNTIME_TOKENS.get() is not None
    with pytest.raises(HvdliteError, match="jax_state_sync is missing"):  # a Keras model on TensorFlow
        of_keras.STATE_SYNC.get()


def test_every_name_has_a_test() -> None:
    """The test is here. The one exception is PARALLEL_UPDATE_STEP, which may be missing (`backends_guards`)."""
    source = Path(__file__).read_text()
    for module in (of_keras, of_tensorflow):
        for name, found in vars(module).items():
            if isinstance(found, PrivateName) and name != "PARALLEL_UPDATE_STEP":
                assert f".{name}" in source or found.attribute in source, name


def test_imports_work_without_any_of_them() -> None:
    """Functions that need them raise no ImportError then."""
    code = f"""
import sys
import keras, tensorflow
for name in {sorted({n.module for n, _ in MEETS if "." in n.module})}:
    sys.modules[name] = None
import hvdlite.keras, hvdlite.tensorflow as hvd
hvd.init()
try:
    hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
except hvdlite.HvdliteError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "is missing" in ran.stdout, ran.stdout + ran.stderr


def test_no_other_file_uses_private_names() -> None:
    """Private names are modules below TensorFlow's, Keras' and JAX's own, and others' attributes that begin with _."""
    for package in ("keras", "tensorflow"):
        for path in sorted((ROOT / "hvdlite" / package).rglob("*.py")):
            if path.name == "private_api.py":
                continue
            tree = ast.parse(path.read_text())
            ours = {alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
                    and str(node.module).startswith("hvdlite") for alias in node.names}  # fmt: skip
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom):
                    assert not str(node.module).startswith(("tensorflow.", "keras.src", "jax._src")), (
                        path,
                        node.lineno,
                    )
                if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
                    owner = ast.unparse(node.value)
                    known = owner in {"self", "cls"} | ours or (owner == "super()" and node.attr == "_moments")
                    assert known, (path, node.lineno, owner)
