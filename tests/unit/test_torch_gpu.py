"""The torch adapter's use of GPUs, with a fake torch.cuda: the choice of a GPU, the order of streams, several GPUs."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd
from hvdlite.errors import HvdliteError
from hvdlite.gradients.use import Use
from hvdlite.torch import cuda, tensors
from hvdlite.torch.attach.attachment import on_gradient
from hvdlite.torch.attach.packing import Packing, Way
from hvdlite.torch.attach.slots import Slots, move
from hvdlite.torch.tensors import to_tensor


@pytest.mark.parametrize(
    ("available", "used", "count", "expected"),
    [(True, False, 4, [1]), (True, False, 3, [2]), (True, True, 4, []), (True, False, 1, []), (False, False, 4, [])],
)
def test_a_rank_takes_the_gpu_of_its_number(
    monkeypatch: pytest.MonkeyPatch, available: bool, used: bool, count: int, expected: list[int]
) -> None:
    """Local rank 5 of 4 GPUs takes 1; unless the script has used one already, or there is no choice."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    cuda.choose_gpu(5)
    assert chosen == expected


def test_gradients_of_two_devices_come_one_at_a_time() -> None:
    """Autograd has a thread for those of the host and one for those of a GPU."""
    inside, most = 0, 0

    def add(p: torch.Tensor) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.01)
        inside -= 1

    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    hvd.init()
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(parameters))
    attachment = optimizer._hvdlite
    streams, packing = SimpleNamespace(join=lambda pack: None), SimpleNamespace(add=add, at_end=False)
    attachment.layout = SimpleNamespace(packing=packing, streams=streams)
    attachment.round.note_local()
    attachment.round.open()
    threads = [threading.Thread(target=on_gradient, args=[weakref.ref(attachment), p]) for p in parameters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hvd.shutdown()
    assert most == 1


@pytest.mark.parametrize("shared", [False, True])
def test_who_keeps_a_gradient_has_its_values_where_storages_stay(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    """As on a GPU: a tensor gets other memory, and stays itself for a graph that has saved it; what shares its storage
    is warned of."""
    monkeypatch.setattr(torch.UntypedStorage, "share_memory_", lambda storage: storage)
    memory = np.array([1.0, 2.0, 3.0])
    alias, weight = to_tensor(memory), torch.ones(3, dtype=torch.float64, requires_grad=True)
    graph = (weight * alias).sum()
    with pytest.warns(UserWarning, match="are lost, this once") if shared else contextlib.nullcontext():
        move(alias, memory, shared)
    memory[:] = 9.0
    graph.backward()
    assert alias.tolist() == weight.grad.tolist() == [1.0, 2.0, 3.0]


def test_gradients_on_two_streams_are_packed_one_behind_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """So what is recorded behind the last is behind all; and each on the stream that computed it, to which its memory
    returns."""
    log: list[Any] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            log.append((self.name, "waits for", other.name))

    a, b = Stream("a"), Stream("b")
    current = a

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        nonlocal current
        before, current = current, stream
        yield
        current = before

    monkeypatch.setattr(torch.cuda, "current_stream", lambda number: current)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch, "_foreach_copy_", lambda views, grads: log.append((current.name, "packs", len(grads))))

    parameters = [torch.ones(10, requires_grad=True) for _ in range(6)]
    for parameter in parameters:
        parameter.grad = torch.ones(10)
    ready: list[int] = []
    views = [torch.zeros(10) for _ in parameters]
    slots = Slots([view.numpy() for view in views], [(1,)] * 6)
    way = Way(lambda index: Use.DENSE, lambda p: True, urgent={2}, to_lend=[(0, 0)] * 6)
    packing = Packing(parameters, slots, way)
    streams = cuda.Streams(0)

    def pack() -> None:
        ready.extend(packing.pack())

    for current, index in ((a, 5), (a, 4), (b, 3), (b, 2), (a, 1)):  # noqa: B007
        streams.join(pack)
        if packing.add(parameters[index]):
            pack()
    current = b
    streams.join(pack)
    assert log == [
        ("a", "packs", 2), ("b", "waits for", "a"), ("b", "packs", 2), ("a", "waits for", "b"), ("a", "packs", 1),
        ("b", "waits for", "a"),
    ]  # fmt: skip
    assert ready == [5, 4, 3, 2, 1]


def test_parameters_on_two_gpus_are_refused() -> None:
    on: list[Any] = [SimpleNamespace(device=torch.device(name)) for name in ("cpu", "cuda:0", "cuda:3")]
    with pytest.raises(HvdliteError, match="GPUs 0, 3: hvdlite drives one GPU per process"):
        cuda.gpu_of(on)
    assert cuda.gpu_of(on[:1]) is None


def test_devices_have_one_name_on_all_ranks() -> None:
    assert tensors.device_name(torch.empty(1)) == "host"
    on_gpu: Any = SimpleNamespace(is_cpu=False, is_cuda=True)
    assert tensors.device_name(on_gpu) == "cuda"
    with pytest.raises(ValueError, match="cannot communicate tensors on meta"):
        tensors.device_name(torch.empty(1, device="meta"))


def test_state_travels_without_its_gpu() -> None:
    """Nested as optimizers nest it; what is no tensor stays what it is."""

    class OnGpu(torch.Tensor):
        def cpu(self) -> Any:  # type: ignore[override]
            return "host copy"

    tensor = torch.zeros(1).as_subclass(OnGpu)
    state = {"state": {0: {"step": tensor}}, "param_groups": [{"lr": 0.1, "betas": (0.9, tensor)}]}
    assert cuda.on_cpu(state) == {
        "state": {0: {"step": "host copy"}}, "param_groups": [{"lr": 0.1, "betas": (0.9, "host copy")}]
    }  # fmt: skip


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    cuda.gpu_at.cache_clear()
    with pytest.raises(HvdliteError, match="pip install cupy-cuda12x"):
        cuda.gpu_at(0)
