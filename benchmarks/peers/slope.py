"""Whether gradients are those of the loss, where random numbers are others than eager's and both cannot be compared."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.peers.case import SEED, Built, Case

SLOPE_TOLERANCE = (
    0.01  # masks of another seed were off by 4 % and more, right gradients by 0.1 %, on the cases of models.py
)
SHARE = 0.001  # of the loss, by which the step along the gradient is to change it


def loss_of(case: Case, built: Built) -> float:
    """The loss of a training step's forward."""
    torch.manual_seed(SEED)
    return float(case.loss(case.forward(built.call)).detach())


def slope_by_norm(case: Case, built: Built, gradients: dict[str, Tensor]) -> float:
    """The loss's slope along these gradients, by central differences with the same seed, relative to their norm.

    It is 1 for the gradients of the loss, and less for gradients of which a part is noise. Differences over two
    distances are extrapolated to none (Richardson): what a curved loss adds goes with the square of the distance. The
    parameters are changed in place, and put back to the bit.
    """
    values = {name: value.detach() for name, value in built.weights.named_parameters() if name in gradients}
    before = {name: value.clone() for name, value in values.items()}
    square = sum(float(gradient.double().square().sum()) for gradient in gradients.values())
    distance = SHARE * abs(loss_of(case, built)) / square if square else 0.0

    def slope_over(step: float) -> float:
        losses = []
        for sign in (1, -1):
            for name, value in values.items():
                value.copy_(before[name] + sign * step * gradients[name])
            losses.append(loss_of(case, built))
        return (losses[0] - losses[1]) / (2 * step * square)

    try:
        return (4 * slope_over(distance / 2) - slope_over(distance)) / 3 if square else 1.0
    finally:
        for name, value in values.items():
            value.copy_(before[name])
