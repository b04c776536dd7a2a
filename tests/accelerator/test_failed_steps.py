"""What a failed step held is free for what is tried next, though autograd's thread lets go of it a moment later."""

import copy
import gc
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from rkgb.devices.out_of_memory import if_it_fits
from rkgb.devices.registry import device_of
from rkgb.process.backward_threads import await_backwards
from rockmate.memory.allocators import start_peak
from tests.module.models import Layers, built, rows
from tests.module.steps import recomputing, squares

pytestmark = [pytest.mark.filterwarnings("ignore::rockmate.FragmentationWarning")]


class Stepping:
    """Steps of a module in which an allocation of the backward fails, from the first one to the last."""

    def __init__(self, extension, module) -> None:
        self.extension, self.module, self.data = extension, module, rows(1)
        self.before_bytes = 0

    def settle(self) -> None:
        """Note what is held without a step."""
        self.clear()
        await_backwards(self.data.device)
        gc.collect()
        self.before_bytes = held_bytes()

    def run(self, nth: int = 0) -> list[int]:
        """Counts of allocations: before the step, before its backward, and after it."""
        counts = [allocations()]
        self.extension.fail_allocation(nth)
        try:
            loss = squares(self.module(self.data))
            counts.append(allocations())
            loss.backward()
        finally:
            self.extension.fail_allocation(0)
        return [*counts, allocations()]

    def failures(self) -> Iterator[Callable[[], object]]:
        before, forward, after = self.run()
        self.settle()
        for nth in range(forward - before + 1, after - before + 1, max(1, (after - forward) // 5)):
            yield lambda nth=nth: self.run(nth)
            self.clear()

    def clear(self) -> None:
        self.module.zero_grad()


def held_bytes() -> int:
    return torch.accelerator.memory.memory_allocated()


def allocations() -> int:
    return torch.accelerator.memory.memory_stats()["allocation.all.allocated"]


@pytest.fixture
def slow_turns():
    """That thread gets no turn to run Python, as it needs to let go, before this one waits for something."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(30.0)
    yield
    sys.setswitchinterval(interval_s)


@pytest.fixture(params=["eager", "planned"])
def steps(extension, request, slow_turns):
    model = recomputing(built(Layers), rows())
    return Stepping(extension, copy.deepcopy(model.original) if request.param == "eager" else model)


def test_nothing_is_left_of_a_step_that_does_not_fit(steps):
    for failing in steps.failures():
        assert if_it_fits(failing) is None
        steps.clear()
        assert held_bytes() == steps.before_bytes


def test_a_peak_is_counted_from_what_is_held_without_a_failed_step(device, steps):
    """What is freed within a step that is measured would hide as much of its peak."""
    for failing in steps.failures():
        with pytest.raises(torch.OutOfMemoryError):
            failing()
        steps.clear()
        assert start_peak(device) == steps.before_bytes


def test_waiting_allocates_nothing_and_may_be_done_within_a_backward(device, steps):
    waits = []

    def wait(gradient):
        before = allocations()
        device_of(device).await_backwards()
        waits.append(allocations() - before)

    handle = steps.module.layers[1].weight.register_hook(wait)
    steps.run()
    handle.remove()
    device_of(device).await_backwards()
    with torch.inference_mode():
        wait(None)
    with torch.no_grad():
        wait(None)
    assert waits == [0, 0, 0]
    assert all(parameter.grad is not None for parameter in steps.module.parameters())
