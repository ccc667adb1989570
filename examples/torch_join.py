"""Train on data of different sizes: every process has its own.

    hvdliterun -np 2 python examples/torch_join.py

Each process holds the handwritten digits of its "hospital", and trains on all of them in every epoch. Rank 0 has the
fewest batches. A rank without further batches calls `hvd.join()`. The other ranks go on, and average with zeros from
that rank. When all ranks have joined, they all take the weights of the last one. The data come with scikit-learn:
nothing is downloaded.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvdlite.torch as hvd

EPOCHS, BATCH, TESTED = 25, 32, 297


def main() -> None:
    hvd.init()
    torch.manual_seed(0)
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(labels))
    test, train = order[:TESTED], order[TESTED:]
    # Rank r has r+1 shares of the images.
    shares = torch.arange(hvd.size()).repeat_interleave(torch.arange(hvd.size()) + 1)
    mine = train[shares[torch.arange(len(train)) % len(shares)] == hvd.rank()]
    loader = DataLoader(TensorDataset(images[mine], labels[mine]), BATCH, shuffle=True)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    for _ in range(EPOCHS):
        for batch, target in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), target).backward()
            optimizer.step()
        last = hvd.join()  # waits for the ranks with more batches
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        # A shorter way: `with hvd.uneven_inputs(model, optimizer):` around the loop.

    batches = hvd.allgather(torch.tensor([len(loader)])).tolist()
    right = (model(images[test]).argmax(1) == labels[test]).float().mean()
    hvd.print(f"batches per rank and epoch: {batches}; held-out accuracy {right:.1%}")


if __name__ == "__main__":
    main()
