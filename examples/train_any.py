"""Train with any framework: the lines about distribution are the same for PyTorch and for Keras on any backend.

    hvdliterun -np 2 python examples/train_any.py --framework torch
    hvdliterun -np 2 python examples/train_any.py --framework keras --keras-backend tensorflow     (or torch, or jax)

`import hvdlite as hvd` finds the framework from the arguments of each call. The data (1,797 images of handwritten
digits) come with scikit-learn: nothing is downloaded.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import hvdlite as hvd


@dataclass
class Task:
    """What a framework provides: a model, its training and its predictions."""

    model: Any
    optimizer: Any
    step: Callable[[np.ndarray, np.ndarray], float]
    """Train on a batch, and return its loss."""
    classify: Callable[[np.ndarray], np.ndarray]


def torch_task() -> Task:
    import torch
    from torch import nn

    hvd.seed(0)  # the same model on all ranks
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(images: np.ndarray, labels: np.ndarray) -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels))
        loss.backward()
        optimizer.step()
        return loss.item()

    return Task(model, optimizer, step, lambda images: model(torch.from_numpy(images)).argmax(1).numpy())


def keras_task() -> Task:
    import keras

    hvd.seed(0)
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((64,)), dense(256, "relu"), dense(256, "relu"), dense(10)])
    optimizer = keras.optimizers.Adam(2e-3)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return Task(
        model, optimizer, lambda images, labels: float(model.train_on_batch(images, labels)),
        lambda images: model.predict(images, verbose=0).argmax(1),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=["torch", "keras"], default="torch")
    parser.add_argument("--keras-backend", choices=["tensorflow", "torch", "jax"], default="tensorflow")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    options = parser.parse_args()
    os.environ["KERAS_BACKEND"] = options.keras_backend  # Keras reads it when it is imported
    data = load_digits()
    images, labels = data.data.astype("float32") / 16, data.target
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = order[:360], order[360:]

    hvd.init()
    task = torch_task() if options.framework == "torch" else keras_task()
    task.optimizer = hvd.DistributedOptimizer(task.optimizer)
    hvd.broadcast_variables(task.model, root_rank=0)

    each = options.batch_size * hvd.size()
    for epoch in range(options.epochs):
        shuffled = np.random.default_rng(epoch).permutation(train)  # the same in every process
        batches = [shuffled[i : i + each] for i in range(0, len(shuffled) - each + 1, each)]
        losses = [task.step(images[share], labels[share]) for share in map(hvd.shard, batches)]
        loss = hvd.allreduce(np.mean(losses), name="loss")
        hvd.print(f"epoch {epoch + 1:2}/{options.epochs}  loss {loss:.4f}")
    right = np.mean(task.classify(images[test]) == labels[test])
    hvd.print(f"{hvd.size()} processes: held-out accuracy {right:.2%}")


if __name__ == "__main__":
    main()
