"""What ranks run for the tests of DistributedDataParallel; compared on each rank, so that only failures travel."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from rockmate import LayoutError, Rockmate, TraceError
from rockmate.layouts.weights import laid_out, lay_out
from rockmate.runtime.step import Step
from tests.distributed import ranks
from tests.module.models import WIDTH, Layers, Normalised, Tied, built, images, rows, tokens
from tests.module.steps import assert_same, assert_same_training, recomputing, seen, squares, train

SMALL_BUCKETS = {"bucket_cap_mb": 0.003}  # a linear layer each


class Unused(nn.Module):
    """Layers, of which the one in the middle is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(hidden))))


class Convolutions(nn.Module):
    """Two convolutions, with what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))).mean((2, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "dropout": (functools.partial(built, Layers), rows),
    "tied": (functools.partial(built, Tied), tokens),
    "unused": (functools.partial(built, Unused), rows),
    "convolutions": (functools.partial(built, Convolutions), images),
    "batch norm": (functools.partial(built, Normalised), images),
}


def here(name: str) -> tuple[Callable[[], nn.Module], Callable[[int], Tensor]]:
    """The model and its batches, on this rank's device."""
    make, batch = MODELS[name]
    return lambda: make().to(ranks.PLACE), lambda seed: batch(seed).to(ranks.PLACE)


def mine(make: Callable[[int], Tensor], steps: int = 3) -> list[Tensor]:
    """Batches of this rank alone."""
    return [make(100 * distributed.get_rank() + step) for step in range(steps)]


def assert_equal_to_eager(name: str, options: dict[str, Any]) -> None:
    """Outputs, reduced gradients, buffers, random stream and parameters over a few steps, bit by bit."""
    make, batch = here(name)
    expected = train(DistributedDataParallel(make(), **options), mine(batch))
    planned = recomputing(make(), batch(0))
    assert planned.plan.recomputations
    assert_same_training(train(DistributedDataParallel(planned, **options), mine(batch)), expected)


def assert_planned_in_training_equal_to_eager(name: str, options: dict[str, Any]) -> tuple[str, int]:
    """Planned within the first forward of DDP: nothing that planning runs is seen by its hooks."""
    make, batch = here(name)
    expected = train(DistributedDataParallel(make(), **options), mine(batch))
    planned = Rockmate(make(), budget=0.9, loss=squares)
    assert_same_training(train(DistributedDataParallel(planned, **options), mine(batch)), expected)
    return str(planned.plan.schedule), len(planned.plans)


def assert_laid_out_equal_to_eager(layout: str, options: dict[str, Any]) -> tuple[str, ...]:
    """In a layout that all ranks have; what of it is in channels_last."""
    make, batch = here("convolutions")
    planned, eager = Rockmate(make(), batch(0), 1.0, loss=squares, layout=layout), make()
    lay_out(eager, laid_out(planned.original))
    expected = train(DistributedDataParallel(eager, **options), mine(batch))
    assert_same_training(train(DistributedDataParallel(planned, **options), mine(batch)), expected)
    return laid_out(planned.original)


def assert_layout_stays_within_data_parallel() -> tuple[str, str]:
    """DDP has noted how its parameters lie; why the layout stays, of a plan that is made in its first step."""
    make, batch = here("convolutions")
    expected = train(DistributedDataParallel(make()), mine(batch))
    planned = Rockmate(make(), budget=1.0, loss=squares, layout="auto")
    assert_same_training(train(DistributedDataParallel(planned), mine(batch)), expected)
    assert not laid_out(planned.original)
    forced = DistributedDataParallel(Rockmate(make(), budget=1.0, loss=squares, layout="channels_last"))
    try:
        forced(batch(0))
    except LayoutError as error:
        return str(planned.plan.layout), str(error)
    return str(planned.plan.layout), ""


def assert_ranks_agree(name: str) -> None:
    """Different data, equal parameters: the gradients really were reduced."""
    make, batch = here(name)
    model = DistributedDataParallel(recomputing(make(), batch(0)))
    trained = train(model, mine(batch))
    for parameter in trained.parameters.values():
        everyone = [torch.empty_like(parameter) for _ in range(distributed.get_world_size())]
        distributed.all_gather(everyone, parameter.contiguous())
        assert all(torch.equal(other, parameter) for other in everyone)


def assert_accumulates(options: dict[str, Any]) -> None:
    """Two batches per step, the first one without communication."""
    make, batch = here("dropout")

    def steps(model: DistributedDataParallel) -> Iterator[dict[str, Tensor | None]]:
        torch.manual_seed(0)
        for first, second in zip(mine(batch, 4)[::2], mine(batch, 4)[1::2], strict=True):
            with model.no_sync():
                squares(model(first)).backward()
            local = seen(model, (), ())
            output = model(second)
            squares(output).backward()
            yield {f"after the first, {name}": value for name, value in local.items()} | seen(model, (), output)
            model.zero_grad()

    expected = list(steps(DistributedDataParallel(make(), **options)))
    found = list(steps(DistributedDataParallel(recomputing(make(), batch(0)), **options)))
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


# ---- when buckets are ready ------------------------------------------------------------------------


class _Operations(TorchDispatchMode):
    """Notes what the backward runs, recomputations left out."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events
        self.recomputing = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.recomputing and function is not torch.ops.aten.detach.default:  # how a handle gives its tensor
            self.events.append(str(function))
        return function(*args, **(kwargs or {}))


def _events_of_backward(model: nn.Module, batches: list[Tensor], runner: Any = None) -> list[list[str]]:
    """Of each step: operations of the backward and buckets that are ready, in order."""
    events: list[str] = []
    mode = _Operations(events)
    ddp = DistributedDataParallel(model, **SMALL_BUCKETS)

    def hook(state: Any, bucket: Any) -> Any:
        sizes = [tensor.numel() for tensor in bucket.gradients()]
        with _paused(mode):
            events.append(f"bucket {bucket.index()} of {sizes}{' (last)' if bucket.is_last() else ''}")
            return allreduce_hook(state, bucket)

    # DDP looks at the annotations, and refuses text in their place.
    hook.__annotations__.update({"bucket": distributed.GradBucket, "return": torch.futures.Future[torch.Tensor]})
    ddp.register_comm_hook(None, hook)
    if runner is not None:
        runner.make_step = functools.partial(_Watched, mode)
    found = []
    for batch in batches:
        loss = squares(ddp(batch))
        events.clear()
        with mode:
            loss.backward()
        found.append(list(events))
    return found


@contextlib.contextmanager
def _paused(mode: _Operations) -> Iterator[None]:
    before, mode.recomputing = mode.recomputing, True
    try:
        yield
    finally:
        mode.recomputing = before


class _Watched(Step):
    """A step whose recomputations the log leaves out."""

    __slots__ = ("_mode",)

    def __init__(self, mode: _Operations, tables: Any) -> None:
        super().__init__(tables)
        self._mode = mode

    def run(self, segment: int) -> None:
        with _paused(self._mode):
            super().run(segment)


def assert_buckets_ready_as_early() -> tuple[int, int]:
    """The same buckets, each after the same operations of the backward; returns how many buckets, and recomputations.

    Without dropout: its backward is another composition of operations in the trace.
    """
    batches = mine(rows)
    expected = _events_of_backward(built(Layers, 4, 0.0), batches)
    planned = recomputing(built(Layers, 4, 0.0), rows())
    found = _events_of_backward(planned, batches, planned._member.runner)
    assert found == expected
    ready = [place for place, event in enumerate(expected[-1]) if event.startswith("bucket")]
    assert ready[0] < len(expected[-1]) / 2, "the first bucket is ready before half of the backward has run"
    return len(ready), planned.plan.recomputations


class _Summed(torch.autograd.Function):
    """The sum over all ranks, in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        distributed.all_reduce(total)
        return total


class Joined(nn.Module):
    """Its function has a collective inside, which no trace shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.second(_Summed.apply(torch.tanh(self.first(hidden)))))


def collectives_are_refused() -> str:
    """On one rank alone, whom nobody would answer; returns the message."""
    if distributed.get_rank() == 0:
        return ""
    model = built(Joined)
    try:
        Rockmate(model, rows(), 0.8)
    except TraceError as error:
        return str(error)
    return "planned"


def sync_batch_norm_is_refused() -> str:
    """Returns the message."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(built(Normalised))
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    try:
        Rockmate(model, images(), 0.8)
    except TraceError as error:
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        return str(error)
    return ""
