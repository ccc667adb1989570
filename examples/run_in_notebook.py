# %% [markdown]
# Start ranks from Python or a notebook, and get their results as a list.
#
# Each part that begins with `# %%` is a cell. Copy the cells into a notebook, or open the file in an editor that
# knows this format (VS Code, Spyder, PyCharm). As a script: `python examples/run_in_notebook.py`, without hvdliterun.

# %%
import hvdlite


# %% The function that every rank runs. It imports what it needs, and calls hvd.init() itself.
def train(lr: float, epochs: int) -> dict:
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import hvdlite.torch as hvd

    hvd.init()
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    loader = hvd.shard(DataLoader(TensorDataset(images[360:], labels[360:]), batch_size=32, shuffle=True))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    losses = []
    for epoch in range(epochs):
        loss = hvd.Metric()
        for batch, target in loader:
            optimizer.zero_grad()
            error = nn.functional.cross_entropy(model(batch), target)
            error.backward()
            optimizer.step()
            loss.update(error, len(target))
        losses.append(loss.compute())  # over all ranks
        hvd.print(f"epoch {epoch + 1}: loss {losses[-1]:.4f}")
    accuracy = (model(images[:360]).argmax(1) == labels[:360]).double().mean().item()
    weights = {name: value.numpy() for name, value in model.state_dict().items()} if hvd.rank() == 0 else None
    return {"rank": hvd.rank(), "losses": losses, "accuracy": accuracy, "weights": weights}


# %% Start two ranks, and wait for both. The arguments and the results are pickled.
if __name__ == "__main__":
    results = hvdlite.run(train, args=(0.05,), kwargs={"epochs": 5}, np=2)
    for each in results:
        print(f"rank {each['rank']}: held-out accuracy {each['accuracy']:.2%}")
    print({name: value.shape for name, value in results[0]["weights"].items()})
