"""Recurrent layers that the CPU runs step by step: the product with the input of all steps comes first.

Without data, PyTorch takes the product of each step by itself, as it does on no device that has kernels for it. What is
kept between the steps, and when it goes, is that of the CPU's own loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, linear

State = tuple[Tensor, ...]  # what one step hands to the next: of an LSTM the output and the cell, else the output


@dataclass(frozen=True, slots=True)
class Weights:
    """Of one layer in one direction."""

    of_input: Tensor
    of_state: Tensor
    input_bias: Tensor | None = None
    state_bias: Tensor | None = None
    projection: Tensor | None = None

    def input_product(self, rows: Tensor) -> Tensor:
        """Of all steps at once."""
        return linear(rows, self.of_input, self.input_bias)

    def state_product(self, state: Tensor) -> Tensor:
        """Of one step."""
        return linear(state, self.of_state, self.state_bias)


Cell = Callable[[Tensor, State, Weights], State]


def _gru(given: Tensor, state: State, weights: Weights) -> State:
    (hidden,) = state
    parts = torch.unsafe_chunk(given, 3, 1)
    products = torch.unsafe_chunk(weights.state_product(hidden), 3, 1)
    reset = products[0].add_(parts[0]).sigmoid_()
    gate = products[1].add_(parts[1]).sigmoid_()
    new = parts[2].add(products[2].mul_(reset)).tanh_()
    return ((hidden - new).mul_(gate).add_(new),)


def _lstm(given: Tensor, state: State, weights: Weights) -> State:
    hidden, cell = state
    gates = torch.unsafe_chunk(weights.state_product(hidden).add_(given), 4, 1)
    entering, forgetting = gates[0].sigmoid_(), gates[1].sigmoid_()
    new, leaving = gates[2].tanh_(), gates[3].sigmoid_()
    cell = (forgetting * cell).add_(entering * new)
    hidden = leaving * cell.tanh()
    return (hidden if weights.projection is None else hidden.matmul(weights.projection.t())), cell


def _simple(activation: Callable[[Tensor], Tensor]) -> Cell:
    return lambda given, state, weights: (activation(weights.state_product(state[0]).add_(given)),)


_CELLS: dict[Any, Cell] = {
    torch.gru: _gru,
    torch.lstm: _lstm,
    torch.rnn_tanh: _simple(torch.tanh),
    torch.rnn_relu: _simple(torch.relu),
}


def recurrent_of_the_cpu(function: Any, args: Sequence[Any]) -> tuple[Tensor, ...] | None:
    """What `torch.gru`, `torch.lstm`, `torch.rnn_tanh` or `torch.rnn_relu` makes of these arguments.

    Args:
        args: (rows [batch, step, width], or [step, batch, width]; states; weights; and the options), or for packed rows
            (rows [all steps, width], how many there are in each step, states, weights, and the options).

    Returns:
        The outputs, and the last states; None for other functions, and for other arguments than these.
    """
    cell = _CELLS.get(function)
    if cell is None or len(args) != 9:
        return None
    if isinstance(args[1], Tensor) and args[1].dtype is torch.int64:
        if args[1].is_meta:
            return None
        rows, counts, states, *options = args
        return _layers(cell, rows, states, options, _Packed(counts.tolist()))
    rows, states, *options, batch_first = args
    if rows.dim() != 3:
        return None
    made = _layers(cell, rows.transpose(0, 1) if batch_first else rows, states, options, _Whole())
    return (made[0].transpose_(0, 1) if batch_first else made[0], *made[1:])


class _Whole:
    """Rows of one length: [step, batch, width]."""

    def layer(
        self, cell: Cell, rows: Tensor, states: Sequence[State], weights: Sequence[Weights]
    ) -> tuple[Tensor, list[State]]:
        """In one direction or in both. The product of the first is there until that of the second is."""
        product = weights[0].input_product(rows)
        output, state = self._run(cell, product.unbind(0), states[0], weights[0], 1)
        if len(weights) == 1:
            return output, [state]
        product = weights[1].input_product(rows)
        other, last = self._run(cell, product.unbind(0)[::-1], states[1], weights[1], -1)
        return torch.cat([output, other], -1), [state, last]

    @staticmethod
    def _run(cell: Cell, steps: Iterable[Tensor], state: State, weights: Weights, order: int) -> tuple[Tensor, State]:
        outputs = []
        for step in steps:
            state = cell(step, state, weights)
            outputs.append(state[0])
        return torch.stack(outputs[::order], 0), state


class _Packed:
    """Rows of several lengths, the longest first: those of the first step, of the second, and so on."""

    def __init__(self, counts: list[int]) -> None:
        self._counts = counts

    def layer(
        self, cell: Cell, rows: Tensor, states: Sequence[State], weights: Sequence[Weights]
    ) -> tuple[Tensor, list[State]]:
        """In one direction or in both."""
        output, state = self._forwards(cell, rows, states[0], weights[0])
        if len(weights) == 1:
            return output, [state]
        other, last = self._backwards(cell, rows, states[1], weights[1])
        return torch.cat([output, other], -1), [state, last]

    def _forwards(self, cell: Cell, rows: Tensor, state: State, weights: Weights) -> tuple[Tensor, State]:
        product, outputs, ended, begin, last = weights.input_product(rows), [], [], 0, self._counts[0]
        for count in self._counts:
            step = product.narrow(0, begin, count)
            begin += count
            if count < last:
                ended.append(tuple(one.narrow(0, count, last - count) for one in state))
                state = tuple(one.narrow(0, 0, count) for one in state)
            last = count
            state = cell(step, state, weights)
            outputs.append(state[0])
        ended.append(state)
        return torch.cat(outputs, 0), tuple(map(torch.cat, zip(*reversed(ended), strict=True)))

    def _backwards(self, cell: Cell, rows: Tensor, state: State, weights: Weights) -> tuple[Tensor, State]:
        product, outputs, end, last = weights.input_product(rows), [], rows.shape[0], self._counts[-1]
        now = tuple(one.narrow(0, 0, last) for one in state)
        for count in reversed(self._counts):
            if count > last:
                more = tuple(one.narrow(0, last, count - last) for one in state)
                now = tuple(torch.cat(parts) for parts in zip(now, more, strict=True))
            step = product.narrow(0, end - count, count)
            end, last = end - count, count
            now = cell(step, now, weights)
            outputs.append(now[0])
        return torch.cat(outputs[::-1], 0), now


def _layers(
    cell: Cell, rows: Tensor, states: Tensor | Sequence[Tensor], options: Sequence[Any], order: _Whole | _Packed
) -> tuple[Tensor, ...]:
    """All layers, one after the other, each in one direction or in both."""
    flat, has_biases, layers, dropout_p, is_training, is_bidirectional = options
    directions = 2 if is_bidirectional else 1
    first = list(zip(*(one.unbind(0) for one in ([states] if isinstance(states, Tensor) else states)), strict=True))
    each = len(flat) // (layers * directions)
    weights = [_weights(flat[begin : begin + each], has_biases) for begin in range(0, len(flat), each)]
    last: list[State] = []
    for layer in range(layers):
        own = slice(layer * directions, (layer + 1) * directions)
        rows, state = order.layer(cell, rows, first[own], weights[own])
        last += state
        if dropout_p and is_training and layer < layers - 1:
            rows = dropout(rows, dropout_p)
    return rows, *(torch.stack(parts, 0) for parts in zip(*last, strict=True))


def _weights(given: Sequence[Tensor], has_biases: bool) -> Weights:
    biases = given[2:4] if has_biases else (None, None)
    rest = given[4:] if has_biases else given[2:]
    return Weights(given[0], given[1], *biases, *rest)
