"""What ranks run for the tests of FSDP2: planned blocks under `fully_shard`, compared with the blocks themselves."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rkgb.devices.allocation_log import AllocationLog
from rockmate import FallbackWarning, Rockmate, TraceError
from rockmate.distributed import apply, plan_blocks
from tests.distributed import ranks
from tests.module.models import WIDTH, built
from tests.module.steps import assert_same, measured_for, recomputing, squares

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
        return self.head(hidden.to(self.head.weight.dtype))  # blocks may give another one


def stack(make: Callable[[], nn.Module]) -> Any:
    """Built with the same weights each time, on this rank's device."""
    return built(make).to(ranks.PLACE)


def batch(seed: int = 0) -> Tensor:
    return torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(seed)).to(ranks.PLACE)


def my_batches(steps: int = 3) -> list[Tensor]:
    return [batch(100 * distributed.get_rank() + step) for step in range(steps)]


def hidden_rows() -> Tensor:
    rows = torch.randn(8, 16, WIDTH, generator=torch.Generator().manual_seed(3))
    return rows.to(ranks.PLACE).requires_grad_()


def whole(value: Tensor | None) -> Tensor | None:
    return value.full_tensor() if isinstance(value, DTensor) else value


def train_sharded(model: nn.Module, batches: list[Tensor], accumulate: int = 1) -> list[dict[str, Tensor | None]]:
    """What every step gives: outputs, gradients of all ranks, parameters, buffers, the random stream."""
    torch.manual_seed(distributed.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    records = []
    for step, tokens in enumerate(batches):
        model.set_requires_gradient_sync(step % accumulate == accumulate - 1)  # type: ignore[operator]
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


def recompute_blocks(model: Stack, sample: Tensor) -> Stack:
    """Each block recomputes all it may; one plan serves all."""
    first = model.blocks[0]
    measured = measured_for(first, sample)
    planned = recomputing(first, sample)._member.planned
    for index, block in enumerate(model.blocks):
        model.blocks[index] = Rockmate._following(block, measured, planned)
    return model


def assert_blocks_equal_to_eager(
    options: dict[str, Any], depth: int = 3, tied: bool = False, accumulate: int = 1
) -> None:
    """Planned blocks, each sharded, within a sharded root."""
    make: Callable[[], Any] = lambda: stack(lambda: Stack(depth, tied=tied))  # noqa: E731
    eager = shard_blocks(make(), options)
    keys = list(eager.state_dict())
    expected = train_sharded(eager, my_batches(), accumulate)
    planned = shard_blocks(recompute_blocks(make(), hidden_rows()), options)
    assert list(planned.state_dict()) == keys
    found = train_sharded(planned, my_batches(), accumulate)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


def assert_planned_in_training_equal_to_eager(policy: str) -> list[int]:
    """Blocks sharded first, and planned when their parameters are gathered for the first step."""
    options = {"mp_policy": POLICIES[policy]}
    make: Callable[[], Any] = lambda: stack(lambda: Stack(2))  # noqa: E731
    expected = train_sharded(shard_blocks(make(), options), my_batches())
    model = make()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = Rockmate(block, budget=0.9)
    shard_blocks(model, options)
    for one, other in zip(train_sharded(model, my_batches()), expected, strict=True):
        assert_same(one, other)
    return [block.plan.recomputations for block in model.blocks]


def assert_whole_model_equal_to_eager(options: dict[str, Any]) -> None:
    """A planned model, sharded as one."""
    make: Callable[[], Any] = lambda: stack(lambda: Stack(2))  # noqa: E731
    eager = fully_shard(make(), **options)
    expected = train_sharded(eager, my_batches())
    planned = fully_shard(recomputing(make(), batch()), **options)
    assert list(planned.state_dict()) == list(eager.state_dict())
    for one, other in zip(train_sharded(planned, my_batches()), expected, strict=True):
        assert_same(one, other)


def assert_checkpoints_are_interchangeable() -> None:
    """What an eager model saves, a planned one loads, by PyTorch's own distributed checkpoints, and goes on equally."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
        squares(model(tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(0)
    eager = shard_blocks(stack(lambda: Stack(2)), {})
    planned = shard_blocks(recompute_blocks(stack(lambda: Stack(2)), hidden_rows()), {})
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (eager, planned)]
    step(eager, optimizers[0], my_batches()[0])
    step(planned, optimizers[1], my_batches()[1])  # so that there is something to be overwritten
    model_state, optimizer_state = get_state_dict(eager, optimizers[0])
    assert model_state.keys() == get_state_dict(planned, optimizers[1])[0].keys()
    model_state, optimizer_state = copy.deepcopy((model_state, optimizer_state))
    set_state_dict(planned, optimizers[1], model_state_dict=model_state, optim_state_dict=optimizer_state)
    for model, optimizer in zip((eager, planned), optimizers, strict=True):
        torch.manual_seed(1)
        step(model, optimizer, my_batches()[2])
    assert_same(
        {name: whole(value.detach()) for name, value in planned.named_parameters()},
        {name: whole(value.detach()) for name, value in eager.named_parameters()},
    )


def assert_applied_equal_to_eager(budget: float, options: dict[str, Any]) -> dict[str, Any]:
    """`apply` against `fully_shard` of blocks and root; returns what this rank has planned."""
    make: Callable[[], Any] = lambda: stack(lambda: Stack(4))  # noqa: E731
    policy = POLICIES[options.pop("policy", "none")]
    options = {"mp_policy": policy, **options}
    eager = shard_blocks(make(), options)
    keys = list(eager.state_dict())
    expected = train_sharded(eager, my_batches())
    model = make()
    plans = apply(model, budget, sample=batch(), loss=squares, **options)
    assert all(isinstance(block, Rockmate) for block in model.blocks)
    assert list(model.state_dict()) == keys
    for one, other in zip(train_sharded(model, my_batches()), expected, strict=True):
        assert_same(one, other)
    return {
        "fits": plans.measured_peak_bytes <= plans.budget_bytes,
        "classes": [names for names, _ in plans.plans],
        "schedules": [str(plan.schedule) for _, plan in plans.plans],
        "recomputations": sum(plan.recomputations for _, plan in plans.plans),
    }


def step_peaks(budget: float) -> tuple[int, int, int]:
    """Bytes of a sharded step, eager and planned, and how many less the plan promises.

    Threads of the process group hold what is being sent until they have sent it, and so some steps hold a block's
    gradients longer than others, as the machine has time for these threads. The least of several steps is taken.
    """

    def peak_bytes(model: nn.Module) -> int:
        peaks = []
        for _ in range(10):
            with AllocationLog(ranks.PLACE) as log:
                squares(model(batch())).backward()
            peaks.append(log.peak_bytes)
        return min(peaks[2:])

    eager_bytes = peak_bytes(shard_blocks(stack(lambda: Stack(4)), {}))
    model = stack(lambda: Stack(4))
    plans = apply(model, budget, sample=batch(), loss=squares)
    whole_bytes = round(plans.budget_bytes / budget)
    return eager_bytes, peak_bytes(model), whole_bytes - plans.measured_peak_bytes


# ---- what is refused -------------------------------------------------------------------------------


def refusals() -> dict[str, str]:
    """Messages, by what was tried."""
    told = {}
    model = stack(lambda: Stack(2))
    fully_shard(model.blocks[1])
    with _noted(told, "planning a model with a sharded block", TraceError):
        Rockmate(model, batch())
    with _noted(told, "planning the blocks of a model with a sharded one", TraceError):
        plan_blocks(model, 0.5, batch())
    planned = Rockmate(stack(lambda: Stack(2)), batch(), 0.8)
    fully_shard(planned.blocks[1])
    with _warned(told, "calling a planned model with a sharded block"):
        planned(batch())
    sharded = fully_shard(recomputing(stack(Block), hidden_rows()), reshard_after_forward=False)
    output = sharded(hidden_rows())
    with torch.no_grad():
        sharded.up.weight.add_(1)
    with _noted(told, "changing a parameter after the forward", RuntimeError):
        squares(output).backward()
    return told


@contextlib.contextmanager
def _warned(told: dict[str, str], what: str) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    told[what] = "\n".join(str(warning.message) for warning in caught if warning.category is FallbackWarning)


@contextlib.contextmanager
def _noted(told: dict[str, str], what: str, kind: type[Exception]) -> Iterator[None]:
    told[what] = ""
    try:
        yield
    except kind as error:
        told[what] = str(error)
