"""Images and texts in one space, as CLIP: two encoders, one loss over all pairs."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

torch.manual_seed(0)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 192, 8, 8)
        layer = {"nhead": 6, "dim_feedforward": 768, "batch_first": True, "norm_first": True, "dropout": 0.0}
        self.image = nn.TransformerEncoder(nn.TransformerEncoderLayer(192, **layer), 3, enable_nested_tensor=False)
        self.words = nn.Embedding(2000, 192)
        self.text = nn.TransformerEncoder(nn.TransformerEncoderLayer(192, **layer), 2, enable_nested_tensor=False)
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, images, tokens):
        seen = self.image(self.patches(images).flatten(2).transpose(1, 2)).mean(1)
        read = self.text(self.words(tokens)).mean(1)
        return self.scale.exp() * normalize(seen, dim=-1) @ normalize(read, dim=-1).t()


model = Towers()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(6):
    logits = model(torch.randn(16, 3, 64, 64), torch.randint(2000, (16, 32)))
    labels = torch.arange(16)
    loss = (cross_entropy(logits, labels) + cross_entropy(logits.t(), labels)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
