"""Training steps to compare, and modules that follow a plan written by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rk_solvers import Limits, Problem, peak_and_time, schedule_of
from rk_solvers.groups import normalise
from rk_solvers.problem import Recompute
from rkgb.devices.allocation_log import AllocationLog
from rkgb.replay.step_record import bitwise_equal
from rkgb.tree import leaves
from rockmate import BudgetTooSmall, Plan, Rockmate
from rockmate.planning.lowered import LoweredPlan
from rockmate.planning.measured import Measured, measure
from rockmate.planning.planner import make_plan
from rockmate.planning.request import PlanRequest
from rockmate.runtime.codegen import compile_program
from rockmate.runtime.lowering import Program, make_program
from rockmate.runtime.runner import Runner
from tests.where import here, random_stream

Loss = Callable[[Any], Tensor]
CPU = torch.device("cpu")
BRIEFLY = Limits(search_s=0.5, extra_s=0.0, rounds=1)  # any plan will do
FEW_ROUNDS = Limits(rounds=2)  # a plan of the default solver that is the same on any machine, and found at once


def squares(output: Any) -> Tensor:
    """A loss that any output has: the mean square of all its differentiable tensors."""
    return torch.stack([tensor.square().mean() for tensor in leaves(output) if tensor.requires_grad]).sum()


def measured_for(model: nn.Module, sample: Any, loss: Loss | None = squares) -> Measured:
    """Graphs and costs of `model`, to plan it several times."""
    return measure(model, sample, PlanRequest(None, loss))


def rockmate_from(measured: Measured, model: nn.Module, request: PlanRequest) -> Rockmate:
    """`Rockmate(model, ...)` without measuring anew: what is measured once serves many plans."""
    return wrapped(measured, model, make_plan(measured, request, model))


def wrapped(measured: Measured, model: nn.Module, planned: LoweredPlan) -> Rockmate:
    """A module that follows a plan that is there already."""
    return Rockmate._following(model, measured, planned)


def planned_if_it_may(model: nn.Module, sample: Any, budget: float, **options: Any) -> Rockmate:
    """Under that budget, or the smallest that is named."""
    try:
        return Rockmate(model, sample, budget, **options)
    except BudgetTooSmall as error:
        return Rockmate(model, sample, error.smallest_budget_bytes, **options)


def recomputing(
    model: nn.Module,
    sample: Any,
    recompute: Callable[[Measured], Recompute] | None = None,
    loss: Loss | None = squares,
) -> Rockmate:
    """A module that follows `recompute` (by default: everything, as late as it may be)."""
    measured = measured_for(model, sample, loss)
    return following(measured, model, (recompute or keep_nothing)(measured))


def following(measured: Measured, model: nn.Module, recompute: Recompute) -> Rockmate:
    """A module that follows `recompute`, put in normal form, whatever it takes."""
    problem = measured.problem
    plan = normalise(problem, recompute)
    peak_bytes, time_ms = peak_and_time(problem, plan)
    schedule = schedule_of(problem, plan)
    planned = LoweredPlan(
        Plan(
            budget_bytes=peak_bytes,
            peak_bytes=peak_bytes,
            time_ms=time_ms,
            baseline_peak_bytes=measured.eager_peak_bytes,
            baseline_time_ms=problem.keep_all_time_ms,
            solver="hand",
            planning_s=0.0,
            schedule=schedule,
        ),
        program_of(measured, plan),
        "a plan written by a test",
    )
    return wrapped(measured, model, planned)


def program_of(measured: Measured, recompute: Recompute) -> Program:
    """What a plan in normal form becomes; the first stages of the problem are the loss's."""
    return make_program(measured.graphs.K_graph, schedule_of(measured.problem, recompute))


def keep_nothing(measured: Measured) -> Recompute:
    """Before each backward operation, everything that leads to it and may be recomputed."""
    problem = measured.problem
    every = tuple(index for index, op in enumerate(problem.forward) if op.recomputable)
    return tuple(
        tuple(group) for group in (_leading_to(problem, stage, every) for stage in range(len(problem.backward)))
    )


def keep_every_other(measured: Measured) -> Recompute:
    """Before each backward operation, every other one of what leads to it: from values kept by the forward."""
    return tuple(tuple(index for index in group if index % 2) for group in keep_nothing(measured))


def _leading_to(problem: Problem, stage: int, indices: Iterable[int]) -> list[int]:
    wanted = set(problem.backward[stage].needs)
    found = []
    for index in sorted(indices, reverse=True):
        if not wanted.isdisjoint(problem.renewed(index)):
            found.append(index)
            wanted.update(problem.forward[index].inputs)
    return found[::-1]


def runner_for(measured: Measured, model: nn.Module, recompute: Recompute) -> Runner:
    """The compiled plan, called like the model: built from the parts, without `Rockmate`."""
    program = program_of(measured, normalise(measured.problem, recompute))
    compiled = compile_program(program, model, "a plan written by a test")
    graph = measured.graphs.D_graph
    return Runner(model, graph, measured.pattern, measured.traits, measured.settings.bound_to(model), compiled)


# ---- steps -----------------------------------------------------------------------------------------


@dataclass
class Trained:
    """What training can see: after every step, and of the module in the end."""

    steps: list[dict[str, Tensor | None]]
    parameters: dict[str, Tensor]


def train(model: nn.Module, batches: Iterable[Any], loss: Loss = squares, forward: Any = None) -> Trained:
    """Steps of SGD with momentum on `batches` from seed 0; `forward` is called in the model's place, if given."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad] or [torch.zeros(1)], 0.05, 0.9)
    steps = []
    for batch in batches:
        optimizer.zero_grad()
        arguments = batch if isinstance(batch, tuple) else (batch,)
        for tensor in leaves(arguments):
            tensor.grad = None
        output = (model if forward is None else forward)(*arguments)  # a compiled one may have no truth
        loss(output).backward()
        steps.append(seen(model, arguments, output))
        optimizer.step()
    return Trained(steps, {name: parameter.detach().clone() for name, parameter in model.named_parameters()})


def seen(model: nn.Module, arguments: tuple[Any, ...], output: Any) -> dict[str, Tensor | None]:
    """Outputs, gradients, buffers and the random stream, copied; the inputs' gradients are taken off."""
    record: dict[str, Tensor | None] = {}
    for index, tensor in enumerate(leaves(output)):
        record[f"output {index}"] = tensor.detach().clone()
    for name, parameter in model.named_parameters():
        record[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.clone()
    for index, tensor in enumerate(leaves(arguments)):
        if tensor.requires_grad:
            record[f"gradient of input {index}"], tensor.grad = tensor.grad, None
    for name, buffer in model.named_buffers():
        record[f"buffer {name}"] = buffer.clone()
    record["random stream"] = random_stream()
    return record


def assert_same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    """Bit by bit; the message names the first entry that differs."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        other = found[name]
        if tensor is None or other is None:
            assert tensor is other, f"{name} is there on one side only"
            continue
        assert (other.shape, other.dtype) == (tensor.shape, tensor.dtype), name
        assert bitwise_equal(tensor, other), f"{name} is off by up to {(tensor - other).abs().max()}"


def assert_same_training(found: Trained, expected: Trained) -> None:
    """Bit by bit, step by step."""
    assert len(found.steps) == len(expected.steps)
    for one, other in zip(found.steps, expected.steps, strict=True):
        assert_same(one, other)
    assert_same(dict(found.parameters), dict(expected.parameters))


def assert_trains_exactly(module: Rockmate, batches: list[Any], loss: Loss = squares) -> None:
    """`module` against a copy of the module that it stands for."""
    eager = copy.deepcopy(module.original)
    assert_same_training(train(module, batches, loss), train(eager, batches, loss))


def assert_same_step(module: Rockmate, eager: nn.Module, batch: Any, seed: int = 0, loss: Loss = squares) -> None:
    """One step of `module` against one of `eager`, each without gradients before it, and on the numbers of `seed`."""
    found = []
    for one in (eager, module):
        one.zero_grad()
        torch.manual_seed(seed)
        output = one(batch)
        loss(output).backward()
        found.append(seen(module.original if one is module else eager, (), output))
    assert_same(found[1], found[0])


def assert_same_walk(module: Rockmate, walk: Callable[[Callable[..., Any]], None]) -> None:
    """`walk` calls what it is given and goes backward; gradients, buffers and random stream are then those of eager."""
    eager = copy.deepcopy(module.original)
    for forward in (module, eager):
        torch.manual_seed(3)
        walk(forward)
    assert_same(seen(module.original, (), ()), seen(eager, (), ()))


def walk_twice(batch: Tensor) -> Callable[[Callable[..., Any]], None]:
    """One forward, whose graph is walked twice."""

    def walk(forward: Callable[..., Any]) -> None:
        loss = squares(forward(batch))
        loss.backward(retain_graph=True)
        loss.backward()

    return walk


def assert_fits_and_trains_exactly(module: Rockmate, batch: Tensor) -> None:
    """The measured peak is within the budget, and training on `batch` is eager's."""
    assert peak_of_step(module, (batch,)) <= module.plan.budget_bytes
    module.original.zero_grad()
    assert_trains_exactly(module, [batch] * 2)


def peak_of_step(forward: Callable[..., Any], arguments: tuple[Any, ...], loss: Loss = squares) -> int:
    """Most bytes alive at once in a step that holds its output to the end."""
    with AllocationLog(here()) as log:
        output = forward(*arguments)
        loss(output).backward()
    return log.peak_bytes
