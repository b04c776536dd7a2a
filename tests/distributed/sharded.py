"""What ranks run for the tests of FSDP2: planned blocks under `fully_shard`, compared with the blocks themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rockmate import PlanMismatch, Rockmate, TraceError
from tests.module.models import WIDTH, built
from tests.module.steps import assert_same, following, measured_for, recomputing, squares

POLICIES = {
    "none": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16 inside": MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
}


class Block(nn.Module):
    """A residual block with dropout, a parameter of its own, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.register_buffer("shift", torch.full((WIDTH,), 0.01))

    def forward(self, hidden: Tensor) -> Tensor:
        inner = torch.nn.functional.gelu(self.up(self.norm(hidden)))
        return hidden + self.scale * self.dropout(self.down(inner)) + self.shift.to(hidden.dtype)


class Stack(nn.Module):
    """An embedding, blocks, and a head that shares the embedding's weight if `tied`."""

    def __init__(self, depth: int = 3, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 64, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def batch(seed: int = 0) -> Tensor:
    return torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(seed))


def my_batches(steps: int = 3) -> list[Tensor]:
    return [batch(100 * distributed.get_rank() + step) for step in range(steps)]


def hidden_rows() -> Tensor:
    return torch.randn(8, 16, WIDTH, generator=torch.Generator().manual_seed(3)).requires_grad_()


def whole(value: Tensor | None) -> Tensor | None:
    return value.full_tensor() if isinstance(value, DTensor) else value


def train_sharded(model: nn.Module, batches: list[Tensor], accumulate: int = 1) -> list[dict[str, Tensor | None]]:
    """What every step gives: outputs, gradients of all ranks, parameters, buffers, the random stream."""
    torch.manual_seed(distributed.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    records = []
    for step, tokens in enumerate(batches):
        output = model(tokens)
        squares(output).backward()
        record: dict[str, Tensor | None] = {"output": output.detach().clone(), "stream": torch.get_rng_state()}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            gradient = whole(parameter.grad)
            record[f"gradient of {name}"] = None if gradient is None else gradient.clone()
        for name, buffer in model.named_buffers():
            record[f"buffer {name}"] = buffer.clone()
        if step % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            record[f"parameter {name}"] = parameter.full_tensor().clone()
        records.append(record)
    return records


def shard_blocks(model: Stack, options: dict[str, Any]) -> Stack:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def plan_blocks(model: Stack, sample: Tensor) -> Stack:
    """Each block recomputes all it may; one plan serves all."""
    first = model.blocks[0]
    measured = measured_for(first, sample)
    planned = recomputing(first, sample)._planned
    for index, block in enumerate(model.blocks):
        model.blocks[index] = Rockmate._following(block, measured, planned)
    return model


def assert_blocks_equal_to_eager(options: dict[str, Any], *, tied: bool = False, accumulate: int = 1) -> None:
    """Planned blocks, each sharded, within a sharded root."""
    make: Callable[[], Any] = lambda: built(lambda: Stack(tied=tied))  # noqa: E731
    eager = shard_blocks(make(), options)
    keys = list(eager.state_dict())
    expected = train_sharded(eager, my_batches(), accumulate)
    planned = shard_blocks(plan_blocks(make(), hidden_rows()), options)
    assert list(planned.state_dict()) == keys
    found = train_sharded(planned, my_batches(), accumulate)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
