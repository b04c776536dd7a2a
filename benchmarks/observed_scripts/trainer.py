"""The Trainer of the transformers library on a BERT: padding, evaluation, logs."""

import logging
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

logging.disable(logging.WARNING)
torch.manual_seed(0)


class Sentences(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(index)
        tokens = torch.randint(3, 3000, (96,), generator=drawn)
        kept = torch.arange(96) < int(torch.randint(40, 96, (1,), generator=drawn))
        return {"input_ids": tokens * kept, "attention_mask": kept.long(), "labels": tokens.sum() % 2}


sizes = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 3000,
}
model = BertForSequenceClassification(BertConfig(**sizes))
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        num_train_epochs=1,
        per_device_train_batch_size=16,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Sentences(96), eval_dataset=Sentences(32))
    trainer.train()
print(*(entry["loss"] for entry in trainer.state.log_history if "loss" in entry))
