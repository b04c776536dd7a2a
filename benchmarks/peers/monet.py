"""What MONeT published of its five models, to stand beside ours.

A. Shah et al., "Memory optimization for deep networks", ICLR 2021. The numbers are those of the README of
github.com/utsaslab/MONeT: PyTorch 1.5.1, CUDA 10.1, images of 224 x 224, for U-Net of 416 x 608, and a step of forward
and backward whose memory includes the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """The published results of one model."""

    batch: int
    eager_gb: float
    points: tuple[tuple[float, float], ...]  # memory in GB, and how many percent longer than eager's a step took

    @property
    def ratios(self) -> list[tuple[float, float]]:
        """Of each point the memory and the time of a step, both by eager's."""
        return [(memory_gb / self.eager_gb, 1 + percent / 100) for memory_gb, percent in self.points]


PUBLISHED = {
    "resnet50": Published(
        184, 15.06, ((10.01, 3.22), (9.01, 4.68), (8.01, 5.56), (6.99, 7.28), (6.00, 9.31), (4.99, 11.95))
    ),
    "googlenet": Published(
        320, 14.93, ((9.98, 7.13), (8.99, 7.87), (8.01, 8.44), (7.02, 9.71), (6.01, 12.14), (4.99, 15.77))
    ),
    "unet": Published(
        11, 14.32, ((10.01, -4.10), (9.01, -2.07), (8.02, -0.09), (7.00, 1.39), (6.01, 4.95), (5.01, 11.51))
    ),
    "mobilenet-v2": Published(
        272, 14.46, ((10.02, 2.40), (9.01, 3.10), (8.02, 4.77), (7.01, 5.53), (6.01, 7.55), (5.01, 8.72))
    ),
    "vgg16": Published(
        176, 14.12, ((9.71, -5.30), (8.66, -4.64), (7.88, -2.18), (6.82, 1.99), (5.90, 5.44), (5.51, 9.11))
    ),
}
