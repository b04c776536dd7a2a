"""Recurrent layers of the CPU: oneDNN runs all steps of an LSTM's layer at once, with a workspace for its backward.

What is kept and computed with was fitted to what was measured, for single precision. Without data, PyTorch would tell
of an LSTM step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import dropout

from rkgb.torch_private.operations import lstm_layer

_PAGE_BYTES = 4096
_LSTM = 2  # among the modes of recurrent layers
_GATES = 4


class Lstm(NamedTuple):
    """The arguments of `torch.lstm` where rows are not packed: those of a batch are as long."""

    given: torch.Tensor
    state: Sequence[torch.Tensor]
    weights: Sequence[torch.Tensor]
    has_biases: bool
    layers: int
    dropout_p: float
    is_training: bool
    is_bidirectional: bool
    batch_first: bool

    def of_the_cpu(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """What it makes, layer by layer; None where the CPU takes no kernel of oneDNN."""
        given, directions = self.given, 2 if self.is_bidirectional else 1
        each = 4 if self.has_biases else 2
        if not given.is_meta or given.dim() != 3 or given.dtype is not torch.float32:
            return None
        if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
            return None
        if len(self.weights) != each * self.layers * directions:  # with projections
            return None
        hidden, cells = (part.contiguous() for part in self.state)
        rows = (given.transpose(0, 1) if self.batch_first else given).contiguous()
        last: list[tuple[torch.Tensor, torch.Tensor]] = []
        for layer in range(self.layers):
            outputs = []
            for direction in range(directions):
                place = layer * directions + direction
                own = self.weights[each * place : each * (place + 1)]
                output, *states = self._layer(rows, own, (hidden[place], cells[place]), direction > 0)
                outputs.append(output)
                last.append((states[0], states[1]))
            rows = outputs[0] if directions == 1 else torch.cat(outputs, -1)
            if self.dropout_p and self.is_training and layer < self.layers - 1:
                rows = dropout(rows, self.dropout_p)
        output = rows.transpose(0, 1) if self.batch_first else rows
        return output, torch.stack([one for one, _ in last]), torch.stack([other for _, other in last])

    def _layer(
        self,
        rows: torch.Tensor,
        weights: Sequence[torch.Tensor],
        state: tuple[torch.Tensor, torch.Tensor],
        is_reversed: bool,
    ) -> Sequence[torch.Tensor]:
        if not self.has_biases:
            none = torch.zeros(weights[0].shape[0], device=rows.device)
            weights = (*weights, none, none)
        size = weights[1].shape[1]
        settings = self.layers, self.has_biases, self.is_bidirectional, self.batch_first, self.is_training
        made: Sequence[torch.Tensor] = lstm_layer(rows, *weights, *state, is_reversed, [], _LSTM, size, *settings)
        return made[:3]


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
