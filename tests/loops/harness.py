"""Training loops, each run twice from the same seed, with the module itself and with the planned one, and compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.devices.allocation_log import AllocationLog
from rkgb.replay.step_record import bitwise_equal
from rkgb.tree import leaves
from rockmate import Rockmate

CPU = torch.device("cpu")
SEED = 7


@dataclass(frozen=True)
class Loop:
    """A loop as people write it, and what is to be seen of its plans."""

    run: Callable[[Run], None]
    quick: bool  # among the tests that every change must pass
    recomputes: bool  # some plan recomputes something
    judged: bool  # the peak of some step is measured and held against the budget
    falls_back: bool  # some call may run otherwise than by a plan within the budget, which is told and counted
    tells: type[Warning] | None  # a warning that users get and can do nothing about; None for nearly all
    fails: str  # why it does, as things are; "" for nearly all

    @property
    def name(self) -> str:
        return self.run.__name__


class Registry(list[Loop]):
    """Loops, in the order in which they are written."""

    def add(
        self,
        *,
        quick: bool = False,
        recomputes: bool = True,
        judged: bool = True,
        falls_back: bool = False,
        tells: type[Warning] | None = None,
        fails: str = "",
    ) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
        def added(run: Callable[[Run], None]) -> Callable[[Run], None]:
            self.append(Loop(run, quick, recomputes, judged, falls_back, tells, fails))
            return run

        return added


class Run:
    """One run of a loop: with planned modules, or with the modules themselves. Keeps all that training can see."""

    def __init__(self, is_planned: bool) -> None:
        self.is_planned = is_planned
        self.models: list[Rockmate] = []
        self.records: list[dict[str, Any]] = []
        self.judged = 0  # steps whose peak was held against a budget
        self._steps = 0

    def plan(self, module: nn.Module, budget: Any = 0.8, **settings: Any) -> Any:
        """What the loop trains: the module planned with its first batch, or as it is."""
        if not self.is_planned:
            return module
        settings = {"time_limit": 1, "cache": False, **settings}
        model = Rockmate(module, budget=budget, **settings)
        self.models.append(model)
        return model

    @contextlib.contextmanager
    def step(self, *models: Any, extra_bytes: int = 0) -> Iterator[None]:
        """A step of `models`, the same one as often as it is called in it: what it takes is within their budgets.

        Steps in which a plan is made, or runs otherwise, are not judged. `extra_bytes` are for what the loop itself
        allocates in the step, beside the modules, and what it holds at the peak.
        """
        self._steps += 1
        if not self.is_planned or self._steps == 1:  # which is planned as for users, without a profiler around
            yield
            return
        before = self._state()
        with AllocationLog(CPU) as log:
            yield
        if self._state() == before:
            budget_bytes = sum(model.plan.budget_bytes for model in models) + extra_bytes
            assert log.peak_bytes <= budget_bytes, f"step {self._steps} takes {log.peak_bytes} of {budget_bytes} bytes"
            self.judged += 1

    def _state(self) -> list[Any]:
        return [(model._family._made, model.fallbacks) for model in self.models]

    def see(self, *modules: Any, **values: Any) -> None:
        """Keep a copy of everything of `modules`, of these values and of the random stream."""
        record: dict[str, Any] = {}
        for name, value in values.items():
            for index, tensor in enumerate(leaves(value)):
                record[f"{name} {index}"] = tensor.detach().clone() if isinstance(tensor, Tensor) else tensor
        for index, module in enumerate(modules):
            _see_module(record, f"module {index}", getattr(module, "original", module))
        record["random stream"] = torch.get_rng_state()
        self.records.append(record)


def _see_module(record: dict[str, Any], prefix: str, module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        record[f"{prefix}: {name}"] = parameter.detach().clone()
        record[f"{prefix}: gradient of {name}"] = None if parameter.grad is None else parameter.grad.clone()
    for name, buffer in module.named_buffers():
        record[f"{prefix}: {name}"] = buffer.clone()
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                record[f"{prefix}: attribute {path}.{name}"] = value.detach().clone()
                record[f"{prefix}: attribute {path}.{name} has a gradient"] = value.requires_grad
            elif isinstance(value, int | float | str):
                record[f"{prefix}: attribute {path}.{name}"] = value


def run_both(loop: Loop) -> Run:
    """Run it with the module itself and planned; assert that nothing differs, and return the planned run."""
    eager, planned = Run(False), Run(True)
    for run in (eager, planned):
        torch.manual_seed(SEED)
        loop.run(run)
    assert eager.records, "the loop keeps nothing to compare"
    assert len(planned.records) == len(eager.records)
    for index, (found, expected) in enumerate(zip(planned.records, eager.records, strict=True)):
        assert found.keys() == expected.keys(), f"record {index}: {found.keys() ^ expected.keys()}"
        for name, value in expected.items():
            assert _equal(found[name], value), f"record {index}: {name} differs"
    return planned


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        return found.shape == expected.shape and found.dtype == expected.dtype and bitwise_equal(found, expected)
    return type(found) is type(expected) and found == expected
