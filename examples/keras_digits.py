"""Train a small convolutional network with Keras' fit on real handwritten digits, on any number of processes.

    hvdliterun -np 2 python examples/keras_digits.py

The data (1,797 images of 8 x 8 pixels) come with scikit-learn: nothing is downloaded. KERAS_BACKEND=torch or jax
chooses another backend. Only the lines marked (1) to (6) differ from a script for one process.
"""

import argparse
import time

import keras
import numpy as np
from sklearn.datasets import load_digits

import hvdlite.keras as hvd


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return 1,437 images to train on and 360 to test with."""
    data = load_digits()
    images, labels = data.images[..., None].astype("float32") / 16, data.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[360:], order[:360]
    return (images[train], labels[train]), (images[test], labels[test])


def network() -> keras.Model:
    layers = keras.layers
    return keras.Sequential([
        keras.Input((8, 8, 1)),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.Conv2D(64, 3, padding="same", activation="relu"), layers.MaxPooling2D(),
        layers.Flatten(), layers.Dropout(0.25), layers.Dense(128, activation="relu"), layers.Dense(10),
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    options = parser.parse_args()

    hvd.init()  # (1)
    hvd.seed(0, per_rank=True)  # (2) each process has its own dropout; (5) makes the weights equal
    (images, labels), test = digits()
    images, labels = hvd.shard((images, labels), even=True)  # (3) all processes must take the same number of steps
    optimizer = keras.optimizers.SGD(options.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer)  # (4)
    model = network()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # (5)
        hvd.callbacks.MetricAverageCallback(),
        # Goyal et al. 2017: the learning rate grows with the number of processes, after a start at the rate of one.
        hvd.callbacks.LearningRateWarmupCallback(options.lr * hvd.size(), warmup_epochs=2),
    ]
    verbose = 2 if hvd.rank() == 0 else 0  # (6)
    began = time.perf_counter()
    model.fit(images, labels, options.batch_size, options.epochs, verbose, callbacks, validation_data=test)
    seconds = time.perf_counter() - began
    _, right = model.evaluate(*test, verbose=0)
    hvd.print(f"{hvd.size()} processes: held-out accuracy {right:.2%}, {seconds:.1f} s")


if __name__ == "__main__":
    main()
