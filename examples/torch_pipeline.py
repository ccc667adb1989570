"""Train a model whose layers are spread over ranks: torch's pipeline parallelism, with the schedule 1F1B.

    hvdliterun -np 2 python examples/torch_pipeline.py

Each rank has a part of the layers. A batch goes through the ranks in pieces, and all ranks work on pieces at a time.
The data (1,797 images of 8 x 8 pixels) come with scikit-learn: nothing is downloaded.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

PIECES = 4
BATCH = 64


def layers() -> list[nn.Module]:
    hidden = [nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(4)]
    return [nn.Sequential(nn.Linear(64, 128), nn.ReLU()), *hidden, nn.Linear(128, 10)]


def part(rank: int, size: int) -> nn.Module:
    """The layers of one rank."""
    torch.manual_seed(0)
    every = layers()
    bounds = [len(every) * number // size for number in (rank, rank + 1)]
    return nn.Sequential(*every[slice(*bounds)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    dist.init_process_group("hvdlite")
    rank, size = dist.get_rank(), dist.get_world_size()
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[5 * BATCH :], order[: 5 * BATCH]

    model = part(rank, size)
    stage = PipelineStage(model, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=PIECES, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    shuffle = torch.Generator().manual_seed(1)  # equal on all ranks: the first has the images, the last the labels

    right = torch.zeros(1)
    for epoch in range(options.epochs):
        model.train()
        for batch in train[torch.randperm(len(train), generator=shuffle)].split(BATCH):
            if len(batch) < BATCH:
                continue
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(images[batch])
            elif rank == size - 1:
                schedule.step(target=labels[batch])
            else:
                schedule.step()
            optimizer.step()
        right.zero_()
        with torch.no_grad():
            for batch in test.split(BATCH):
                values = images[batch] if rank == 0 else torch.empty(BATCH, 128)
                if rank > 0:
                    dist.recv(values, rank - 1)
                found = model(values)
                if rank < size - 1:
                    dist.send(found, rank + 1)
                else:
                    right += (found.argmax(1) == labels[batch]).sum()
        if rank == size - 1 and (epoch + 1) % 5 == 0:
            print(f"epoch {epoch + 1:2}/{options.epochs}  held-out accuracy {right.item() / len(test):.2%}", flush=True)
    dist.broadcast(right, size - 1)
    if rank == 0:
        print(f"{size} processes: held-out accuracy {right.item() / len(test):.2%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
