"""accelerate, which takes the backend "mpi" on CPUs where torch has it."""

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2 and accelerator.is_main_process == (accelerator.process_index == 0)
assert torch.distributed.get_backend() == "hvdlite", torch.distributed.get_backend()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.randn(64, 8)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), 8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for _ in range(4):
    for inputs, wanted in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), wanted)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
assert losses[-1] < losses[0] / 4, losses
print(f"trained {[parameter.double().sum().item() for parameter in model.parameters()]}", flush=True)
