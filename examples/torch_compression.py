"""Train on real handwritten digits, and send a hundredth of the gradients between hosts.

    hvdliterun -np 4 -H host1:2,host2:2 python examples/torch_compression.py
    hvdliterun -np 2 -x HVDLITE_COMPRESS_WITHIN_HOST=1 python examples/torch_compression.py      on one host

The ranks of a host add their gradients exactly. Hosts exchange the elements with the largest sums; the others wait for
a later step. Only the argument `compression` differs from other training. The data come with scikit-learn: nothing is
downloaded.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import hvdlite.torch as hvd

EPOCHS, BATCH, TESTED = 20, 32, 297


def main() -> None:
    hvd.init()
    torch.manual_seed(0)
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(labels))
    test, train = order[:TESTED], order[TESTED:]

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), compression=hvd.Compression.topk(ratio=0.01)
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    for _ in range(EPOCHS):
        shuffled = train[torch.randperm(len(train))]  # the same on all ranks
        for rows in shuffled.split(BATCH * hvd.size()):
            mine = rows[hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()

    right = (model(images[test]).argmax(1) == labels[test]).float().mean()
    hvd.print(f"{hvd.size()} processes: held-out accuracy {right:.1%}")


if __name__ == "__main__":
    main()
