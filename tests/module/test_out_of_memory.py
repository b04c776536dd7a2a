"""Memory that is short at one place of planning: it goes on with less, or says so; all is left as it was."""

import copy
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rkgb.pipeline
import rockmate.planning.trying.tried
from rkgb import TraceError
from rkgb.devices.out_of_memory import is_out_of_memory, out_of_memory_told
from rkgb.ir.sample import make_sample
from rkgb.pipeline import exact_trace
from rkgb.replay.replay import record_step
from rkgb.replay.spool import Spool
from rkgb.tree import leaves
from rockmate import BudgetError, Rockmate
from tests.free_memory import free_is
from tests.module.models import WIDTH, Layers, Normalised, built, images, rows
from tests.module.module_state import state_of
from tests.module.steps import FEW_ROUNDS, assert_same, assert_same_training, squares, train

LARGE_BYTES = 1 << 12  # activations of the models here are, their buffers are not


def no_memory() -> RuntimeError:
    """As PyTorch's allocator for the CPU raises it."""
    try:
        torch.empty(1 << 60, dtype=torch.uint8)
    except RuntimeError as error:
        return error.with_traceback(None)
    raise AssertionError("this machine has an exbibyte of memory")


class Short(TorchDispatchMode):
    """No memory for the result of the `nth` operation that makes a large one, be it of a forward or of a backward."""

    def __init__(self, nth: int) -> None:
        super().__init__()
        self.left = nth

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        large = any(tensor.nbytes >= LARGE_BYTES for tensor in leaves(result))
        if large and func is not torch.ops.aten.copy_.default:  # which writes to where memory is
            self.left -= 1
            if self.left == -1:
                raise no_memory()
        return result


def error_of(plan: Callable[[], object], nth: int) -> Exception | None:
    """What `plan` raises where there is no memory for its `nth` operation."""
    try:
        with Short(nth):
            plan()
    except RuntimeError as error:
        return error
    return None


@contextmanager
def operations_counted() -> Iterator[list[int]]:
    """Tells, afterwards, how many operations have run."""
    counting, counted = Short(1 << 30), list[int]()
    with counting:
        yield counted
    counted.append((1 << 30) - counting.left)


@pytest.mark.parametrize("places", [6, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("make", "batch"), [(Layers, rows), (Normalised, images)], ids=["layers", "normalised"])
@pytest.mark.ci
def test_memory_that_is_short_at_any_place_of_planning_leaves_all_as_it_was(make, batch, places, monkeypatch):
    # Planning takes the user's modes aside, and the one of this test with them.
    monkeypatch.setattr("rkgb.process.surroundings.without_dispatch_modes", nullcontext)
    model = built(make)
    squares(model(batch(1))).backward()  # gradients and statistics to be found again
    before = state_of(model)

    def plan() -> Rockmate:
        return Rockmate(model, batch(), 0.9, loss=squares, solver="greedy", limits=FEW_ROUNDS)

    plan()  # what is made once, at the first use
    with operations_counted() as counted:
        plan()
    (count,) = counted
    assert count > 10 * places
    refusals = 0
    for nth in range(3, count, count // places):
        error = error_of(plan, nth)  # none where less memory does
        assert_same(state_of(model), before)
        if error is not None:
            assert is_out_of_memory(error)
            assert [note for note in error.__notes__ if note.startswith("No memory was left")]
            refusals += 1
    assert refusals > 0
    model.zero_grad()
    planned = plan()
    eager = copy.deepcopy(model)
    assert_same_training(train(planned, [batch(1), batch(2)]), train(eager, [batch(1), batch(2)]))


def checks_of(monkeypatch, model: nn.Module, sample: Tensor, low_memory: bool | None = None) -> tuple[list, list]:
    """How a trace was checked (on disk or not), and what was told of it; the first check runs out of memory."""
    checked, told = [], []
    replay_check = rkgb.pipeline.replay_check

    def short_in_memory(graph, module, data, on_disk, *how):
        checked.append(on_disk)
        if not on_disk:
            raise no_memory()
        replay_check(graph, module, data, on_disk, *how)

    monkeypatch.setattr(rkgb.pipeline, "replay_check", short_in_memory)
    exact_trace(model, make_sample(model, sample), low_memory=low_memory, on_stage=lambda stage, *_: told.append(stage))
    return checked, told


def test_a_check_without_enough_memory_is_made_on_disk_and_says_so(monkeypatch):
    checked, told = checks_of(monkeypatch, built(Layers), rows())
    assert checked == [False, True]
    assert any("on disk" in stage for stage in told)


def test_a_check_that_is_to_be_in_memory_is_never_made_elsewhere(monkeypatch):
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        checks_of(monkeypatch, built(Layers), rows(), low_memory=False)


def test_within_a_container_of_little_memory_the_check_is_made_on_disk_and_eager_is_not_tried(monkeypatch, tmp_path):
    (tmp_path / "job").mkdir()
    for name, text in (("memory.max", "2000000"), ("memory.current", "1000000"), ("memory.stat", "inactive_file 0")):
        (tmp_path / "job" / name).write_text(text)
    (tmp_path / "membership").write_text("0::/job\n")
    model, told = built(Layers), []
    expected = Rockmate(model, rows(), 0.8, loss=squares, solver="greedy").plan
    monkeypatch.setattr("rkgb.devices.host_memory._CGROUP_ROOT", tmp_path)
    monkeypatch.setattr("rkgb.devices.host_memory._CGROUP_MEMBERSHIP", tmp_path / "membership")
    planned = Rockmate(
        model, rows(), None, loss=squares, solver="greedy", progress=lambda stage, *_: told.append(stage)
    )
    assert planned.plan.budget_bytes == 900_000  # of the 1,000,000 that the container leaves
    assert planned.plan.baseline_peak_bytes == pytest.approx(expected.baseline_peak_bytes, rel=0.01)
    assert planned.plan.baseline_peak_bytes > 1_000_000
    assert any("on disk" in stage for stage in told)
    assert any("does not fit" in stage for stage in told)


class Waves(nn.Module):
    """Complex products, whose backward wants lazily conjugated tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

    def forward(self, hidden: Tensor) -> Tensor:
        turned = torch.fft.fft(hidden) @ self.weight
        return (turned.conj() * turned).imag.sin() + (turned.conj().mH.mH * turned.conj()).real


def test_what_is_set_aside_on_disk_comes_back_with_its_lazy_conjugation():
    module = built(Waves)
    sample = make_sample(module, rows(requires_grad=True))
    in_memory = record_step(module, sample, lambda data: data.call(module))
    with Spool() as spool:
        on_disk = record_step(module, sample, lambda data: data.call(module), spool=spool)
        assert in_memory.first_difference(on_disk) is None


def wrapped(cause: Exception) -> Exception:
    try:
        raise TraceError("the module cannot be traced") from cause
    except TraceError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        no_memory(),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("could not create a primitive"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        wrapped(no_memory()),
        wrapped(MemoryError()),
    ],
    ids=repr,
)
def test_what_says_that_memory_is_short(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape '[3]' is invalid for input of size 2"),
        RuntimeError("could not create a primitive descriptor for a matmul primitive"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),  # the disk's room, not memory's
        ValueError("DefaultCPUAllocator: can't allocate memory"),
        wrapped(ValueError("no such index")),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_what_does_not(error):
    assert not is_out_of_memory(error)


def test_a_budget_of_more_than_there_is_is_refused_before_the_step_runs(monkeypatch):
    network = built(Layers)
    monkeypatch.setattr("rockmate.planning.trying.tried.device_of", free_is(10_000))
    with pytest.raises(BudgetError, match=r"is more than there is: a step would take .* and 9\.77 KiB are free on cpu"):
        Rockmate(network, rows(), "1TiB", loss=squares)


@pytest.mark.parametrize("failures", [1, 3])
def test_where_gaps_leave_no_memory_for_a_plan_s_step_one_that_takes_less_is_made(monkeypatch, failures):
    model, sample = built(Layers), rows()
    unhindered = Rockmate(model, sample, 0.8, loss=squares, limits=FEW_ROUNDS).plan
    steps: list[int] = []

    def measured_peak(*args):
        steps.append(1)
        if len(steps) <= failures:
            raise no_memory()
        return measured(*args)

    measured = rockmate.planning.trying.tried.measured_peak
    monkeypatch.setattr(rockmate.planning.trying.tried, "measured_peak", measured_peak)
    plan = Rockmate(model, sample, 0.8, loss=squares, limits=FEW_ROUNDS).plan
    assert plan.budget_bytes == unhindered.budget_bytes
    assert plan.peak_bytes < 0.95 * unhindered.budget_bytes
    assert plan.measured_peak_bytes <= plan.budget_bytes


def test_where_no_plan_s_step_finds_memory_the_allocator_s_error_is_raised(monkeypatch):
    def measured_peak(*args):
        raise no_memory()

    monkeypatch.setattr(rockmate.planning.trying.tried, "measured_peak", measured_peak)
    with pytest.raises(RuntimeError) as caught:
        Rockmate(built(Layers), rows(), 0.8, loss=squares, limits=FEW_ROUNDS)
    assert is_out_of_memory(caught.value)


def test_what_others_note_does_not_keep_it_from_being_told_once():
    error = no_memory()
    error.add_note("whatever a user's forward has to say")
    with (
        pytest.raises(RuntimeError) as caught,
        out_of_memory_told("in a step", "Give more."),
        out_of_memory_told("in a part of it", "Free some."),
    ):
        raise error
    assert caught.value.__notes__ == [
        "whatever a user's forward has to say",
        "No memory was left in a part of it. Free some.",
    ]
