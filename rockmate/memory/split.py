"""What training holds beside a step: what a budget for all of it leaves to the step, and gradients that are there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from rk_solvers import Problem
from rkgb import AllGraphs, DGraph, LeafKind
from rkgb.devices.registry import device_of
from rkgb.ir.profiles import backward_stages
from rkgb.torch_private.identity import storage_key
from rockmate.errors import BudgetError, OptimizerError
from rockmate.memory.optimizer_state import check_optimizer
from rockmate.units import format_bytes

Scope = Literal["step", "total", "reserved"]
SCOPES = ("step", "total", "reserved")


@dataclass(frozen=True, slots=True)
class Residents:
    """Bytes that a training loop holds on the device while a step runs. None is counted twice."""

    parameter_bytes: int
    gradient_bytes: int  # of the parameters that train
    optimizer_bytes: int
    buffer_bytes: int  # and other tensors of the module that its forward reads
    input_bytes: int  # one batch like the sample
    present_bytes: int  # of all these, what is allocated already
    window_bytes: int = 0  # of parameters that rest in a second memory, which are no others here
    gradients_go: bool = False  # each as soon as it is complete, to a step of its parameter: then none is resident

    def with_window(self, resting_bytes: int, window_bytes: int) -> Residents:
        """With so many bytes of the parameters in a second memory, but for a window of them."""
        left_bytes = self.parameter_bytes - resting_bytes
        return replace(self, parameter_bytes=left_bytes, window_bytes=self.window_bytes + window_bytes)

    @property
    def total_bytes(self) -> int:
        """All of them together."""
        return sum(size_bytes for _, size_bytes in self.parts())

    def parts(self) -> tuple[tuple[str, int], ...]:
        """What there is, with its bytes."""
        window = (("window of parameters that rest", self.window_bytes),) if self.window_bytes else ()
        return (
            ("parameters", self.parameter_bytes),
            *window,
            ("gradients", self.gradient_bytes),
            ("optimizer state", self.optimizer_bytes),
            ("buffers", self.buffer_bytes),
            ("inputs", self.input_bytes),
        )


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """How a budget for all of training is divided."""

    total_bytes: int  # the budget
    residents: Residents

    @property
    def step_bytes(self) -> int:
        """What is left for the step, above the residents; not positive where they alone exceed the budget."""
        return self.total_bytes - self.residents.total_bytes

    def parts(self) -> tuple[tuple[str, int], ...]:
        """The residents with their bytes, and what is left for the step; their sum is the budget."""
        return (*self.residents.parts(), ("step", self.step_bytes))

    def __str__(self) -> str:
        held = ", ".join(f"{format_bytes(size_bytes)} {name}" for name, size_bytes in self.residents.parts())
        left = f"{format_bytes(self.step_bytes)} are" if self.step_bytes > 0 else "nothing is"
        return (
            f"of {format_bytes(self.total_bytes)}, {format_bytes(self.residents.total_bytes)} are parameters, "
            f"gradients, optimizer state, buffers and inputs ({held}); {left} left for the step"
        )


def check_scope(scope: object, optimizer: object) -> None:
    """Raise `BudgetError` for no scope, `OptimizerError` for what is no optimizer or would not be counted."""
    if scope not in SCOPES:
        raise BudgetError(
            f'scope is {scope!r}; give "step", for a budget of what a step takes above what was there before it, '
            '"total", for one of parameters, gradients, optimizer state, buffers and inputs too, or "reserved", for '
            "one of what an accelerator's allocator holds for a step, gaps included."
        )
    if optimizer is None:
        return
    check_optimizer(optimizer)
    if scope != "total":
        raise OptimizerError(
            f'an optimizer is given, but scope is "{scope}": a budget of the step leaves the optimizer\'s state out. '
            'Say scope="total" to count it, or leave the optimizer out.'
        )


def count_residents(
    model: torch.nn.Module,
    inputs: Iterable[torch.Tensor],
    constants: Iterable[torch.Tensor],
    device: torch.device,
    optimizer_bytes: tuple[int, int],
    gradients_go: bool = False,
) -> Residents:
    """Count what training `model` holds on `device`: storages once, gradients of what trains alone.

    `optimizer_bytes` are those of its state, and of that part of it which is there already. Gradients that go as soon
    as they are complete are no residents.
    """
    seen: set[int] = set()
    parameters = list(model.parameters())
    parameter_bytes = _new_storage_bytes(parameters, device, seen)
    buffer_bytes = _new_storage_bytes([*model.buffers(), *constants], device, seen)
    input_bytes = _new_storage_bytes(inputs, device, seen)
    # A gradient is as large as its parameter, however that lies in its storage.
    trained = [p for p in parameters if p.requires_grad and p.device == device]
    gradient_bytes = 0 if gradients_go else sum(device_of(device).allocated_bytes(p.nbytes) for p in trained)
    trained = [] if gradients_go else trained
    gradients_there = _new_storage_bytes([p.grad for p in trained if p.grad is not None], device, seen)
    state_bytes, state_there_bytes = optimizer_bytes
    there = parameter_bytes + buffer_bytes + input_bytes + gradients_there + state_there_bytes
    found = Residents(parameter_bytes, gradient_bytes, state_bytes, buffer_bytes, input_bytes, there)
    return replace(found, gradients_go=gradients_go)


def _new_storage_bytes(tensors: Iterable[torch.Tensor], device: torch.device, seen: set[int]) -> int:
    """Bytes of the storages on `device` that are not in `seen`, which they are added to."""
    found = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device == device and (key := storage_key(tensor)) not in seen:
            seen.add(key)
            found += device_of(device).allocated_bytes(storage.nbytes())
    return found


# ---- gradients that are there before a step ----------------------------------------------------------------


def gradients_there(model: torch.nn.Module, graph: DGraph) -> frozenset[str]:
    """The parameters of `graph`, by their names in it, to whose gradients a backward would add in place now.

    Not so where there is no gradient, and where autograd makes a new one of both: sparse gradients, other types.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    leaves = [leaf for leaf in graph.leaves.values() if leaf.kind is LeafKind.PARAMETER]
    return frozenset(leaf.name for leaf in leaves if gradient_is_there(parameters[leaf.path]))


def gradient_is_there(parameter: torch.Tensor) -> bool:
    """Whether a backward adds to the parameter's gradient, in place of making one."""
    if not parameter.is_leaf:  # put there by `torch.func.functional_call`
        return False
    gradient = parameter.grad
    return gradient is not None and gradient.layout is torch.strided and gradient.dtype == parameter.dtype


def parameter_at(model: torch.nn.Module, path: str) -> torch.Tensor:
    """What stands in the place of a parameter: within `torch.func.functional_call`, any tensor does."""
    holder, _, name = path.rpartition(".")
    held: torch.Tensor = model.get_submodule(holder)._parameters[name]  # type: ignore[assignment]
    return held


def gradients_made(graphs: AllGraphs) -> dict[str, int]:
    """The parameters to which the backward gives a gradient, by their names in the graph, with its bytes."""
    return {
        name: size_bytes
        for profile in graphs.profiles
        for name, size_bytes in profile.parameter_gradient_bytes.items()
        if graphs.D_graph.leaves[name].kind is LeafKind.PARAMETER
    }


def put_gradients(model: torch.nn.Module, graph: DGraph, names: Collection[str]) -> None:
    """Give these parameters of `graph` gradients of zeros: a borrowed `model` then runs a step that adds to them."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in sorted(names):
        parameter = parameters[graph.leaves[name].path]
        parameter.grad = torch.zeros_like(parameter)


def above_gradients(problem: Problem, graphs: AllGraphs, there: Collection[str] | None = None) -> Problem:
    """The same step, above gradients of parameters that are there from its start: of these, by name, or of all.

    What a backward computes is then added to them and freed, so that it no longer counts from there on.
    """
    stages = graphs.K_graph.backward
    finished: list[int] = [0] * (len(stages) + 1)  # bytes of gradients that are complete after so many stages
    last: list[dict[str, int]] = [{} for _ in graphs.blocks]  # by operation, after how many stages its backward is over
    for index, (comp, profile) in enumerate(zip(stages, backward_stages(graphs.profiles), strict=True)):
        last[comp.block].update(dict.fromkeys(profile.nodes, index + 1))
    for name, block in _last_blocks(graphs).items():
        if there is not None and name not in there:
            continue
        stage = _stages_until(graphs, name, block, last[block])
        finished[stage] += graphs.profiles[block].parameter_gradient_bytes[name]
    first = len(problem.backward) - len(stages)  # those before are the loss's
    backward = list(problem.backward)
    done_bytes = 0
    for stage in range(len(stages)):
        done_bytes += finished[stage]
        op = backward[first + stage]
        less = min(done_bytes, op.resident_bytes)
        backward[first + stage] = replace(op, resident_bytes=op.resident_bytes - less, peak_bytes=op.peak_bytes - less)
    return replace(problem, backward=tuple(backward))


def _last_blocks(graphs: AllGraphs) -> dict[str, int]:
    """For each parameter with a gradient, the block in whose backward it is completed: autograd waits for its last."""
    found: dict[str, int] = {}
    for index, profile in enumerate(graphs.profiles):
        for name in profile.parameter_gradient_bytes:
            found.setdefault(name, index)  # the backward goes from the last block to the first
    return found


def _stages_until(graphs: AllGraphs, parameter: str, block: int, last: Mapping[str, int]) -> int:
    """How many stages of the backward have run when the parameter's gradient is surely complete.

    `last` tells of each operation with a backward after how many stages that is over.
    """
    values = graphs.D_graph.values
    waiting, done = [parameter], 0
    while waiting:
        name = waiting.pop()
        for op in graphs.blocks[block].ops:
            if name not in op.inputs or not any(values[output].requires_grad for output in op.output_names):
                continue
            if op.name in last:
                done = max(done, last[op.name])
            elif all(values[output].owner == parameter for output in op.output_names):
                waiting += op.output_names  # the parameter itself, as it is: its readers tell
            else:
                return max((i + 1 for i, comp in enumerate(graphs.K_graph.backward) if comp.block >= block), default=0)
    return done
