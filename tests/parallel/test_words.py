"""Errors name the user's call as the user wrote it: a call of one rank alone fails once the others have left."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.parallel import jobs

INTERNAL = re.compile(r"\b(lane|plan|bucket|noname|signature)\b|(optimizer|tape|object|variables)\.\d")
COLLECTIVE = "rank 1 shut down, ended, or removed the process set, without calling it. It is collective: every rank must call it. [HVD910]"

SCRIPT = """
SETUP
calls = CALLS
if hvd.rank() == 0:
    for number, call in enumerate(calls):
        try:
            exec(call)
        except Exception as error:
            print("@told", number, str(error).replace(chr(10), " "), flush=True)
"""
TORCH = """
import torch, hvdlite.torch as hvd
hvd.init(process_sets="dynamic")
torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), named_parameters=model.named_parameters())
"""
KERAS = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import numpy as np, keras, hvdlite.keras as hvd
hvd.init()
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
x, y = np.ones((2, 2)), np.ones((2, 1))
"""


TORCH_CALLS = {
    "hvd.DistributedOptimizer(torch.optim.Adam(torch.nn.Linear(2, 2).parameters()))":
        f"hvd.DistributedOptimizer(Adam): {COLLECTIVE}",
    "hvd.broadcast_parameters(model.state_dict(), 0)": f"hvd.broadcast_parameters: {COLLECTIVE}",
    "hvd.broadcast_optimizer_state(optimizer, 0)": f"hvd.broadcast_optimizer_state: {COLLECTIVE}",
    "hvd.broadcast_object(1)": f"hvd.broadcast_object: {COLLECTIVE}",
    "hvd.allgather_object(1, name='args')": f"hvd.allgather_object(name='args'): {COLLECTIVE}",
    "hvd.add_process_set([0])": f"hvd.add_process_set: {COLLECTIVE}",
    "hvd.allreduce(torch.ones(1))": f"allreduce (unnamed call 1): {COLLECTIVE}",
    "hvd.SyncBatchNorm(2)(torch.ones(3, 2))": f"hvd.SyncBatchNorm: {COLLECTIVE}",
    "hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), None, hvd.Sum)()": f"sparse_allreduce: {COLLECTIVE}",
    "model(torch.ones(1, 2)).sum().backward()": "gradients of DistributedOptimizer(SGD): rank 1 shut down",
    "hvd.recv(1)": "message 1 from rank 1 to rank 0: rank 1 shut down",
}  # fmt: skip
KERAS_CALLS = {
    "model.save('PATH/best.keras'); hvd.load_model('PATH/best.keras')": f"hvd.load_model('PATH/best.keras'): {COLLECTIVE}",
    "hvd.DistributedOptimizer(keras.optimizers.Adam())": f"hvd.DistributedOptimizer(Adam): {COLLECTIVE}",
    "model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)], verbose=0)":
        f"hvd.callbacks.BroadcastGlobalVariablesCallback: {COLLECTIVE}",
    "model.fit(x, y, verbose=0)": "gradients of DistributedOptimizer(SGD): rank 1 shut down",
}  # fmt: skip


def told(setup: str, calls: list[str]) -> dict[int, str]:
    """The errors that rank 0 gets if it alone makes these calls, by their numbers."""
    result = jobs.run(2, ["-c", SCRIPT.replace("SETUP", setup).replace("CALLS", repr(calls))])
    lines = [line.partition("@told ")[2] for line in result.output.splitlines() if "@told" in line]
    return {int(number): text for number, _, text in (line.partition(" ") for line in lines)}


@pytest.mark.parametrize(("setup", "calls"), [
    pytest.param(TORCH, TORCH_CALLS, id="torch"),
    pytest.param(KERAS, KERAS_CALLS, id="keras", marks=pytest.mark.full),
])  # fmt: skip
def test_what_one_rank_calls_alone_is_named_as_it_was_called(setup: str, calls: dict[str, str], tmp_path: Path) -> None:
    path = str(tmp_path)
    found = told(setup, [call.replace("PATH", path) for call in calls])
    for number, (call, words) in enumerate(calls.items()):
        text = found[number]
        assert words.replace("PATH", path) in text and not INTERNAL.search(text.replace(path, "")), (call, text)


UNCAUGHT = """
import sys, threading, traceback
import torch, hvdlite.torch as hvd

def step():
    model(torch.ones(1, 2)).sum().backward()

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
if hvd.rank() == 0:
    try:
        step()
    except hvd.HorovodInternalError as error:
        print("@caught", len(traceback.extract_tb(error.__traceback__)), flush=True)
        again = threading.Thread(target=step)
        again.start()
        again.join()
"""


@pytest.mark.parametrize(("level", "frames"), [("", 2), ("debug", 5)])
def test_tracebacks_show_the_users_frames_and_the_last_of_ours(level: str, frames: int, tmp_path: Path) -> None:
    """The call is in a thread, where the step is the only frame of the user. A caught exception has all frames."""
    script = tmp_path / "script.py"
    script.write_text(UNCAUGHT)
    result = jobs.run(2, [str(script)], {"HVDLITE_LOG_LEVEL": level} if level else {})
    assert result.code == 1 and "hvdlite: rank 0 failed: ShutdownError in thread" in result.output, result.output
    (caught,) = [int(line.split()[1]) for line in result.output.splitlines() if line.startswith("@caught")]
    _, _, printed = result.output.partition("Exception in thread")
    shown = printed.count('  File "')
    assert caught >= 9 and (shown == frames if not level else shown >= frames), result.output
    assert ("frames inside hvdlite and libraries are left out" in printed) == (not level)
