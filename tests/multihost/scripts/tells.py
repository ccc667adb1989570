"""Each rank tells, in one line of JSON, where it is and what it sees."""

import json
import os
import socket
import sys

import numpy as np

import hvdlite as hvd

hvd.init()
told = {
    "rank": hvd.rank(),
    "local": [hvd.local_rank(), hvd.local_size()],
    "cross": [hvd.cross_rank(), hvd.cross_size()],
    "host": socket.gethostname(),
    "folder": os.getcwd(),
    "sum": float(hvd.allreduce(np.full(1000, hvd.rank() + 1.0, np.float32), op=hvd.Sum)[-1]),
    "env": {name: os.environ.get(name) for name in sys.argv[1:]},
}
sys.stdout.write(json.dumps(told) + "\n")  # in one piece
