"""A rank of a job in which one rank fails: `python -m tests.parallel.faults HOW WHO`, under hvdliterun.

Each rank first prints the shared-memory files of its process. The failing rank then prints the time of its failure.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time

import numpy as np

import hvdlite as hvd
from hvdlite import ops

LARGE = 1 << 23


def main(how: str, who: int) -> None:
    if how == "raise-in-backward":
        load_torch()
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair] if how.endswith("astray") else None)
    with open("/proc/self/maps") as maps:
        files = {line.split()[5] for line in maps if "/dev/shm/" in line}
    print("files", *files, flush=True)
    hvd.allreduce(np.ones(3), name="warm-up")
    chosen = who % hvd.size() == hvd.rank()
    if how == "raise-in-backward":
        train(chosen)
    if how.startswith("large-"):
        large(getattr(signal, how.removeprefix("large-")), chosen)
    if how.startswith("no-memory"):
        gather(chosen)
    elif chosen:
        print("fault", time.time(), flush=True)
        FAULTS.get(how, lambda: None)()
    if chosen and how.endswith("astray"):
        hvd.allreduce(np.ones(3), name="metric", process_set=pair)
    if how == "sleep-2" and not chosen:
        catch_the_stall()
        return
    if not (chosen and how == "skip"):
        hvd.allreduce(np.ones(3), name="loss")
    hvd.allreduce(np.ones(3), name="accuracy")


def load_torch() -> None:
    """Import torch before the stall watch looks: on a busy machine that takes longer than these jobs' limits."""
    import torch

    import hvdlite.torch  # noqa: F401

    torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1).step()


def train(chosen: bool) -> None:
    """Train for ever. The chosen rank's third backward raises after some of its gradients have been taken."""
    import torch

    import hvdlite.torch as hvd_torch

    def strike(grad: torch.Tensor) -> torch.Tensor:
        print("fault", time.time(), flush=True)
        raise ValueError("no such luck")

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    optimizer = hvd_torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(10**9):
        optimizer.zero_grad()
        hidden = model[:2](torch.ones(2, 8))
        if chosen and step == 2:
            hidden.register_hook(strike)
        model[2:](hidden).sum().backward()
        optimizer.step()


def large(number: int, chosen: bool) -> None:
    """All-reduce large arrays for ever, and send the chosen rank a signal in the middle."""

    def strike() -> None:
        time.sleep(0.3)
        print("fault", time.time(), flush=True)
        os.kill(os.getpid(), number)

    if chosen:
        threading.Thread(target=strike).start()
    array = np.ones(LARGE, np.float32)
    while True:
        ops.allreduce_(array, name="large")


def gather(chosen: bool) -> None:
    """Gather a gigabyte, for which the chosen rank has no room. It catches the error, and goes on."""
    mine = np.zeros((1 << 30) // hvd.size(), np.uint8)
    if chosen:
        with open("/proc/self/statm") as sizes:
            has = int(sizes.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (has + (1 << 28), -1))
        print("fault", time.time(), flush=True)
    try:
        hvd.allgather(mine, name="rows")
    except MemoryError:
        print("caught MemoryError", flush=True)


def catch_the_stall() -> None:
    """Catch the error, check that no call can follow, and end normally."""
    for call in (lambda: hvd.allreduce(np.ones(3), name="loss"), lambda: hvd.allreduce(np.ones(3), name="next")):
        try:
            call()
        except hvd.StallError as error:
            print("caught", str(error).splitlines()[0], flush=True)
    hvd.shutdown()
    try:
        hvd.init()
    except hvd.HvdliteError as error:
        print("no init:", str(error).splitlines()[0], flush=True)


def endless_loop() -> None:
    while True:
        pass


def fail() -> None:
    raise ValueError("no such luck")


def fail_in_a_thread() -> None:
    threading.Thread(target=fail).start()
    time.sleep(60)


FAULTS = {
    "loop": endless_loop,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(60),
    "sleep-2": lambda: time.sleep(60),
    "skip": lambda: None,
    "raise": fail,
    "raise-in-thread": fail_in_a_thread,
    "exit-0": lambda: sys.exit(0),
    "exit-7": lambda: sys.exit(7),
    "os-exit-0": lambda: os._exit(0),
}

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
