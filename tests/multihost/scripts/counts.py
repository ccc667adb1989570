"""Counts steps, with an all-reduce in each, until SIGTERM: `python counts.py FILE`. FILE keeps the number of steps. If
FILE exists, the script goes on from there for five steps more."""

import signal
import sys
import time
from pathlib import Path
from types import FrameType

import numpy as np

import hvdlite as hvd

stopped = 0.0


def stop(number: int, frame: FrameType | None) -> None:
    global stopped
    stopped = 1.0


signal.signal(signal.SIGTERM, stop)
checkpoint = Path(sys.argv[1])
hvd.init()
step = hvd.broadcast_object(int(checkpoint.read_text()) if checkpoint.exists() else 0)
last = step + 5 if step else None
hvd.print(f"{hvd.size()} ranks begin at step {step}", flush=True)
told = 0.0
while step != last and not told:
    step += 1
    time.sleep(0.05)
    told = float(hvd.allreduce(np.array([stopped]), op=hvd.Max)[0])
if hvd.rank() == 0:
    checkpoint.write_text(str(step))
hvd.print(f"saved step {step}", flush=True)
