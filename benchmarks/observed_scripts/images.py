"""A classifier of images: convolutions, batch normalisation, SGD with momentum, evaluation between."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width, wider, stride):
        super().__init__()
        self.one = nn.Conv2d(width, wider, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(wider, wider, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(wider), nn.BatchNorm2d(wider)])
        self.short = nn.Conv2d(width, wider, 1, stride, bias=False)

    def forward(self, x):
        hidden = torch.relu(self.norms[0](self.one(x)))
        return torch.relu(self.norms[1](self.two(hidden)) + self.short(x))


model = nn.Sequential(
    Block(3, 32, 1), Block(32, 64, 2), Block(64, 128, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
held_out = torch.randn(32, 3, 32, 32)
for step in range(8):
    images, labels = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    model.train()
    loss = cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 4:
        model.eval()
        with torch.no_grad():
            print(model(held_out).sum().item())
    print(loss.item())
