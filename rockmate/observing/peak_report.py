"""Who holds the memory at the highest moment of training, by kind, module, line and operation."""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rkgb.devices.accelerator import Accelerator
from rkgb.devices.allocation_log import AllocationLog, there_is_a_profiler
from rkgb.devices.caching_allocator import AllocationEvent
from rkgb.devices.out_of_memory import is_out_of_memory
from rkgb.devices.registry import device_of, kinds_text, usual_device
from rkgb.shapes.machine import known_name
from rkgb.tree import leaves
from rockmate.errors import ArgumentError
from rockmate.observing.labels import Labels
from rockmate.observing.ledger import Holder, Ledger, StepMoment
from rockmate.units import format_bytes

if TYPE_CHECKING:
    from rockmate.forecast.answer import Estimate

_SHOWN = 12
_TICK_NS = 1000  # of the clock by which accelerators' allocators tell times


class _End(NamedTuple):
    """Where a step ended."""

    time_ns: int
    known: dict[int, str]  # tensors that were known then, by address
    next_node: int


class PeakReport:
    """Context that watches training as it is, and tells who holds the memory at its highest moment.

        with rockmate.PeakReport() as report:
            train(model)  # any loop; steps of optimizers are where steps end
        print(report)

    Sizes are of what was allocated inside, to the byte, and those of `holders` add up to the peak. Nothing is changed:
    the same operations run. Each is looked at, so that small ones take longer; take no times inside. Where the highest
    moment is a sum of gradients of one tensor, it is a gradient higher than without: PyTorch sums in place only where
    nobody looks.

    Args:
        device: where the tensors are; None for the accelerator, or for the CPU where there is none.
        keep_model: hold the model that was called last, for `estimate` after a script that lets it go. A loop over
            several models then has one while it makes the next.

    Raises:
        ValueError: for a kind of device that cannot be measured.
        RuntimeError: on entry, within a profiler (of the CPU) or another such context, or where the history of the
            accelerator's allocator is recorded for somebody else; when a result is read before the end.
    """

    def __init__(self, device: torch.device | str | None = None, *, keep_model: bool = False) -> None:
        self.device = usual_device() if device is None else torch.device(device)
        if not device_of(self.device).is_supported:
            raise ValueError(f"PeakReport measures {kinds_text()} devices, not {str(self.device)!r}")
        self._ledger: Ledger | None = None
        self._labels = Labels(0 if device_of(self.device).is_host else _TICK_NS)
        self._labels.calls.keeps_last = keep_model
        self._log: AllocationLog | None = None
        self._hooks: list[Any] = []
        self._gradients: dict[int, str] = {}
        self._ends: list[_End] = []  # of steps whose events are not read yet
        self._events: list[AllocationEvent] = []  # that are read, of the step that is not at its end
        self._counting = contextlib.ExitStack()

    # ---- what was found ----------------------------------------------------------------------------------------

    @property
    def steps(self) -> tuple[StepMoment, ...]:
        """The highest moment of each step; the last is of what came after the last step, if anything did."""
        if self._ledger is None or self._log is not None:
            raise RuntimeError("PeakReport has no result yet: read it after the end of its `with` block")
        return tuple(self._ledger.steps)

    @property
    def highest(self) -> StepMoment:
        """That of the step with the highest one."""
        return max(self.steps, key=lambda step: step.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated inside and alive at once."""
        return self.highest.peak_bytes

    @property
    def holders(self) -> tuple[Holder, ...]:
        """Who held the bytes then, the largest first: their sizes add up to `peak_bytes`."""
        return self.highest.holders

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes then by kind: parameters, gradients, optimizer state, buffers, activations, temporary and others."""
        found = Counter[str]()
        for holder in self.holders:
            found[holder.kind] += holder.size_bytes
        return dict(found.most_common())

    @property
    def growing(self) -> tuple[Holder, ...]:
        """What lives on from step to step, more of it each time."""
        assert self._ledger is not None
        return tuple(holder for holder in self._ledger.growing() if holder.size_bytes)

    def estimate(self, budget: float | int | str = 0.5) -> Estimate:
        """What a plan for `budget` would cost, by shapes alone: no kernel runs. `rockmate.estimate` of the largest
        training call that was seen, of the module with most parameters, with what a cross-entropy takes for a loss.

        Args:
            budget: of a step, as for `Rockmate`: a part of the eager step's peak, a size, bytes.

        Raises:
            ArgumentError: no training call of a module was seen that is still there, or it is planned already.
            Exception: what the module raises without data.
        """
        # Here, as watching is to be quick to import, and most reports are read without.
        from rockmate.forecast.estimate import estimate

        found = self._labels.calls.largest()
        if found is None:
            raise ArgumentError(
                "no module was called in training that is still there: keep the model until the report is read."
            )
        module, sample = found
        if hasattr(module, "plan") and hasattr(module, "original"):
            raise ArgumentError(f"{type(module.original).__name__} is planned already: see its plan.")
        steps = next((one for one in self._labels.optimizers if _is_of(one, module)), None)
        return estimate(module, sample, optimizer=steps, device=_machine_of(self.device), budget=budget, batches=False)

    def __str__(self) -> str:
        return "\n".join(_text(self))

    # ---- watching ----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if device_of(self.device).is_host and there_is_a_profiler():
            raise RuntimeError("PeakReport needs PyTorch's profiler, which is running: stop the other profile first")
        self._ledger = Ledger()
        self._log = AllocationLog(self.device, foreign=True)
        self._log.__enter__()
        self._hooks = [
            register_optimizer_step_pre_hook(self._note_gradients),
            register_optimizer_step_post_hook(self._step_ends),
        ]
        self._counting.enter_context(self._labels.counting_ranges())
        self._labels.watch(self._between)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._labels.end()
        self._counting.close()
        for hook in self._hooks:
            hook.remove()
        self._note_gradients()
        log, self._log = self._log, None
        assert log is not None
        log.__exit__(kind, error, traceback)
        self._read(log)
        if self._events or not self._ledger_of_now.steps:
            self._add(self._events, self._known())
        if error is not None and is_out_of_memory(error):
            error.add_note("\n".join(_text(self)))

    def _note_gradients(self, *_: Any) -> None:
        """Before a step: after it, a loop may let them go."""
        for root in list(self._labels.roots):
            for parameter in root.parameters():
                if parameter.grad is not None:
                    self._gradients[parameter.grad.untyped_storage().data_ptr()] = "gradients"

    def _step_ends(self, *_: Any) -> None:
        self._ends.append(_End(time.time_ns(), self._known(), self._labels.next_node()))
        self._gradients.clear()

    def _between(self) -> None:
        """Read what was recorded, where a step has ended: a log takes memory, too."""
        log = self._log
        if not self._ends or log is None:
            return
        log.__exit__(None, None, None)
        self._read(log)
        self._log = AllocationLog(self.device, foreign=True)
        self._log.__enter__()

    def _read(self, log: AllocationLog) -> None:
        """Steps that have ended, one by one."""
        events = [*self._events, *log.events]
        for end in self._ends:
            count = bisect_right(events, end.time_ns, key=lambda event: event.time_ns)
            self._add(events[:count], end.known)
            self._labels.forget(end.time_ns, end.next_node)
            del events[:count]
        self._ends.clear()
        self._events = events

    def _add(self, events: list[AllocationEvent], known: dict[int, str]) -> None:
        self._ledger_of_now.add(events, self._labels.at, self._labels.first_backward_ns, known)

    @property
    def _ledger_of_now(self) -> Ledger:
        assert self._ledger is not None
        return self._ledger

    def _known(self) -> dict[int, str]:
        """Tensors that are known, by address."""
        found = dict(self._gradients)
        for root in list(self._labels.roots):
            found |= _addresses(root.buffers(), "buffers") | _addresses(root.parameters(), "parameters")
        for optimizer in list(self._labels.optimizers):
            found |= _addresses(leaves(dict(optimizer.state)), "optimizer state")
        return found


def _is_of(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> bool:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(id(parameter) in held for parameter in module.parameters())


def _machine_of(device: torch.device) -> str:
    """Its name, as `rockmate.estimate` takes one, or its memory where that is not known."""
    kind = device_of(device)
    if kind.is_host:
        return "cpu"
    ask = getattr(torch.get_device_module(device), "get_device_name", None)
    known = None if ask is None else known_name(ask(device))
    assert isinstance(kind, Accelerator)
    return known or str(kind.memory_bytes()[1])


def _addresses(tensors: Iterable[torch.Tensor], kind: str) -> dict[int, str]:
    return {tensor.untyped_storage().data_ptr(): kind for tensor in tensors}


def _text(report: PeakReport) -> Iterable[str]:
    steps = report.steps
    number = steps.index(report.highest)
    yield f"{format_bytes(report.peak_bytes)} at the highest moment, in step {number + 1} of {len(steps)}:"
    for kind, size_bytes in report.kinds.items():
        yield f"  {format_bytes(size_bytes):>9}  {kind}"
    yield "by module, line and operation:"
    for holder in report.holders[:_SHOWN]:
        yield f"  {_line_of(holder)}"
    rest = report.holders[_SHOWN:]
    if rest:
        yield f"  {format_bytes(sum(holder.size_bytes for holder in rest)):>9}  {len(rest)} others"
    for holder in report.growing:
        yield f"growing from step to step: {_line_of(holder).strip()}"


def _line_of(holder: Holder) -> str:
    label = holder.label
    where = " ".join(filter(None, [label.module, label.line]))
    blocks = f"{holder.blocks} × " if holder.blocks > 1 else ""
    phase = f", {label.phase}" if label.phase else ""
    return f"{format_bytes(holder.size_bytes):>9}  {holder.kind}: {blocks}{label.operation or 'memory'} {where}{phase}"
