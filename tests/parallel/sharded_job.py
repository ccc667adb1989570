"""A job that trains with a sharded optimizer from its last checkpoint on: `python -m tests.parallel.sharded_job ...`.

It prints the digest of the model and all state after it has loaded, and at the end.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hvdlite.torch as hvd
from tests.parallel.common import digest
from tests.parallel.ranks.torch_sharded import adam, backward, folder, model


def killing(change: Callable[..., Any], number: int) -> Callable[..., Any]:
    """A function that kills this process instead of its call of this number."""

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal number
        number -= 1
        if not number:
            os.kill(os.getpid(), signal.SIGKILL)
        return change(*args, **kwargs)

    return call


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--steps", type=int, default=0, help="how many steps there are in all")
    parser.add_argument("--save", type=int, nargs="*", default=(), help="after which steps to save")
    parser.add_argument("--kill", nargs=3, help="the rank that dies in the last save, at which call, of what")
    options = parser.parse_args()

    hvd.init()
    net = model()
    optimizer = hvd.DistributedOptimizer(adam(net.parameters()), sharded=True)
    hvd.broadcast_parameters(net.state_dict(), 0)
    first = hvd.load(options.path, missing_ok=True, model=net, optimizer=optimizer, step=0)["step"]

    def tell(what: str) -> None:
        path = folder() / "whole.pt"
        hvd.save(path, model=net, optimizer=optimizer, consolidate=True)
        state = torch.load(path, weights_only=True)["optimizer"]["state"]
        tensors = [value for _, its in sorted(state.items()) for _, value in sorted(its.items())]
        if hvd.rank() == 0:
            print(what, first, "-".join(digest([*net.parameters(), *tensors]).split()), flush=True)

    tell("loaded")
    for step in range(first, options.steps):
        optimizer.zero_grad()
        backward(net, step)
        optimizer.step()
        if step + 1 in options.save:
            if options.kill and step + 1 == options.save[-1]:
                rank, number, name = options.kill
                owner: Any = os if hasattr(os, name) and name != "unlink" else Path
                if hvd.rank() == int(rank):
                    setattr(owner, name, killing(getattr(owner, name), int(number)))
            hvd.save(options.path, model=net, optimizer=optimizer, step=step + 1)
            tell(f"saved {step + 1}")
    tell("ended")


if __name__ == "__main__":
    main()
