"""Train on real handwritten digits, and average weights every few steps instead of gradients in every step.

    hvdliterun -np 2 python examples/torch_local_sgd.py
    hvdliterun -np 2 python examples/torch_local_sgd.py --diloco

Use it where the network is slow: between the averages ranks send nothing, and wait for nobody. Only the argument
`strategy` differs from other training, and `hvd.average_parameters` before evaluation: until then each rank has weights
of its own. The data come with scikit-learn: nothing is downloaded.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import hvdlite.torch as hvd

EPOCHS, BATCH, TESTED = 20, 32, 297


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=8, help="steps between two averages")
    parser.add_argument("--diloco", action="store_true", help="apply the average change with an outer optimizer")
    options = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(labels))
    test, train = order[:TESTED], order[TESTED:]

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    strategy = hvd.DiLoCo(options.every) if options.diloco else hvd.LocalSGD(options.every)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), strategy=strategy)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    for _ in range(EPOCHS):
        shuffled = train[torch.randperm(len(train))]  # the same on all ranks
        for rows in shuffled.split(BATCH * hvd.size()):
            mine = rows[hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()

    hvd.average_parameters(model)
    right = (model(images[test]).argmax(1) == labels[test]).float().mean()
    hvd.print(f"{hvd.size()} processes: held-out accuracy {right:.1%}")


if __name__ == "__main__":
    main()
