"""Contexts of the user's around planned steps: the first batch is planned within them, and later ones run there."""

import contextlib
import copy
import cProfile
import sys
import tracemalloc
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from rkgb.process.surroundings import surroundings_aside
from rockmate import PeakMemory, ReplanWarning, Rockmate

BUDGET_BYTES = 100_000
WIDTH = 32


class Counted(TorchDispatchMode):
    """Counts what runs below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


class Doubling(TorchFunctionMode):
    """Changes what a function of Python's gives."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch._C._nn.gelu else result


def in_half(tensor: Tensor) -> tuple[torch.dtype, Tensor]:
    return tensor.dtype, tensor.to(torch.bfloat16) if tensor.dtype is torch.float32 else tensor


def out_of_half(packed: tuple[torch.dtype, Tensor]) -> Tensor:
    return packed[1].to(packed[0])


@contextlib.contextmanager
def traced_by_python() -> Any:
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        yield
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def memory_traced() -> Any:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "identity hooks": lambda: saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    "hooks that put away": lambda: saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy),
    "lossy hooks": lambda: saved_tensors_hooks(in_half, out_of_half),
    "save_on_cpu": save_on_cpu,
    "disabled hooks": lambda: torch.autograd.graph.disable_saved_tensors_hooks("no hooks"),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "flops": lambda: FlopCounterMode(display=False),
    "dispatch mode": Counted,
    "single-threaded": lambda: torch.autograd.set_multithreading_enabled(False),
    "device": lambda: torch.device("cpu"),
    "cProfile": cProfile.Profile,
    "settrace": traced_by_python,
    "tracemalloc": memory_traced,
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))))


def batch(rows: int = 96) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))


def planned(**options: Any) -> Rockmate:
    return Rockmate(model(), budget=BUDGET_BYTES, solver="greedy", cache=False, **options)


def costs(module: Rockmate) -> tuple[Any, ...]:
    """What was measured for the plan but for times, which are never the same."""
    problem = module._family.members[0].measured.problem
    without_times = msgspec.to_builtins(
        replace(
            problem,
            forward=tuple(replace(op, time_ms=0.0, repeat_ms=None) for op in problem.forward),
            backward=tuple(replace(op, time_ms=0.0) for op in problem.backward),
        )
    )
    return module.plan.baseline_peak_bytes, without_times


def step(module: nn.Module, data: Tensor, run: Callable[..., Any] | None = None) -> list[Tensor]:
    torch.manual_seed(1)
    module.zero_grad()
    output = module(data) if run is None else run(module, data)
    output.square().mean().backward()
    return [output.detach(), *(parameter.grad.clone() for parameter in module.parameters()), torch.get_rng_state()]


def same(these: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, these, others))


@pytest.fixture(scope="module")
def alone() -> Rockmate:
    """Planned with nothing around."""
    module = planned()
    step(module, batch())
    assert module.plan.recomputations, "a plan that keeps all shows nothing"
    return module


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.ci
def test_a_first_batch_is_planned_as_with_nothing_around_and_its_step_is_exact(name: str, alone: Rockmate) -> None:
    eager, module = model(), planned()
    for _ in range(2):
        with CONTEXTS[name]():
            expected = step(eager, batch())
        with CONTEXTS[name]():
            assert same(step(module, batch()), expected)
    assert costs(module) == costs(alone)
    assert module.plan.measured_peak_bytes <= BUDGET_BYTES


@pytest.mark.parametrize("name", ["hooks that put away", "lossy hooks", "save_on_cpu", "flops"])
def test_a_forward_within_and_a_backward_after_is_exact(name: str, alone: Rockmate) -> None:
    def forward_alone(module: nn.Module, data: Tensor) -> Tensor:
        with CONTEXTS[name]():
            return module(data)

    assert same(step(alone, batch(), forward_alone), step(model(), batch(), forward_alone))


def test_hooks_have_what_is_kept_and_nothing_of_planning() -> None:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    module = planned()
    counts = []
    for _ in range(2):
        packed.clear()
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            module(batch()).sum()
        counts.append(len(packed))
    assert counts[0] == counts[1] > 0


def test_counters_count_a_step_and_not_its_planning() -> None:
    module, counts = planned(), []
    for _ in range(2):
        with FlopCounterMode(display=False) as flops, Counted() as operations:
            step(module, batch())
        counts.append((flops.get_total_flops(), operations.count))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_planned_module_within_a_checkpoint(reentrant: bool) -> None:
    def run(module: nn.Module, data: Tensor) -> Tensor:
        return checkpoint(module, data.requires_grad_(reentrant), use_reentrant=reentrant)

    module, eager = planned(), model()
    for _ in range(2):
        assert same(step(module, batch(), run), step(eager, batch(), run))
    assert module.plans


def test_within_inference_mode_a_step_is_the_modules_own() -> None:
    module, eager = planned(), model()
    with torch.inference_mode(), torch.enable_grad():
        torch.manual_seed(1)
        output = module(batch())
        torch.manual_seed(1)
        assert torch.equal(output, eager(batch()))
    assert output.is_inference()
    assert not module.plans


def test_gradients_switched_on_again_within_no_grad(alone: Rockmate) -> None:
    module = planned()
    with torch.no_grad(), torch.enable_grad():
        assert same(step(module, batch()), step(model(), batch()))
    with torch.inference_mode(), torch.inference_mode(mode=False):
        assert same(step(module, batch()), step(model(), batch()))
    assert costs(module) == costs(alone)


# ---- profilers -----------------------------------------------------------------------------------

PROFILERS: dict[str, Callable[[], Any]] = {
    "torch.profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "with memory": lambda: torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, record_shapes=True
    ),
    "autograd's": lambda: torch.autograd.profiler.profile(use_cpu=True),
    "emit_itt": torch.autograd.profiler.emit_itt,
}


@pytest.mark.parametrize("name", PROFILERS)
@pytest.mark.ci
def test_within_a_profiler_the_plan_is_the_same_and_an_epoch_goes_on(name: str, alone: Rockmate) -> None:
    eager, module = model(), planned()
    with PROFILERS[name](), pytest.warns(ReplanWarning, match="planned while a profiler runs"):
        assert same(step(module, batch()), step(eager, batch()))
    assert costs(module) == costs(alone)
    assert module.plan.measured_peak_bytes <= BUDGET_BYTES
    with PROFILERS[name](), pytest.warns(ReplanWarning, match="was planned once more"):
        assert same(step(module, batch(40)), step(eager, batch(40)))  # the short last batch


@pytest.mark.ci
def test_planning_is_not_in_the_profile() -> None:
    module, counts = planned(), []
    for _ in range(2):
        with warnings.catch_warnings(action="ignore"), PROFILERS["torch.profiler"]() as profile:
            step(module, batch())
        counts.append({event.key: event.count for event in profile.key_averages() if event.key == "aten::addmm"})
    assert counts[0] == counts[1]


@pytest.mark.ci
def test_a_profiler_whose_schedule_warms_up_survives_planning_and_so_does_the_process(alone: Rockmate) -> None:
    module, profiled = planned(), []
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1),
        on_trace_ready=lambda profile: profiled.append(len(profile.events())),
    ) as profile:
        step(model(), batch())
        profile.step()  # now it is prepared
        with pytest.raises(RuntimeError, match="PyTorch's profiler"), PeakMemory():
            pass
        with warnings.catch_warnings(action="ignore"):
            step(module, batch())
        profile.step()
        step(module, batch())
        profile.step()
    assert profiled[0] > 0
    assert costs(module) == costs(alone)


@pytest.mark.slow
@pytest.mark.ci
def test_autocast_is_in_force_where_a_step_is_measured_apart() -> None:
    def cast(module: nn.Module, data: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(data)

    there, here = planned(), planned()
    with warnings.catch_warnings(action="ignore"), PROFILERS["torch.profiler"]():
        assert same(step(there, batch(), cast), step(model(), batch(), cast))
    step(here, batch(), cast)
    assert costs(there) == costs(here)


# ---- what a plan does not run under --------------------------------------------------------------


def test_a_mode_that_changes_functions_has_the_module_run_by_itself_and_is_named() -> None:
    module, eager = planned(), model()
    with Doubling():
        expected = step(eager, batch())
    with Doubling(), pytest.warns(ReplanWarning, match="Doubling, a TorchFunctionMode, is around the call"):
        assert same(step(module, batch()), expected)
    with Doubling():  # told once
        assert same(step(module, batch()), expected)
    assert same(step(module, batch()), step(eager, batch()))


def test_what_may_be_changed_before_the_backward_runs_by_itself() -> None:
    def changed(module: nn.Module, data: Tensor) -> Tensor:
        data = data.clone()
        output = module(data)
        data.zero_()
        return output

    module, eager = planned(), model()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        expected = step(eager, batch(), changed)
    with (
        torch.autograd.graph.allow_mutation_on_saved_tensors(),
        pytest.warns(ReplanWarning, match="allow_mutation_on_saved_tensors"),
    ):
        assert same(step(module, batch(), changed), expected)


class Counts(nn.Module):
    """A parametrization that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, weight: Tensor) -> Tensor:
        self.calls.add_(1)
        return weight * torch.tanh(self.calls)


def test_cached_parametrizations_are_computed_once_as_the_module_does() -> None:
    def twice(module: nn.Module, data: Tensor) -> Tensor:
        with parametrize.cached():
            return module(data) + module(data)

    eager = model()
    parametrize.register_parametrization(eager[0], "weight", Counts())
    module = Rockmate(copy.deepcopy(eager), budget=BUDGET_BYTES, solver="greedy", cache=False)
    with pytest.warns(ReplanWarning, match=r"parametrize\.cached"):
        results = step(module, batch(), twice)
    assert same(results, step(eager, batch(), twice))
    assert same(list(module.buffers()), list(eager.buffers()))


# ---- suspension ----------------------------------------------------------------------------------


def test_all_that_was_aside_is_back_also_after_an_error() -> None:
    top = torch._C._autograd._top_saved_tensors_default_hooks
    with (
        saved_tensors_hooks(in_half, out_of_half),
        Counted() as operations,
        Doubling(),
        warnings.catch_warnings(action="ignore"),
        torch.autograd.detect_anomaly(check_nan=False),
    ):
        with contextlib.suppress(ZeroDivisionError), surroundings_aside():
            assert top(True) is None
            assert not torch.is_anomaly_enabled()
            assert not torch._C._len_torch_dispatch_stack()
            assert not torch._C._len_torch_function_stack()
            with surroundings_aside():
                raise ZeroDivisionError
        assert top(True) == (in_half, out_of_half)
        assert torch.is_anomaly_enabled()
        assert not torch.is_anomaly_check_nan_enabled()
        assert torch._C._get_dispatch_stack_at(0) is operations
        assert torch._C._len_torch_function_stack() == 1
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks"):
        with surroundings_aside(), saved_tensors_hooks(in_half, out_of_half):
            pass
        with pytest.raises(RuntimeError, match="no hooks"), saved_tensors_hooks(in_half, out_of_half):
            pass


def test_default_devices_stay() -> None:
    with torch.device("meta"), surroundings_aside():
        assert torch.ones(1).is_meta


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:Sequential was planned while a profiler runs:rockmate.ReplanWarning")
@pytest.mark.ci
def test_a_step_that_is_planned_while_its_peak_is_measured_goes_on() -> None:
    module = planned()
    eager = copy.deepcopy(module.original)
    with PeakMemory() as peak:
        found = step(module, batch())
    assert peak.peak_bytes > 0
    assert same(found, step(eager, batch()))
