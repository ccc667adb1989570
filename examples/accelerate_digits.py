"""Train with Hugging Face's accelerate, on CPUs, over MPI.

    HVDLITE_AS_MPI=1 hvdliterun -np 2 python examples/accelerate_digits.py

No line of the script names hvdlite. On CPUs accelerate chooses the backend "mpi", and HVDLITE_AS_MPI=1 makes it mean
hvdlite. The data (1,797 images of handwritten digits) come with scikit-learn: nothing is downloaded. accelerate: pip
install accelerate.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    set_seed(0)
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    train, test = TensorDataset(images[360:], labels[360:]), TensorDataset(images[:360], labels[:360])
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=100)
    )

    for epoch in range(options.epochs):
        for inputs, wanted in train_loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(inputs), wanted))
            optimizer.step()
        right: list[torch.Tensor] = []
        with torch.no_grad():
            for inputs, wanted in test_loader:
                right.append(accelerator.gather_for_metrics(model(inputs).argmax(1) == wanted))
        accuracy = torch.cat(right).float().mean()
        accelerator.print(f"epoch {epoch + 1:2}/{options.epochs}  held-out accuracy {accuracy:.2%}")
    accelerator.print(f"{accelerator.num_processes} processes: held-out accuracy {accuracy:.2%}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
