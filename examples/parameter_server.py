"""Train on real handwritten digits with a parameter server: no rank waits for a slower one.

    hvdliterun -np 4 python examples/parameter_server.py
    hvdliterun -np 4 python examples/parameter_server.py --slow 0.02

The parameters lie in slices, and each rank is the server of one. After an update a rank sends its change of each slice
to the server, and gets the slice's present values back. `age` bounds how old the weights of an update may be. With
`--slow` rank 0 sleeps so many seconds per batch. `hvd.WorkQueue` deals batches to the rank that asks, so the others
train on more batches, and all end together. The data come with scikit-learn: nothing is downloaded.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

import hvdlite.torch as hvd

EPOCHS, BATCH, TESTED = 30, 32, 297


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--age", type=int, default=4, help="the bound, in updates of each rank")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds that rank 0 sleeps per batch")
    options = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(labels))
    test, train = order[:TESTED], order[TESTED:]

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    strategy = hvd.BoundedStaleness(age=options.age)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), strategy=strategy)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    queue, batches = hvd.WorkQueue(len(train), BATCH), 0
    for _ in range(EPOCHS):
        for indices in queue:
            mine, batches = train[indices], batches + 1
            time.sleep(options.slow if hvd.rank() == 0 else 0.0)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()

    hvd.average_parameters(model)
    everyones = hvd.allgather_object((batches, max(hvd.staleness(), default=0)))
    right = (model(images[test]).argmax(1) == labels[test]).float().mean()
    hvd.print(f"batches by rank: {[count for count, _ in everyones]}; stalest update: {max(s for _, s in everyones)}")
    hvd.print(f"{hvd.size()} processes: held-out accuracy {right:.1%}")


if __name__ == "__main__":
    main()
