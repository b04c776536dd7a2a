"""Calls and their arguments as Python expressions, and the objects that their names stand for."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from rkgb import DGraph, DNode, LeafKind
from rkgb.ir.call import Call, Ref, is_ref, ref_names
from rkgb.ir.opaque import OpaqueCall
from rkgb.passes.b_to_d import statistics_written
from rkgb.process.autocast import autocast
from rkgb.restore.as_saved import as_leaf, as_nonleaf
from rkgb.state.generators import OwnGenerator, is_own_generator
from rkgb.torch_private.operations import OpOverload
from rkgb.tree import leaves, map_leaves
from rockmate.guards.numbers import Operand, RunTimeNumbers
from rockmate.runtime.bindings import BINDINGS, binding
from rockmate.runtime.sized import Size, SizedCode
from rockmate.runtime.step import Step


class Expressions:
    """Writes the calls of one graph for one module."""

    def __init__(
        self,
        graph: DGraph,
        module: torch.nn.Module,
        numbers: RunTimeNumbers | None = None,
        sized: SizedCode | None = None,
    ) -> None:
        self.namespace: dict[str, Any] = {
            "torch": torch,
            "aten": SimpleNamespace(),  # as torch.ops.aten, with the operations that are called
            "autocast": autocast,
            "as_leaf": as_leaf,
            "as_nonleaf": as_nonleaf,
            "Step": Step,
        }
        self._graph = graph
        self._module = module
        self._numbers = numbers
        self._sized_calls = {} if sized is None else sized.calls
        self._taken = {*graph.values, *self.namespace, "step", "saved", "forward"}
        self._functions: dict[Any, str] = {}
        self.leaves = {name: self._leaf(name) for name in graph.leaves}  # how each is read

    def call(self, op: DNode, repeated: bool, tracked: bool) -> str:
        """The call that `op` is; `repeated` by a recomputation, with its differentiable arguments `tracked`."""
        tracker = op if tracked else None
        if isinstance(op.call.function, OpaqueCall):
            return self._opaque_call(op, op.call.function, tracker)
        call = self._sized_calls.get(op.name, op.call)
        call = call if self._numbers is None else self._numbers.call(op.name, call)
        args = list(call.args)
        statistics = statistics_written(op.call) if repeated else None
        if statistics is not None:
            # The forward has counted this batch already.
            args[statistics[0]] = args[statistics[1]] = None
        texts = [self._value(arg, tracker) for arg in args]
        texts += [f"{key}={self._value(value, tracker)}" for key, value in call.kwargs.items()]
        return f"{self._function(call)}({', '.join(texts)})"

    def value(self, argument: Any) -> str:
        """An argument of a call."""
        return self._value(argument)

    def _opaque_call(self, op: DNode, function: OpaqueCall, tracker: DNode | None) -> str:
        # The submodule reads its parameters and buffers, the third of the arguments, itself.
        args, kwargs, _ = op.call.args
        texts = [self._value(arg, tracker) for arg in args]
        texts += [f"{key}={self._value(value, tracker)}" for key, value in kwargs.items()]
        submodule = function.in_module(self._module)
        text = f"{self._bind(function.__name__, submodule)}({', '.join(texts)})"
        return text if function.is_plain else f"{self._bind('tensors_in', function.parts)}({text})"

    def _function(self, call: Call) -> str:
        function = call.function
        if isinstance(function, OpOverload):
            namespace, name = function._schema.name.split("::")
            overload = function._schema.overload_name or "default"
            if name.isidentifier() and not keyword.iskeyword(name) and not keyword.iskeyword(overload):
                if namespace == "aten" and (least := self._with_least_code(call)) is not None:
                    overloads = vars(self.namespace["aten"]).setdefault(name, SimpleNamespace())
                    setattr(overloads, overload, least)
                    return f"aten.{name}.{overload}"
                return f"torch.ops.{namespace}.{name}.{overload}"
        if function not in self._functions:
            self._functions[function] = self._bind(call.op_name, function)
        return self._functions[function]

    @staticmethod
    def _with_least_code(call: Call) -> Callable[..., Any] | None:
        """What calls the operation with the least code around it; None where that would be another overload."""
        if call.function in BINDINGS:
            return binding(call)
        return getattr(call.function, "_op", call.function)

    def generator(self, own: OwnGenerator) -> str:
        """A random generator of the user's own."""
        if not own.steps:
            return self._bind("generator", own.generator)
        # Read from the module at each call, as parameters are: another one may have been put there.
        submodule = self._module.get_submodule(own.module_path)
        return f"{self._bind(own.module_path.replace('.', '_') or 'model', submodule)}{own.text}"

    def _value(self, value: Any, tracker: DNode | None = None) -> str:
        """An argument; of a call of `tracker` that autograd is to see as it saw it in the forward, if there is one."""
        if isinstance(value, Ref):
            text = self.leaves.get(value.name, value.name)
            leaf = self._graph.leaves.get(value.name)
            parameter = leaf is not None and leaf.kind is LeafKind.PARAMETER
            if tracker is None or parameter:
                return text
            requires_grad = tracker.tracks(value.name, self._graph.values)
            if value.name in tracker.written and leaf is None:
                # The variable stays a tensor without a graph, whatever writes into its storage.
                return f"as_nonleaf({text})" if requires_grad else f"{text}.detach()"
            return f"as_leaf({text})" if requires_grad else text
        if isinstance(value, OwnGenerator):
            return self.generator(value)
        if isinstance(value, Operand):
            return f"step.numbers[{str(value.expression)!r}]"
        if isinstance(value, Size):
            return f"step.sizes[{value.text!r}]"
        if type(value) in (list, tuple) and leaves(value, _is_written_apart):
            return self._written([self._value(item, tracker) for item in value], type(value))
        if names := ref_names(value):
            if type(value) is dict and all(isinstance(key, str) for key in value):
                return "{" + ", ".join(f"{key!r}: {self._value(item, tracker)}" for key, item in value.items()) + "}"
            made = self._bind(type(value).__name__.lower(), partial(_rebuilt, value, names))
            return f"{made}({', '.join(self._value(Ref(name), tracker) for name in names)})"
        return self._literal(value)

    def _literal(self, value: Any) -> str:
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if value is None or isinstance(value, (bool, int, float, str, complex)):
            return repr(value)
        if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
            return str(value)
        if isinstance(value, torch.device):
            return f'torch.device("{value}")'
        if isinstance(value, (list, tuple)):
            return self._written([self._literal(item) for item in value], list if isinstance(value, list) else tuple)
        return self._bind("constant", map_leaves(lambda own: own.in_module(self._module), value, is_own_generator))

    @staticmethod
    def _written(items: list[str], kind: type) -> str:
        if kind is list:
            return f"[{', '.join(items)}]"
        return f"({', '.join(items)})" if len(items) > 1 else f"({items[0]},)" if items else "()"

    def _leaf(self, name: str) -> str:
        leaf = self._graph.leaves[name]
        if leaf.kind is LeafKind.INPUT:
            return name
        if leaf.kind is LeafKind.CONSTANT:
            return self._bind(name, leaf.constant, wanted=True)
        # Read from the module at each call: libraries such as FSDP put other tensors there.
        owner, _, attribute = leaf.path.rpartition(".")
        module = self._bind(owner.replace(".", "_") or "model", self._module.get_submodule(owner))
        if attribute.isidentifier() and not keyword.iskeyword(attribute):
            return f"{module}.{attribute}"
        return f"getattr({module}, {attribute!r})"  # as those of a ParameterList are

    def _bind(self, stem: str, value: Any, wanted: bool = False) -> str:
        for name, known in self.namespace.items():
            if known is value:
                return name
        name = stem if wanted else re.sub(r"\W", "_", stem)  # submodules may have any name
        while not wanted and (name in self._taken or keyword.iskeyword(name) or not name.isidentifier()):
            name = f"{name}_" if name.isidentifier() else f"_{name}"
        self._taken.add(name)
        self.namespace[name] = value
        return name


def _is_written_apart(leaf: object) -> bool:
    """Whether it is no literal, wherever it stands."""
    return isinstance(leaf, (Ref, Size, OwnGenerator))


def _rebuilt(tree: Any, names: list[str], *tensors: torch.Tensor) -> Any:
    """A copy of `tree` with these tensors in the places of the references of these names."""
    given = dict(zip(names, tensors, strict=True))
    return map_leaves(lambda ref: given[ref.name], tree, is_ref)
