"""A LightningModule: its trainer has the loop."""

import logging
import warnings

import lightning.pytorch as lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
    logging.getLogger(name).setLevel(logging.ERROR)
torch.manual_seed(0)


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        wide = [nn.Linear(512, 1024), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(1024)]
        self.model = nn.Sequential(
            *wide, nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10)
        )

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = cross_entropy(self.model(inputs), targets)
        print(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


batches = DataLoader(TensorDataset(torch.randn(2048, 512), torch.randint(10, (2048,))), batch_size=256)
quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
lightning.Trainer(max_epochs=1, accelerator="cpu", **quiet).fit(Classifier(), batches)
