"""Horovod's callbacks for `model.fit`, on Keras 3 and every backend."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import ref

import keras
import numpy as np

from hvdlite.errors import HvdliteError
from hvdlite.gradients.exchange import CARING, IN_SETS, OWN, Exchange
from hvdlite.gradients.lists import keep_own
from hvdlite.gradients.replica_check import checksum
from hvdlite.gradients.variables import common_name, is_one_of
from hvdlite.job import runtime
from hvdlite.keras.attachment import Attachment, attachment_of
from hvdlite.keras.backends import border, settle
from hvdlite.keras.functions import give
from hvdlite.keras.schedules import LearningRateScheduleCallback, LearningRateWarmupCallback
from hvdlite.lanes.calls import calling
from hvdlite.ops.objects import allgather_object

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

BROADCAST = "hvd.callbacks.BroadcastGlobalVariablesCallback"
STOP_TOGETHER = (
    "Give callbacks that may stop it (EarlyStopping) averaged metrics: put hvd.callbacks.MetricAverageCallback() "
    "before them; and begin at the same epoch"
)
BEGIN_TOGETHER = (
    "Begin at the same epoch: give fit() the same initial_epoch= on every rank, and BackupAndRestore to every rank, "
    'with a folder for each: keras.callbacks.BackupAndRestore(f"backup/{hvd.rank()}")'
)


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """In each fit(), gives every rank root_rank's weights when training begins, and weights and optimizer state after
    the first batch, when all of them are there, and other callbacks have restored what they restore.

    Also makes sure that ranks do train together. Where Keras would compile the step with XLA, which cannot exchange
    gradients, it is compiled without; a step compiled before the optimizer was attached is compiled anew. Raises on
    every rank HvdliteError where the ranks' numbers of epochs or steps differ, or some end an epoch before others
    (by TerminateOnNaN, say) or stop after one (EarlyStopping), so that others would wait for ever; RuntimeError
    where a step has changed the weights without reducing gradients over the ranks; and HvdliteError where at the
    end of an epoch trainable weights that a distributed optimizer trains differ between ranks (with the optimizer's
    replica_check="warn" a warning, with "off" nothing).
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        """local_variables: a variable or several that keep this rank's values. device: for Horovod's sake. Raises
        ValueError for a root_rank that can be none in any job."""
        super().__init__()
        if not hasattr(root_rank, "__index__") or root_rank < 0:
            raise ValueError(f"BroadcastGlobalVariablesCallback: root_rank={root_rank!r} is no rank, from 0 on")
        self.root_rank = root_rank
        self.started = self.reduces = False  # the first batch has been broadcast; a step has reduced gradients
        self.first: ref[Exchange] | None = None  # what a step reduces first
        self.warned = False  # of weights that differ
        self.local: list[Any] = []
        if local_variables is not None:
            self.register_local_var(local_variables)

    def register_local_var(self, var: Any) -> None:
        """Keep this rank's own value of a variable, or of several. Raises ValueError for what is none."""
        keep_own(self.local, var)

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self.given = model
        if runtime.size() == 1:
            return
        if keras.backend.backend() == "tensorflow" and getattr(model, "jit_compile", False):
            model.jit_compile = False  # JAX calls back from XLA
            model.train_function = None  # it may have been made before
            if runtime.rank() == 0:
                print("hvdlite: the training step is compiled without XLA, in which ranks cannot communicate")
        attachment = self.attachment
        if model.__dict__.get("_hvdlite_step") is not attachment:
            model.train_function = None
            model.__dict__["_hvdlite_step"] = attachment  # past __setattr__, with which Keras keeps account of parts

    @property
    def attachment(self) -> Attachment | None:
        return None if self.model.optimizer is None else attachment_of(self.model.optimizer)

    @calling(BROADCAST)
    def on_train_begin(self, logs: Any = None) -> None:
        settle()  # steps of an earlier fit
        CARING.append(self)
        self.first = Exchange.first = None
        self.reductions, self.started, self.reduces = Exchange.reductions, False, runtime.size() == 1
        weights = len(self.model.weights)  # of layers that have been built, also where the model says that it has not
        known = self.params or {}  # a CallbackList in a loop of one's own may have none
        plans = allgather_object((known.get("epochs"), known.get("steps"), self.model.built, weights))
        for what, numbers in zip(("epochs", "steps in an epoch"), zip(*plans, strict=True), strict=False):
            if None not in numbers and len(set(numbers)) > 1:
                raise HvdliteError(
                    f"fit() has other numbers of {what} on other ranks (by rank: {', '.join(map(str, numbers))}), and "
                    "some would wait for ever. Drop the remainder of the data, or give steps_per_epoch= and epochs="
                )
        if all(built and weights for *_, built, weights in plans) or len({weights for *_, weights in plans}) == 1:
            self.broadcast(self.model.weights)
        self.before = self.digests() if self.model.built else None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.go_on_together(f"begins epoch {epoch + 1}")

    def on_train_end(self, logs: Any = None) -> None:
        CARING.remove(self)
        self.go_on_together("stops")

    @calling(BROADCAST)
    def go_on_together(self, what: str) -> None:
        """Raise HvdliteError where other ranks do something else now."""
        said = allgather_object(what)
        if len(set(said)) > 1:
            everyone = ", ".join(f"rank {rank} {what}" for rank, what in enumerate(said))
            cure = STOP_TOGETHER if "stops" in said else BEGIN_TOGETHER
            raise HvdliteError(f"training would go on without some ranks: {everyone}. {cure}")

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.reduces:
            self.look_for_reductions()
        if not self.started:
            state = [variable for optimizer in self.optimizers() for variable in optimizer.variables]
            self.broadcast([*self.model.weights, *state])
            self.started = True

    @calling(BROADCAST)
    def broadcast(self, variables: Iterable[Any]) -> None:
        """Give all ranks root_rank's values of those that are to be the same."""
        changed = give(self.common(variables), self.root_rank)
        if changed is not None and any(allgather_object(changed)):
            self.model.make_train_function(force=True)  # fit() has it made before training begins
            self.model.test_function = self.model.predict_function = None

    @calling(BROADCAST)
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if runtime.size() == 1:
            return
        border().wait()
        if self.first and (exchange := self.first()):
            exchange.end_of(f"the end of epoch {epoch + 1}")
        everyone = allgather_object(self.digests([*OWN, *IN_SETS]))
        for number in everyone[0]:  # a rank that is no member of a process set does not know that one reduces them
            if all(number in theirs for theirs in everyone) and len({theirs[number] for theirs in everyone}) > 1:
                self.refuse(
                    f"after epoch {epoch + 1} the ranks' weights differ, of "
                    f"{common_name(self.trained()[number])} (variable {number}) first: something changed them, or the "
                    "learning rate, on some ranks only (a callback before MetricAverageCallback, an optimizer that is "
                    "not distributed). Variables that are meant to differ are given as local_variables="
                )
                return

    def refuse(self, difference: str) -> None:
        """The ranks' weights differ: raise HvdliteError, or do what the user's replica_check= says instead."""
        attachment = self.attachment
        mode = runtime.replica_check(attachment.settings.replica_check if attachment else None)
        if mode == "error":
            raise HvdliteError(difference)
        if mode == "warn" and runtime.rank() == 0 and not self.warned:
            logging.getLogger("hvdlite").warning(difference)
        self.warned = True

    def optimizers(self) -> list[Any]:
        """The model's, and those that a training step of its own has."""
        several = [values_of(each) for each in vars(self.model).values()]
        own = [each for values in several for each in values if isinstance(each, keras.optimizers.Optimizer)]
        return list({id(each): each for each in (self.model.optimizer, *own) if each is not None}.values())

    def cares_for(self, variable: Any) -> bool:
        """Whether it is one of the model's. Asked in a step, for which Keras on JAX has taken variables' values out:
        reading `model` would put them back."""
        return is_one_of(variable, self.given.weights)

    def common(self, variables: Iterable[Any]) -> list[Any]:
        """Those that are to be the same on all ranks."""
        return [variable for variable in variables if not is_one_of(variable, self.local)]

    def trained(self) -> list[Any]:
        """The trainable weights that are to be the same on all ranks."""
        return self.common(self.model.trainable_variables)

    def digests(self, apart: Sequence[Any] = ()) -> dict[int, int]:
        """Of those weights' bits, by number; without those that may be `apart`."""
        return {
            number: checksum(keras.ops.convert_to_numpy(variable))
            for number, variable in enumerate(self.trained())
            if not is_one_of(variable, apart)
        }

    def look_for_reductions(self) -> None:
        """Raise RuntimeError where the steps so far have changed weights, and have reduced no gradients."""
        border().wait()
        groups = [each.gradients.group for each in map(attachment_of, self.optimizers()) if each is not None]
        if Exchange.reductions != self.reductions:
            self.reduces, self.first = True, Exchange.first
        elif groups and all(group is None or group.size == 1 for group in groups):
            self.reduces = True  # of a process set that this rank is no member of, or alone in
        elif self.before is None:
            self.before = self.digests()
        elif self.before != self.digests():
            raise RuntimeError(
                "a training step has not reduced any gradients over the ranks: each rank trains alone. Compile the "
                "model with optimizer=hvd.DistributedOptimizer(optimizer), or use DistributedGradientTape of "
                "hvdlite.tensorflow."
            )


def values_of(found: Any) -> Iterable[Any]:
    """What is in a dict, list or tuple, else the object itself."""
    return found.values() if isinstance(found, dict) else found if isinstance(found, (list, tuple)) else (found,)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """At the end of each epoch, averages all metrics in `logs` over the ranks: put it before callbacks that read them.

    All ranks must have the same metrics, else HvdliteError on every rank. weighted: by the number of samples that each
    rank has seen, which gives the metric over all samples where ranks have different numbers of them.
    """

    def __init__(self, device: str = "", weighted: bool = False) -> None:
        """device: for Horovod's sake."""
        super().__init__()
        self.weighted = weighted
        self.seen = 0.0  # samples in this epoch's training

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.seen = 0.0

    def on_test_begin(self, logs: Any = None) -> None:
        self.seen = self.seen or self.samples()

    @calling("hvd.callbacks.MetricAverageCallback")
    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is None or runtime.size() == 1:
            return
        trained, tested = self.seen or self.samples(), self.samples()
        mine = {name: (np.asarray(logs[name]), tested if name.startswith("val_") else trained) for name in sorted(logs)}
        said = allgather_object(mine)
        for rank, theirs in enumerate(said):
            if theirs.keys() != said[0].keys():
                raise HvdliteError(
                    f"MetricAverageCallback: rank {rank} has the metrics {', '.join(theirs)}, rank 0 has "
                    f"{', '.join(said[0])}. Every rank must have the same."
                )
        for name in mine:
            values, weights = zip(*(theirs[name] for theirs in said), strict=True)
            mean = np.average(np.stack(values).astype(np.float64), axis=0, weights=weights if self.weighted else None)
            logs[name] = mean if mean.ndim else float(mean)

    def samples(self) -> float:
        """How many samples the model's loss has been averaged over since it was last reset."""
        losses = [metric for metric in self.model.metrics if metric.name == "loss" and hasattr(metric, "count")]
        return float(keras.ops.convert_to_numpy(losses[0].count)) if losses else 1.0


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """A ModelCheckpoint that keeps the best model only. Its `filepath` may be set later, before training."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
        save_weights_only: bool = False,
        filepath: str | None = None,
    ) -> None:
        ending = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath or f"unset{ending}", monitor=monitor, verbose=verbose, save_best_only=True,
            save_weights_only=save_weights_only, mode=mode, save_freq=save_freq,
        )  # fmt: skip
        self.filepath = filepath

    def on_train_begin(self, logs: Any = None) -> None:
        if self.filepath is None:
            raise ValueError("BestModelCheckpoint: set its filepath before training")
        super().on_train_begin(logs)
