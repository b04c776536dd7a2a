"""What planning must leave as it was."""

import random

import numpy as np
import torch
from torch import Tensor, nn

from tests.where import random_stream


def state_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Parameters, gradients, buffers, modes, names of attributes, random streams: copied, by name."""
    state: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        state[f"parameter {name}"] = parameter.detach().clone()
        state[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.clone()
    for name, buffer in model.named_buffers():
        state[f"buffer {name}"] = buffer.clone()
    state["modes"] = torch.tensor([module.training for module in model.modules()])
    state["attributes"] = torch.tensor([hash(tuple(vars(module))) for module in model.modules()])
    state["random stream"] = random_stream()
    state["Python's random stream"] = torch.tensor(random.getstate()[1])
    state["NumPy's random stream"] = torch.from_numpy(np.random.get_state()[1].astype(np.int64))
    state["gradients on"] = torch.tensor(torch.is_grad_enabled())
    return state
