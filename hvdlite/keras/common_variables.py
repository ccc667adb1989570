"""The variables of a model that are to be the same on all ranks, and a checksum of each."""

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
    """A model's variables without those that stay a rank's own.

    Attributes:
        given: The model in training, which may lack its present values on JAX; None before there is one.
        local: The variables that keep this rank's values.
    """

    def __init__(self) -> None:
        self.given: Model | None = None
        self.local: list[Variable] = []

    def follow(self, model: Model) -> None:
        """Look at this model from now on."""
        self.given = model

    @property
    def model(self) -> Model:
        """The model with its present values."""
        return private_api.up_to_date(self.given)

    def keep_own(self, variable: object) -> None:
        """Keep this rank's own value of a variable, or of several. Raises ValueError for what is no variable."""
        keep_own(self.local, variable)

    def among(self, variables: Iterable[Variable]) -> list[Variable]:
        """Those of these variables that are to be the same on all ranks."""
        return [variable for variable in variables if not is_one_of(variable, self.local)]

    def trained(self) -> list[Variable]:
        """The trainable weights that are to be the same on all ranks."""
        return self.among(self.model.trainable_variables)

    def checksums(self, without: Sequence[Variable] = ()) -> dict[int, int]:
        """A checksum of each trained weight, by number. Reads all of them, from a GPU as well.

        Args:
            without: Variables that may differ between ranks, and are left out.
        """
        return {
            number: checksum(keras.ops.convert_to_numpy(variable))
            for number, variable in enumerate(self.trained())
            if not is_one_of(variable, without)
        }

    def optimizers(self) -> list[Optimizer]:
        """The model's optimizer, and those that a training step of its own has."""
        several = [members(each) for each in vars(self.model).values()]
        own = [each for values in several for each in values if isinstance(each, keras.optimizers.Optimizer)]
        return list({id(each): each for each in (self.model.optimizer, *own) if each is not None}.values())

    @property
    def attachment(self) -> KerasAttachment | None:
        """What is attached to the model's optimizer."""
        return None if self.model.optimizer is None else attachment_of(self.model.optimizer)


def members(found: object) -> Iterable[object]:
    """What is in a dict, list or tuple; else the object itself."""
    return found.values() if isinstance(found, dict) else found if isinstance(found, (list, tuple)) else (found,)
