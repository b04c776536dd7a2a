"""Loops of training over networks with habits: what happens between the steps, and all that each event leaves."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from rkgb.devices.allocation_log import AllocationLog
from rkgb.tree import leaves
from rockmate import Rockmate
from tests.module.habits import WIDTH, Network

BATCH, LENGTH = 8, 12
Loss = Callable[[Any], Tensor]


def squares(output: Any) -> Tensor:
    """What is planned with: the mean squares of all outputs with gradients."""
    return torch.stack([one.float().square().mean() for one in leaves(output) if one.requires_grad]).sum()


def absolute(output: Any) -> Tensor:
    """Another loss, of the first output alone."""
    return next(one for one in leaves(output) if one.requires_grad).float().abs().sum()


@dataclass(frozen=True)
class Shape:
    """What calls look like."""

    batch: int = BATCH
    length: int = LENGTH
    mask: bool = False
    flag: bool = False
    requires_grad: bool = False
    contiguous: bool = True


def batch(seed: int, shape: Shape) -> dict[str, Any]:
    """Arguments of one call, by the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    rows, length = shape.batch, shape.length
    x = torch.randn(rows, length, WIDTH, generator=generator)
    if not shape.contiguous:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    ids = torch.randint(WIDTH, (rows, length), generator=generator).float()
    arguments: dict[str, Any] = {"x": x.requires_grad_(shape.requires_grad)}
    arguments["extras"] = {"ids": ids, "lengths": lengths, "empty": torch.empty(0, WIDTH)}
    if shape.mask:
        arguments["mask"] = torch.rand(rows, length, 1, generator=generator)
    if shape.flag:
        arguments["flag"] = True
    return arguments


def seed_streams(seed: int) -> None:
    """Start all random numbers anew."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@dataclass
class Run:
    """One network that goes through the events, and what it leaves."""

    model: Any
    shape: Shape
    optimizer: torch.optim.Optimizer = None  # type: ignore[assignment]
    saved: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)

    @property
    def is_planned(self) -> bool:
        return isinstance(self.model, Rockmate)

    @property
    def network(self) -> Network:
        return self.model.original if self.is_planned else self.model

    def begin(self) -> None:
        parameters = [one for one in self.model.parameters() if not isinstance(one, nn.UninitializedParameter)]
        self.optimizer = torch.optim.SGD(parameters, 0.02, 0.9)

    def forward_backward(self, seed: int, shape: Shape, loss: Loss = squares, *, left: bool = False) -> None:
        """`left`: the losses that the forward has left in attributes count."""
        arguments = batch(seed, shape)
        seed_streams(seed)
        output = self.model(**arguments)
        total = loss(output)
        if left:
            total = total + sum(self.network.losses())
        total.backward()
        self.outputs += [output, total, arguments["x"].grad]

    def peak_bytes(self, seed: int) -> int:
        """Most bytes of a step that has its plan."""
        self.optimizer.zero_grad()
        arguments = batch(seed, self.shape)
        seed_streams(seed)
        with AllocationLog(torch.device("cpu")) as log:
            output = self.model(**arguments)
            squares(output).backward()
        return log.peak_bytes

    def step(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-1, 1)
        self.optimizer.step()


# ---- events -----------------------------------------------------------------------------------------


def train(run: Run, seed: int, shape: Shape | None = None, **kwargs: Any) -> None:
    run.optimizer.zero_grad()
    run.forward_backward(seed, shape or run.shape, **kwargs)
    run.step()


def left_behind(run: Run, seed: int) -> None:
    train(run, seed, left=True)


def evaluated_between(run: Run, seed: int) -> None:
    evaluate(run, seed)
    train(run, seed + 1, left=True)


def accumulate(run: Run, seed: int) -> None:
    run.optimizer.zero_grad()
    run.forward_backward(seed, run.shape)
    run.forward_backward(seed + 1, run.shape, left=True)
    run.step()


def keep_gradients(run: Run, seed: int) -> None:
    run.optimizer.zero_grad(set_to_none=False)
    run.forward_backward(seed, run.shape)
    run.step()


def evaluate(run: Run, seed: int) -> None:
    run.model.eval()
    with torch.no_grad():
        run.outputs.append(run.model(**batch(seed, run.shape)))
    run.model.train()


def call_without_gradients(run: Run, seed: int) -> None:
    seed_streams(seed)
    with torch.no_grad():
        run.outputs.append(run.model(**batch(seed, run.shape)))


def generate(run: Run, seed: int) -> None:
    run.model.eval()
    with torch.inference_mode():
        for length in (2, 3, 4):
            run.outputs.append(run.model(**batch(seed, Shape(2, length))))
    run.model.train()


def other_batch(run: Run, seed: int) -> None:
    train(run, seed, Shape(BATCH - 3, run.shape.length))


def other_length(run: Run, seed: int) -> None:
    train(run, seed, Shape(run.shape.batch, LENGTH - 4))


def larger(run: Run, seed: int) -> None:
    train(run, seed, Shape(2 * BATCH, LENGTH + 3))


def flagged(run: Run, seed: int) -> None:
    train(run, seed, Shape(flag=not run.shape.flag, mask=run.shape.mask))


def masked(run: Run, seed: int) -> None:
    train(run, seed, Shape(flag=run.shape.flag, mask=not run.shape.mask))


def input_gradients(run: Run, seed: int) -> None:
    train(run, seed, Shape(requires_grad=not run.shape.requires_grad))


def not_contiguous(run: Run, seed: int) -> None:
    train(run, seed, Shape(contiguous=not run.shape.contiguous))


def other_loss(run: Run, seed: int) -> None:
    train(run, seed, loss=absolute)


def two_before_one_backward(run: Run, seed: int) -> None:
    run.optimizer.zero_grad()
    seed_streams(seed)
    outputs = [run.model(**batch(seed + part, run.shape)) for part in range(2)]
    sum(squares(output) for output in outputs).backward()
    run.outputs += outputs
    run.step()


def abandoned(run: Run, seed: int) -> None:
    """A forward without a backward."""
    seed_streams(seed)
    run.outputs.append(run.model(**batch(seed, run.shape)))


def walked_twice(run: Run, seed: int) -> None:
    seed_streams(seed)
    run.optimizer.zero_grad()
    loss = squares(run.model(**batch(seed, run.shape)))
    loss.backward(retain_graph=True)
    loss.backward()
    run.step()


def gradients_asked_for(run: Run, seed: int) -> None:
    seed_streams(seed)
    loss = squares(run.model(**batch(seed, run.shape)))
    parameters = [one for one in run.model.parameters() if one.requires_grad]
    run.outputs.append(torch.autograd.grad(loss, parameters, allow_unused=True))


def advance(run: Run, seed: int) -> None:
    run.network.advance()
    train(run, seed)


def freeze(run: Run, seed: int) -> None:
    for parameter in run.network.parts[0].parameters():
        parameter.requires_grad_(not parameter.requires_grad)
    train(run, seed)


def save_state(run: Run, seed: int) -> None:
    run.saved = copy.deepcopy(run.model.state_dict())
    train(run, seed)
    run.model.load_state_dict(run.saved)
    train(run, seed + 1)


def deep_copy(run: Run, seed: int) -> None:
    run.model = copy.deepcopy(run.model)
    run.begin()
    train(run, seed)


def pickled(run: Run, seed: int) -> None:
    held = io.BytesIO()
    pickle.dump(run.model, held)
    held.seek(0)
    run.model = pickle.load(held)
    run.begin()
    train(run, seed)


@contextlib.contextmanager
def default_type() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def moved_away() -> contextlib.AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(lambda one: one.clone(), lambda one: one)


AROUND: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "hooks": moved_away,
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "flops": lambda: FlopCounterMode(display=False),
    "default type": default_type,
    "default device": lambda: torch.device("cpu"),
    "save_on_cpu": lambda: torch.autograd.graph.save_on_cpu(),
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
}


@dataclass(frozen=True)
class Within:
    """A step within something else."""

    name: str

    @property
    def __name__(self) -> str:
        return f"within {self.name}"

    def __call__(self, run: Run, seed: int) -> None:
        with AROUND[self.name]():
            train(run, seed, Shape(run.shape.batch - 1, run.shape.length) if seed % 2 else run.shape, loss=absolute)


def beside_a_planner(run: Run, seed: int) -> None:
    """Another thread plans another model meanwhile; what eager training does is the same without it."""
    if not run.is_planned:
        train(run, seed)
        return

    layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh())

    def plan() -> None:
        Rockmate(layers, torch.ones(4, 8), 1.0, solver="greedy", cache=False)

    arguments = batch(seed, run.shape)
    seed_streams(seed)
    thread = threading.Thread(target=plan)
    run.optimizer.zero_grad()
    thread.start()
    try:
        output = run.model(**arguments)
        total = squares(output)
        total.backward()
    finally:
        thread.join()
    run.outputs += [output, total, arguments["x"].grad]
    run.step()


def in_another_thread(run: Run, seed: int) -> None:
    failed: list[Exception] = []

    def work() -> None:
        try:
            train(run, seed)
        except Exception as error:  # noqa: BLE001  raised again below
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


Event = Callable[[Run, int], None]
EVENTS: list[Event] = [
    left_behind,
    evaluated_between,
    accumulate,
    keep_gradients,
    evaluate,
    call_without_gradients,
    generate,
    other_batch,
    other_length,
    larger,
    flagged,
    masked,
    input_gradients,
    not_contiguous,
    other_loss,
    two_before_one_backward,
    abandoned,
    walked_twice,
    gradients_asked_for,
    advance,
    advance,
    freeze,
    save_state,
    deep_copy,
    pickled,
    beside_a_planner,
    in_another_thread,
    *[Within(name) for name in AROUND if name != "profiler"],
]


# ---- what can be seen -------------------------------------------------------------------------------


def seen(value: Any, depth: int = 0) -> Any:
    """A copy that compares: tensors with their gradient flags, containers and plain objects by their content."""
    if isinstance(value, nn.UninitializedParameter):
        return "uninitialized"
    if isinstance(value, Tensor):
        return value.detach().clone(), value.requires_grad
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, dict):
        return {key: seen(one, depth + 1) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(seen(one, depth + 1) for one in value)]
    if callable(value):
        return "function"
    if hasattr(value, "__dict__") and depth < 4:
        return {name: seen(one, depth + 1) for name, one in vars(value).items()}
    return value


_OWN = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def state_of(network: nn.Module, *, streams: bool = True) -> dict[str, Any]:
    """All of a network that can be seen, and the random streams."""
    found: dict[str, Any] = {}
    for path, part in network.named_modules():
        for name, value in vars(part).items():
            if name in _OWN or not name.startswith("_"):
                found[f"{path}.{name}"] = seen(value)
    for name, parameter in network.named_parameters():
        found[f"gradient of {name}"] = seen(parameter.grad)
    if streams:
        found["random stream"] = torch.get_rng_state()
        found["Python's random stream"] = random.getstate()
        found["NumPy's random stream"] = np.random.get_state()[1].tolist()
    return found


def difference(one: Any, other: Any, place: str = "") -> str | None:
    """Where two of what `seen` returns differ, None where they are equal to the bit."""
    if type(one) is not type(other):
        return f"{place}: {_short(one)} and {_short(other)}"
    if isinstance(one, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{place}: {one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
        if torch.equal(one, other) or (
            (one.isnan() == other.isnan()).all() and torch.equal(one.nan_to_num(), other.nan_to_num())
        ):
            return None
        return f"{place}: off by up to {(one.double() - other.double()).abs().max():.3g}"
    if isinstance(one, dict):
        if list(one) != list(other):
            return f"{place}: {sorted(set(map(str, one)) ^ set(map(str, other)))} on one side, or in another order"
        return next((d for key in one if (d := difference(one[key], other[key], f"{place} {key}"))), None)
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return f"{place}: {len(one)} and {len(other)} items"
        pairs = enumerate(zip(one, other, strict=True))
        return next((d for index, (a, b) in pairs if (d := difference(a, b, f"{place} {index}"))), None)
    return None if one == other or one != one else f"{place}: {_short(one)} and {_short(other)}"


def _short(value: Any) -> str:
    return " ".join(str(value).split())[:80]
