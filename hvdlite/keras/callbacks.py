"""Horovod's callbacks for `model.fit`, on Keras 3 and every backend."""

from __future__ import annotations

from hvdlite.keras.average_callback import AverageParametersCallback
from hvdlite.keras.best_model import BestModelCheckpoint
from hvdlite.keras.broadcast_callback import BroadcastGlobalVariablesCallback
from hvdlite.keras.job_metrics import JobMetricsCallback
from hvdlite.keras.metric_average import MetricAverageCallback
from hvdlite.keras.schedules import LearningRateScheduleCallback, LearningRateWarmupCallback

__all__ = [
    "AverageParametersCallback",
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "JobMetricsCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
