"""Whichever allocation finds no memory: a clear error, nothing left behind, and the next step is eager's to the bit."""

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rkgb.devices.registry import device_of
from rkgb.replay.step_record import bitwise_equal
from rockmate import PlanOptions, Rockmate, max_batch, verify, zoo
from tests.module.models import Layers, Normalised, Tied, built, images, rows, tokens
from tests.module.module_state import state_of
from tests.module.steps import FEW_ROUNDS, assert_same, assert_same_step, recomputing, squares
from tests.where import here, random_stream

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::rockmate.FragmentationWarning"),
    pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning"),
]

MODELS = {"layers": (Layers, rows), "normalised": (Normalised, images), "tied": (Tied, tokens)}
every_model = pytest.mark.parametrize(("make", "batch"), MODELS.values(), ids=MODELS)
many_places = pytest.mark.parametrize("places", [8, pytest.param(1 << 30, marks=pytest.mark.slow, id="all")])


def allocations(run: Callable[[], object]) -> int:
    """How often `run` asks for memory."""
    count = "allocation.all.allocated"
    before = torch.accelerator.memory.memory_stats()[count]
    run()
    return torch.accelerator.memory.memory_stats()[count] - before


def spread(count: int, places: int) -> range:
    """Numbers of allocations, from the first to the last."""
    return range(1, count + 1, max(1, count // places))


@contextmanager
def failing(extension: Any, nth: int) -> Iterator[None]:
    """The `nth` allocation finds no memory."""
    extension.fail_allocation(nth)
    try:
        yield
    finally:
        extension.fail_allocation(0)


def error_of(run: Callable[[], object]) -> Exception | None:
    """What `run` raises, without what its frames hold."""
    try:
        run()
    except Exception as error:  # noqa: BLE001  the test looks at it
        return error.with_traceback(None)
    return None


def held_bytes() -> int:
    """Bytes of the device in use, once autograd's thread has let go of what failed."""
    device_of(here()).await_backwards()
    gc.collect()
    return torch.accelerator.memory.memory_allocated()


class Passed(TorchDispatchMode):
    """What a module's eager forward leaves in streams and buffers at each operation: an error may end it at any."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.states = module, list[list[Tensor]]()

    def look(self) -> None:
        self.states.append([random_stream(), *(buffer.clone() for buffer in self.module.buffers())])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.look()
        return result


def states_of_the_forward(module: nn.Module, data: Tensor) -> list[list[Tensor]]:
    torch.manual_seed(0)
    with Passed(module) as passed:
        passed.look()
        module(data)
    return passed.states


@many_places
@every_model
def test_a_step_that_finds_no_memory_leaves_what_a_failed_eager_step_leaves(extension, make, batch, places):
    model, data = recomputing(built(make), batch()), batch(1)
    eager, buffers = copy.deepcopy(model.original), copy.deepcopy(dict(model.named_buffers()))
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    passed = states_of_the_forward(copy.deepcopy(eager), data)
    complete = copy.deepcopy(eager)
    squares_of(complete, data)

    def put_back() -> None:
        model.zero_grad()
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])

    forward = allocations(lambda: model(data))
    put_back()
    count = allocations(lambda: squares_of(model, data))
    put_back()
    assert count > forward
    before = held_bytes()
    for nth in spread(count, places):
        with failing(extension, nth):
            error = error_of(lambda: squares_of(model, data))
        assert isinstance(error, torch.OutOfMemoryError), nth
        assert "Test accelerator out of memory" in str(error)
        found = [random_stream(), *(buffer.clone() for buffer in model.buffers())]
        expected = passed if nth <= forward else passed[-1:]
        assert any(all(map(torch.equal, found, state)) for state in expected), f"allocation {nth} of {count}"
        for (name, mine), theirs in zip(model.named_parameters(), complete.parameters(), strict=True):
            assert torch.equal(mine, values[name])
            # A weight that is used twice may have the part of one use.
            assert mine.grad is None or make is Tied or bitwise_equal(mine.grad, theirs.grad), name
        assert torch.is_grad_enabled()
        del error, found
        put_back()
        assert held_bytes() == before, f"allocation {nth} of {count}"
    assert_same_step(model, eager, data)


def squares_of(module: nn.Module, data: Tensor) -> None:
    """A step from the same random numbers."""
    torch.manual_seed(0)
    squares(module(data)).backward()


@pytest.mark.parametrize(("make", "batch"), [(Layers, rows), (Normalised, images)], ids=["layers", "normalised"])
def test_gradients_that_are_there_get_all_of_a_failed_step_s_part_or_nothing(extension, make, batch):
    model, data = recomputing(built(make), batch()), batch(1)
    squares_of(model, batch(2))
    before = [parameter.grad.clone() for parameter in model.parameters()]
    complete = copy.deepcopy(model.original)
    for parameter, gradient in zip(complete.parameters(), before, strict=True):
        parameter.grad = gradient.clone()
    squares_of(complete, data)
    count = allocations(lambda: squares_of(model, data))
    for nth in spread(count, 8):
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            parameter.grad = gradient.clone()
        with failing(extension, nth):
            assert isinstance(error_of(lambda: squares_of(model, data)), torch.OutOfMemoryError), nth
        for mine, theirs, gradient in zip(model.parameters(), complete.parameters(), before, strict=True):
            assert bitwise_equal(mine.grad, gradient) or bitwise_equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("places", [12, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scope", ["step", pytest.param("reserved", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("make", "batch"), [(Layers, rows), (Normalised, images)], ids=["layers", "normalised"])
def test_planning_that_finds_no_memory_anywhere_leaves_all_as_it_was(extension, make, batch, scope, places):
    model = built(make)
    squares_of(model, batch(1))  # gradients and statistics to be found again
    before, sample = state_of(model), batch()
    budget: Any = "64 MiB" if scope == "reserved" else 0.9

    def plan() -> Rockmate:
        return Rockmate(model, sample, budget, loss=squares, solver="greedy", limits=FEW_ROUNDS, scope=scope)

    plan()  # what is made once, at the first use
    count = allocations(plan)
    held, refusals = held_bytes(), 0
    for nth in spread(count, places):
        with failing(extension, nth):
            error = error_of(plan)  # none where another way took less
        assert_same(state_of(model), before)
        if error is not None:
            assert isinstance(error, torch.OutOfMemoryError), f"allocation {nth} of {count}: {error!r}"
            assert "Test accelerator out of memory" in str(error)
            assert [note for note in error.__notes__ if note.startswith("No memory was left")], nth
            refusals += 1
        del error
        assert held_bytes() == held, f"allocation {nth} of {count}"
        assert not extension.records_history(0)
    assert refusals > 0
    eager = copy.deepcopy(model)
    assert_same_step(plan(), eager, batch(2))


@pytest.mark.parametrize("places", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_a_first_call_or_one_of_another_size_that_finds_no_memory_may_be_made_again(extension, places):
    """Where memory runs out while a call is planned, training ends as eager training does, or it goes on."""
    eager = built(Layers)
    first, other = rows(1), rows(2)[:200]

    def fresh() -> Rockmate:
        return Rockmate(copy.deepcopy(eager), budget=0.8, loss=squares, solver="greedy", limits=FEW_ROUNDS)

    def after_the_first() -> Rockmate:
        model = fresh()
        squares_of(model, first)
        model.zero_grad()
        return model

    for make, data in ((fresh, first), (after_the_first, other)):
        model = make()
        count = allocations(lambda model=model, data=data: squares_of(model, data))
        del model
        for nth in spread(count, places):
            model = make()
            with failing(extension, nth), torch.random.fork_rng(devices=[]):
                error = error_of(lambda model=model, data=data: squares_of(model, data))
            assert error is None or isinstance(error, torch.OutOfMemoryError), f"{nth} of {count}: {error!r}"
            del error
            assert_same_step(model, copy.deepcopy(eager), data)
            del model
            assert not extension.records_history(0)


def test_where_a_step_finds_no_memory_it_does_once_there_is_some(extension):
    """As where a user holds too much for a moment: what is reserved and unused is given back before an error."""
    model, data = recomputing(built(Layers), rows()), rows(1)
    eager = copy.deepcopy(model.original)
    torch.accelerator.memory.empty_cache()
    extension.limit(0, torch.accelerator.memory.memory_reserved())
    held: list[Tensor] = []

    def hold() -> None:
        while True:
            held.append(torch.empty(1 << 16, dtype=torch.uint8, device=data.device))

    assert isinstance(error_of(hold), torch.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError, match="Test accelerator out of memory"):
        squares_of(model, data)
    extension.limit(0, torch.accelerator.memory.memory_reserved() + (40 << 20))
    assert_same_step(model, eager, data)
    assert held


def test_verify_that_finds_no_memory_leaves_all_as_it_was(extension):
    model = built(Normalised)
    squares_of(model, images(1))
    before, gradients = state_of(model), [parameter.grad for parameter in model.parameters()]
    sample, options = images(), PlanOptions(loss=squares, solver="greedy", limits=FEW_ROUNDS)

    def check() -> object:
        return verify(model, sample, 0.9, options=options)

    check()
    count, held = allocations(check), held_bytes()
    for nth in spread(count, 6):
        with failing(extension, nth):
            error = error_of(check)
        assert error is None or isinstance(error, torch.OutOfMemoryError), f"{nth} of {count}: {error!r}"
        assert_same(state_of(model), before)
        assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
        del error
        assert held_bytes() == held, f"allocation {nth} of {count}"


@pytest.mark.parametrize("never_merges", [False, True])
def test_training_is_exact_where_freed_blocks_are_never_merged(extension, never_merges):
    """Gaps that nothing fits into: more is reserved, and nothing else differs."""
    extension.never_merge(never_merges)
    model = Rockmate(built(Layers), rows(), 0.7, loss=squares, limits=FEW_ROUNDS)
    eager = copy.deepcopy(model.original)
    for seed in range(4):
        assert_same_step(model, eager, rows(seed), seed)
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:there was not the memory to compare the trace")
@pytest.mark.parametrize("name", ["bert-tiny", "gpt2-tiny", "resnet18-tiny"])
def test_the_largest_batch_of_a_full_device_is_found_and_trained_there(device, extension, name):
    entry = zoo.get(name, device=device)
    torch.accelerator.memory.empty_cache()
    extension.limit(0, torch.accelerator.memory.memory_reserved() + (200 << 20))
    found = max_batch(entry.model, entry.sample, "auto", loss=squares, limits=FEW_ROUNDS)
    assert len(found.trials) <= 5
    # Where one tensor is a fifth of the device, gaps between tensors may leave no room for it: the step of a plan that
    # is within the budget is then refused. Nothing else is out of memory.
    assert name == "gpt2-tiny" or not any(trial.lacks_memory for trial in found.trials)
    refused = [trial.batch for trial in found.trials if not trial.fits]
    # After such a refusal the next batch is smaller by a part of what is open, as nothing tells how far the gaps reach.
    nearest = 0.1 if any(trial.lacks_memory for trial in found.trials) else 0.05
    assert not refused or min(refused) - found.batch <= nearest * found.batch
    sample = zoo.get(name, device=device, batch=found.batch).sample  # at most this is on the device beside the model
    gc.collect()
    model = Rockmate(entry.model, sample, plan=found.plan_file)
    gc.collect()
    torch.accelerator.memory.empty_cache()
    squares(model(*sample)).backward()  # within the device
    entry.model.zero_grad()
    extension.limit(0, 16 << 30)
    assert_same_step(model, copy.deepcopy(entry.model), *sample)
