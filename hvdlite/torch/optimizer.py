"""`DistributedOptimizer`: Horovod's name and arguments for attaching to a torch optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch

from hvdlite.gradients.compression import compressor
from hvdlite.gradients.groups import groups_given, parse_groups
from hvdlite.gradients.terms import Terms, passes_of
from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.lanes.calls import calling
from hvdlite.ops import Adasum, Average, Op, op_of, require_adasum
from hvdlite.torch.attach.adasum_steps import DeltaAttachment, attach_delta
from hvdlite.torch.attach.attachment import Attachment, attach
from hvdlite.torch.attach.parameters import flat
from hvdlite.torch.attach.settings import Settings
from hvdlite.torch.compression import Compression
from hvdlite.torch.private_api import takes_hooks

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


def DistributedOptimizer(
    optimizer: OptimizerT,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op | int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    replica_check: str | None = None,
) -> OptimizerT:
    """Make every backward() end with gradients averaged over all ranks, as long as the optimizer lives. Returns it.

    After `loss.backward()`, `p.grad` of every parameter of the optimizer is the ranks' average: clip it, unscale it,
    step. The optimizer gains `synchronize()`, `skip_synchronize()`, `no_sync()`, `set_backward_passes_per_step()`, and
    to be read `op`, `process_set` and `backward_passes_per_step`. Collective: every rank attaches the same optimizer to
    the same model; a difference raises MismatchError with a diff on every rank before any gradient moves. In a job of
    one rank nothing is attached but these.

    named_parameters: `model.named_parameters()`, for names in messages; by default parameters are numbered.
    compression: `Compression.none`, `.fp16` or `.bf16`: the dtype in which gradients travel; or one's own, with
    Horovod's `compress(gradient) -> (tensor of its shape, context)` and `decompress(reduced tensor, context)`; it is
    asked with zeros, too, for the dtype and where a rank has no gradient.
    backward_passes_per_step: gradients are summed locally over that many backward() and reduced at the last.
    op: Average or Sum (Min, Max, Product where they make sense); Adasum combines the ranks' steps instead of their
    gradients, and takes none of the arguments about gradients but compression. gradient_predivide_factor: f divides
    before the sum and multiplies after; with Average only. groups: a number of groups, or lists of
    parameters, that are to travel together; num_groups: deprecated name for the number. sparse_as_dense: sparse
    gradients travel dense.
    process_set: the ranks that reduce together; on others nothing is attached but these. Its members attach.
    replica_check: what happens where the ranks begin with different weights or optimizer state: "error" (by default),
    "warn", or "off", which never compares them. By default what HVDLITE_REPLICA_CHECK says.

    Raises ValueError or TypeError for arguments that cannot be right, RuntimeError where the optimizer is attached
    already.
    """
    require_unattached(optimizer)
    op, passes, size = op_of(op), passes_of(backward_passes_per_step), runtime.size()
    if op is Adasum:
        require_adasum(size, process_set is global_process_set)
    parameters = flat(optimizer.param_groups)
    settings = Settings(
        known=tuple(parameters),
        names=names_of(parameters, named_parameters),
        groups=groups_of(parameters, groups_given(groups, num_groups)),
        terms=Terms(op, gradient_predivide_factor),
        compression=compressor(compression),
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        replica_check=runtime.replica_check(replica_check),
    )
    with calling(f"hvd.DistributedOptimizer({type(optimizer).__name__})"):
        if op is Adasum and size > 1:
            attach_delta(optimizer, settings, compression)
        else:
            attach(optimizer, settings, passes)
    optimizer.__dict__.update(op=op, process_set=process_set, backward_passes_per_step=passes)
    return optimizer


def require_unattached(optimizer: Any) -> None:
    """Raises TypeError for what is no optimizer, RuntimeError for one that is attached, unless by `elastic.run`: what
    that calls again may attach, too. Forgets older attachments."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"DistributedOptimizer takes a torch optimizer first, not a {type(optimizer).__name__}: "
            "DistributedOptimizer(optimizer, named_parameters=model.named_parameters())"
        )
    if not takes_hooks(optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} has not called Optimizer.__init__, as wrappers of another optimizer may "
            "not have: attach that one, and wrap it then"
        )
    attached: Attachment | DeltaAttachment | None = optimizer.__dict__.get("_hvdlite")
    if attached is not None and attached.alive and attached.group is not None and not attached.renewed:
        raise RuntimeError("this optimizer is attached already: call hvd.DistributedOptimizer once")
    if attached is not None:
        attached.detach()


def names_of(
    parameters: Sequence[torch.nn.Parameter], named: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> dict[int, str]:
    """Parameter names by id(). Raises ValueError for what are no pairs, repeated names, or parameters left out."""
    if named is None:
        return {}
    pairs = list(named) if isinstance(named, Iterable) else [None]
    if any(not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) for pair in pairs):
        raise ValueError("named_parameters must be (name, parameter) pairs: pass model.named_parameters()")
    names = [name for name, _ in pairs]
    if twice := sorted(name for name, times in Counter(names).items() if times > 1):
        raise ValueError(f"named_parameters has repeated names: {', '.join(twice)}")
    by_id = {id(p): name for name, p in pairs}
    if missing := sum(id(p) not in by_id for p in parameters):
        raise ValueError(
            f"named_parameters, {len(pairs)} of them, leaves out {missing} of the optimizer's {len(parameters)} "
            "parameters: give those of all of its models; a generator can be read only once"
        )
    return by_id


def groups_of(parameters: Sequence[torch.nn.Parameter], groups: object) -> dict[int, int]:
    """Group numbers by id() of the parameters. Raises ValueError as `parse_groups`, and for members that are no
    tensors."""
    keys = [id(p) for p in parameters if p.requires_grad]
    numbers = parse_groups(groups, parameter_key, "parameters").numbers(keys)
    return {key: number for key, number in zip(keys, numbers, strict=True) if number is not None}


def parameter_key(found: object) -> int:
    """What a parameter in `groups=` is known by. Raises ValueError for what is no tensor."""
    if not isinstance(found, torch.Tensor):
        raise ValueError(f"groups must be a number or lists of parameters: {found!r} is no tensor")
    return id(found)
