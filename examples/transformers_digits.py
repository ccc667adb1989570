"""Train with transformers' Trainer, on CPUs, over MPI.

    HVDLITE_AS_MPI=1 hvdliterun -np 2 python examples/transformers_digits.py

No line of the script names hvdlite. On CPUs the Trainer chooses the backend "mpi", and HVDLITE_AS_MPI=1 makes it mean
hvdlite. The model is a torch module; a model of transformers can take its place. The data (1,797 images of 8 x 8
pixels) come with scikit-learn: nothing is downloaded. transformers: pip install transformers accelerate.
"""

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from transformers import EvalPrediction, Trainer, TrainingArguments


class Digits(nn.Module):
    """A small convolutional network. As the Trainer wants it, it returns the loss, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * 16, 10),
        )  # fmt: skip

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(images)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": (prediction.predictions.argmax(1) == prediction.label_ids).mean().item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--folder", default="transformers_digits", help="where the Trainer writes checkpoints")
    options = parser.parse_args()

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    samples: list[dict[str, Any]] = [
        {"images": image, "labels": int(label)} for image, label in zip(images, data.target, strict=True)
    ]
    arguments = TrainingArguments(
        options.folder, use_cpu=True, num_train_epochs=options.epochs, per_device_train_batch_size=32,
        learning_rate=2e-3, eval_strategy="epoch", save_strategy="epoch", save_total_limit=1, report_to=[],
        disable_tqdm=True, seed=0,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = Trainer(
        Digits(), arguments, train_dataset=samples[360:], eval_dataset=samples[:360], compute_metrics=accuracy
    )
    trainer.train()
    found = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"{arguments.world_size} processes: held-out accuracy {found['eval_accuracy']:.2%}")


if __name__ == "__main__":
    main()
