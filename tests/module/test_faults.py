"""Whatever fails, and wherever in a step: afterwards the module trains exactly, and nothing has been left behind."""

import copy
import gc
import multiprocessing
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from rkgb.devices.allocation_log import AllocationLog
from rkgb.devices.registry import device_of
from rockmate import Rockmate
from tests.module.models import WIDTH, Layers, Normalised, Smooth, Tied, built, images, rows, tokens
from tests.module.steps import assert_same_training, assert_trains_exactly, recomputing, squares, train
from tests.where import here, placed

FAULTS = (RuntimeError, KeyboardInterrupt, MemoryError, torch.OutOfMemoryError)
MODELS: dict[str, tuple[type[nn.Module], Callable[[int], Tensor]]] = {
    "layers": (Layers, rows),
    "normalised": (Normalised, images),
    "tied": (Tied, tokens),
}
every_model = pytest.mark.parametrize(("make", "batch"), MODELS.values(), ids=MODELS)
every_fault = pytest.mark.parametrize("fault", FAULTS, ids=[fault.__name__ for fault in FAULTS])


def planned(make: type[nn.Module], batch: Callable[[int], Tensor]) -> Rockmate:
    model = recomputing(built(make), batch(0))
    assert model.plan.recomputations > 0
    return model


class Failing(TorchDispatchMode):
    """Raises a fault in place of the `nth` operation that runs, in the forward, a recomputation or a backward."""

    def __init__(self, fault: type[BaseException], nth: int) -> None:
        super().__init__()
        self.fault, self.left = fault, nth

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == -1:
            raise self.fault("on purpose")
        return func(*args, **(kwargs or {}))


def fail_at(model: Rockmate, data: Tensor, fault: type[BaseException], nth: int) -> bool:
    """A step in which the `nth` operation fails; whether there is one."""
    try:
        with Failing(fault, nth):
            squares(model(data)).backward()
    except fault:
        return True
    finally:
        model.zero_grad()
    return False


def operations_of(model: Rockmate, data: Tensor) -> int:
    counting = Failing(RuntimeError, 1 << 30)
    with counting:
        squares(model(data)).backward()
    model.zero_grad()
    return (1 << 30) - counting.left


@every_fault
@every_model
def test_a_fault_in_any_operation_leaves_the_module_usable(make, batch, fault):
    model = planned(make, batch)
    count = operations_of(model, batch(1))
    for nth in range(0, count, max(1, count // 12)):
        assert fail_at(model, batch(1), fault, nth)
        assert torch.is_grad_enabled()
    assert not fail_at(model, batch(1), fault, count)
    assert_trains_exactly(model, [batch(1), batch(2)])


@pytest.mark.slow
@every_model
def test_after_a_fault_in_each_single_operation_the_next_step_is_exact(make, batch):
    model = planned(make, batch)
    for nth in range(operations_of(model, batch(1))):
        assert fail_at(model, batch(1), KeyboardInterrupt, nth)
        assert_trains_exactly(model, [batch(2)])
        model.zero_grad()  # gradients that are there are added to, by other operations


@every_fault
@pytest.mark.parametrize("place", ["weight", "accumulated", "output", "inner"])
def test_a_fault_in_a_hook_leaves_the_module_usable(place, fault):
    model = planned(Layers, rows)

    def fail(*_: object) -> None:
        raise fault("on purpose")

    weight = model.layers[1].weight
    output = model(rows(1))
    if place == "weight":
        handle = weight.register_hook(fail)
    elif place == "accumulated":
        handle = weight.register_post_accumulate_grad_hook(fail)
    elif place == "output":
        handle = output.register_hook(fail)
    else:
        handle = output.grad_fn.next_functions[0][0].register_prehook(fail)
    with pytest.raises(fault, match="on purpose"):
        squares(output).backward()
    handle.remove()
    model.zero_grad()
    assert_trains_exactly(model, [rows(1), rows(2)])


class Fragile(torch.autograd.Function):
    """Fails where `faults` says so: in its forward or its backward."""

    faults: ClassVar[dict[str, BaseException]] = {}

    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        if "forward" in Fragile.faults:
            raise Fragile.faults["forward"]
        return value.sin()

    @staticmethod
    def backward(ctx, gradient):
        if "backward" in Fragile.faults:
            raise Fragile.faults["backward"]
        return gradient * ctx.saved_tensors[0].cos()


class WithFragile(nn.Module):
    """Code of the user's among operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = F.gelu(self.first(hidden)).tanh()
        return F.dropout(self.last(Fragile.apply(hidden).exp()), 0.1).tanh()


@every_fault
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_fault_in_the_user_s_own_function_is_raised_as_it_is(where, fault, monkeypatch):
    model = planned(WithFragile, rows)
    raised = fault("on purpose")
    monkeypatch.setitem(Fragile.faults, where, raised)
    with pytest.raises(fault) as caught:
        squares(model(rows(1))).backward()
    monkeypatch.undo()
    assert caught.value is raised
    model.zero_grad()
    assert_trains_exactly(model, [rows(1), rows(2)])


# ---- leaks ---------------------------------------------------------------------------------------------------


def net_bytes(log: AllocationLog) -> int:
    return sum(event.size_bytes for event in log.events)


@pytest.mark.parametrize(
    ("make", "batch"),
    [pytest.param(*case, id=name, marks=() if name == "tied" else pytest.mark.slow) for name, case in MODELS.items()],
)
def test_two_hundred_steps_leave_what_two_leave(make, batch):
    model = planned(make, batch)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    data = [batch(seed) for seed in range(4)]

    def steps(count: int) -> int:
        with AllocationLog(here()) as log:
            for number in range(count):
                squares(model(data[number % 4])).backward()
                optimizer.step()
                optimizer.zero_grad()
        return net_bytes(log)

    steps(2)  # the momenta are there from now on
    gc.disable()
    try:
        assert steps(2) == 0
        assert steps(200) == 0
    finally:
        gc.enable()


@pytest.mark.ci
@pytest.mark.slow
def test_two_hundred_steps_of_which_every_other_fails_leave_nothing():
    model, fault = planned(Layers, rows), MemoryError
    data = rows(1)
    count = operations_of(model, data)
    fail_at(model, data, fault, count // 2)
    gc.collect()
    with AllocationLog(here()) as log:
        for number in range(100):
            assert fail_at(model, data, fault, number * 7 % count)
            squares(model(data)).backward()
            model.zero_grad()
        device_of(here()).await_backwards()  # an accelerator's thread lets go of a failed step a moment later
        gc.collect()  # the exceptions' tracebacks are cycles of their own
    assert net_bytes(log) == 0


# ---- threads and processes -----------------------------------------------------------------------------------


def test_a_fault_in_one_thread_leaves_a_module_in_another_alone():
    """Without random operations: all threads of a process draw from one random stream."""
    steady, failing = planned(Smooth, rows), planned(Normalised, images)
    expected = train(copy.deepcopy(steady.original), [rows(1)] * 20)
    start, done = threading.Barrier(2), threading.Event()
    count = operations_of(failing, images(1))

    def fail_often() -> int:
        start.wait()
        faults = 0
        while not done.is_set() or not faults:
            faults += fail_at(failing, images(1), MemoryError, faults * 5 % count)
        return faults

    def steps() -> object:
        start.wait()
        try:
            return train(steady, [rows(1)] * 20)
        finally:
            done.set()

    with ThreadPoolExecutor(2) as pool:
        faults, found = pool.submit(fail_often), pool.submit(steps)
        assert faults.result() > 0
        trained = found.result()
    for record in (*trained.steps, *expected.steps):
        record.pop("random stream")
    assert_same_training(trained, expected)
    assert_trains_exactly(failing, [images(1), images(2)])


class Masks(nn.Module):
    """Every output shows the mask that it was multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.dropout(torch.sin(hidden * self.scale * (k + 1)), 0.5, self.training) for k in range(6))


@pytest.mark.ci
def test_threads_that_share_a_random_stream_repeat_each_its_own_numbers():
    """No step of theirs can be eager's to the bit; but each one's gradients must be those of its own outputs."""
    data = placed(torch.rand(8, WIDTH).add_(0.1)).requires_grad_()
    models = [recomputing(built(Masks), data) for _ in range(3)]
    assert models[0].plan.recomputations > 0
    interval = sys.getswitchinterval()
    start = threading.Barrier(len(models))

    def errors(model: Rockmate) -> int:
        start.wait()
        found = 0
        for _ in range(200):
            outputs = model(data)
            (gradient,) = torch.autograd.grad(sum(output.sum() for output in outputs), data)
            kept = [2 * (k + 1) * (output != 0) for k, output in enumerate(outputs)]
            expected = sum(mask * torch.cos(data.detach() * (k + 1)) for k, mask in enumerate(kept))
            found += not torch.allclose(gradient, expected, atol=1e-4)
        return found

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(models)) as pool:
            assert sum(pool.map(errors, models)) == 0
    finally:
        sys.setswitchinterval(interval)


class Batches(Dataset):
    """Batches that are made in other processes."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return rows(index)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system has no fork")
def test_a_data_loader_may_fork_between_a_forward_and_its_backward():
    """Workers start and end while a graph with handles is alive."""
    model, waiting = planned(Layers, rows), planned(Smooth, rows)
    eager, other = copy.deepcopy(model.original), copy.deepcopy(waiting.original)
    alive = waiting(rows(1))
    batches = list(DataLoader(Batches(), batch_size=None, num_workers=2, multiprocessing_context="fork"))
    assert_same_training(train(model, batches), train(eager, [rows(index) for index in range(6)]))
    squares(alive).backward()
    squares(other(rows(1))).backward()
    for one, expected in zip(waiting.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, expected.grad)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system has no fork")
def test_workers_run_while_the_module_trains():
    model = planned(Smooth, rows)
    eager = copy.deepcopy(model.original)
    found = train(model, DataLoader(Batches(), batch_size=None, num_workers=2, multiprocessing_context="fork"))
    expected = train(eager, [rows(index) for index in range(6)])
    for record in (*found.steps, *expected.steps):
        record.pop("random stream")  # a loader draws its workers' seeds
    assert_same_training(found, expected)
