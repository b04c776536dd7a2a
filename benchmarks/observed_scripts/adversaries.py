"""A generator and a discriminator: two optimizers, steps by turns."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

torch.manual_seed(0)


def up(width, narrower):
    return nn.Sequential(nn.ConvTranspose2d(width, narrower, 4, 2, 1, bias=False), nn.BatchNorm2d(narrower), nn.ReLU())


def down(width, wider):
    return nn.Sequential(nn.Conv2d(width, wider, 4, 2, 1, bias=False), nn.LeakyReLU(0.2))


generator = nn.Sequential(
    nn.ConvTranspose2d(64, 128, 4), nn.ReLU(), up(128, 64), up(64, 32), nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh()
)
discriminator = nn.Sequential(down(3, 32), down(32, 64), down(64, 128), nn.Conv2d(128, 1, 4), nn.Flatten(0))
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
real, fake = torch.ones(32), torch.zeros(32)
for _ in range(6):
    images, noise = torch.randn(32, 3, 32, 32), torch.randn(32, 64, 1, 1)
    of_discriminator.zero_grad()
    made = generator(noise)
    judged = binary_cross_entropy_with_logits(discriminator(images), real)
    judged = judged + binary_cross_entropy_with_logits(discriminator(made.detach()), fake)
    judged.backward()
    of_discriminator.step()
    of_generator.zero_grad()
    fooled = binary_cross_entropy_with_logits(discriminator(made), real)
    fooled.backward()
    of_generator.step()
    print(judged.item(), fooled.item())
