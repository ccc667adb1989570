"""Train a model that is sharded over ranks with torch's fully_shard (FSDP2), and save and load a checkpoint.

    hvdliterun -np 2 python examples/torch_fsdp.py

Each rank keeps a part of every weight, gradient and momentum. The checkpoint may be read by another number of ranks:

    hvdliterun -np 2 python examples/torch_fsdp.py --checkpoint /tmp/digits
    hvdliterun -np 4 python examples/torch_fsdp.py --checkpoint /tmp/digits

The data (1,797 images of 8 x 8 pixels) come with scikit-learn: nothing is downloaded.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def network() -> nn.Module:
    """A transformer's encoder that reads an image's rows."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Linear(8, 64),
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.Flatten(),
        nn.Linear(8 * 64, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--checkpoint", help="a folder: read if it is there, and written at the end")
    options = parser.parse_args()

    dist.init_process_group("hvdlite")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(labels))
    train, test = order[360:], order[:360]

    mesh = init_device_mesh("cpu", (size,))
    model = network()
    for block in model[1].layers:  # type: ignore[index]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    held = sum(each.to_local().numel() for each in model.parameters())  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if options.checkpoint and os.path.exists(options.checkpoint):
        weights, state = get_state_dict(model, optimizer)
        found: dict[str, Any] = {"model": weights, "optimizer": state}
        dcp.load(found, checkpoint_id=options.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    for epoch in range(options.epochs):
        for batch in train[torch.randperm(len(train))].split(32 * size)[:-1]:  # equal on all ranks
            mine = batch.chunk(size)[rank]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()
        with torch.no_grad():
            right = (model(images[test]).argmax(1) == labels[test]).float().mean()
        if rank == 0:
            print(f"epoch {epoch + 1:2}/{options.epochs}  held-out accuracy {right:.2%}", flush=True)
    if options.checkpoint:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=options.checkpoint)
    if rank == 0:
        whole = sum(each.numel() for each in model.parameters())
        print(f"{size} processes: held-out accuracy {right:.2%}, {held} of {whole} weights on rank 0")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
