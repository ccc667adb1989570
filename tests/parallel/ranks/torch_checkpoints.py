"""Checkpoints: training resumes with the same bits, and an error of rank 0 is the same error on all ranks."""

from __future__ import annotations

import argparse
import contextlib
import resource
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hvdlite
import hvdlite.torch as hvd
from tests.parallel.common import digest, last, logged, require_error, require_same_bits

SIZES = (1, 2, 3)


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A new folder for rank 0; one that there is not for the others, as on another host."""
    with tempfile.TemporaryDirectory() as name:
        hvd.barrier()
        yield Path(name) if hvd.rank() == 0 else Path("/nowhere/at/all")
        hvd.barrier()


class Run:
    """A training with all that has state."""

    def __init__(self, seed: int, kind: str = "SGD") -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        )
        options = {"momentum": 0.9} if kind == "SGD" else {}
        self.optimizer = getattr(torch.optim, kind)(self.model.parameters(), lr=0.1 / (seed + 1), **options)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0, factor=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + seed), growth_interval=2)
        self.optimizer = hvd.DistributedOptimizer(self.optimizer, self.model.named_parameters())

    def parts(self) -> dict[str, Any]:
        return vars(self)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(torch.rand(6, 4)).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.plateau.step(hvd.allreduce(loss.detach()))

    def digests(self) -> list[str]:
        tensors = list(
            self.model.parameters() if hvd.rank() else self.model.state_dict().values()
        )  # statistics are a rank's own
        tensors += [
            torch.as_tensor(value)
            for its in self.optimizer.state.values()
            for value in its.values()
            if value is not None
        ]
        settings = (
            self.optimizer.param_groups[0]["lr"],
            self.scheduler.state_dict(),
            self.plateau.state_dict(),
            self.scaler.state_dict(),
        )
        return [digest([tensor]) for tensor in tensors] + [repr(settings)]


def check_resuming_equals_going_on() -> None:
    """Bit for bit, with all that has state, dropout's numbers included, into objects that began otherwise. Only rank 0
    has the file."""
    for kind in ("SGD", "AdamW"):
        with folder() as where:
            torch.manual_seed(7)
            run = Run(0, kind)
            torch.manual_seed(100 + hvd.rank())  # other data, other dropout
            run.train(3)
            hvd.save(where / "run.pt", rng=True, **run.parts(), epoch=3)
            run.train(4)

            again = Run(1 + hvd.rank(), kind)
            again.train(0 if kind == "SGD" else 1) if hvd.size() == 1 else None
            state = hvd.load(where / "run.pt", rng=True, **again.parts(), epoch=0)
            assert state == {"epoch": 3}
            again.train(4)
            assert again.digests() == run.digests(), kind
            rates = hvd.allgather_object(again.optimizer.param_groups[0]["lr"])
            assert len(set(rates)) == 1
            require_same_bits(list(again.model.parameters()))


def check_a_plain_loop_resumes_in_one_line() -> None:
    """The same line where there is no file yet, and where there is one."""
    with folder() as where:
        net = torch.nn.Linear(2, 2)
        for begun in (0, 5):
            start = hvd.load(where / "run.pt", missing_ok=True, model=net, epoch=0)["epoch"]
            assert start == begun
            hvd.save(where / "run.pt", model=net, epoch=5)
        require_same_bits(list(net.parameters()))


def check_torch_alone_reads_it() -> None:
    """Without trust; and what torch.save has written by hand loads."""
    with folder() as where:
        net = torch.nn.BatchNorm1d(3)
        extras: dict[str, Any] = {
            "best": np.float64(0.5),
            "history": [(1, np.float32(2)), {"a": np.int64(3)}],
            "tensor": torch.arange(3),
        }
        hvd.save(where / "run.pt", model=net, rng=True, **extras)
        if hvd.rank() == 0:
            found = torch.load(where / "run.pt", weights_only=True)
            assert found["best"] == 0.5 and found["history"] == [(1, 2.0), {"a": 3}]
            assert found["model"]._metadata == net.state_dict()._metadata  # type: ignore[attr-defined]
            torch.save({"net": torch.nn.Linear(2, 2).state_dict(), "note": "by hand"}, where / "mine.pt")
        hvd.barrier()
        found = hvd.load(where / "run.pt", model=net)
        assert found["best"] == 0.5 and found["tensor"].tolist() == [0, 1, 2] and set(found) == set(extras)
        other = torch.nn.Linear(2, 2)
        assert hvdlite.load(where / "mine.pt", net=other) == {"note": "by hand"}
        require_same_bits(list(other.parameters()))


def check_what_was_not_asked_for_is_returned() -> None:
    """A state without its object; and the default of an extra that the file has not."""
    with folder() as where:
        net = torch.nn.Linear(2, 1)
        hvdlite.save(where / "run.pt", model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.5))
        found = hvdlite.load(where / "run.pt", model=net, best=1.5)
        assert found["best"] == 1.5 and found["optimizer"]["param_groups"][0]["lr"] == 0.5 and len(found) == 2


def check_what_the_file_lacks_is_named() -> None:
    """On all ranks, before anything is restored."""
    with folder() as where:
        net = torch.nn.Linear(2, 1)
        hvd.save(where / "run.pt", model=torch.nn.Linear(2, 1), epoch=3)
        before = digest(list(net.parameters()))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        require_error(
            ValueError, lambda: hvd.load(where / "run.pt", model=net, opt=optimizer), "no opt", "model, epoch"
        )
        require_error(ValueError, lambda: hvd.load(where / "run.pt", rng=True, model=net), "saved without it")
        assert digest(list(net.parameters())) == before
        require_error(FileNotFoundError, lambda: hvd.load(where / "none.pt", model=net), "hvd.load: rank 0", "none.pt")


def check_extras_that_are_no_plain_data() -> None:
    """Refused on all ranks, by name, and the old file stays."""
    with folder() as where:
        net = torch.nn.Linear(2, 1)
        hvd.save(where / "run.pt", model=net, epoch=1)
        odds = (argparse.Namespace(lr=1), [torch.nn.Linear(1, 1)], np.arange(3), lambda: 1, threading.Lock())
        for odd in odds:
            require_error(
                TypeError,
                lambda: hvd.save(where / "run.pt", model=net, epoch=2, odd=odd),
                "'odd'",
                "plain data",
            )
        assert hvd.load(where / "run.pt", model=net)["epoch"] == 1
        assert hvd.rank() or [each.name for each in where.iterdir()] == ["run.pt"]


def check_rank_0_cannot_write() -> None:
    """No folder, no room: the same error everywhere, what was there stays whole, and the job goes on."""
    with folder() as where:
        net = torch.nn.Linear(300, 300)
        hvd.save(where / "run.pt", model=net, epoch=1)
        for path in (where / "no" / "run.pt", where):
            text = require_error(OSError, lambda: hvd.save(path, model=net), "hvd.save: rank 0")
            assert len({text.partition(": '")[0] for text in hvd.allgather_object(text)}) == 1
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            require_error(
                OSError, lambda: hvd.save(where / "run.pt", model=net, epoch=2), "hvd.save: rank 0", "File too large"
            )
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert hvd.load(where / "run.pt", model=net)["epoch"] == 1
        assert hvd.rank() or [each.name for each in where.iterdir()] == ["run.pt"]


def check_one_rank_cannot_restore() -> None:
    """Its own error there, which the others learn of."""
    with folder() as where:
        hvd.save(where / "run.pt", model=torch.nn.Linear(2, 1))
        net = torch.nn.Linear(3 if last() else 2, 1)
        if hvd.size() == 1:
            hvd.load(where / "run.pt", model=net)
        elif last():
            require_error(RuntimeError, lambda: hvd.load(where / "run.pt", model=net), "size mismatch")
        else:
            require_error(
                hvd.HorovodInternalError,
                lambda: hvd.load(where / "run.pt", model=net),
                f"rank {hvd.size() - 1}",
                "size mismatch",
            )


def check_ranks_that_give_other_names() -> None:
    with folder() as where:
        net = torch.nn.Linear(2, 1)
        more: dict[str, Any] = {"epoch": 1} if last() else {}
        if hvd.size() > 1:
            require_error(
                ValueError,
                lambda: hvd.save(where / "run.pt", model=net, **more),
                f"rank {hvd.size() - 1} gives epoch, model",
            )
        assert hvd.rank() or not list(where.iterdir())


def check_a_load_is_a_new_beginning() -> None:
    """Ranks that come apart right after it are an error at the next step, as at the first."""
    with folder() as where:
        net = torch.nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        hvd.broadcast_parameters(net.state_dict(), 0)

        def step() -> None:
            optimizer.zero_grad()
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()

        for _ in range(3):
            step()
        hvd.save(where / "run.pt", model=net, optimizer=optimizer)
        hvd.load(where / "run.pt", model=net, optimizer=optimizer)
        step()
        hvd.load(where / "run.pt", model=net, optimizer=optimizer)
        with torch.no_grad():
            net.bias.add_(1.0 if last() else 0.0)
        if hvd.size() > 1:
            require_error(hvdlite.MismatchError, step, "different models")


def check_random_states_of_other_ranks() -> None:
    """A warning, and generators stay as they are."""
    with folder() as where:
        hvd.save(where / "run.pt", rng=True)
        if hvd.rank() == 0:
            found = torch.load(where / "run.pt", weights_only=True)
            found["rng_of_ranks"].append(found["rng_of_ranks"][0])
            torch.save(found, where / "run.pt")
        hvd.barrier()
        torch.manual_seed(5)
        with logged() as told:
            assert hvd.load(where / "run.pt", rng=True) == {}
        assert torch.initial_seed() == 5 and torch.equal(
            torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(5))
        )
        assert len(told) == (hvd.rank() == 0) and all("none is restored" in text for text in told)


def check_broadcasting_a_scheduler() -> None:
    """Is refused with what serves it."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    cure = ("hvd.load", "scheduler.load_state_dict(hvd.broadcast_object(scheduler.state_dict(), root_rank))")
    require_error(TypeError, lambda: hvd.broadcast_optimizer_state(scheduler, 0), *cure)  # type: ignore[arg-type]
    require_error(TypeError, lambda: hvdlite.broadcast_variables(scheduler, 0), *cure)


def check_objects_that_are_optimizers_inside_of_wrappers() -> None:
    """Whoever holds on to groups and state still does; a state keeps its dtype."""
    with folder() as where:
        net = torch.nn.Linear(2, 1).to(torch.bfloat16)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
        net(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        for its in optimizer.state.values():
            its["momentum_buffer"] = its["momentum_buffer"].float() + 1e-5
        groups, wanted = optimizer.param_groups, [its["momentum_buffer"].clone() for its in optimizer.state.values()]
        hvd.save(where / "run.pt", optimizer=optimizer)
        hvd.load(where / "run.pt", optimizer=optimizer)
        assert optimizer.param_groups is groups
        if hvd.rank() == 0:
            assert all(
                torch.equal(its["momentum_buffer"], each)
                for its, each in zip(optimizer.state.values(), wanted, strict=True)
            )
