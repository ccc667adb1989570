"""Exceptions from the measures of the house (`tests/measures.py`): the row as it is printed, and the reason.

A row that no longer occurs must go. Add one only where the rule would make the code worse.
"""

EXPLAINED: dict[str, str] = {
    "hvdlite.keras.elastic: self.state.batch": (
        "The user names this attribute (KerasState(model, batch=0)), and a state of the user's own has no "
        "setter."
    ),
    "hvdlite.keras.elastic: self.state.epoch": (
        "The user names this attribute (KerasState(model, epoch=0)), and a state of the user's own has no "
        "setter."
    ),
    "hvdlite.keras.schedules.__init__: 7 parameters": (
        "Horovod's signature of LearningRateScheduleCallback, whose arguments scripts give by position."
    ),
    "hvdlite.tensorflow.aggregation.__init__: 9 parameters": "Horovod's signature of LocalGradientAggregationHelper.",
    "hvdlite.torch.attach.slots: alias.data": (
        "The attribute is torch's: only assigning it gives an existing tensor other memory."
    ),
    "hvdlite.torch.sync_batch_norm.__init__: 9 parameters": (
        "The parameters are those of torch.nn.BatchNorm2d and Horovod's process_set."
    ),
}
