"""Calls compiled code in a module's place: checks the call, runs the forward, rebuilds the output."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from rkgb import DGraph, Sample
from rkgb.call import is_ref
from rkgb.dgraph import leaf_tensors
from rkgb.state import autocast_in_force, training_mode, without_autocast
from rkgb.tree import map_leaves
from rockmate.codegen import CompiledProgram
from rockmate.errors import PlanMismatch
from rockmate.pattern import CallPattern
from rockmate.runtime import Step, StepTables


class Runner:
    """A planned forward, called like the module that it stands for."""

    def __init__(self, module: torch.nn.Module, graph: DGraph, pattern: CallPattern, compiled: CompiledProgram) -> None:
        self._module = module
        self._graph = graph
        self._compiled = compiled
        self._signature = inspect.signature(module.forward)
        self._pattern = pattern
        self._output_names = graph.output_names
        self._submodules = list(module.named_modules())
        self._parameters = list(module.named_parameters())
        with training_mode(module):  # as it was planned, whatever its mode is now
            self._modes = [submodule.training for _, submodule in self._submodules]
        self._gradients = [parameter.requires_grad for _, parameter in self._parameters]
        self._layouts = [(parameter.dtype, parameter.stride()) for _, parameter in self._parameters]
        self._devices = {parameter.device for parameter in module.parameters()} | pattern.devices
        self._input_outputs = {name for name in self._output_names if name in graph.leaves}
        self.make_step: Callable[[StepTables], Step] = Step  # another one may watch what a step does

    def expect_flags_of(self, other: Runner) -> None:
        """Hold the module to the flags with which `other`'s was planned: this one is a copy, made later."""
        self._modes, self._gradients = other._modes, other._gradients

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward, as the module would. Raises `InputMismatch` or `PlanMismatch` before anything runs."""
        bound = self._signature.bind(*args, **kwargs)
        tensors = self._pattern.check(Sample(bound.args, bound.kwargs))
        self._check_module()
        with without_autocast() if self._pattern.autocast else contextlib.nullcontext():
            results = self._compiled.forward(self.make_step(self._compiled.tables), *tensors)
        values = dict(zip(self._output_names, results, strict=True))
        if self._input_outputs:
            values |= {n: leaf_tensors(self._graph.leaves, self._module, tensors)[n] for n in self._input_outputs}
        return map_leaves(lambda ref: values[ref.name], self._graph.output, is_ref)

    def _check_module(self) -> None:
        cast = autocast_in_force(self._devices)
        if cast != self._pattern.autocast:
            raise PlanMismatch(
                f"autocast is {_autocast_text(cast)}, but was {_autocast_text(self._pattern.autocast)} when the module "
                "was planned: planned code casts as it did then. Call and plan the module under the same autocast."
            )
        for (name, submodule), mode in zip(self._submodules, self._modes, strict=True):
            if submodule.training is not mode:
                raise PlanMismatch(
                    f"submodule {name or '(root)'!r} is in {'training' if submodule.training else 'eval'} mode, "
                    "but was not when the module was planned. Put it back, or plan the module again."
                )
        for (name, parameter), flag, layout in zip(self._parameters, self._gradients, self._layouts, strict=True):
            if parameter.requires_grad is not flag:
                raise PlanMismatch(
                    f"requires_grad of {name!r} is {parameter.requires_grad}, but was {flag} when the module was "
                    "planned. Put it back, or plan the module again."
                )
            if (parameter.dtype, parameter.stride()) != layout:
                raise PlanMismatch(
                    f"{name!r} is {parameter.dtype} with strides {parameter.stride()}, but was {layout[0]} with "
                    f"strides {layout[1]} when the module was planned. Put it back, or plan the module again."
                )


def _autocast_text(cast: tuple[tuple[str, torch.dtype], ...]) -> str:
    return " and ".join(f"on for {kind} ({str(dtype).removeprefix('torch.')})" for kind, dtype in cast) or "off"
