"""Train a classifier of digits under a limit for its activations, in rotor's words.

python examples/train_mnist_rotor.py --mem-limit 18MiB

The digits are drawn here, seven bars each, moved about and noisy: 28 x 28 like those of MNIST, and nothing is loaded.
"""

import argparse
import os
import sys

# On a busy machine OpenMP's threads, spinning while they wait, make small operations a hundred times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rockmate import BudgetTooSmall
from rockmate.compat import rotor

# Which of the bars a digit lights: top, upper left and right, middle, lower left and right, bottom.
BARS = ("1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111", "1010010", "1111111", "1111011")
PLACES = (
    (2, 2, 4, 14),
    (2, 2, 12, 4),
    (2, 12, 12, 14),
    (10, 2, 12, 14),
    (10, 2, 20, 4),
    (10, 12, 20, 14),
    (18, 2, 20, 14),
)


def draw_digits(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images [count, 1, 28, 28] and their digits."""
    shapes = torch.zeros(10, 22, 16)
    for digit, bars in enumerate(BARS):
        for is_lit, (top, left, bottom, right) in zip(bars, PLACES, strict=True):
            shapes[digit, top:bottom, left:right] += is_lit == "1"
    digits = torch.randint(10, (count,), generator=generator)
    images = 0.2 * torch.randn(count, 1, 28, 28, generator=generator)
    for image, digit in zip(images, digits.tolist(), strict=True):
        top, left = torch.randint(6, (2,), generator=generator).tolist()
        image[0, top : top + 22, left : left + 16] += shapes[digit].clamp(max=1)
    return images, digits


def build_model() -> nn.Sequential:
    """A Sequential of Sequentials."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(32 * 7 * 7, 10)),
    )


def main() -> None:
    """Plan with the first batch, then train."""
    parser = argparse.ArgumentParser(description="Train a classifier of digits under a limit for its activations.")
    parser.add_argument("--mem-limit", default=None, help='such as "18MiB"; the free memory, where it is left out')
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()

    torch.manual_seed(0)
    dataset = TensorDataset(*draw_digits(options.steps * options.batch_size, torch.Generator().manual_seed(1)))
    loader = DataLoader(dataset, batch_size=options.batch_size, shuffle=True)
    model = rotor.Checkpointable(build_model(), mem_limit=options.mem_limit)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()
    for step, (images, digits) in enumerate(loader, start=1):
        optimizer.zero_grad()
        try:
            loss = criterion(model(images), digits)
        except BudgetTooSmall as error:
            sys.exit(str(error))
        loss.backward()
        optimizer.step()
        if step == 1:
            print(model.plan)
            print(model.sequence)
        if step == 1 or step % 10 == 0:
            print(f"step {step:3}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
