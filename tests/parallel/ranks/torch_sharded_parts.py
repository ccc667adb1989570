"""Checkpoints of sharded optimizers, in which each rank writes its part of the state."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

import hvdlite.torch as hvd
from hvdlite.checkpoints import files
from tests.parallel.common import at_sizes, last, require_error, restart
from tests.parallel.ranks.torch_sharded import (
    ELEMENTWISE,
    adam,
    backward,
    continue_training,
    elements,
    folder,
    model,
    require_equal,
    same_state,
    train,
    weights,
)

SIZES = (2, 3, 4)


def names(where: Path) -> list[str]:
    return sorted(each.name for each in where.iterdir())


def parts(where: Path) -> list[Path]:
    """The files of the ranks."""
    return sorted(each for each in where.iterdir() if each.name.startswith("run.pt."))


def whole_state(optimizer: optim.Optimizer, where: Path) -> dict[str, Any]:
    """The whole state on all ranks."""
    hvd.save(where / "whole", optimizer=optimizer, consolidate=True)
    found: dict[str, Any] = torch.load(where / "whole", weights_only=True)["optimizer"]
    return found


def check_each_rank_writes_its_part() -> None:
    """Bit for bit what training goes on with; loaded with sharding and without; and plain torch refuses it."""
    where = folder()
    for make, kind in ((adam, "gradients"), (adam, True), (optim.Adafactor, True), (ELEMENTWISE["momentum"], True)):
        net, optimizer = train(make, kind, steps=3)
        hvd.save(where / "run.pt", model=net, optimizer=optimizer, epoch=3)
        assert [each.name.rpartition("-")[2] for each in parts(where)] == [
            f"{rank}of{hvd.size()}" for rank in range(hvd.size())
        ]
        assert len(names(where)) == 1 + hvd.size()  # those of the optimizer before are gone
        bytes_of_state = sum(4 * value.numel() for its in optimizer.state.values() for value in its.values())
        assert parts(where)[hvd.rank()].stat().st_size < 1.1 * bytes_of_state + 20_000
        for sharded in (True, False, "gradients"):
            if sharded == "gradients" and make is optim.Adafactor:
                continue
            expected, state = train(make, False, steps=3)
            other = model()
            again = hvd.DistributedOptimizer(make(other.parameters()), sharded=sharded)
            assert hvd.load(where / "run.pt", model=other, optimizer=again) == {"epoch": 3}
            assert sharded != kind or elements(again) == elements(optimizer)
            same_state(whole_state(again, folder()), state.state_dict())
            continue_training(other, again)
            continue_training(expected, state)
            require_equal(other, expected)
        alone = make(net.parameters())
        require_error(KeyError, partial(alone.load_state_dict, torch.load(where / "run.pt")["optimizer"]), "state")
        loaded = hvd.load(where / "run.pt", model=model())  # without the optimizer
        assert loaded["epoch"] == 3 and "state" not in loaded["optimizer"]
        refused = partial(optimizer.load_state_dict, loaded["optimizer"])
        require_error(ValueError, refused, "hvd.load")
        hvd.barrier()


def check_all_that_has_state() -> None:
    """Two optimizers, frozen and later parameters, a scheduler, a scaler, random states; twice, without leftovers."""
    where = folder()

    def make() -> dict[str, Any]:
        net = model()
        net[4].requires_grad_(False)
        first = hvd.DistributedOptimizer(adam([*net[0].parameters(), *net[4].parameters()]), sharded=True)
        second = hvd.DistributedOptimizer(ELEMENTWISE["momentum"](net[2].parameters()), sharded=True)
        scheduler = optim.lr_scheduler.StepLR(first, 2)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        return {"net": net, "first": first, "second": second, "scheduler": scheduler, "scaler": scaler}

    def go_on(net: nn.Sequential, first: Any, second: Any, scheduler: Any, scaler: Any, steps: range) -> None:
        for step in steps:
            if step == 2:
                net[4].requires_grad_(True)
            for optimizer in (first, second):
                optimizer.zero_grad()
            x = torch.randn(7, 30, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))
            scaler.scale(net(x).square().mean()).backward()
            for optimizer in (first, second):
                scaler.step(optimizer)
            scaler.update()
            scheduler.step()

    run = make()
    for stop in (2, 4):
        go_on(**run, steps=range(stop - 2, stop))
        torch.manual_seed(hvd.rank())
        hvd.save(where / "run.pt", **run, rng=True, stop=stop)
    go_on(**run, steps=range(4, 7))
    assert len(names(where)) == 1 + hvd.size()
    again = make()
    again["net"][4].requires_grad_(True)
    assert hvd.load(where / "run.pt", **again, rng=True) == {"stop": 4}
    assert torch.rand(1).equal(torch.rand(1, generator=torch.Generator().manual_seed(hvd.rank())))
    go_on(**again, steps=range(4, 7))
    require_equal(again["net"], run["net"])
    assert again["first"].param_groups[0]["lr"] == run["first"].param_groups[0]["lr"]


def check_other_orders_of_memory() -> None:
    """A piece is of the saved parameter's order; the loading parameter may have another one."""

    def convolutions(order: torch.memory_format) -> nn.Module:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Unflatten(1, (3, 2, 5)), nn.Conv2d(3, 64, 2), nn.Conv2d(64, 96, (1, 3)), nn.Flatten())
        return net.to(memory_format=order)  # type: ignore[call-overload]

    where, orders = folder(), (torch.channels_last, torch.contiguous_format)
    for order in orders:
        net, optimizer = train(adam, True, 2, convolutions(order))
        hvd.save(where / "run.pt", model=net, optimizer=optimizer)
        expected = whole_state(optimizer, folder())
        for other in orders:
            again = hvd.DistributedOptimizer(adam(convolutions(other).parameters()), sharded=True)
            hvd.load(where / "run.pt", optimizer=again)
            same_state(whole_state(again, folder()), expected)
            assert elements(again) == elements(optimizer)


@at_sizes(4)
def check_other_numbers_of_ranks() -> None:
    """Of four ranks on two, of two on four, and into plain optimizers on each."""
    where, pair = folder(), None

    def trained(sharded: bool, few: bool) -> tuple[nn.Module, optim.Optimizer]:
        options = {"process_set": pair} if few else {}
        net = model()
        optimizer = hvd.DistributedOptimizer(adam(net.parameters()), sharded=sharded, **options)
        return net, optimizer

    def go_on(net: nn.Module, optimizer: optim.Optimizer, few: bool) -> None:
        if not few or hvd.rank() in (1, 2):
            continue_training(net, optimizer)

    restart(DYNAMIC_PROCESS_SETS="1")
    pair = hvd.add_process_set([1, 2])
    for few in (False, True):
        net, optimizer = trained(True, few)
        go_on(net, optimizer, few)
        hvd.save(where / "run.pt", model=net, optimizer=optimizer)
        writers = (1, 2) if few else (0, 1, 2, 3)
        assert [each.name.rpartition("-")[2] for each in parts(where)] == [f"{rank}of4" for rank in writers]
        if few:
            refused = partial(hvd.save, where / "run.pt", optimizer=optimizer, consolidate=True)
            require_error(ValueError, refused, "rank 0 is none of the ranks [1, 2]")
        for on_few in (True, False):
            nets = []
            for sharded in (True, False):
                other, again = trained(sharded, on_few)
                hvd.load(where / "run.pt", model=other, optimizer=again)
                hvd.broadcast_parameters(other.state_dict(), 1)  # rank 0's were not trained, if few are
                go_on(other, again, on_few)
                state = 2 * sum(p.numel() for p in other.parameters()) / (2 if on_few else 4)
                assert not sharded or (on_few and hvd.rank() in (0, 3)) or elements(again) < 1.04 * state
                nets.append(other)
            assert all(map(torch.equal, weights(nets[0]), weights(nets[1])))
    restart()


@contextmanager
def patched(name: str, new: Callable[..., Any], on: bool = True) -> Iterator[None]:
    """Replace a function of `files`."""
    old = getattr(files, name)
    if on:
        setattr(files, name, new)
    try:
        yield
    finally:
        setattr(files, name, old)


def check_errors_of_one_rank() -> None:
    """One error on all ranks; the older checkpoint stays, and nothing else."""
    where = folder()
    _net, optimizer = train(adam, True, steps=1)
    save = partial(hvd.save, where / "run.pt", optimizer=optimizer, bulk=torch.zeros(50_000))
    save()
    before = names(where)
    elsewhere = folder()
    with patched("unfinished", lambda target, name: elsewhere / name, last()):
        text = require_error(OSError, save, f"rank {hvd.size() - 1} has written", "consolidate=True", "share")
    assert len(set(hvd.allgather_object(text))) == 1
    with patched("unfinished", lambda target, name: Path("/nowhere") / name, last()):
        require_error(FileNotFoundError, save, f"rank {hvd.size() - 1} cannot use the file")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for who in (hvd.size() - 1, 0):
        if hvd.rank() == who:
            resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
        try:
            text = require_error(OSError, save, f"hvd.save: rank {who}", "File too large")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert len(set(hvd.allgather_object(text))) == 1  # and all ranks have removed their files
        assert names(where) == before and not names(elsewhere)
    require_error(TypeError, partial(save, odd=object()), "odd")
    hvd.barrier()
    assert names(where) == before
    again = hvd.DistributedOptimizer(adam(model().parameters()), sharded=True)
    hvd.load(where / "run.pt", optimizer=again)
    same_state(whole_state(again, elsewhere), whole_state(optimizer, elsewhere))


def check_parts_that_are_missing_or_damaged() -> None:
    """An error on all ranks, before anything is restored, with the file's name."""
    where = folder()
    net, optimizer = train(adam, True, steps=1)
    hvd.save(where / "run.pt", model=net, optimizer=optimizer)
    part = parts(where)[-1]
    whole, other = part.read_bytes(), model()
    again = hvd.DistributedOptimizer(adam(other.parameters()), sharded=True)
    middle = len(whole) // 2
    damages = (None, b"", whole[:-100], b"x" * len(whole), whole[:middle] + b"damage" + whole[middle + 6 :])
    for damage in damages:
        hvd.barrier()
        if hvd.rank() == 0:
            part.unlink() if damage is None else part.write_bytes(damage)
        load = partial(hvd.load, where / "run.pt", model=other, optimizer=again)
        text = require_error(ValueError, load, part.name, "missing" if damage is None else "damaged")
        assert len(set(hvd.allgather_object(text))) == 1
        require_equal(other, model())
        assert not again.state
    hvd.barrier()
    part.write_bytes(whole) if hvd.rank() == 0 else None
    hvd.barrier()
    smaller = hvd.DistributedOptimizer(adam(nn.Linear(30, 211).parameters()), sharded=True)
    require_error(ValueError, lambda: hvd.load(where / "run.pt", optimizer=smaller), "2 parameters, but 6")
    other = nn.Sequential(*(nn.Linear(30, 211) for _ in range(3)))
    wrong = hvd.DistributedOptimizer(adam(other.parameters()), sharded=True)
    require_error(ValueError, lambda: hvd.load(where / "run.pt", optimizer=wrong), "parameter 2", "[97, 211]")
    require_error(ValueError, lambda: hvd.load(where / "run.pt", optimizer=other), "sharded optimizer")


def check_a_job_killed_at_any_moment() -> None:
    """The folder before and after each change on the disk: each time the older or the newer checkpoint loads."""
    where, copies = folder(), folder()
    net, optimizer = train(adam, True, steps=1)
    hvd.save(where / "run.pt", optimizer=optimizer, stop=1)
    states = {1: whole_state(optimizer, folder())}
    backward(net, 1)
    optimizer.step()
    states[2] = whole_state(optimizer, folder())

    def copy() -> None:
        target = copies / f"{hvd.rank()} {len(list(copies.iterdir())):03}"
        target.mkdir()
        for file in where.iterdir():
            with suppress(FileNotFoundError):  # another rank has renamed or removed it since
                (target / file.name).write_bytes(file.read_bytes())

    def copying(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            copy()
            try:
                return change(*args, **kwargs)
            finally:
                copy()

        return call

    changes: list[tuple[Any, str]] = [(os, "fsync"), (os, "replace"), (os, "chmod"), (Path, "unlink")]
    olds = [getattr(owner, name) for owner, name in changes]
    for (owner, name), old in zip(changes, olds, strict=True):
        setattr(owner, name, copying(old))
    try:
        hvd.save(where / "run.pt", optimizer=optimizer, stop=2)
    finally:
        for (owner, name), old in zip(changes, olds, strict=True):
            setattr(owner, name, old)
    hvd.barrier()
    again = hvd.DistributedOptimizer(adam(model().parameters()), sharded=True)
    stops, left = [], []
    for each in sorted(copies.iterdir()):
        stop = hvd.load(each / "run.pt", optimizer=again)["stop"]
        same_state(whole_state(again, folder()), states[stop])
        if each.name.startswith("0"):
            stops.append(stop)
            left.append(len(parts(each)))
            hvd.save(each / "run.pt", optimizer=optimizer)
            assert len(parts(each)) == hvd.size()  # a save removes what a killed one has left
        hvd.barrier()
    assert {*stops} == {1, 2} and stops == sorted(stops)
    assert {*left} == {*range(hvd.size(), 2 * hvd.size() + 1)}
