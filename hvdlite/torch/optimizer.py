"""`DistributedOptimizer`: Horovod's name and arguments for attaching to a torch optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

import torch

from hvdlite.compression.codec import Codec
from hvdlite.gradients import attaching
from hvdlite.gradients.compression import Compressor, lossy_of
from hvdlite.gradients.settings import Arguments
from hvdlite.gradients.terms import passes_of
from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.lanes.calls import calling
from hvdlite.ops import Adasum, Average, Op, op_of, require_adasum
from hvdlite.strategies import Reach, Strategy, require_strategy
from hvdlite.system.user_warnings import warn
from hvdlite.torch.attach.adasum_steps import DeltaAttachment, attach_delta
from hvdlite.torch.attach.attachment import Attachment, attach
from hvdlite.torch.attach.parameters import flat
from hvdlite.torch.attach.scaling import refuse_unknown_scaler
from hvdlite.torch.attach.settings import TorchSettings, parameter_key
from hvdlite.torch.attach.strategy_steps import Asked, StrategyAttachment
from hvdlite.torch.compression import Compression
from hvdlite.torch.private_api import takes_hooks
from hvdlite.torch.sharded.division import divided
from hvdlite.torch.sharded.steps import shard

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


def DistributedOptimizer(
    optimizer: OptimizerT,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] | Compressor | Codec | Literal["auto"] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op | int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    replica_check: str | None = None,
    sharded: bool | Literal["gradients"] = False,
    grad_scaler: torch.amp.GradScaler | None = None,
    strategy: Strategy | None = None,
) -> OptimizerT:
    """Make every backward() end with gradients that are averaged over all ranks, as long as the optimizer lives.

    After `loss.backward()`, `p.grad` of every parameter of the optimizer is the ranks' average: clip it, unscale it,
    and call `step()`. Each backward() waits for all ranks. The optimizer gains the methods `synchronize()`,
    `skip_synchronize()`, `no_sync()` and `set_backward_passes_per_step()`, and the attributes `op`, `process_set` and
    `backward_passes_per_step`. In a job of one rank it gains only these.

    Collective: every rank attaches the same optimizer to the same model.

    Args:
        optimizer: A torch optimizer. It stays the same object.
        named_parameters: `model.named_parameters()`, for names in messages; None: messages number the parameters.
        compression: The dtype in which gradients travel: hvd.Compression.none, fp16 or bf16. Or your own class with
            Horovod's `compress(gradient) -> (tensor of the same shape, context)` and `decompress(tensor, context)`. It
            is also called with zeros: to find out the dtype, and where a rank has no gradient.
        backward_passes_per_step: Gradients are summed on each rank over that many backward() calls, and reduced in the
            last one.
        op: hvd.Average or Sum; Min, Max and Product are possible. Adasum combines the ranks' steps instead of their
            gradients, and ignores all arguments about gradients but compression.
        gradient_predivide_factor: Gradients are divided by it before the sum, and multiplied by it after. With Average
            only.
        num_groups: Deprecated: a number for `groups`.
        groups: A number of groups, or lists of parameters whose gradients travel together.
        sparse_as_dense: Whether sparse gradients travel dense.
        process_set: The ranks that reduce together. On other ranks the optimizer only gains the methods and attributes.
        replica_check: What happens if the ranks begin with different weights or optimizer state: "error", "warn", or
            "off", which never compares them. By default what HVDLITE_REPLICA_CHECK says, else "error".
        sharded: Whether each rank keeps the optimizer's state of a part of the parameters only, so that all state takes
            1/size of the memory (ZeRO-1). Gradients and weights stay whole on every rank. step() waits for all ranks.
            Save with `hvd.save`. "gradients": each rank also gets its part of the averages only (ZeRO-2's messages: an
            all-reduce's bytes per step, instead of 1.5 times these). Operations on p.grad then raise an error: clip
            with `hvd.clip_grad_norm_`. Gradients take as much memory as before.
        grad_scaler: The GradScaler that scales the loss. Lossy compressors need it; others do not.
        strategy: How the ranks' models are kept together instead: hvd.LocalSGD, hvd.DiLoCo, hvd.Neighbors or
            hvd.BoundedStaleness. Gradients then stay each rank's own, and step() may wait for other ranks. Arguments
            about gradients count while the strategy averages gradients (`warmup_steps`, `hierarchical`).

    Returns:
        The same optimizer object.

    Raises:
        MismatchError: Optimizers, models or arguments differ between ranks; on every rank, with a diff, before any
            gradient moves. Or ranks begin with different weights; at the end of the first backward().
        ValueError: An argument cannot be right, or another attached optimizer has some of the parameters. Or with
            `sharded`: the optimizer or a parameter cannot be divided.
        TypeError: `optimizer` is no torch optimizer, or another argument has a wrong type.
        RuntimeError: The optimizer is attached already.
        NotImplementedError: `op` is Adasum, and the ranks are not all ranks of the job, or no power of two.
    """
    require_unattached(optimizer)
    op, passes = op_of(op), passes_of(backward_passes_per_step)
    adasum = op is Adasum and runtime.size() > 1
    if op is Adasum:
        require_adasum(runtime.size(), process_set is global_process_set)
        if sharded:
            raise ValueError("op=Adasum with sharded=True is not possible: each rank has steps of its own")
    if strategy is not None:
        require_served(strategy, op, sharded)
    parameters = flat(optimizer.param_groups)
    names = names_of(parameters, named_parameters)
    asked = Arguments(
        compression=compression, sparse_as_dense=sparse_as_dense, op=op, num_groups=num_groups, groups=groups,
        gradient_predivide_factor=gradient_predivide_factor, process_set=process_set, replica_check=replica_check,
        sharded=sharded,
    )  # fmt: skip
    settings = TorchSettings.of(asked.checked(parameter_key, "parameters"), parameters, names)
    if not isinstance(grad_scaler, torch.amp.GradScaler | None):
        raise TypeError(f"grad_scaler must be a torch.amp.GradScaler, not a {type(grad_scaler).__name__}")
    settings = replace(settings, scaler=grad_scaler)
    if strategy is not None:
        require_gradients(strategy, settings.compression)
    how = lossy_of(settings.compression)
    keeps = how is not None and (how.error_feedback or how.momentum > 0)
    if keeps and isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"compression={settings.compression} adds to each gradient what was not sent before, and LBFGS compares "
            "several gradients of one step: use hvd.Compression.bf16"
        )
    if how is not None and how.momentum > 0 and any(has_momentum(group) for group in optimizer.param_groups):
        warn(
            f"compression={settings.compression} adds a momentum to the gradients, and {type(optimizer).__name__} adds "
            "another one: use SGD without momentum, or leave the compressor's momentum out"
        )
    with calling(f"hvd.DistributedOptimizer({type(optimizer).__name__})"):
        division = divided(optimizer, settings) if sharded else None
        if division and division.way.gradients:
            settings = replace(settings, borders=division.borders)
        if strategy is not None and settings.size > 1:
            StrategyAttachment(optimizer, Asked(strategy, settings, passes))
        elif adasum:
            attach_delta(optimizer, settings)
        else:
            attach(optimizer, settings, passes)
        if division:
            shard(optimizer, division)
    if keeps:
        refuse_unknown_scaler(optimizer)
    optimizer.__dict__.update(op=op, process_set=process_set, backward_passes_per_step=passes)
    return optimizer


def has_momentum(group: Mapping[str, object]) -> bool:
    """Whether an optimizer's group of parameters has a momentum, as SGD's, or betas, as Adam's."""
    return bool(group.get("momentum")) or "betas" in group


def require_served(strategy: object, op: Op, sharded: object) -> None:
    """Refuse arguments that no strategy can serve.

    Raises:
        TypeError: `strategy` is no strategy.
        ValueError: Another argument does not go with a strategy.
    """
    require_strategy(strategy)
    if op is not Average:
        raise ValueError(f"strategy= averages weights, and op=hvd.{op.name} is about gradients: leave op out")
    if sharded:
        raise ValueError("strategy= with sharded= is not possible: each rank steps all weights by itself")


def require_gradients(strategy: Strategy, compression: type[Compressor]) -> None:
    """Raise ValueError for a compression of gradients, if the strategy never averages gradients."""
    if compression is not Compression.none and strategy.reaches == {Reach.NONE}:
        raise ValueError(
            f"strategy={strategy!r} averages no gradients, so compression={compression} would have no effect: leave it "
            "out. hvd.DiLoCo(compression=...) compresses what DiLoCo sends"
        )


def require_unattached(optimizer: object) -> None:
    """Refuse an optimizer that cannot be attached, and detach it from an earlier runtime.

    Raises:
        TypeError: It is no torch optimizer.
        RuntimeError: It is attached already, and not by `elastic.run`: the function that `elastic.run` calls again may
            attach its optimizer.
        ValueError: It was sharded.
    """
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
    attached: Attachment | DeltaAttachment | StrategyAttachment | None = optimizer.__dict__.get("_hvdlite")
    if attached is not None:
        attaching.require_replaceable(attached.alive, attached.renewed, attached.settings.process_set)
        if isinstance(attached, Attachment) and attached.settings.sharded and attached.ranks.runtime.everyone.size > 1:
            raise ValueError(
                f"this {type(optimizer).__name__} was attached with sharded=True before hvd.shutdown(), and may have a "
                "part of its state only: attach a new optimizer, and load a checkpoint (hvd.load) [HVD414]"
            )
        attached.detach()


def names_of(
    parameters: Sequence[torch.nn.Parameter], named: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> Mapping[int, str]:
    """Return the parameters' names by id(); empty without names.

    Raises:
        ValueError: `named` has no (name, parameter) pairs, or repeats a name, or leaves out a parameter.
    """
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
            "parameters: give those of all of its models. A generator can be read only once [HVD303]"
        )
    return by_id
