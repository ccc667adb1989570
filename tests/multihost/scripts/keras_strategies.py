"""A strategy that averages gradients within hosts, with Keras on PyTorch; also after a restart of communication."""

import os

os.environ["KERAS_BACKEND"] = "torch"

from dataclasses import dataclass

import keras
import numpy as np

import hvdlite.keras as hvd
from hvdlite.elastic import start_again
from hvdlite.strategies import Reach, Running, Site, Strategy

hvd.init()


@dataclass(frozen=True)
class WithinHosts(Strategy):
    """Averages gradients within hosts in updates 1, 3, 5, ..."""

    def start(self, site: Site) -> Running:
        return Running()

    def reach(self, step: int) -> Reach:
        return Reach.HOST if step % 2 else Reach.NONE

    @property
    def reaches(self) -> frozenset[Reach]:
        return frozenset([Reach.HOST, Reach.NONE])


variable = keras.Variable(np.zeros(2, "float32"))
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), strategy=WithinHosts())
hosts = hvd.allgather_object(os.uname().nodename)
mates = [rank for rank, host in enumerate(hosts) if host == os.uname().nodename]
wanted = 0.0
for step in range(1, 7):
    if step == 4:
        start_again()
    optimizer.apply([keras.ops.full((2,), float(hvd.rank()))], [variable])
    wanted -= float(np.mean(mates)) if step % 2 else hvd.rank()
    found = keras.ops.convert_to_numpy(variable)
    assert (found == wanted).all(), (step, found, wanted)
if hvd.rank() == 0:
    print(*hosts)
