"""Train on real handwritten digits without all-reduce: each rank averages its weights with its neighbours' only.

    hvdliterun -np 4 python examples/torch_decentralized.py
    hvdliterun -np 4 python examples/torch_decentralized.py --topology one-peer

In each step a rank sends its weights to its neighbours, and waits for theirs alone (D-PSGD). The messages travel while
the rank computes gradients. In a one-peer graph it sends to one other rank per step, at distances 1, 2, 4 ... in turn.
The ranks' weights differ a little, so `hvd.average_parameters` comes before evaluation. The data come with
scikit-learn: nothing is downloaded.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import hvdlite.torch as hvd

EPOCHS, BATCH, TESTED = 20, 32, 297
TOPOLOGIES = {"ring": hvd.RingGraph, "grid": hvd.MeshGrid2DGraph, "one-peer": hvd.OnePeerExponential()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", choices=TOPOLOGIES, default="ring", help="who averages with whom")
    options = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(labels))
    test, train = order[:TESTED], order[TESTED:]

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    strategy = hvd.Neighbors(TOPOLOGIES[options.topology])
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), strategy=strategy)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    for _ in range(EPOCHS):
        shuffled = train[torch.randperm(len(train))]  # the same on all ranks
        for rows in shuffled.split(BATCH * hvd.size()):
            mine = rows[hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()

    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    hvd.average_parameters(model)
    apart = (mine - nn.utils.parameters_to_vector(model.parameters())).norm() / mine.norm()
    right = (model(images[test]).argmax(1) == labels[test]).float().mean()
    hvd.print(f"rank 0 was {apart:.2%} away from the average model")
    hvd.print(f"{hvd.size()} processes: held-out accuracy {right:.1%}")


if __name__ == "__main__":
    main()
