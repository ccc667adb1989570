"""Train with Lightning's Trainer: as on any machine, but for the name of the backend.

    hvdliterun -np 2 python examples/lightning_digits.py

hvdliterun starts the ranks, and Lightning finds them. Rank 0 alone shows the bar and writes the checkpoint. The data
(1,797 images of 8 x 8 pixels) come with scikit-learn: nothing is downloaded. Lightning: pip install lightning.
"""

import argparse
import os

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Digits(lightning.LightningModule):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * 16, 10),
        )  # fmt: skip

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        images, labels = batch
        right = (self.layers(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, prog_bar=True, sync_dist=True)  # the average over all ranks' images

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,437 images to train on and 360 to test with."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument(
        "--folder", default="lightning_digits", help="where the checkpoint of the best epoch is written"
    )
    options = parser.parse_args()

    ranks_of_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # hvdliterun sets it
    lightning.seed_everything(0)
    best = ModelCheckpoint(options.folder, monitor="accuracy", mode="max")
    trainer = lightning.Trainer(
        accelerator="cpu", strategy=DDPStrategy(process_group_backend="hvdlite"), devices=ranks_of_host,
        num_nodes=int(os.environ.get("WORLD_SIZE", "1")) // ranks_of_host, max_epochs=options.epochs, callbacks=[best],
        logger=False,
    )  # fmt: skip
    train, test = digits()
    trainer.fit(Digits(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=180))
    if trainer.is_global_zero:
        accuracy = trainer.callback_metrics["accuracy"]
        print(f"{trainer.world_size} processes: held-out accuracy {accuracy:.2%}, best epoch: {best.best_model_path}")


if __name__ == "__main__":
    main()
