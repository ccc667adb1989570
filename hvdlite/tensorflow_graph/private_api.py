"""Everything private of TensorFlow that hvdlite uses. See `hvdlite.private_names`.

Distributed optimizers and tapes call `require_all` when they are made. Two names serve few users, and are looked up
where they are used: GPU_NODE with a GPU, SESSION_DATASET in the graphs of TF1 sessions.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import tensorflow as tf

from hvdlite.system.private_names import PrivateName, require

SINCE = "2.18"

FUNCTION_GRAPH = PrivateName(
    "tensorflow.python.framework.func_graph", "FuncGraph",
    "tell the graph of a tf.function, which runs in the program's order, from a TF1 session's, which does not", SINCE,
)  # fmt: skip
IN_XLA = PrivateName(
    "tensorflow.python.ops.control_flow_util", "GraphOrParentsInXlaContext",
    "refuse steps that XLA compiles, in which ranks cannot communicate", SINCE,
)  # fmt: skip
RECORD = PrivateName(
    "tensorflow.python.eager.record", "record_operation",
    "tell tapes the gradients of collectives in graphs", SINCE,
)  # fmt: skip
RECORDS = PrivateName(
    "tensorflow.python.eager.record", "could_possibly_record",
    "refuse second derivatives of gradients that were reduced over the ranks", SINCE,
)  # fmt: skip
ATTRIBUTE_SCOPE = PrivateName(
    "tensorflow", "Graph._attr_scope", "find the gradients of collectives in graphs again", SINCE
)  # fmt: skip
GPU_NODE = PrivateName(
    "tensorflow.python.ops.script_ops", "_internal_py_func", "run collectives of a graph on the GPU", SINCE
)  # fmt: skip
SESSION_DATASET = PrivateName(
    "tensorflow.python.data.ops.map_op", "_MapDataset",
    "run collectives beside the threads of a TF1 session, where they would wait for each other", SINCE,
)  # fmt: skip
IN_GRAPH_MODE = PrivateName(
    "tensorflow.python.ops.resource_variable_ops", "ResourceVariable._in_graph_mode",
    "tell variables of a TF1 session, which have values only there, from others", SINCE,
)  # fmt: skip

ALWAYS = (FUNCTION_GRAPH, IN_XLA, RECORD, RECORDS, ATTRIBUTE_SCOPE)


@cache
def require_all() -> None:
    """Raise HvdliteError when TensorFlow lacks a name that every distributed optimizer and tape needs."""
    require(ALWAYS)
    with tf.init_scope():
        if tf.executing_eagerly():
            in_session(tf.Variable(0, trainable=False, name="hvdlite"))  # IN_GRAPH_MODE is set per variable


def in_session(variable: Any) -> bool:
    """Whether a variable has its value in a TF1 session. So it is for whatever is no variable."""
    if not isinstance(variable, tf.Variable) or not hasattr(type(variable), "handle"):  # as TF1's reference variables
        return True
    return bool(IN_GRAPH_MODE.of(variable))
