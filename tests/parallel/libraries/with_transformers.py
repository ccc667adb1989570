"""transformers' Trainer, on a tiny model that is made from a config."""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(0)
config = BertConfig(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50,
)  # fmt: skip
model = BertForSequenceClassification(config)
data = [{"input_ids": torch.randint(0, 50, (6,)), "labels": index % 2} for index in range(32)]
arguments = TrainingArguments(
    tempfile.mkdtemp(), use_cpu=True, per_device_train_batch_size=4, num_train_epochs=1, report_to=[],
    save_strategy="no", disable_tqdm=True,
)  # fmt: skip
Trainer(model, arguments, train_dataset=data).train()
assert arguments.world_size == 2 and torch.distributed.get_backend() == "hvdlite"
print(f"trained {[parameter.double().sum().item() for parameter in model.parameters()]}", flush=True)
