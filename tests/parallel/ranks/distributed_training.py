"""Training over torch.distributed's backend "hvdlite": DDP, sharding, tensor parallel and pipelines.

Weights equal those of one process that trains with the big batch.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)  # fmt: skip
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import hvdlite as hvd
from hvdlite.job import runtime
from tests.parallel.common import at_sizes, require_error
from tests.parallel.distributed_common import grouped
from tests.parallel.distributed_models import (
    Block,
    data,
    full,
    loss_of,
    mine,
    network,
    require_close,
    require_pipeline,
    sgd,
    sharded,
    train,
    trained_alone,
    whole,
)  # fmt: skip

SIZES = (2, 4)


def require_same_on_all_ranks(model: nn.Module) -> None:
    """Check that all ranks have the same weights, to the last bit."""
    for name, value in model.state_dict().items():
        found = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(found, value)
        assert all(each.equal(value) for each in found), name


# DistributedDataParallel


@grouped
def check_ddp() -> None:
    """In its ways that give the same weights."""
    expected = trained_alone()
    ways: tuple[dict[str, Any], ...] = (
        {}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True},
        {"bucket_cap_mb": 0.0005}, {"bucket_cap_mb": 0.0005, "gradient_as_bucket_view": True}, {"broadcast_buffers": False},
        {"gradient_as_bucket_view": True, "static_graph": True},
    )  # fmt: skip
    for options in ways:
        model = network()
        parallel = DistributedDataParallel(model, **options)
        train(parallel, sgd(parallel.parameters()))
        require_close(parallel.state_dict(), expected, prefix="module.")
        require_same_on_all_ranks(model)


@grouped
def check_ddp_begins_with_the_weights_of_rank_0() -> None:
    parallel = DistributedDataParallel(network(seed=hvd.rank()))
    train(parallel, sgd(parallel.parameters()))
    require_close(parallel.state_dict(), trained_alone(), prefix="module.")


class Branches(nn.Module):
    """Two branches, where a rank uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(6, 4)
        self.branches = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, inputs: torch.Tensor, which: int) -> torch.Tensor:
        found: torch.Tensor = self.branches[which](self.trunk(inputs))
        return found


@grouped
def check_ddp_finds_unused_parameters() -> None:
    """Ranks use different branches; nobody uses the last one, whose gradient stays None."""
    p, r = hvd.size(), hvd.rank()
    alone, model = Branches(), Branches()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    for step in range(3):
        inputs, _ = data(step)
        parallel.zero_grad()
        alone.zero_grad()
        parallel(mine(inputs), r % 2).sum().backward()
        for rank in range(p):
            (alone(inputs.chunk(p)[rank], rank % 2).sum() / p).backward()
        for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
            assert (found.grad is None) == (expected.grad is None)
            assert expected.grad is None or torch.allclose(found.grad, expected.grad, atol=1e-5)
    parallel = DistributedDataParallel(Branches())
    parallel(mine(data(0)[0]), 0).sum().backward()
    require_error(RuntimeError, lambda: parallel(mine(data(0)[0]), 0), "find_unused_parameters=True")


@grouped
def check_ddp_without_synchronization() -> None:
    """no_sync accumulates: two half steps and one synchronization are one step of twice the batch."""
    for view in (False, True):
        alone, parallel = network(), DistributedDataParallel(network(), gradient_as_bucket_view=view)
        optimizers = sgd(alone.parameters()), sgd(parallel.parameters())
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for half in range(2):
                inputs, targets = data(10 * step + half)
                loss_of(alone, inputs, targets).backward()
                if half:
                    loss_of(parallel, mine(inputs), mine(targets)).backward()
                else:
                    with parallel.no_sync():
                        loss_of(parallel, mine(inputs), mine(targets)).backward()
            for optimizer in optimizers:
                optimizer.step()
        require_close(parallel.state_dict(), alone.state_dict(), prefix="module.")


@grouped
def check_ddp_with_uneven_inputs() -> None:
    """join: ranks that have no more batches take part with nothing."""
    parallel = DistributedDataParallel(network())
    optimizer, steps = sgd(parallel.parameters()), 0
    with parallel.join(divide_by_initial_world_size=False):
        for step in range(3 + 2 * hvd.rank()):
            inputs, targets = data(step)
            optimizer.zero_grad()
            loss_of(parallel, mine(inputs), mine(targets)).backward()
            optimizer.step()
            steps += 1
    assert steps == 3 + 2 * hvd.rank()
    require_same_on_all_ranks(parallel)

    def until_others_end() -> None:
        with parallel.join(throw_on_early_termination=True):
            for step in range(2 + hvd.rank()):
                loss_of(parallel, *map(mine, data(step))).backward()

    require_error(RuntimeError, until_others_end, "exhausted")


class Normalized(nn.Module):
    """A network with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(inputs)
        return found


@grouped
def check_ddp_broadcasts_buffers() -> None:
    parallel = DistributedDataParallel(Normalized())
    train(parallel, sgd(parallel.parameters()))
    parallel(mine(data(0)[0]))
    with torch.no_grad():
        parallel.eval()
        parallel.train()
        parallel(data(1)[0])
    for value in parallel.buffers():
        found = [torch.empty_like(value) for _ in range(hvd.size())]
        dist.all_gather(found, value)
        assert all(torch.allclose(each.double(), value.double(), atol=1e-1) for each in found)


@grouped
def check_ddp_with_hooks_of_compression() -> None:
    """The hooks of torch that run on CPUs: all-reduce, and sums in half precision."""
    expected = trained_alone()
    for hook, within in ((default_hooks.allreduce_hook, 1e-6), (default_hooks.fp16_compress_hook, 3e-3)):
        for view in (False, True):
            parallel = DistributedDataParallel(network(), gradient_as_bucket_view=view)
            parallel.register_comm_hook(None, hook)
            train(parallel, sgd(parallel.parameters()))
            require_close(parallel.state_dict(), expected, within, prefix="module.")
            require_same_on_all_ranks(parallel)
    parallel = DistributedDataParallel(network())
    parallel.register_comm_hook(None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
    train(parallel, sgd(parallel.parameters()))
    require_close(parallel.state_dict(), expected, 3e-3, prefix="module.")
    parallel = DistributedDataParallel(network())

    def by_hand(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Sums in bfloat16: torch's own bf16 hook refuses CPUs."""
        small = bucket.buffer().to(torch.bfloat16).div_(hvd.size())
        future = dist.all_reduce(small, async_op=True).get_future()
        return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))

    parallel.register_comm_hook(None, by_hand)
    train(parallel, sgd(parallel.parameters()))
    require_close(parallel.state_dict(), expected, 3e-2, prefix="module.")
    require_same_on_all_ranks(parallel)


@grouped
def check_ddp_with_power_sgd() -> None:
    train_with_power_sgd(25.0)


@grouped
def check_power_sgd_with_several_buckets() -> None:
    train_with_power_sgd(0.0005)


def train_with_power_sgd(megabytes: float) -> None:
    """Check that the loss falls, and ranks agree. megabytes: as `bucket_cap_mb`."""
    parallel = DistributedDataParallel(network(), bucket_cap_mb=megabytes)
    state = powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=2,
        start_powerSGD_iter=2,
        min_compression_rate=0.5,
        orthogonalization_epsilon=1e-8,
    )
    parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer, losses = torch.optim.SGD(parallel.parameters(), lr=0.1), []
    inputs, targets = data(0)
    for _ in range(25):
        optimizer.zero_grad()
        loss = loss_of(parallel, mine(inputs), mine(targets))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.97 * losses[2], losses
    require_same_on_all_ranks(parallel)


@grouped
def check_ddp_with_post_local_sgd() -> None:
    parallel = DistributedDataParallel(network())
    alone, _ = dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=2)
    parallel.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(parallel.parameters(), lr=0.1), averager)
    train(parallel, optimizer, steps=6)
    first = parallel.module[0].weight
    found = [torch.empty_like(first) for _ in range(hvd.size())]
    dist.all_gather(found, first.detach())
    assert not all(each.equal(found[0]) for each in found)
    averager.average_parameters(parallel.parameters())
    train(parallel, optimizer, steps=1)


@grouped
def check_ddp_with_sparse_gradients() -> None:
    p = hvd.size()

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.EmbeddingBag(20, 6, sparse=True, mode="sum"), nn.Linear(6, 2))

    alone, parallel = make(), DistributedDataParallel(make())
    models = alone, parallel
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(4):
        rows = torch.randint(0, 20, (4 * p, 3), generator=torch.Generator().manual_seed(step))
        for model, optimizer, share in zip(models, optimizers, (whole, mine), strict=True):
            optimizer.zero_grad()
            model(share(rows)).square().mean().backward()
            optimizer.step()
    require_close(parallel.state_dict(), alone.state_dict(), prefix="module.")


@grouped
def check_ddp_on_a_part_of_the_ranks() -> None:
    """Each pair of neighbours trains for itself."""
    group, _ = dist.new_subgroups(2)
    parallel = DistributedDataParallel(network(), process_group=group)
    half = hvd.rank() // 2

    def share(rows: torch.Tensor) -> torch.Tensor:
        return rows.chunk(hvd.size() // 2)[half].chunk(2)[hvd.rank() % 2]

    def both(rows: torch.Tensor) -> torch.Tensor:
        return rows.chunk(hvd.size() // 2)[half]

    alone = network()
    train(alone, sgd(alone.parameters()), share=both)
    train(parallel, sgd(parallel.parameters()), share=share)
    require_close(parallel.state_dict(), alone.state_dict(), prefix="module.")


@grouped
def check_hooks_that_need_cpp_are_clear_errors_or_work() -> None:
    """torch's C++ hooks: the all-reduce works, and the one in half precision raises an error that names the way round."""
    parallel = DistributedDataParallel(network())
    parallel._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    train(parallel, sgd(parallel.parameters()))
    require_close(parallel.state_dict(), trained_alone(), prefix="module.")
    parallel = DistributedDataParallel(network())
    hook = dist.BuiltinCommHookType.FP16_COMPRESS
    text = require_error(NotImplementedError, lambda: parallel._register_builtin_comm_hook(hook))
    assert "fp16_compress_hook" in text, text


@grouped
def check_zero_redundancy() -> None:
    """Each rank has a part of the optimizer's state; the weights are those of one process."""
    alone = network()
    train(alone, torch.optim.Adam(alone.parameters(), lr=0.01), share=whole)
    for options in ({}, {"parameters_as_bucket_view": True}):
        parallel = DistributedDataParallel(network())
        optimizer = ZeroRedundancyOptimizer(parallel.parameters(), torch.optim.Adam, lr=0.01, **options)
        train(parallel, optimizer)
        require_close(parallel.state_dict(), alone.state_dict(), 2e-6, prefix="module.")
        assert len(optimizer.optim.state) < len([*parallel.parameters()])
        optimizer.consolidate_state_dict(0)
        assert hvd.rank() or len(optimizer.state_dict()["state"]) == len([*parallel.parameters()])
    parallel = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(parallel.parameters(), torch.optim.SGD, lr=0.1)
    with Join([parallel, optimizer]):
        for step in range(2 + hvd.rank()):
            optimizer.zero_grad()
            loss_of(parallel, *map(mine, data(step))).backward()
            optimizer.step()
    require_same_on_all_ranks(parallel)


# Sharding


@grouped
def check_fsdp2() -> None:
    expected = trained_alone()
    mesh = init_device_mesh("cpu", (hvd.size(),))
    for options in ({}, {"reshard_after_forward": False}, {"reshard_after_forward": 2 if hvd.size() == 4 else True}):
        model = sharded(network(), mesh=mesh, **options)
        assert model[0].weight.to_local().numel() < 16 * 6  # type: ignore[index]
        train(model, sgd(model.parameters()))
        require_close(full(model), expected)


@grouped
def check_fsdp2_in_mixed_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(network(), mesh=init_device_mesh("cpu", (hvd.size(),)), mp_policy=policy)
    optimizer = sgd(model.parameters())
    for step in range(4):
        inputs, targets = map(mine, data(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs).float(), targets).backward()
        assert model[0].weight.grad.dtype == torch.float32  # type: ignore[index]
        optimizer.step()
    require_close(full(model), trained_alone(), 2e-2)


@at_sizes(4)
@grouped
def check_fsdp2_on_a_mesh_of_two_dimensions() -> None:
    """HSDP: shards within a pair of ranks, and copies of them on the other pair."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(network(), mesh=mesh)
    train(model, sgd(model.parameters()))
    require_close(full(model), trained_alone())


@grouped
def check_fsdp2_clips_and_accumulates() -> None:
    """clip_grad_norm_ over shards, and set_requires_gradient_sync."""
    alone, model = network(), sharded(network(), mesh=init_device_mesh("cpu", (hvd.size(),)))
    optimizers = sgd(alone.parameters()), sgd(model.parameters())
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for half in range(2):
            inputs, targets = data(10 * step + half)
            loss_of(alone, inputs, targets).backward()
            model.set_requires_gradient_sync(half == 1)  # type: ignore[operator]
            loss_of(model, mine(inputs), mine(targets)).backward()
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (alone, model)]
        assert torch.allclose(norms[0], norms[1].full_tensor(), atol=1e-5)  # type: ignore[attr-defined]
        for optimizer in optimizers:
            optimizer.step()
    require_close(full(model), alone.state_dict())


@grouped
def check_fsdp1() -> None:
    expected = trained_alone()
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        model = FullyShardedDataParallel(
            network(), sharding_strategy=strategy, device_id=torch.device("cpu"), use_orig_params=True
        )
        train(model, sgd(model.parameters()))
        with FullyShardedDataParallel.summon_full_params(model):
            found = {name: value.clone() for name, value in model.module.state_dict().items()}
        require_close(found, expected)


# Tensors and pipelines


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """All ranks' parts of a DTensor."""
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


@grouped
def check_distributed_tensors() -> None:
    p = hvd.size()
    mesh = init_device_mesh("cpu", (p,))
    table = torch.arange(6.0 * p * p).reshape(2 * p, 3 * p)
    rows = distribute_tensor(table, mesh, [Shard(0)])
    assert rows.to_local().equal(table.chunk(p)[hvd.rank()])
    columns = rows.redistribute(placements=[Shard(1)])
    assert columns.to_local().equal(table.chunk(p, 1)[hvd.rank()])
    assert columns.redistribute(placements=[Replicate()]).to_local().equal(table)
    assert whole_of(rows @ columns.t()).equal(table @ table.t())
    assert whole_of(rows.sum()) == table.sum() and whole_of(rows.max()) == table.max()
    uneven = torch.arange(2.0 * p + 1)
    assert distribute_tensor(uneven, mesh, [Shard(0)]).full_tensor().equal(uneven)


@grouped
def check_tensor_parallel() -> None:
    """Every rank trains on all rows."""
    mesh = init_device_mesh("cpu", (hvd.size(),), mesh_dim_names=("tp",))
    model = parallelize_module(Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert dict(model.named_parameters())["up.weight"].to_local().shape == (16 // hvd.size(), 6)  # type: ignore[attr-defined]
    train(model, sgd(model.parameters()), share=whole)
    require_close(full(model), trained_alone(make=Block))


@at_sizes(4)
@grouped
def check_tensor_parallel_with_sharding() -> None:
    """Two dimensions: FSDP2 over pairs of tensor-parallel ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Block(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD([parameter for name, parameter in model.named_parameters()], lr=0.1, foreach=False)
    train(model, optimizer, share=lambda rows: rows.chunk(2)[hvd.rank() // 2])
    alone = Block()
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), share=whole)
    require_close(full(model), alone.state_dict())


@grouped
def check_pipelines() -> None:
    for make in (ScheduleGPipe, Schedule1F1B):
        require_pipeline(make)


# Checkpoints


@at_sizes(4)
def check_checkpoints_move_from_four_ranks_to_two() -> None:
    """Saved by four ranks in two ways, and read by two, which go on with the same weights and momentum."""
    folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, 0)
    try:
        dist.init_process_group("hvdlite")
        model = sharded(network(), mesh=init_device_mesh("cpu", (4,)))
        optimizer = sgd(model.parameters())
        train(model, optimizer)
        expected = full(model)
        weights, momentum = get_state_dict(model, optimizer)
        checkpoint.save({"model": weights, "optimizer": momentum}, checkpoint_id=os.path.join(folder, "now"))
        later = checkpoint.async_save({"model": weights, "optimizer": momentum}, checkpoint_id=os.path.join(folder, "later"),
                                      process_group=dist.new_group(range(4), backend="gloo"))  # fmt: skip
        later.result()
        train(model, optimizer, steps=2)
        goal = full(model)
        pair = dist.new_group([0, 1])
        if hvd.rank() < 2:
            for name in ("now", "later"):
                restore(os.path.join(folder, name), pair, expected, goal)
        dist.barrier()
        dist.destroy_process_group()
    finally:
        hvd.barrier()
        if hvd.rank() == 0:
            shutil.rmtree(folder)


def restore(folder: str, pair: dist.ProcessGroup, now: dict[str, torch.Tensor], later: dict[str, torch.Tensor]) -> None:
    """Read a checkpoint on two ranks, compare the weights, go on, and compare them again."""
    model = sharded(network(seed=5), mesh=DeviceMesh.from_group(pair, "cpu"))
    optimizer = sgd(model.parameters())
    weights, momentum = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": momentum}
    checkpoint.load(state, checkpoint_id=folder, process_group=pair)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    require_close(full(model), now, 0.0)
    train(model, optimizer, steps=2, share=lambda rows: rows.chunk(2)[hvd.rank()])
    require_close(full(model), later)


@grouped
def check_checkpoints() -> None:
    """save and load over this backend alone; async_save wants a group of gloo beside it."""
    folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, 0)
    try:
        model = sharded(network(), mesh=init_device_mesh("cpu", (hvd.size(),)))
        train(model, sgd(model.parameters()))
        expected = full(model)
        checkpoint.save(get_model_state_dict(model), checkpoint_id=folder)
        other = sharded(network(seed=3), mesh=init_device_mesh("cpu", (hvd.size(),)))
        state = get_model_state_dict(other)
        checkpoint.load(state, checkpoint_id=folder)
        other.load_state_dict(state)
        require_close(full(other), expected, 0.0)
    finally:
        hvd.barrier()
        if hvd.rank() == 0:
            shutil.rmtree(folder)


# Functional collectives, eager and compiled


def functional_calls(given: torch.Tensor) -> list[torch.Tensor]:
    """Every functional collective."""
    world = dist.group.WORLD
    p = dist.get_world_size()
    return [
        functional.all_reduce(given, "sum", world) + 1, functional.all_gather_tensor(given, 0, world) * 2,
        functional.reduce_scatter_tensor(given.repeat(p), "sum", 0, world),
        functional.all_to_all_single(given.repeat(p), None, None, world), functional.broadcast(given, 1, world),
        *functional.all_reduce_coalesced([given, 2 * given], "avg", world),
        *functional.all_gather_into_tensor_coalesced([given, 2 * given], world),
        *functional.reduce_scatter_tensor_coalesced([given.repeat(p)], "sum", [0], world),
    ]  # fmt: skip


def require_functional(call: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
    p, r = hvd.size(), hvd.rank()
    found = call(torch.full((3,), r + 1.0))
    total, every = p * (p + 1) / 2, [rank + 1.0 for rank in range(p) for _ in range(3)]
    expected = [[total + 1] * 3, [2 * each for each in every], [total] * 3, every, [2.0] * 3, [total / p] * 3,
                [2 * total / p] * 3, every, [2 * each for each in every], [total] * 3]  # fmt: skip
    for number, (one, values) in enumerate(zip(found, expected, strict=True)):
        assert one.tolist() == values, (number, one, values)


@grouped
def check_functional_collectives() -> None:
    require_functional(functional_calls)
    given = torch.full((3,), hvd.rank() + 1.0, requires_grad=True)
    functional.all_gather_tensor_autograd(given, 0, dist.group.WORLD).sum().backward()
    assert (given.grad == hvd.size()).all()


@grouped
def check_functional_collectives_when_compiled() -> None:
    torch._dynamo.reset()
    require_functional(torch.compile(functional_calls, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()

    def plain(given: torch.Tensor) -> torch.Tensor:
        changed = given.clone()
        dist.all_reduce(changed)
        return changed * 2

    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    assert (compiled(torch.ones(3)) == 2 * hvd.size()).all()


@grouped
def check_compiled_models() -> None:
    """DDP of a compiled model, a compiled DDP, and a compiled FSDP2 model."""
    expected = trained_alone()
    torch._dynamo.reset()
    inner = DistributedDataParallel(torch.compile(network(), backend="aot_eager"))
    train(inner, sgd(inner.parameters()))
    require_close(inner.state_dict(), expected, prefix="module._orig_mod.")
    torch._dynamo.reset()
    parallel = DistributedDataParallel(network())
    outer = torch.compile(parallel, backend="aot_eager")
    train(outer, sgd(parallel.parameters()))  # type: ignore[arg-type]
    require_close(parallel.state_dict(), expected, prefix="module.")
    torch._dynamo.reset()
    model = sharded(network(), mesh=init_device_mesh("cpu", (hvd.size(),)))
    train(torch.compile(model, backend="aot_eager"), sgd(model.parameters()))  # type: ignore[arg-type]
    require_close(full(model), expected)


@grouped
def check_the_summary_sees_ddps_waits() -> None:
    """DDP waits in C++. All ranks but one come 30 ms earlier to the end of backward, and wait for it."""
    model = DistributedDataParallel(network())
    optimizer = sgd(model.parameters())
    slowest = dist.get_rank() == dist.get_world_size() - 1
    steps = runtime.current().observers.steps
    before, steps_before = runtime.current().observers.meter.spent, steps.number
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, *map(mine, data(step)))
        time.sleep(0.04 if slowest else 0.01)
        loss.backward()
        optimizer.step()
    spent = runtime.current().observers.meter.spent - before
    assert steps.number == steps_before + 6
    assert slowest or 6 * 0.03 * 0.8 < spent.waiting < 6 * 0.06, spent
    assert not slowest or spent.waiting < 6 * 0.03 * 0.5, spent
