"""A plan out of a file: the same training without measuring or solving, or a refusal that says what differs."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from rk_solvers import Greedy
from rkgb import pipeline
from rockmate import (
    ArgumentError,
    BudgetError,
    PinError,
    Plan,
    PlanFile,
    PlanFileMismatch,
    PlanFileWarning,
    Rockmate,
    TraceWarning,
    plan_files,
    zoo,
)
from tests.module.steps import assert_trains_exactly, squares
from tests.where import here, placed

BATCH, WIDTH = 32, 16


class Block(nn.Module):
    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.relu(self.norm(self.linear(x))))


class Network(nn.Module):
    def __init__(self, rate: float = 0.1, depth: int = 4, offset: float = 0.5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(rate) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 3)
        self.table = torch.full((WIDTH,), offset, device=here())

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x * self.table) * scale, "features": x}


def sample(batch: int = BATCH) -> torch.Tensor:
    return placed(torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(batch)))


def only_logits(output: dict[str, torch.Tensor]) -> torch.Tensor:
    return output["logits"].square().mean()


@pytest.fixture(scope="module")
def plan_file() -> PlanFile:
    return Rockmate(placed(Network()), sample(), 0.6, loss=only_logits, solver=Greedy()).plan_file()


@pytest.fixture
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("this is to be neither measured nor solved")

    monkeypatch.setattr("rkgb.profile.measure._measure", refuse)
    monkeypatch.setattr("rockmate.planning.planner._solve", refuse)
    monkeypatch.setattr("rockmate.planning.trying.tried.real_peak_bytes", refuse)
    monkeypatch.setattr("rockmate.planning.measured.eager_peak_bytes", refuse)


def but_for_seconds(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in Plan.__slots__ if name != "planning_s"}


@pytest.mark.usefixtures("nothing_measured")
def test_the_same_plan_runs_and_trains_exactly(plan_file: PlanFile, tmp_path: Path):
    path = tmp_path / "plan.json"
    plan_files.save(plan_file, path)
    for plan in (plan_file, path, str(path)):
        planned = Rockmate(placed(Network()), sample(), plan=plan)
        assert but_for_seconds(planned.plan) == but_for_seconds(plan_file.plan)
    assert planned.plan.recomputations > 0
    assert_trains_exactly(planned, [sample()] * 3, only_logits)
    again = planned.plan_file()
    assert msgspec.structs.replace(again.promise, planning_s=0.0) == msgspec.structs.replace(
        plan_file.promise, planning_s=0.0
    )
    assert (again.graph, again.problem, again.measured) == (plan_file.graph, plan_file.problem, plan_file.measured)


@pytest.mark.parametrize("name", ["gpt2-tiny", "resnet18-tiny", "unet-tiny", "transformer-tiny"])
@pytest.mark.ci
def test_real_models_run_by_the_plans_of_files(name: str, request: pytest.FixtureRequest):
    entry = zoo.get(name)
    text = plan_files.dumps(Rockmate(entry.model, entry.sample, 0.8, loss=entry.loss, solver=Greedy()).plan_file())
    request.getfixturevalue("nothing_measured")
    entry = zoo.get(name)
    planned = Rockmate(entry.model, entry.sample, plan=plan_files.loads(text))
    assert_trains_exactly(planned, [entry.make_batch(seed)[0] for seed in range(2)], entry.loss)


def test_without_a_sample_the_plan_is_the_first_batchs(plan_file: PlanFile):
    planned = Rockmate(Network(), plan=plan_file)
    assert planned.plans == ()
    assert_trains_exactly(planned, [sample()] * 2, only_logits)
    assert planned.plan.schedule == plan_file.plan.schedule


def test_a_call_of_another_shape_is_planned_within_the_files_budget(plan_file: PlanFile):
    planned = Rockmate(Network(), sample(), plan=plan_file, solver=Greedy())
    with pytest.warns(match="planned once more"):
        planned(sample(BATCH // 2))["logits"].sum().backward()
    assert {plan.budget_bytes for plan in planned.plans} == {plan_file.promise.budget_bytes}


def test_planning_leaves_the_module_as_it_was(plan_file: PlanFile):
    model = Network()
    before, stream = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    Rockmate(model, sample(), plan=plan_file)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(parameter.grad is None for parameter in model.parameters())


DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "shape": (Network(), sample(16), r"input 0 is float32\[16, 16\], but was float32\[32, 16\]"),
    "dropout": (Network(rate=0.3), sample(), r"calls aten::bernoulli_.float with .*0.7.*, but did with .*0.9"),
    "depth": (Network(depth=5), sample(), r"parameter blocks.4.linear.bias, float32\[16\] grad, was not read there"),
    "constant": (Network(offset=0.25), sample(), r"constant constant_0, float32\[16\], holds other numbers"),
    "argument": (Network(), (sample(), 3.0), r"calls aten::mul.Scalar with \(%linear_4, 3.0\), but did with"),
    "frozen": (Network().requires_grad_(False), sample().requires_grad_(), r"linear.weight is float32\[16, 16\], but"),
    "other": (nn.Linear(WIDTH, 3), sample(), "plan was made for Network .*, and this is Linear"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_another_graph_is_refused_and_the_difference_told(plan_file: PlanFile, what: str):
    model, given, told = DIFFERENT[what]
    with pytest.raises(PlanFileMismatch, match="(?s)" + told):
        Rockmate(model, given, plan=plan_file)


@pytest.mark.ci
def test_outputs_that_the_loss_trains_are_part_of_the_graph():
    both = Rockmate(Network(), sample(), 0.9, loss=squares, solver=Greedy()).plan_file()
    one = Rockmate(Network(), sample(), 0.9, loss=only_logits, solver=Greedy()).plan_file()
    assert both.graph.digest != one.graph.digest
    assert both.asked.trained == ("add_11", "mul_1") or len(both.asked.trained or ()) == 2


def test_of_a_plan_that_other_code_measured_the_decisions_are_followed(plan_file: PlanFile, monkeypatch):
    first, *rest = plan_file.measured.blocks
    profile = first.profile
    name, op = next((name, op) for name, op in profile.ops.items() if op.saved)
    moved = msgspec.structs.replace(
        first,
        profile=msgspec.convert(
            {**msgspec.to_builtins(profile), "ops": {**msgspec.to_builtins(profile.ops), name: _without_saved(op)}},
            type(profile),
        ),
    )
    forged = msgspec.structs.replace(
        plan_file, measured=msgspec.structs.replace(plan_file.measured, blocks=(moved, *rest))
    )
    monkeypatch.setattr(Greedy, "solve", None)
    with pytest.warns(PlanFileWarning, match=f"{name} .*saves .* here, but .* decisions are followed") as told:
        planned = Rockmate(Network(), sample(), plan=plan_files.loads(plan_files.dumps(forged)))
    assert told[0].filename == __file__
    assert planned.plan.schedule == plan_file.parsed_schedule
    assert_trains_exactly(planned, [sample()] * 2, only_logits)


def test_of_a_plan_that_knows_blocks_otherwise_the_decisions_are_followed(plan_file: PlanFile):
    """As where an older Rockmate told blocks apart by less."""
    blocks = tuple(msgspec.structs.replace(block, digest=f"{block.digest}0") for block in plan_file.measured.blocks)
    older = msgspec.structs.replace(plan_file, measured=msgspec.structs.replace(plan_file.measured, blocks=blocks))
    with pytest.warns(PlanFileWarning, match="nothing was recorded of the block that begins with .* followed"):
        planned = Rockmate(Network(), sample(), plan=older)
    assert planned.plan.schedule == plan_file.parsed_schedule
    assert_trains_exactly(planned, [sample()], only_logits)


def _without_saved(op: Any) -> dict[str, Any]:
    return {**msgspec.to_builtins(op), "saved": msgspec.to_builtins(op.saved[1:])}


# ---- made elsewhere ------------------------------------------------------------------------------------


def made_by(plan_file: PlanFile, **other: Any) -> PlanFile:
    return msgspec.structs.replace(plan_file, made=msgspec.structs.replace(plan_file.made, **other))


@pytest.mark.parametrize("other", [{"torch": "2.9.0"}, {"device": "cuda NVIDIA H200"}])
def test_of_a_plan_made_elsewhere_the_decisions_are_followed(plan_file: PlanFile, other: dict[str, str], monkeypatch):
    monkeypatch.setattr(Greedy, "solve", None)
    with pytest.warns(PlanFileWarning, match="measured anew"):
        planned = Rockmate(Network(), sample(), plan=made_by(plan_file, **other))
    assert planned.plan.schedule == plan_file.parsed_schedule
    assert planned.plan.measured_peak_bytes is not None
    assert_trains_exactly(planned, [sample()] * 2, only_logits)


def test_with_other_threads_the_peak_is_measured_again(plan_file: PlanFile):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned = Rockmate(Network(), sample(), plan=made_by(plan_file, threads=7))
    assert planned.plan.measured_peak_bytes == plan_file.promise.measured_peak_bytes


def test_a_plan_that_takes_more_here_than_its_budget_is_refused(plan_file: PlanFile, monkeypatch):
    content = json.loads(plan_files.dumps(plan_file))
    content["made"]["threads"] = 7
    content["promise"]["budget_bytes"] = 1000
    content["promise"]["measured_peak_bytes"] = 999
    forged = msgspec.convert({key: value for key, value in content.items() if key != "digest"}, PlanFile)
    with pytest.raises(PlanFileMismatch, match="above its budget of 1000 B"):
        Rockmate(Network(), sample(), plan=forged)


# ---- what goes with a plan -------------------------------------------------------------------------------


@pytest.mark.ci
def test_pins_opaque_parts_and_scope_come_from_the_file():
    model = Network()
    pin = {"pin": model.blocks[1], "opaque": model.blocks[2], "scope": "total", "optimizer": torch.optim.AdamW}
    first = Rockmate(model, sample(), 0.9, solver=Greedy(), **pin)
    found = plan_files.loads(plan_files.dumps(first.plan_file()))
    planned = Rockmate(Network(), sample(), plan=found)
    assert found.asked.opaque == ("blocks.2",)
    assert found.asked.pinned
    assert planned.memory_split == first.memory_split
    assert planned.plan_file().asked == found.asked
    planned.plan_for(sample(BATCH // 2))
    assert planned.plan_file().asked == found.asked, "for calls of other shapes, too"
    assert_trains_exactly(planned, [sample()] * 2, only_logits)


def test_a_plan_goes_with_no_budget_and_no_pins(plan_file: PlanFile):
    with pytest.raises(BudgetError, match="a plan has its budget"):
        Rockmate(Network(), sample(), 0.5, plan=plan_file)
    with pytest.raises(PinError, match="the plan out"):
        Rockmate(Network(), sample(), plan=plan_file, pin=torch.ops.aten.relu)
    with pytest.raises(ArgumentError, match="give a PlanFile"):
        Rockmate(Network(), sample(), plan=3)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        Rockmate(Network(), sample(), plan="there is none")


def test_where_no_memory_is_left_to_compare_the_trace_a_plan_of_a_file_goes_on(plan_file: PlanFile, monkeypatch):
    compared = []

    def lacking(*_: Any) -> None:
        compared.append(True)
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(pipeline, "replay_check", lacking)
    with pytest.warns(TraceWarning, match="not the memory to compare the trace of Network .* when its plan was made"):
        model = Rockmate(Network(), sample(), plan=plan_file)
    assert len(compared) == 2, "in memory and on disk"
    assert_trains_exactly(model, [sample()] * 2, only_logits)
    with pytest.raises(torch.OutOfMemoryError):  # whose trace nobody has compared
        Rockmate(Network(), sample(), 0.9)


def test_copies_follow_the_file_too(plan_file: PlanFile):
    planned = Rockmate(Network(), plan=plan_file)
    twin = copy.deepcopy(planned)
    for module in (planned, twin):
        assert_trains_exactly(module, [sample()] * 2, only_logits)
        assert module.plan.schedule == plan_file.plan.schedule
