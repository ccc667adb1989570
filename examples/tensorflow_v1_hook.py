"""Train with the TensorFlow 1 script of Horovod's tutorials on real handwritten digits: only its import differs.

    hvdliterun -np 2 python examples/tensorflow_v1_hook.py

The data come with scikit-learn: nothing is downloaded.
"""

import argparse

import numpy as np
import tensorflow.compat.v1 as tf
from sklearn.datasets import load_digits

import hvdlite.tensorflow as hvd

tf.disable_eager_execution()


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return 1,437 images to train on and 360 to test with."""
    data = load_digits()
    images, labels = data.data.astype("float32") / 16, data.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[360:], order[:360]
    return images[train], labels[train], images[test], labels[test]


def layer(name: str, shape: list[int]) -> tuple[tf.Variable, tf.Variable]:
    """Weights and biases of one layer."""
    weights = tf.get_variable(f"{name}_w", shape, initializer=tf.glorot_uniform_initializer())
    return weights, tf.get_variable(f"{name}_b", shape[-1:], initializer=tf.zeros_initializer())


def network(images: tf.Tensor) -> tf.Tensor:
    """A convolution and two fully connected layers."""
    w1, b1 = layer("convolution", [3, 3, 1, 32])
    w2, b2 = layer("hidden", [4 * 4 * 32, 128])
    w3, b3 = layer("output", [128, 10])
    features = tf.nn.relu(tf.nn.conv2d(tf.reshape(images, [-1, 8, 8, 1]), w1, strides=1, padding="SAME") + b1)
    pooled = tf.reshape(tf.nn.max_pool2d(features, 2, 2, "VALID"), [-1, 4 * 4 * 32])
    return tf.nn.relu(pooled @ w2 + b2) @ w3 + b3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200, help="of all processes together")
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    options = parser.parse_args()
    train_images, train_labels, test_images, test_labels = digits()

    # Horovod: initialize Horovod.
    hvd.init()

    images = tf.placeholder(tf.float32, [None, 64])
    labels = tf.placeholder(tf.int64, [None])
    logits = network(images)
    loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
    accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), labels), tf.float32))

    # Horovod: adjust learning rate based on number of workers.
    opt = tf.train.MomentumOptimizer(0.02 * hvd.size(), 0.9)

    # Horovod: add Horovod Distributed Optimizer.
    opt = hvd.DistributedOptimizer(opt)

    global_step = tf.train.get_or_create_global_step()
    train_op = opt.minimize(loss, global_step=global_step)

    hooks = [
        # Horovod: broadcast initial variable states from rank 0 to all other processes.
        hvd.BroadcastGlobalVariablesHook(0),
        # Horovod: adjust number of steps based on number of workers.
        tf.train.StopAtStepHook(last_step=options.steps // hvd.size()),
    ]

    # Horovod: pin GPU to be used to process local rank (one GPU per process).
    config = tf.ConfigProto()
    config.gpu_options.allow_growth = True
    config.gpu_options.visible_device_list = str(hvd.local_rank())

    rows = np.random.default_rng(hvd.rank())
    right = 0.0
    with tf.train.MonitoredTrainingSession(hooks=hooks, config=config) as session:
        while not session.should_stop():
            chosen = rows.integers(0, len(train_labels), options.batch_size)
            feed = {images: train_images[chosen], labels: train_labels[chosen]}
            step, _ = session.run([global_step, train_op], feed)
            if not session.should_stop() and step % 100 == 0:
                right = session.run(accuracy, {images: test_images, labels: test_labels})
                if hvd.rank() == 0:
                    print(f"step {step}: held-out accuracy {right:.2%}", flush=True)
    if hvd.rank() == 0:
        print(f"{hvd.size()} processes: held-out accuracy {right:.2%}")


if __name__ == "__main__":
    main()
