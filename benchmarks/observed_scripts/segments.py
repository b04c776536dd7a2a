"""A U-Net that segments images: skips across, an average of the weights, several losses."""

import copy

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, interpolate

torch.manual_seed(0)


def pair(width, wider):
    return nn.Sequential(
        nn.Conv2d(width, wider, 3, 1, 1), nn.GroupNorm(8, wider), nn.SiLU(), nn.Conv2d(wider, wider, 3, 1, 1), nn.SiLU()
    )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([pair(3, 32), pair(32, 64), pair(64, 128)])
        self.up = nn.ModuleList([pair(192, 64), pair(96, 32)])
        self.out = nn.Conv2d(32, 1, 1)

    def forward(self, x):
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
            x = nn.functional.max_pool2d(x, 2) if layer is not self.down[-1] else x
        for layer, skip in zip(self.up, reversed(kept[:-1]), strict=True):
            x = layer(torch.cat([interpolate(x, scale_factor=2.0), skip], 1))
        return self.out(x)


model = UNet()
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(6):
    images, masks = torch.randn(4, 3, 64, 64), (torch.rand(4, 1, 64, 64) > 0.5).float()
    logits = model(images)
    overlap = 1 - 2 * (logits.sigmoid() * masks).sum() / (logits.sigmoid().sum() + masks.sum())
    loss = binary_cross_entropy_with_logits(logits, masks) + overlap
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for one, other in zip(average.parameters(), model.parameters(), strict=True):
            one.lerp_(other, 0.01)
    print(loss.item())
