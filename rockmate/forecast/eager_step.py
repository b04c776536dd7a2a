"""One eager training step on shapes alone: its highest moment, and who holds the bytes then."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from rkgb import Sample
from rkgb.devices.allocation_log import highest_moment
from rkgb.devices.caching_allocator import AllocationEvent
from rkgb.shapes.device import Shapes
from rkgb.shapes.watch import StorageWatch
from rkgb.state.module_state import for_planning, module_devices, module_state_kept
from rkgb.torch_private.identity import storage_key
from rkgb.tree import leaves
from rockmate.memory.optimizer_state import optimizer_state_bytes
from rockmate.planning.costs import LossFunction, evaluate_loss

PHASES = ("forward", "backward", "optimizer step")


@dataclass(frozen=True, slots=True)
class EagerStep:
    """Bytes of one step of training without a plan. All are as the machine's allocator rounds them."""

    parameter_bytes: int
    buffer_bytes: int
    input_bytes: int
    optimizer_bytes: int  # of its state
    events: tuple[AllocationEvent, ...]  # of the forward, the loss and the backward, above those
    forward_events: int  # how many of them are of the forward and the loss
    optimizer_events: tuple[AllocationEvent, ...]  # of the optimizer's step, which comes after them
    kinds: dict[int, str]  # of each storage that the events make, by number
    time_ms: float | None  # estimated; of the forward and the backward
    optimizer_ms: float | None
    knows_optimizer_step: bool  # else what it computes with is not in the events
    held_sizes_bytes: tuple[int, ...] = ()  # of parameters, buffers and inputs, one by one
    first_optimizer_events: tuple[AllocationEvent, ...] = ()  # of its first step, which makes its state

    @property
    def held_bytes(self) -> int:
        """What is there before the step."""
        return self.parameter_bytes + self.buffer_bytes + self.input_bytes + self.optimizer_bytes

    @property
    def all_events(self) -> tuple[AllocationEvent, ...]:
        """Of the whole step."""
        return (*self.events, *self.optimizer_events)

    @property
    def peak_bytes(self) -> int:
        """The most that is allocated, with what is there before the step."""
        return self.held_bytes + self._highest[0]

    @property
    def step_peak_bytes(self) -> int:
        """The most that forward and backward allocate above what was there: what a budget of Rockmate's is of."""
        return highest_moment(self.events)[0]

    @property
    def after_backward_bytes(self) -> int:
        """The most that is allocated from the end of the backward on, with what is there before the step."""
        level = sum(event.size_bytes for event in self.events)
        return self.held_bytes + level + max(0, highest_moment(self.optimizer_events)[0])

    def training_events(self, steps: int = 3) -> Iterator[AllocationEvent]:
        """From the first parameter on: what training allocates and gives back, as a caching allocator sees it.

        At the end of a step gradients go first, in the order in which they came, and then what else is left of it.
        """
        numbers, first = itertools.count(), [event.size_bytes for event in self.first_optimizer_events]
        there_before = self.optimizer_bytes - sum(first)  # what is of no events
        for size_bytes in (*self.held_sizes_bytes, there_before):
            if size_bytes > 0:
                yield AllocationEvent(next(numbers), size_bytes)
        for step in range(steps):
            alive: dict[int, tuple[int, int]] = {}
            optimizer_events = self.optimizer_events if step else self.first_optimizer_events or self.optimizer_events
            for event in (*self.events, *optimizer_events):
                if event.size_bytes > 0:
                    alive[event.address] = next(numbers), event.size_bytes
                    yield AllocationEvent(*alive[event.address])
                else:
                    number, size_bytes = alive.pop(event.address)
                    yield AllocationEvent(number, -size_bytes)
            own = {event.address for event in self.events}  # and what else is there is the optimizer's state
            ends = [address for address in alive if address in own]
            for address in sorted(ends, key=lambda address: self.kinds.get(address) != "gradients"):
                number, size_bytes = alive[address]
                yield AllocationEvent(number, -size_bytes)

    @property
    def _highest(self) -> tuple[int, int]:
        return highest_moment(self.all_events)

    @property
    def peak_in(self) -> str:
        """The phase of the highest moment."""
        place = self._highest[1]
        if place > len(self.events):
            return PHASES[2]
        return PHASES[0] if place <= self.forward_events else PHASES[1]

    def split(self) -> tuple[tuple[str, int], ...]:
        """Who holds the bytes at the highest moment: their sum is `peak_bytes`."""
        alive: dict[int, int] = {}
        for event in self.all_events[: self._highest[1]]:
            if event.size_bytes > 0:
                alive[event.address] = event.size_bytes
            else:
                del alive[event.address]
        found = Counter[str]()
        for number, size_bytes in alive.items():
            found[self.kinds.get(number, "temporary")] += size_bytes
        there = {
            "parameters": self.parameter_bytes,
            "gradients": found["gradients"],
            "optimizer state": self.optimizer_bytes,
            "activations": found["activations"],
            "temporary": found["temporary"],
            "buffers and inputs": self.buffer_bytes + self.input_bytes,
        }
        return tuple((kind, size_bytes) for kind, size_bytes in there.items() if size_bytes)


def observe_eager_step(
    model: torch.nn.Module,
    sample: Sample,
    loss: LossFunction | None,
    optimizer: Optimizer | Callable[..., Optimizer] | None,
    device: Shapes,
) -> EagerStep:
    """Run a step of `model`, which has no data, as the user's loop does: what is told here has no gradients before it.

    The output and the loss live until the end of the step, as in most loops. Without a `loss`, one like a cross-entropy
    is assumed. Raises `OptimizerError`, `LossError`, and what the module raises.
    """
    seen: set[int] = set()
    parameters = list(model.parameters())
    held = [_stored_sizes(tensors, device, seen) for tensors in (parameters, model.buffers(), sample.tensors)]
    optimizer_bytes = optimizer_state_bytes(optimizer, parameters, device.device)[0]
    kinds: dict[int, str] = {}
    watch = StorageWatch(device.machine, device.clock)
    with for_planning(model), module_state_kept(model, module_devices(model, sample.tensors)):
        started_ms = device.clock.now_ms
        with watch:
            output = sample.copy().call(model) if _is_written(sample) else sample.call(model)
            value = evaluate_loss(loss, output) if loss is not None else _assumed_loss(output)
            forward_events = len(watch.events)
            kinds.update(dict.fromkeys(watch.alive, "activations"))
            value.backward()
        trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
        for parameter in trained:
            number = watch.number_of(parameter.grad) if parameter.grad is not None else None
            if number is not None:
                kinds[number] = "gradients"
        time_ms = device.clock.now_ms - started_ms
        step_events = tuple(_rounded(watch.events, device))
        step = _optimizer_step(optimizer, trained, device, watch.made)
        watch.stop()
        del output, value
    has_speed = device.machine.has_speed
    return EagerStep(
        sum(held[0]),
        sum(held[1]),
        sum(held[2]),
        optimizer_bytes,
        step_events,
        forward_events,
        tuple(_rounded(step.events if step else (), device)),
        kinds,
        time_ms if has_speed else None,
        step.time_ms if has_speed and step else None,
        step is not None,
        tuple(itertools.chain(*held)),
        tuple(_rounded(step.first_events if step else (), device)),
    )


def _is_written(sample: Sample) -> bool:
    return any(tensor.requires_grad for tensor in sample.tensors)


def _stored_sizes(tensors: Iterable[torch.Tensor], device: Shapes, seen: set[int]) -> list[int]:
    found = []
    for tensor in tensors:
        if storage_key(tensor) not in seen:
            seen.add(storage_key(tensor))
            found.append(device.allocated_bytes(tensor.untyped_storage().nbytes()))
    return found


def _rounded(events: Iterable[AllocationEvent], device: Shapes) -> Iterable[AllocationEvent]:
    for event in events:
        size_bytes = device.allocated_bytes(abs(event.size_bytes))
        yield AllocationEvent(event.address, size_bytes if event.size_bytes > 0 else -size_bytes, event.time_ns)


def _assumed_loss(output: Any) -> torch.Tensor:
    trained = [tensor for tensor in leaves(output) if tensor.requires_grad]
    if not trained:
        raise ValueError("no output requires a gradient")
    return torch.stack(
        [(t if t.dim() == 0 else torch.log_softmax(t.abs() if t.is_complex() else t, -1).mean()) for t in trained]
    ).sum()


class _OptimizerStep(NamedTuple):
    first_events: list[AllocationEvent]  # which makes the state
    events: list[AllocationEvent]  # of a later one
    time_ms: float


def _optimizer_step(
    optimizer: Optimizer | Callable[..., Optimizer] | None,
    trained: list[torch.nn.Parameter],
    device: Shapes,
    first: int,
) -> _OptimizerStep | None:
    """What steps allocate and free again, and the time of one; None where it does not run so."""
    if optimizer is None or not trained:
        return _OptimizerStep([], [], 0.0)
    try:
        made = optimizer if isinstance(optimizer, Optimizer) else optimizer(trained)
        if device.machine.is_accelerator:
            for group in made.param_groups:
                if group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = True  # PyTorch's default there: all parameters at once, and as much again
        with StorageWatch(device.machine, device.clock, first=first) as making:
            made.step()
        first_events = making.stop()
        started_ms = device.clock.now_ms
        with StorageWatch(device.machine, device.clock, first=making.made) as watch:
            made.step()
        return _OptimizerStep(first_events, watch.stop(), device.clock.now_ms - started_ms)
    except Exception:  # noqa: BLE001  whatever an optimizer raises that reads values
        return None
