"""Recurrent layers of the CPU: oneDNN runs all steps of an LSTM's layer at once, with a workspace for its backward.

What is kept and computed with was fitted to what was measured, for single precision. Without data, PyTorch would tell
of an LSTM step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import dropout

from rkgb.torch_private.operations import lstm_layer

_PAGE_BYTES = 4096
_LSTM = 2  # among the modes of recurrent layers
_GATES = 4


def lstm_of_the_cpu(
    given: torch.Tensor,
    state: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    layers: int,
    dropout_p: float,
    is_training: bool,
    is_bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """What `torch.lstm` makes, layer by layer; None where the CPU takes no kernel of oneDNN."""
    directions = 2 if is_bidirectional else 1
    each = 4 if has_biases else 2
    if not given.is_meta or given.dim() != 3 or given.dtype is not torch.float32:
        return None
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return None
    if len(weights) != each * layers * directions:  # with projections
        return None
    hidden, cells = (part.contiguous() for part in state)
    rows = (given.transpose(0, 1) if batch_first else given).contiguous()
    last_hidden, last_cells = [], []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            place = layer * directions + direction
            own = list(weights[each * place : each * (place + 1)])
            if not has_biases:
                own += [torch.zeros(own[0].shape[0], device=given.device)] * 2
            sizes = own[1].shape[1], layers, has_biases, is_bidirectional, batch_first, is_training
            states = hidden[place], cells[place]
            made = lstm_layer(rows, *own, *states, direction > 0, [], _LSTM, *sizes)
            outputs.append(made[0])
            last_hidden.append(made[1])
            last_cells.append(made[2])
        rows = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout_p and is_training and layer < layers - 1:
            rows = dropout(rows, dropout_p)
    output = rows.transpose(0, 1) if batch_first else rows
    return output, torch.stack(last_hidden), torch.stack(last_cells)


def lstm_layer_made(given: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """What a layer makes: outputs, the last states, and the workspace."""
    state, size, is_training = args[4], args[9], args[14]
    steps, rows = given.shape[:2]
    output = given.new_empty(steps, rows, size)
    kept_bytes = _kept_bytes(steps, rows, given.shape[2], size) if is_training else 0
    workspace = torch.empty(kept_bytes, dtype=torch.uint8, device=given.device)
    return output, torch.empty_like(state), torch.empty_like(state), workspace


def _kept_bytes(steps: int, rows: int, width: int, size: int) -> int:
    """Gates, three arrays of states between layers, two of cells, and outputs; each from a page on."""
    arrays = [
        steps * rows * _padded(_GATES * size),
        *3 * [2 * (steps + 1) * rows * _padded(max(width, size))],
        *2 * [2 * (steps + 1) * rows * size],
        steps * rows * _padded(size),
    ]
    return sum(-(-4 * array // _PAGE_BYTES) * _PAGE_BYTES for array in arrays)


def _padded(count: int) -> int:
    """Numbers of a row in cache lines, and not such that all rows meet in the same."""
    count = -(-count // 16) * 16
    return count + 16 if count % 256 == 0 else count


def lstm_layer_scratch(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    """Gates of all steps, and weights in another order."""
    given, weight = args[0], args[2]
    return _gates_bytes(given, weight) + _weights_bytes(given, weight)


def lstm_layer_backward_scratch(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    """The same, and gradients of the weights in that order."""
    given, weight = args[0], args[2]
    return _gates_bytes(given, weight) + 2 * _weights_bytes(given, weight)


def _gates_bytes(given: torch.Tensor, weight: torch.Tensor) -> int:
    return given.shape[0] * given.shape[1] * _padded(weight.shape[0]) * given.itemsize


def _weights_bytes(given: torch.Tensor, weight: torch.Tensor) -> int:
    return (given.shape[2] + weight.shape[1]) * _padded(weight.shape[0]) * weight.itemsize
