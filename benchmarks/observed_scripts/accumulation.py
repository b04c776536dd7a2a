"""Gradients of four batches for one step, under autocast, the losses kept in a list."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, norm_first=True)
encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
model = nn.ModuleDict({"words": nn.Embedding(3000, 128), "encoder": encoder, "head": nn.Linear(128, 5)})
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
losses = []
for step in range(20):
    tokens, labels = torch.randint(3000, (8, 48)), torch.randint(5, (8,))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model["head"](model["encoder"](model["words"](tokens)).mean(1))
        loss = cross_entropy(logits.float(), labels) / 4
    loss.backward()
    losses.append(loss.detach())
    if step % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
print(*(loss.item() for loss in losses))
