"""A short training with hvdlite's everyday helpers. `everyday_before.py` does the same by hand, and prints the same.

    hvdliterun -np 2 python examples/everyday.py

The data (1,797 images of handwritten digits) come with scikit-learn: nothing is downloaded.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvdlite.torch as hvd

EPOCHS, BATCH, TESTED = 6, 32, 296


@hvd.rank_zero_only
def describe(model: nn.Module) -> None:
    print(f"{sum(each.numel() for each in model.parameters())} weights on each of {hvd.size()} processes", flush=True)


def main() -> None:
    hvd.init()
    log = hvd.logger()
    hvd.seed(0)
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    train, test = TensorDataset(images[TESTED:], labels[TESTED:]), TensorDataset(images[:TESTED], labels[:TESTED])
    loader = hvd.shard(DataLoader(train, BATCH, shuffle=True))
    held_out = hvd.shard(DataLoader(test, 100))

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
    describe(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    log.info("%d steps in each epoch", len(loader))
    hvd.seed(0, per_rank=True)  # each rank drops out other units

    for epoch in range(EPOCHS):
        loss, right = hvd.Metric(), hvd.Metric()
        for batch, target in loader:
            optimizer.zero_grad()
            error = nn.functional.cross_entropy(model(batch), target)
            error.backward()
            optimizer.step()
            loss.update(error, len(target))
        model.eval()
        for batch, target in held_out:
            right.update((model(batch).argmax(1) == target).double().mean(), len(target))
        model.train()
        found = hvd.average_metrics({"loss": loss, "accuracy": right})
        hvd.print(f"epoch {epoch + 1}: loss {found['loss']:.4f}, held-out accuracy {found['accuracy']:.2%}")


if __name__ == "__main__":
    main()
