"""`average_parameters`: the average of all ranks' models, before evaluation and saving."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import keras
import numpy as np
from keras.optimizers import Optimizer

from hvdlite.arrays import Array, is_float
from hvdlite.gradients.registry import registry
from hvdlite.gradients.tensors import Variable
from hvdlite.gradients.variables import have_layers_follow, is_one_of, refuse_parts
from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.keras import private_api
from hvdlite.keras.attachment import innermost
from hvdlite.keras.strategy.outside import keeping
from hvdlite.keras.strategy.steps import at_work
from hvdlite.lanes.calls import calling
from hvdlite.strategies.averaging import average_model_, settle
from hvdlite.strategies.staleness import server


class AveragedParameters:
    """A context at whose end a model gets this rank's own weights back.

    Attributes:
        own: The variables, and the values that they had.
    """

    def __init__(self, own: Sequence[tuple[Variable, Array]]) -> None:
        self.own = own

    def __enter__(self) -> AveragedParameters:
        """Return this object; the weights are averages already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore this rank's weights."""
        self.restore()

    def restore(self) -> None:
        """Give the model this rank's own weights back. Waits for nobody."""
        for variable, value in self.own:
            variable.assign(value)
        have_layers_follow([variable for variable, _ in self.own])


def average_parameters(model: keras.Model, process_set: ProcessSet = global_process_set) -> AveragedParameters:
    """Give a model the average of all ranks' weights, in place. Collective; waits for all ranks of the process set.

    With a strategy, ranks have different weights between synchronizations. Average them before evaluation and saving:

        with hvd.average_parameters(model):  # at its end each rank has its own weights again
            model.evaluate(data)

    Without `with`, training goes on from the average. What strategies have under way is finished first. Statistics of
    BatchNormalization are averaged, too. Whole numbers become the largest of all ranks, and the states of random number
    generators stay. So do variables of `register_local_var`.

    Args:
        model: A Keras model or layer, built, the same on every rank.
        process_set: The ranks.

    Returns:
        A context manager, which restores this rank's weights when it is left.

    Raises:
        ValueError: The model has not been built, or its strategy keeps other ranks together than the process set's.
        MismatchError: The ranks' models differ; on every rank.
        NotImplementedError: The model is an `hvd.Chain`.
    """
    return averaged(model, process_set)


def averaged(model: keras.Model, process_set: ProcessSet, counts: bool = True) -> AveragedParameters:
    """As `average_parameters`. counts: whether this rank's values count."""
    refuse_parts(model)
    if not model.built:
        raise ValueError(f"{model.name} has no weights yet: build it (or call it once) before averaging them [HVD316]")
    group = runtime.group_of(process_set)
    own = list(registry.own)
    chosen = [each for each in private_api.up_to_date(model).weights if not is_one_of(each, own)]
    for each in keeping(chosen):
        if each.group is not group:
            raise ValueError(
                f"hvd.average_parameters: {each.title} keeps the ranks {list(each.group.ranks)} together: give "
                "average_parameters its process_set"
            )
    if group.size == 1:
        return AveragedParameters([])
    with calling("hvd.average_parameters"):
        settle(group)
        before = [np.array(keras.ops.convert_to_numpy(each), order="C") for each in chosen]
        after = [value.copy() for value in before]
        numbers = [value for value in after if is_float(value.dtype) or value.dtype.kind in "iu"]
        average_model_(group, numbers, counts)
        changed = [n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a.tobytes() != b.tobytes()]
    for number in changed:
        chosen[number].assign(after[number])
    have_layers_follow([chosen[number] for number in changed])
    return AveragedParameters([(chosen[number], before[number]) for number in changed])


def serve_parameters(optimizer: Optimizer, model: keras.Model) -> None:
    """Be a parameter server: keep a part of the parameters for the ranks that train, until all of them shut down.

    The last ranks call this instead of fit(), if the optimizer has `BoundedStaleness(servers=...)`. They take part in
    the workers' `average_parameters(model)`. Workers must not call other collectives of all ranks meanwhile.

    Args:
        optimizer: The attached optimizer, built: `optimizer.build(model.trainable_variables)`.
        model: The model, as on the workers. It is overwritten by each average.

    Raises:
        ValueError: This rank is no server, or the optimizer has not been built.
        HvdliteError: Communication has broken.
    """
    if not optimizer.built:
        raise ValueError("serve_parameters: call optimizer.build(model.trainable_variables) first")
    steps = next((each for each in at_work() if each.optimizer is innermost(optimizer)), None)
    running = server(steps.started() if steps else None)
    running.serve(lambda: averaged(model, running.site.process_set, counts=False))
