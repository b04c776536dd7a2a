"""From a traced graph to one whose regions are compiled where that pays: each is tried on the sample."""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from rkgb import DGraph, Sample
from rkgb.devices.out_of_memory import is_out_of_memory
from rkgb.ir.call import bind
from rkgb.ir.compiled import CompiledCall
from rkgb.ir.dgraph import last_uses, leaf_tensors
from rkgb.process.autocast import without_autocast
from rkgb.state.module_state import module_devices, module_state_kept
from rockmate.errors import CompileError, CompileWarning
from rockmate.progress import ProgressCallback
from rockmate.regions.code import build, call_of, has_code
from rockmate.regions.find import Region, named_regions, regions_of
from rockmate.regions.join import joined
from rockmate.regions.option import CompiledRegions, KnownTrials, RegionTrial
from rockmate.regions.trial import tried

_TRIED: dict[CompiledCall, RegionTrial] = {}  # in this process: each class is tried once
_TOLD: set[str] = set()  # reasons against compiling


def with_compiled_regions(
    graph: DGraph,
    module: torch.nn.Module,
    sample: Sample,
    apart: Collection[str],
    progress: ProgressCallback,
    known: KnownTrials | None = None,
    anew: bool = True,
) -> tuple[DGraph, CompiledRegions]:
    """`graph` with its regions compiled where that takes less time, or fewer bytes in no more, and all that were tried.

    Each class of equal regions is compiled once, and run beside its operations on what the first of them reads. What
    cannot be compiled stays as it is. Operations whose names are in `apart` are in no region. Classes that are `known`
    are not tried again, and what is found is added there. Where nothing is to be compiled `anew`, regions are left as
    they are for which there is no code yet. `module`, in the mode in which it was traced, is left as it was.
    """
    started = time.perf_counter()
    regions = regions_of(graph, apart)
    if not anew:
        regions = [region for region in regions if has_code(graph, region)]
    if not regions:
        return graph, CompiledRegions()
    calls = [call_of(graph, region) for region in regions]
    found = _Trials(graph, dict(zip(regions, calls, strict=True)), progress).run(module, sample, known)
    trials = tuple(
        replace(found[call], operations=tuple(op.name for op in region.ops))
        for region, call in zip(regions, calls, strict=True)
    )
    _tell_failed(found.values(), sum(1 for trial in trials if trial.refused))
    taken = [(region, call) for region, call, trial in zip(regions, calls, trials, strict=True) if trial.pays]
    return joined(graph, taken), CompiledRegions(trials, seconds=time.perf_counter() - started)


def _tell_failed(trials: Iterable[RegionTrial], parts: int) -> None:
    """Warn of what cannot be compiled, each reason once in a process."""
    reasons = dict.fromkeys(trial.refused for trial in trials if trial.refused and trial.refused not in _TOLD)
    if not reasons:
        return
    _TOLD.update(reasons)
    many = "1 part of the model stays as it is" if parts == 1 else f"{parts} parts of the model stay as they are"
    warnings.warn(f"{many}, and cannot be compiled: {'; '.join(reasons)}.", CompileWarning, stacklevel=2)


def as_chosen(
    graph: DGraph, chosen: CompiledRegions, progress: ProgressCallback, of_any_size: bool = False
) -> tuple[DGraph, CompiledRegions]:
    """`graph` with the regions compiled that were `chosen` in one like it, and these.

    Regions that it does not have are left out, as are those whose code is for their sizes alone where it is to be
    `of_any_size`. Raises `CompileError` where one cannot be compiled.
    """
    if not chosen.chosen:
        return graph, chosen
    regions = named_regions(graph, [trial.operations for trial in chosen.chosen])
    calls = [call_of(graph, region) for region in regions]
    classes = {call: region for region, call in zip(regions, calls, strict=True) if not call.kernels}
    for number, (call, region) in enumerate(classes.items()):
        progress("compile", number, len(classes))
        try:
            build(graph, region, call)
        except Exception as error:
            raise CompileError(
                f"{region.ops[0].name} and {len(region.ops) - 1} operations after it, which the plan has compiled, "
                f"cannot be compiled here: {reason_of(error)}. Plan with compile=False."
            ) from error
    if classes:
        progress("compile", len(classes), len(classes))
    pairs = [pair for pair in zip(regions, calls, strict=True) if not of_any_size or pair[1].kernels[0].any_size]
    names = {tuple(op.name for op in region.ops) for region, _ in pairs}
    trials = tuple(trial for trial in chosen.trials if trial.operations in names)
    return joined(graph, pairs), replace(chosen, trials=trials) if of_any_size else chosen


def reason_of(error: Exception) -> str:
    """Of an error, in one line."""
    if is_out_of_memory(error):
        return "memory ran out while it was tried"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


@dataclass(eq=False, slots=True)
class _Trials:
    """A walk through the graph on the sample, in which the first region of each class is compiled and tried."""

    graph: DGraph
    calls: dict[Region, CompiledCall]
    progress: ProgressCallback

    def run(
        self, module: torch.nn.Module, sample: Sample, known: KnownTrials | None
    ) -> dict[CompiledCall, RegionTrial]:
        """What was found, by class."""
        found = self._of_before(known)
        if all(call in found for call in self.calls.values()):
            return found
        graph = joined(self.graph, list(self.calls.items()), divided=False)
        region_of_node = {f"compiled_{number}": region for number, region in enumerate(self.calls)}
        classes = len(set(self.calls.values()))
        with module_state_kept(module, module_devices(module, sample.tensors), graph.generators), without_autocast():
            values: dict[str, Any] = dict(leaf_tensors(graph.leaves, module, sample.copy().tensors))
            given = set(values)
            for node, dropped in zip(graph.nodes, last_uses(graph.nodes, []), strict=True):
                call = node.call.function
                if isinstance(call, CompiledCall) and call not in found:
                    self.progress("compile", len(found), classes)
                    found[call] = _TRIED[call] = trial = self._try(region_of_node[node.name], call, values)
                    if known is not None:
                        known.put(call.digest, trial)
                with torch.no_grad():
                    bind(node.outputs, node.call.evaluate(values), values)
                for name in dropped:
                    if name not in given:
                        values.pop(name, None)
        self.progress("compile", classes, classes)
        return found

    def _of_before(self, known: KnownTrials | None) -> dict[CompiledCall, RegionTrial]:
        """Of the classes that are known: what was found, and what pays compiled again, from the compiler's cache."""
        found: dict[CompiledCall, RegionTrial] = {}
        for region, call in self.calls.items():
            trial = _TRIED.get(call)
            if trial is None and known is not None:
                trial = known.get(call.digest)
            if trial is None or call in found:
                continue
            if trial.pays and not call.kernels:
                self.progress("compile", len(found), len(set(self.calls.values())))
                try:
                    build(self.graph, region, call)
                except Exception:  # noqa: BLE001  then it is tried again, and that is told
                    continue
            found[call] = trial
        return found

    def _try(self, region: Region, call: CompiledCall, values: dict[str, Any]) -> RegionTrial:
        was_built = bool(call.kernels)  # for a plan of a file, which goes on with them
        try:
            if not was_built:
                build(self.graph, region, call)
            trial = tried(self.graph, region, call, values)
        except Exception as error:  # noqa: BLE001  whatever the compiler cannot do stays as it is
            trial = RegionTrial((), 0.0, 0.0, 0, 0, reason_of(error))
        if trial.refused and not was_built:
            call.build([])  # its operations run one by one from here on
        return trial
