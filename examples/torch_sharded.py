"""Train with an optimizer whose state is divided among ranks, and save and load a checkpoint.

    hvdliterun -np 2 python examples/torch_sharded.py

With Adam, a model's optimizer state takes twice the memory of its weights. Here each rank keeps a part of that state.
The lines marked (1) differ from a script without sharding. In a checkpoint, each rank writes its part of the state into
a separate file, and any number of ranks may read it. With consolidate=True there is one file, for plain PyTorch, too:

    hvdliterun -np 2 python examples/torch_sharded.py --checkpoint /tmp/digits.pt
    hvdliterun -np 4 python examples/torch_sharded.py --checkpoint /tmp/digits.pt

The data (1,797 images of 8 x 8 pixels) come with scikit-learn: nothing is downloaded.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import hvdlite.torch as hvd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoint", help="a file: read if it is there, and written at the end")
    options = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(data.target)
    order = torch.randperm(len(labels))
    train, test = order[360:], order[:360]

    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), sharded=True)  # (1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    first = 0
    if options.checkpoint:
        first = hvd.load(options.checkpoint, missing_ok=True, model=model, optimizer=optimizer, epoch=0)["epoch"]

    for epoch in range(first, first + options.epochs):
        order = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))]
        share = order[: len(order) // hvd.size() * hvd.size()][hvd.rank() :: hvd.size()]
        for batch in share.split(32):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # gradients are whole on every rank
            optimizer.step()

    right = (model(images[test]).argmax(1) == labels[test]).float().mean()
    state = sum(value.numel() for its in optimizer.state.values() for value in its.values())
    if options.checkpoint:
        hvd.save(options.checkpoint, model=model, optimizer=optimizer, epoch=first + options.epochs)  # (1) on all ranks
    held = hvd.allgather_object(state)
    weights = sum(p.numel() for p in model.parameters())
    hvd.print(f"{weights:,} weights; numbers in the optimizer's state, by rank: {', '.join(f'{n:,}' for n in held)}")
    hvd.print(f"{hvd.size()} processes: held-out accuracy {100 * right:.1f}% after {first + options.epochs} epochs")


if __name__ == "__main__":
    main()
