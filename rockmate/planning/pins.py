"""What the user wants to be saved and never recomputed: from modules, operators and names to operations."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

import torch

from rkgb import DGraph, DNode
from rkgb.torch_private.operations import OpOverload, OpOverloadPacket
from rockmate.errors import PinError
from rockmate.planning.costs import LossCost

Pin = torch.nn.Module | OpOverload | OpOverloadPacket | str
Pins = Pin | Iterable[Pin]

_SHOWN = 6  # names in a message
_FORMS = (
    "Give submodules of the model, operators such as torch.ops.aten.topk, or names of operations such as "
    '"softmax_3" (rkgb.make_all_graphs(model, sample).D_graph has them).'
)


def as_pins(given: Pins) -> tuple[Pin, ...]:
    """One pin or several, as a tuple. Raises `PinError` for what is neither."""
    if isinstance(given, Pin):
        return (given,)  # containers of modules, and texts, can be iterated over as well
    if not isinstance(given, Iterable):
        raise PinError(f"pin is {given!r}, a {type(given).__name__}. {_FORMS}")
    return tuple(given)


def check_pins(model: torch.nn.Module, pins: Sequence[Pin]) -> None:
    """Raise `PinError` for what could not be found in any graph of `model`, before there is one."""
    own = {id(module) for module in model.modules()}
    for pin in pins:
        if not isinstance(pin, Pin):
            raise PinError(f"{pin!r} cannot be pinned: it is a {type(pin).__name__}. {_FORMS}")
        if isinstance(pin, torch.nn.Module) and id(pin) not in own:
            raise PinError(
                f"the {type(pin).__name__} to be pinned is no submodule of this {type(model).__name__}: the very "
                "object that the model holds is needed, not a copy of it or one that it held before."
            )


def pinned_operations(model: torch.nn.Module, graph: DGraph, pins: Sequence[Pin]) -> dict[str, str]:
    """Names of the operations of `graph` that are pinned, and by what.

    Raises `PinError` where a pin is no operation's, naming what there is.
    """
    reasons: dict[str, str] = {}
    modules = _Modules(model, graph) if pins else None
    for pin in pins:
        if isinstance(pin, torch.nn.Module):
            assert modules is not None
            why, names = f"pinned with {modules.name(pin)}", modules.operations(pin)
        elif isinstance(pin, str):
            why, names = "pinned by name", [op.name for op in graph if op.name == pin]
        else:
            why, names = f"pinned as {pin}", [op.name for op in graph if _is_call_of(pin, op)]
        if not names:
            raise _not_found(pin, graph)
        for name in names:
            reasons.setdefault(name, f"{name} is {why}")
    return reasons


def reading_what_is_written(graph: DGraph, loss: LossCost | None) -> dict[str, str]:
    """Operations that read an output which the loss writes into, and so run once, with the reason."""
    if loss is None or not loss.written:
        return {}
    written = {graph.owner(graph.output_names[place]): graph.output_names[place] for place in loss.written}
    return {
        op.name: f"{op.name} reads {written[graph.owner(name)]}, which the loss writes into"
        for op in graph
        for name in op.inputs
        if graph.owner(name) in written
    }


def _is_call_of(operator: OpOverload | OpOverloadPacket, op: DNode) -> bool:
    function = op.call.function
    if isinstance(operator, OpOverloadPacket):
        return isinstance(function, OpOverload) and function.overloadpacket == operator
    return function == operator


class _Modules:
    """Which operations ran while a module was called."""

    def __init__(self, model: torch.nn.Module, graph: DGraph) -> None:
        self._model = model
        self._graph = graph
        self._inside: dict[int, list[DNode]] = {id(model): list(graph)}
        for op in graph:
            # A module that is held in several places has several paths.
            for called in {id(model.get_submodule(path)) for path in op.source.modules} - {id(model)}:
                self._inside.setdefault(called, []).append(op)

    def name(self, module: torch.nn.Module) -> str:
        """In the user's words."""
        path = next(path for path, other in self._model.named_modules() if other is module)
        return f"submodule {path!r}" if path else "the whole model"

    def operations(self, module: torch.nn.Module) -> list[str]:
        """Names of those that `module` ran; of a mere container such as `nn.ModuleList`, its modules."""
        ops = self._ran_in(module)
        if not ops:
            raise PinError(self._silent(module))
        # A view looks at a storage that may have been filled elsewhere, and takes no time: it stays free.
        return [op.name for op in ops if self._computes(op)] or [op.name for op in ops]

    def _ran_in(self, module: torch.nn.Module) -> list[DNode]:
        if type(module).forward is torch.nn.Module.forward:
            found = dict.fromkeys(op for child in module.children() for op in self._ran_in(child))
            return list(found)
        return self._inside.get(id(module), [])

    def _computes(self, op: DNode) -> bool:
        return bool(op.written) or any(self._graph.owner(name) == name for name in op.output_names)

    def _silent(self, module: torch.nn.Module) -> str:
        return (
            f"{self.name(module)}, a {type(module).__name__}, is to be pinned, but no operation ran while it was called"
            ": it is not called on this sample, or computes nothing. What runs in other methods than its forward "
            "belongs to the module that calls them: pin that one, or operations by name."
        )


def _not_found(pin: Pin, graph: DGraph) -> PinError:
    if isinstance(pin, str):
        what, known = f"no operation is called {pin!r}", [op.name for op in graph]
    else:
        functions = [op.call.function for op in graph]
        known = [str(f) for f in functions if isinstance(f, OpOverload)]
        if isinstance(pin, OpOverloadPacket):
            known = [str(f.overloadpacket) for f in functions if isinstance(f, OpOverload)]
        what = f"no operation calls {pin}"
    known = list(dict.fromkeys(known))
    near = difflib.get_close_matches(str(pin), known, _SHOWN)
    shown = ", ".join(near or known[:_SHOWN]) + (", …" if not near and len(known) > _SHOWN else "")
    listed = f"Near it: {shown}" if near else f"There are: {shown}"
    return PinError(f"{what} in the graph of this model, so that nothing is pinned by it. {listed}. {_FORMS}")
