"""Train a Keras model in two parts on different processes, and its parts on several processes each.

    hvdliterun -np 2 python examples/keras_chain.py        # each process has one part
    hvdliterun -np 4 python examples/keras_chain.py        # each part is on two processes, which share the data

The data (1,797 images of 8 x 8 pixels) come with scikit-learn: nothing is downloaded. KERAS_BACKEND=torch chooses
PyTorch. Every process runs the same lines; only (1) to (3) differ from a script for one process.
"""

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits

import hvdlite.keras as hvd

layers = keras.layers


def body() -> keras.Model:
    return keras.Sequential([
        keras.Input((8, 8, 1)), layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.Conv2D(64, 3, padding="same", activation="relu"), layers.MaxPooling2D(), layers.Flatten(),
    ], name="body")  # fmt: skip


def head() -> keras.Model:
    return keras.Sequential([keras.Input((1024,)), layers.Dense(128, activation="relu"), layers.Dense(10)], name="head")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--save", metavar="FOLDER", help="where the parts' files go: body.keras and head.keras")
    options = parser.parse_args()

    hvd.init(process_sets="dynamic")
    keras.utils.set_random_seed(0)
    columns = hvd.size() // 2
    places = [hvd.add_process_set(range(columns)), hvd.add_process_set(range(columns, 2 * columns))]  # (1)
    data = load_digits()
    images, labels = data.images[..., None].astype("float32") / 16, data.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[360:], order[:360]
    share = train[: len(train) // columns * columns][hvd.rank() % columns :: columns]  # (2)

    model = hvd.Chain(list(zip(places, (body, head), strict=True)))  # (3) each process makes its own part only
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), loss, metrics=["accuracy"])
    model.fit(images[share], labels[share], 32 // columns, options.epochs, verbose=2 if hvd.rank() == 0 else 0)
    _, right = model.evaluate(images[test], labels[test], verbose=0)
    hvd.print(f"{hvd.size()} processes: held-out accuracy {right:.2%}")
    if options.save and hvd.rank() % columns == 0:
        for part in model.parts.values():
            part.save(f"{options.save}/{part.name}.keras")


if __name__ == "__main__":
    main()
