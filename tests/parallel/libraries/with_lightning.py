"""Lightning's Trainer and Fabric."""

import csv
import os
import sys
import tempfile
import warnings

import lightning
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy as FabricStrategy
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

from hvdlite.torch.lightning import JobMetricsCallback

warnings.simplefilter("ignore")
ON = {"accelerator": "cpu", "devices": int(os.environ["LOCAL_WORLD_SIZE"])}


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


torch.manual_seed(1)
x = torch.randn(64, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
model, folder = Model(), tempfile.mkdtemp()
trainer = lightning.Trainer(
    strategy=DDPStrategy(process_group_backend="hvdlite"), max_epochs=5, default_root_dir=folder,
    enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1, callbacks=[JobMetricsCallback()],
    logger=CSVLogger(folder), **ON,
)  # fmt: skip
trainer.fit(model, DataLoader(data, 8))
assert torch.distributed.get_backend() == "hvdlite" and trainer.world_size == 2
assert trainer.callback_metrics["loss"] < 1
rank, saved = trainer.global_rank, [file for _, _, files in os.walk(folder) for file in files]
assert trainer.is_global_zero == (rank == 0) and bool(saved) == (rank == 0), saved

if rank == 0:
    with open(os.path.join(trainer.logger.log_dir, "metrics.csv")) as file:
        steps = [float(row["hvdlite/steps"]) for row in csv.DictReader(file) if row.get("hvdlite/steps")]
    assert steps == [4.0] * 5, steps

fabric = Fabric(strategy=FabricStrategy(process_group_backend="hvdlite"), **ON)
fabric.launch()
plain = Model().layer
wrapped, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), 0.1))
for batch in fabric.setup_dataloaders(DataLoader(data, 8)):
    optimizer.zero_grad()
    fabric.backward(torch.nn.functional.mse_loss(wrapped(batch[0]), batch[1]))
    optimizer.step()
assert fabric.global_rank == rank
weights = [parameter.double().sum().item() for parameter in (*model.parameters(), *plain.parameters())]
print(f"trained {weights}", flush=True)
sys.exit(0)
