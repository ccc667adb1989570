"""All private names of TensorFlow that hvdlite uses. See `hvdlite.system.private_names`.

Distributed optimizers and tapes call `require_all` when they are made. Few users need GPU_NODE (a GPU) and
SESSION_DATASET (graphs of TF1 sessions), so hvdlite looks these two up at their first use.
"""

from __future__ import annotations

from functools import cache

import tensorflow as tf

from hvdlite.system.private_names import PrivateName, require

SINCE = "2.18"

FUNCTION_GRAPH = PrivateName(
    "tensorflow.python.framework.func_graph", "FuncGraph",
    "distinguish the graph of a tf.function, which runs in the program's order, from the graph of a TF1 session", SINCE,
)  # fmt: skip
IN_XLA = PrivateName(
    "tensorflow.python.ops.control_flow_util", "GraphOrParentsInXlaContext",
    "refuse steps that XLA compiles, since ranks cannot communicate there", SINCE,
)  # fmt: skip
RECORD = PrivateName(
    "tensorflow.python.eager.record", "record_operation",
    "give tapes the gradients of collectives in graphs", SINCE,
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
    "run collectives outside the threads of a TF1 session, where they would wait for each other", SINCE,
)  # fmt: skip
IN_GRAPH_MODE = PrivateName(
    "tensorflow.python.ops.resource_variable_ops", "ResourceVariable._in_graph_mode",
    "distinguish variables of a TF1 session, which have values only there, from others", SINCE,
)  # fmt: skip

ALWAYS = (FUNCTION_GRAPH, IN_XLA, RECORD, RECORDS, ATTRIBUTE_SCOPE)


@cache
def require_all() -> None:
    """Raise HvdliteError when TensorFlow lacks a name that every distributed optimizer and tape needs."""
    require(ALWAYS)
    with tf.init_scope():
        if tf.executing_eagerly():
            in_session(tf.Variable(0, trainable=False, name="hvdlite"))  # IN_GRAPH_MODE is an attribute of instances


def in_session(variable: object) -> bool:
    """Return whether a variable has its value in a TF1 session; True also for an object that is no variable."""
    # TF1's reference variables have no handle.
    if not isinstance(variable, tf.Variable) or not hasattr(type(variable), "handle"):
        return True
    return bool(IN_GRAPH_MODE.of(variable))
