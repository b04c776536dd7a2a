"""Plans where they were not made: on another processor, under other flags of PyTorch, with other threads."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from rockmate import PlanFileWarning, PlanMismatch, ReplanWarning, Rockmate, plan_files
from rockmate.plan_files import PlanFile
from rockmate.plan_files.record import made_here

BUDGET_BYTES = 100_000


@pytest.fixture(autouse=True)
def folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCKMATE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ROCKMATE_CACHE", "1")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1))))


def batch() -> Tensor:
    return torch.randn(96, 32, generator=torch.Generator().manual_seed(0))


def planned(**options: Any) -> Rockmate:
    return Rockmate(model(), budget=BUDGET_BYTES, solver="greedy", **options)


def step(module: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    module.zero_grad()
    output = module(batch())
    output.square().mean().backward()
    return [output.detach(), *(parameter.grad.clone() for parameter in module.parameters()), torch.get_rng_state()]


def same(these: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, these, others))


@contextlib.contextmanager
def mkldnn(enabled: bool) -> Iterator[None]:
    """`torch.backends.mkldnn.flags` warns of a flag for other devices that it sets, too."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(enabled)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def plan_file() -> PlanFile:
    module = planned(cache=False)
    step(module)
    assert module.plan.recomputations
    return plan_files.loads(plan_files.dumps(module.plan_file()))


def made_by(plan_file: PlanFile, **other: Any) -> PlanFile:
    return msgspec.structs.replace(plan_file, made=msgspec.structs.replace(plan_file.made, **other))


def test_a_plan_tells_its_processor_and_the_flags(plan_file: PlanFile):
    assert torch.backends.cpu.get_cpu_capability() in plan_file.made.processor
    assert "mkldnn_enabled=True" in plan_file.made.flags
    with mkldnn(False):
        assert "mkldnn_enabled=False" in made_here(torch.device("cpu")).flags


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"processor": "Abacus 3000, WOOD"}, r"made on Abacus 3000, WOOD, and this is .* decisions are followed"),
        ({"flags": ("mkldnn_enabled=False",)}, r"mkldnn_enabled is True, but was False .*decisions are followed"),
    ],
)
@pytest.mark.ci
def test_elsewhere_its_decisions_are_followed_and_what_differs_is_told(plan_file: PlanFile, other: Any, told: str):
    with pytest.warns(PlanFileWarning, match=told):
        module = Rockmate(model(), batch(), plan=made_by(plan_file, **other))
    assert module.plan.schedule == plan_file.parsed_schedule
    assert module.plan_file().made == made_here(torch.device("cpu"))
    assert same(step(module), step(model()))


@pytest.mark.ci
def test_of_an_older_file_that_tells_no_processor_one_real_step_is_run(plan_file: PlanFile, monkeypatch: Any):
    older = made_by(plan_file, processor="", flags=())
    content = plan_files.dumps(older)
    assert b"processor" not in content
    steps: list[Any] = []
    real = plan_files.restore.measured_peak
    monkeypatch.setattr(plan_files.restore, "measured_peak", lambda *given: steps.append(1) or real(*given))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = Rockmate(model(), batch(), plan=plan_files.loads(content))
    assert steps == [1]
    assert same(step(module), step(model()))


@pytest.mark.ci
def test_the_cache_keeps_plans_of_each_place_apart():
    for flags in (True, False, True):
        with mkldnn(flags):
            step(planned())
    assert len(plan_files.cache.entries()) == 2


# ---- flags that change while a module is trained -----------------------------------------------------


@pytest.mark.ci
def test_a_flag_that_is_changed_has_its_own_plan_and_the_first_comes_back_with_it():
    module, eager = planned(cache=False), model()
    assert same(step(module), step(eager))
    first = module.plan
    with (
        mkldnn(False),
        pytest.warns(ReplanWarning, match="mkldnn_enabled is False, but was True when the module was planned"),
    ):
        assert same(step(module), step(eager))
    assert len(module.plans) == 2
    assert same(step(module), step(eager))
    assert module.plan is first


def test_attention_runs_the_implementation_that_is_chosen_for_the_step():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(32, 96)

        def forward(self, data: Tensor) -> Tensor:
            query, key, value = self.mix(data).view(4, 24, 2, 48).transpose(1, 2).split(16, -1)
            return nn.functional.scaled_dot_product_attention(query, key, value)

    torch.manual_seed(0)
    eager = Attention()
    module = Rockmate(Attention(), budget=1 << 30, cache=False)
    module.load_state_dict(eager.state_dict())
    step(module)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), pytest.warns(ReplanWarning):
        assert same(step(module), step(eager))


@pytest.mark.ci
def test_with_other_threads_a_plan_is_made_again_where_its_promise_may_not_hold():
    module, eager = planned(cache=False), model()
    step(module)
    with threads(torch.get_num_threads() + 1):
        with pytest.warns(ReplanWarning, match="threads, but ran with"):
            assert same(step(module), step(eager))
        assert same(step(module), step(eager))
    assert len(module.plans) == 2


def test_where_nothing_is_planned_again_threads_may_change_and_flags_may_not():
    module = planned(cache=False, shapes="error")
    step(module)
    with threads(torch.get_num_threads() + 1):
        step(module)
    with mkldnn(False), pytest.raises(PlanMismatch, match="mkldnn_enabled is False"):
        step(module)
