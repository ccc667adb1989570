"""Exceptions from the measures of the house (`tests/measures.py`): the row as it is printed, and the reason.

A row that no longer occurs must go. Add one only where the rule would make the code worse.
"""

EXPLAINED: dict[str, str] = {
    "hvdlite.check: os.environ": "The report shows what the environment has, and starts programs with it.",
    "hvdlite.common.util: os.environ": "`env()` is Horovod's context manager that sets variables for a script.",
    "hvdlite.keras.attachment: optimizer.built": (
        "Keras' own attribute: its optimizers set it, and so do their subclasses."
    ),
    "hvdlite.keras.elastic: self.state.batch": (
        "The user names this attribute (KerasState(model, batch=0)), and a state of the user's own has no setter."
    ),
    "hvdlite.keras.elastic: self.state.epoch": (
        "The user names this attribute (KerasState(model, epoch=0)), and a state of the user's own has no setter."
    ),
    "hvdlite.keras.schedules.__init__: 7 parameters": (
        "Horovod's signature of LearningRateScheduleCallback, whose arguments scripts give by position."
    ),
    "hvdlite.lanes.swallowed: _first": "A lane's handle notes the error where it raises it, below `job`.",
    "hvdlite.lanes.swallowed: _watching": "Says whether `_first` may be noted.",
    "hvdlite.lanes.swallowed: rank": "Belongs to `_first`, and is read after the job has ended.",
    "hvdlite.ops.reductions.reduce: 7 parameters": (
        "allreduce_'s six, in the order that all reductions share, and the root"
    ),
    "hvdlite.runner.common.util.env: os.environ": "Horovod's function, which returns the launcher's variables.",
    "hvdlite.tensorflow.aggregation.__init__: 9 parameters": "Horovod's signature of LocalGradientAggregationHelper.",
    "hvdlite.torch.attach.compiled: _told": "Remembers that dynamo, which is one per process, leaves hvdlite out.",
    "hvdlite.torch.attach.slots: alias.data": (
        "The attribute is torch's: only assigning it gives an existing tensor other memory."
    ),
    "hvdlite.torch.sharded.pieces: p.data": (
        "The attribute is torch's: only assigning it makes the user's parameter its piece."
    ),
    "hvdlite.torch.elastic.state: _registry": "Horovod's registry of state handlers, which scripts set before init().",
    "hvdlite.torch.sync_batch_norm.__init__: 9 parameters": (
        "The parameters are those of torch.nn.BatchNorm2d and Horovod's process_set."
    ),
}
