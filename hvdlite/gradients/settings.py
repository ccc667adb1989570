"""What the user asks `DistributedOptimizer` or `DistributedGradientTape` for: one vocabulary for all frameworks.

    Arguments   as the user gave them, by Horovod's names, unchecked
    Settings    checked, and the same for PyTorch, TensorFlow and Keras
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import cast

from hvdlite.gradients.compression import Compressor, compressor
from hvdlite.gradients.groups import Groups, groups_given, parse_groups
from hvdlite.gradients.tensors import Variable
from hvdlite.gradients.terms import Terms
from hvdlite.gradients.variables import is_variable, name_of
from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.ops import Adasum, Average, Op, op_of


@dataclass(frozen=True)
class Settings:
    """What the user asked for. Hashable, if the compressor is.

    Attributes:
        terms: The operation over ranks, and the factor before it.
        compression: The compressor: Horovod's `compress` and `decompress`.
        sparse_as_dense: Whether sparse gradients travel dense.
        groups: The parameters that travel together.
        scale_local: Whether gradients of local variables are divided by the number of ranks, as averaged ones are.
        process_set: The ranks that reduce together.
        replica_check: What happens when ranks' weights differ, one of `config.REPLICA_CHECKS`.
    """

    terms: Terms
    compression: type[Compressor]
    sparse_as_dense: bool = False
    groups: Groups = field(default_factory=Groups)
    scale_local: bool = True
    process_set: ProcessSet = global_process_set
    replica_check: str = "error"

    @property
    def size(self) -> int:
        """How many ranks reduce gradients together with this one; 1 where it is no member of the set."""
        return runtime.group_of(self.process_set).size if self.process_set.included() else 1


@dataclass(frozen=True)
class Arguments:
    """A user's arguments, by Horovod's names; see `hvd.DistributedOptimizer`."""

    compression: object
    sparse_as_dense: bool = False
    op: Op | int = Average
    gradient_predivide_factor: float = 1.0
    num_groups: int = 0
    groups: object = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    replica_check: str | None = None

    def checked(self, key: Callable[[object], Hashable], what: str = "variables") -> Settings:
        """These arguments as settings.

        Args:
            key: Gives what a parameter in `groups` is known by. Raises ValueError for what is no parameter.
            what: 'parameters' or 'variables', for messages.

        Raises:
            ValueError: An argument cannot be right, or the process set is not registered.
        """
        terms = Terms(op_of(self.op), self.gradient_predivide_factor)
        runtime.current().groups.find(self.process_set)  # raises where it is not registered
        groups = parse_groups(groups_given(self.groups, self.num_groups), key, what)
        return Settings(
            terms=terms,
            compression=compressor(self.compression),
            sparse_as_dense=self.sparse_as_dense,
            groups=groups,
            scale_local=self.scale_local_gradients,
            process_set=self.process_set,
            replica_check=runtime.replica_check(self.replica_check),
        )


def settings_of(arguments: Arguments) -> Settings:
    """The settings of an optimizer or tape of Keras or TensorFlow.

    Raises:
        ValueError: As `Arguments.checked`.
        NotImplementedError: The operation is Adasum, which only PyTorch's optimizers have.
    """
    if op_of(arguments.op) is Adasum:
        raise NotImplementedError("op=Adasum is not supported yet; use op=Average")
    return arguments.checked(variable_key)


def variable_key(found: object) -> str:
    """What a variable in `groups=` is known by. Raises ValueError for what is no variable."""
    if not is_variable(found):
        raise ValueError(f"groups must be a number or lists of variables: {found!r} is no variable")
    return name_of(cast(Variable, found))


def check_name(name: object) -> None:
    """Raise TypeError for an argument that Horovod's scripts give in the wrong place."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name={name!r} is no text: the second argument is a name; give others with their own, such as "
                        "compression=")  # fmt: skip
