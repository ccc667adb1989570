"""Train with a custom TensorFlow loop on real handwritten digits, on any number of processes.

    hvdliterun -np 2 python examples/tensorflow_tape.py

The data come with scikit-learn: nothing is downloaded. Only the lines marked (1) to (6) differ from a script for one
process.
"""

import argparse
import time

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import hvdlite.tensorflow as hvd


def digits() -> tuple[tf.data.Dataset, tuple[tf.Tensor, tf.Tensor]]:
    """Return 1,437 images to train on and 360 to test with."""
    data = load_digits()
    images, labels = (data.images[..., None] / 16).astype("float32"), data.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[360:], order[:360]
    return tf.data.Dataset.from_tensor_slices((images[train], labels[train])), (images[test], labels[test])


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
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    options = parser.parse_args()

    hvd.init()  # (1)
    train, (images, labels) = digits()
    train = hvd.shard(train, even=True)  # (2)
    batches = train.shuffle(2000, seed=hvd.rank()).batch(options.batch_size, drop_remainder=True)
    model = network()
    optimizer = keras.optimizers.Adam(1e-3 * hvd.size() ** 0.5)  # (3)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        tape = hvd.DistributedGradientTape(tape)  # (4)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    hvd.broadcast_variables(model, root_rank=0)  # (5)
    began = time.perf_counter()
    for epoch in range(options.epochs):
        losses = [step(x, y) for x, y in batches]
        mean = hvd.allreduce(tf.reduce_mean(losses))  # (6) over all processes
        hvd.print(f"epoch {epoch + 1:2}/{options.epochs}  loss {mean:.4f}")
    seconds = time.perf_counter() - began
    right = np.mean(np.argmax(model(images), 1) == labels)
    hvd.print(f"{hvd.size()} processes: held-out accuracy {right:.2%}, {seconds:.1f} s")


if __name__ == "__main__":
    main()
