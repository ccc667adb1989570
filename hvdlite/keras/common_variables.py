"""The variables of a model that must be equal on all ranks, and their checksums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import keras
from keras import Model
from keras.optimizers import Optimizer

from hvdlite.gradients.lists import keep_own
from hvdlite.gradients.replica_check import checksum
from hvdlite.gradients.tensors import Variable
from hvdlite.gradients.variables import is_one_of
from hvdlite.keras import private_api
from hvdlite.keras.attachment import KerasAttachment, attachment_of


class CommonVariables:
    """A model's variables, except local ones: these keep each rank's own values.

    Attributes:
        given: The model in training, None before set_model(). On JAX, within fit(), its variables may hold old values.
        local: The local variables.
    """

    def __init__(self) -> None:
        self.given: Model | None = None
        self.local: list[Variable] = []

    def follow(self, model: Model) -> None:
        """Use this model from now on."""
        self.given = model

    @property
    def model(self) -> Model:
        """The model; its variables hold their present values."""
        return private_api.up_to_date(self.given)

    def keep_own(self, variable: object) -> None:
        """Make a variable, or several, local.

        Raises:
            ValueError: `variable` has no variables.
        """
        keep_own(self.local, variable)

    def among(self, variables: Iterable[Variable]) -> list[Variable]:
        """Return the given variables that are not local."""
        return [variable for variable in variables if not is_one_of(variable, self.local)]

    def trained(self) -> list[Variable]:
        """Return the trainable weights that are not local."""
        return self.among(self.model.trainable_variables)

    def checksums(self, without: Sequence[Variable] = ()) -> dict[int, int]:
        """Return a checksum of each trained weight, by its index in `trained()`. Copies weights on a GPU to the host.

        Args:
            without: Variables to leave out, because they may differ between ranks.
        """
        return {
            number: checksum(keras.ops.convert_to_numpy(variable))
            for number, variable in enumerate(self.trained())
            if not is_one_of(variable, without)
        }

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers that the model has, in `optimizer` or in other attributes, for a step of its own."""
        several = [members(each) for each in vars(self.model).values()]
        own = [each for values in several for each in values if isinstance(each, keras.optimizers.Optimizer)]
        return list({id(each): each for each in (self.model.optimizer, *own) if each is not None}.values())

    @property
    def attachment(self) -> KerasAttachment | None:
        """The attachment of the model's optimizer; None if there is none."""
        return None if self.model.optimizer is None else attachment_of(self.model.optimizer)


def members(found: object) -> Iterable[object]:
    """Return the members of a dict, list or tuple; for any other object, the object alone."""
    return found.values() if isinstance(found, dict) else found if isinstance(found, (list, tuple)) else (found,)
