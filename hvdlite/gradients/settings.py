"""The settings of `DistributedOptimizer` and `DistributedGradientTape`: one vocabulary for all frameworks.

    Arguments   the user's arguments, by Horovod's names, unchecked
    Settings    the same, checked; equal for PyTorch, TensorFlow and Keras

An adapter makes `Arguments` from a user's call, and gives the checked `Settings` to what it attaches. All other modules
of this room take the user's wishes from `Settings` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from hvdlite.gradients.compression import Compressor, compressor, lossy_of
from hvdlite.gradients.groups import Groups, groups_given, parse_groups
from hvdlite.gradients.terms import Terms
from hvdlite.gradients.variables import is_variable, name_of
from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.ops import Adasum, Average, Op, Sum, op_of

GRADIENTS = "gradients"
"""The value of `sharded` with which gradients are sharded, too."""


@dataclass(frozen=True)
class Settings:
    """A user's settings, checked. Hashable if the compressor is.

    Attributes:
        terms: The operation over ranks, and the factor before the sum.
        compression: The compressor, with Horovod's `compress` and `decompress`.
        sparse_as_dense: Whether sparse gradients travel dense.
        groups: The parameters that travel together.
        scale_local: Whether gradients of local variables are divided by the number of ranks, like averages.
        process_set: The ranks that reduce together.
        replica_check: The reaction to ranks' weights that differ: one of `config.REPLICA_CHECKS`.
        sharded: Whether each rank has a part of the optimizer's state only; GRADIENTS: and of the gradients.
    """

    terms: Terms
    compression: type[Compressor]
    sparse_as_dense: bool = False
    groups: Groups = field(default_factory=Groups)
    scale_local: bool = True
    process_set: ProcessSet = global_process_set
    replica_check: str = "error"
    sharded: bool | str = False

    @property
    def size(self) -> int:
        """The number of ranks that reduce together; 1 if this rank is not one of them."""
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
    sharded: bool | str = False

    def checked(self, key: Callable[[object], Hashable], what: str = "variables") -> Settings:
        """Check the arguments.

        Args:
            key: Returns the key of a parameter in `groups`. Raises ValueError for another object.
            what: 'parameters' or 'variables', for messages.

        Returns:
            The settings.

        Raises:
            ValueError: An argument has an invalid value, or the process set is not registered.
        """
        terms = Terms(op_of(self.op), self.gradient_predivide_factor)
        if self.sharded not in (False, True, GRADIENTS):
            raise ValueError(f"sharded={self.sharded!r}: it can be False, True or {GRADIENTS!r}")
        given = compressor(self.compression, lossy=True)
        if lossy_of(given) and terms.op not in (Average, Sum):
            raise ValueError(f"compression={given} is for op=hvd.Average or hvd.Sum, not op=hvd.{terms.op.name}")
        runtime.current().groups.find(self.process_set)  # raises ValueError if it is not registered
        groups = parse_groups(groups_given(self.groups, self.num_groups), key, what)
        return Settings(
            terms=terms,
            compression=given,
            sparse_as_dense=self.sparse_as_dense,
            groups=groups,
            scale_local=self.scale_local_gradients,
            process_set=self.process_set,
            replica_check=runtime.replica_check(self.replica_check),
            sharded=self.sharded,
        )


def settings_of(arguments: Arguments) -> Settings:
    """Check the arguments of an optimizer or tape of Keras or TensorFlow.

    Raises:
        ValueError: As for `Arguments.checked`.
        NotImplementedError: The operation is Adasum, which only PyTorch's optimizers have.
    """
    if op_of(arguments.op) is Adasum:
        raise NotImplementedError("op=Adasum is not supported yet; use op=Average")
    return arguments.checked(variable_key)


def variable_key(found: object) -> str:
    """The key of a variable in `groups=`: its name. Raises ValueError for another object."""
    if not is_variable(found):
        raise ValueError(f"groups must be a number or lists of variables: {found!r} is no variable")
    return name_of(found)


def check_name(name: object) -> None:
    """Raise TypeError if `name` is no text: scripts sometimes give another argument in its place."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name={name!r} is no text: the second argument is a name; give other arguments by keyword, "
                        "such as compression=")  # fmt: skip
