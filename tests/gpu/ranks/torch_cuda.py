"""Checks that need a GPU: races between streams, mixed placement, AMP, layouts, compiled models, graph capture."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.algorithms import pipeline
from hvdlite.arrays import cupy
from hvdlite.gpu_streams import Mark
from hvdlite.job import runtime
from hvdlite.transports.nccl import Nccl
from tests.parallel.common import require_error, require_same_bits, restart

pipeline.WHOLE = pipeline.GPU_CHUNK = 1 << 14  # rings in several chunks
CUDA = torch.device("cuda", 0)
LONG_KERNEL = 300_000  # clock cycles: about 0.2 ms, longer than the start of an all-reduce
TIMES = 2000
SHARED_BYTES = 64 << 20
SHARED, RING, STAGED = WAYS = (
    {"ALGORITHM": "shared"}, {"ALGORITHM": "ring", "CUDA_AWARE": "1"}, {"ALGORITHM": "ring", "CUDA_AWARE": "0"}
)  # fmt: skip


def mismatches(times: int, cycles: int = LONG_KERNEL) -> int:
    """All-reduce the result of a long kernel right after it was issued, and read the sum at once."""
    x, wrong = torch.zeros(50_000, device=CUDA), torch.zeros((), dtype=torch.int64, device=CUDA)
    p = hvd.size()
    for step in range(times):
        torch.cuda._sleep(cycles)
        x.fill_(step % 97 + hvd.rank())
        hvd.allreduce_(x, op=hvd.Sum, name="race")
        wrong += (x != p * (step % 97) + p * (p - 1) // 2).sum()
    return int(hvd.allreduce(wrong, op=hvd.Sum))


def require_no_race(way: dict[str, str]) -> None:
    restart(**way)
    assert mismatches(TIMES) == 0, way
    with torch.cuda.stream(torch.cuda.Stream()):  # not only on torch's default stream
        assert mismatches(TIMES // 10) == 0, way
    restart()


def check_no_race_in_peers_memory() -> None:
    require_no_race(SHARED)


def check_no_race_in_the_ring() -> None:
    require_no_race(RING)


def check_no_race_through_host_memory() -> None:
    require_no_race(STAGED)


def check_the_race_is_there() -> None:
    """Without hvdlite's waits the check above finds races, which shows that it could find one.

    It uses another stream than the default one, because the MPI's copies may wait for that.
    """
    if hvd.size() == 1:
        return
    wait = Mark.wait
    for way in WAYS:
        restart(**way)
        mismatches(3)  # the first call allocates, which waits
        Mark.wait = lambda self: None
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                found = mismatches(100, 10 * LONG_KERNEL)  # kernels that surely run until the first read
        finally:
            Mark.wait = wait
        assert found > 0, way
    restart()


def model(device: torch.device = CUDA) -> nn.Module:
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10)
    ).to(device)


def batches() -> list[torch.Tensor]:
    """One batch for each rank."""
    return [torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(rank)) for rank in range(hvd.size())]


def gradients(net: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    net.zero_grad()
    net(batch).square().mean().backward()
    return [p.grad.detach().clone() for p in net.parameters()]


def require_mean_gradients(prepare: Callable[[nn.Module], Any] = lambda net: net, attached: Any = None) -> None:
    """Gradients of an attached model are the mean of the gradients of each rank's batch, within float32's precision."""
    alone = model()
    separate = [gradients(alone, batch.to(CUDA)) for batch in batches()]
    expected = [torch.stack(grads).double().mean(0) for grads in zip(*separate, strict=True)]
    net = attached or model()
    _ = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    found = gradients(prepare(net), batches()[hvd.rank()].to(CUDA))
    for grad, exact in zip(found, expected, strict=True):
        assert grad.device == CUDA
        torch.testing.assert_close(grad.double(), exact, rtol=1e-4, atol=1e-5)
    require_same_bits(found)


def check_gradients_every_way() -> None:
    for way in WAYS:
        restart(**way)
        require_mean_gradients()
    restart()


def check_channels_last() -> None:
    require_mean_gradients(attached=model().to(memory_format=torch.channels_last))  # type: ignore[call-overload]


def check_compiled() -> None:
    require_mean_gradients(prepare=lambda net: torch.compile(net, backend="aot_eager"))


def check_sync_batch_norm_is_one_big_batch() -> None:
    """Outputs, gradients and running statistics are right for batches of different sizes."""
    sizes = [3 + rank for rank in range(hvd.size())]
    generator = torch.Generator().manual_seed(0)
    everything = [torch.randn(n, 5, 4, generator=generator, dtype=torch.float64) * 3 + 50 for n in sizes]
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in everything]
    big, small = nn.BatchNorm1d(5).double().to(CUDA), hvd.SyncBatchNorm(5).to(CUDA)
    whole = torch.cat(everything).to(CUDA).requires_grad_()
    mine = everything[hvd.rank()].float().to(CUDA).requires_grad_()
    expected, found = big(whole), small(mine)
    (expected * torch.cat(weights).to(CUDA)).sum().backward()
    (found * weights[hvd.rank()].float().to(CUDA)).sum().backward()
    part = slice(sum(sizes[: hvd.rank()]), sum(sizes[: hvd.rank() + 1]))
    summed = {name: hvd.allreduce(getattr(small, name).grad, op=hvd.Sum) for name in ("weight", "bias")}
    for got, exact in (
        (found, expected[part]), (mine.grad, whole.grad[part]), (small.running_mean, big.running_mean),
        (small.running_var, big.running_var), (summed["weight"], big.weight.grad), (summed["bias"], big.bias.grad),
    ):  # fmt: skip
        assert got.device == CUDA
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4)
    require_same_bits([small.running_mean, small.running_var])


def check_backward_on_another_stream() -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        require_mean_gradients()


def check_host_and_device_parameters_in_one_model() -> None:
    here, there = nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(1000, device=CUDA))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([here, there], lr=1.0))
    for _ in range(3):
        optimizer.zero_grad()
        ((here.sum() + there.sum().cpu()) * (hvd.rank() + 1)).backward()
        assert all((p.grad == (hvd.size() + 1) / 2).all() for p in (here, there))
        optimizer.step()


def check_a_model_moved_after_attaching() -> None:
    torch.manual_seed(0)
    net = nn.Linear(30, 30)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0))
    for device in ("cpu", "cuda", "cpu"):
        net.to(device)
        optimizer.zero_grad()
        (sum(p.sum() for p in net.parameters()) * (hvd.rank() + 1)).backward()
        assert all((p.grad == (hvd.size() + 1) / 2).all() and p.grad.device.type == device for p in net.parameters())
        optimizer.step()


def check_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    weight = nn.Parameter(torch.ones(10, device=CUDA))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    for bad in (True, False):
        optimizer.zero_grad()
        factor = float("inf") if bad and hvd.rank() == hvd.size() - 1 else 1.0
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (weight == (1.0 if bad else 0.0)).all()
    assert scaler.get_scale() == 2.0


def check_low_precision() -> None:
    p = hvd.size()
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8):
        x = torch.full((1001,), hvd.rank() + 1, dtype=dtype, device=CUDA)
        assert (hvd.allreduce(x, op=hvd.Sum) == p * (p + 1) // 2).all() and (x == hvd.rank() + 1).all(), dtype


def check_results_outlive_later_calls() -> None:
    """Gathered tensors are freed while kernels read them. The lane does not reuse their memory too early."""
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    for step in range(300):
        mine = torch.full((1000 + hvd.rank(),), step, device=CUDA)
        everyone = hvd.allgather(mine)
        torch.cuda._sleep(LONG_KERNEL // 10)
        wrong += (everyone != step).sum()
        del everyone
    assert int(wrong) == 0


def check_nothing_stays_behind() -> None:
    """After several jobs whose optimizers share memory, the GPU has as much free memory as before."""

    def one() -> None:
        restart(ALGORITHM="shared")
        weight = nn.Parameter(torch.zeros(SHARED_BYTES // 4, device=CUDA))
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        for _ in range(2):
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()
        assert hvd.size() == 1 or optimizer._hvdlite.reducer.arenas["cuda"].peers is not None

    def room() -> int:
        restart()
        gc.collect()
        torch.cuda.empty_cache()
        cupy().get_default_memory_pool().free_all_blocks()
        torch.cuda.synchronize()
        hvd.barrier()
        free = torch.cuda.mem_get_info()[0]
        hvd.barrier()
        return free

    one()
    before = room()
    for _ in range(5):
        one()
    assert before - room() < SHARED_BYTES, "memory of earlier jobs is still taken"


def check_graph_capture_is_refused() -> None:
    x = torch.ones(10, device=CUDA)
    hvd.allreduce_(x, op=hvd.Sum, name="before")
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="relaxed")
        try:
            require_error(hvd.HorovodInternalError, lambda: hvd.allreduce_(x, name="inside"), "CUDA graph")
        finally:
            graph.capture_end()
    assert (hvd.allreduce(torch.ones(3, device=CUDA), op=hvd.Sum) == hvd.size()).all()


def check_nccl_wants_a_gpu_for_each_rank() -> None:
    """If ranks share a GPU, NCCL cannot work: each rank raises a clear error, and the job continues."""
    if hvd.size() == 1:
        return
    restart(GPU_OPERATIONS="nccl")
    require_error(hvd.HorovodInternalError, lambda: hvd.allreduce(torch.ones(3, device=CUDA)), "share GPU")
    restart()
    assert (hvd.allreduce(torch.ones(3, device=CUDA), op=hvd.Sum) == hvd.size()).all()


def check_nccl_among_one() -> None:
    """NCCL works with one rank for every dtype and operation that it is used for, on the current stream."""
    xp = cupy()
    alone = runtime.current().world.split(hvd.rank())
    assert alone is not None
    with xp.cuda.Stream(non_blocking=True) as stream:
        nccl = Nccl(alone, xp)
        for dtype in ("float32", "float64", "float16", "int8", "uint8", "int32", "uint32", "int64", "uint64"):
            for operation in ("sum", "min", "max", "product"):
                array = xp.arange(100).astype(dtype)
                nccl.allreduce(array, operation)
                stream.synchronize()
                assert (array == xp.arange(100).astype(dtype)).all(), (dtype, operation)
        nccl.close()
    alone.close()


def check_sparse_gradients_leave_the_same_bits() -> None:
    """Sparse rows of several ranks are added up before they are applied, because a GPU adds duplicates in any order."""
    torch.manual_seed(0)
    net = nn.Embedding(50, 257, sparse=True, device=CUDA)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.3))
    rows = torch.Generator(CUDA).manual_seed(hvd.rank())
    for _ in range(30):
        optimizer.zero_grad()
        chosen = torch.randint(50, (4000,), device=CUDA, generator=rows)
        (net(chosen) * torch.randn(4000, 257, device=CUDA, generator=rows)).sum().backward()
        optimizer.step()
        gathered = hvd.synchronize(hvd.sparse_allreduce_async(net.weight.grad.coalesce(), name="sparse", op=hvd.Sum))
        require_same_bits(torch.zeros(50, 257, device=CUDA).add_(gathered).cpu())
        require_same_bits(net.weight.detach().cpu())
