"""What the front ends make of calls of opaque submodules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from rkgb.devices.registry import device_of
from rkgb.errors import TraceError
from rkgb.ir.bgraph import BNode
from rkgb.ir.opaque import OpaqueCall, OpaqueModules, held_by, is_compiled, is_plain, outline
from rkgb.ir.sample import Sample
from rkgb.opaque.examine import examine
from rkgb.process.autocast import Autocast
from rkgb.recording.record import Recorder
from rkgb.recording.untraced import untraced
from rkgb.state.generators import GeneratorsMet


def recorded_call(
    recorder: Recorder, path: str, submodule: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call an opaque submodule, note the call as one operation of `recorder`, and return its output."""
    recorder.generators.meet((args, kwargs))
    place = str(recorder.source())
    with untraced():
        function, output = call_and_examine(path, submodule, Sample(args, kwargs), place, recorder.generators)
        output = function.apart((args, kwargs), output)
    recorder.note_opaque(path, function, (args, kwargs, held_by(submodule)), function.parts(output))
    return output


def call_and_examine(
    path: str, submodule: torch.nn.Module, arguments: Sample, place: str, generators: GeneratorsMet
) -> tuple[OpaqueCall, Any]:
    """Call an opaque submodule: the operation that such calls are, and the output of this one."""
    _refuse_captured_graphs(path, submodule)
    before = outline((arguments.args, arguments.kwargs))
    flags = tuple(tensor.requires_grad for tensor in arguments.tensors)
    traits = examine(submodule, path, arguments, generators)
    output = arguments.call(submodule)
    if outline((arguments.args, arguments.kwargs)) != before:
        raise TraceError(
            f"at {place} submodule {path!r}, which is one operation of the graph, changes an object in its arguments "
            "(such as a cache of keys and values): the graph would not know. Switch that off, or return what is new."
        )
    function = OpaqueCall(
        path=path,
        submodule=submodule,
        place=place,
        is_compiled=is_compiled(submodule),
        gradients=flags,
        grad_enabled=torch.is_grad_enabled(),
        autocast=Autocast.now(),
        expected=outline(output),
        is_plain=is_plain(output),
        traits=traits,
    )
    return function, output


def _refuse_captured_graphs(path: str, submodule: torch.nn.Module) -> None:
    if not is_compiled(submodule) or not any(
        device_of(parameter.device).may_capture_graphs for parameter in submodule.parameters()
    ):
        return
    compiled = submodule._compiled_call_impl or submodule
    config: dict[str, Any] = getattr(compiled, "get_compiler_config", dict)() or {}
    if config.get("triton.cudagraphs"):
        raise TraceError(
            f"submodule {path!r} is compiled to run as CUDA graphs (mode 'reduce-overhead' or 'max-autotune'): their "
            "results lie in memory that the next run takes again, so that no plan can keep them. Compile it with the "
            "default mode, or with 'max-autotune-no-cudagraphs'."
        )


def told_of_calls(nodes: Iterable[BNode]) -> list[str]:
    """What to tell of the opaque calls among `nodes`."""
    found = dict.fromkeys(
        node.call.function.path
        for node in nodes
        if isinstance(node.call.function, OpaqueCall) and node.call.function.traits.reads_data
    )
    return [
        f"submodule {path!r} is one operation of the graph, and what it runs depends on its data: it is never "
        "recomputed, and its bytes and times are those of the sample. Give a sample that takes as much as any batch."
        for path in found
    ]


def refuse_uncalled(module: torch.nn.Module, opaque: OpaqueModules, called: set[str]) -> None:
    """Raise `TraceError` where nothing that the user declared to be opaque was called."""
    inside = {path for path in opaque.declared if any(path.startswith(f"{outer}.") for outer in called)}
    if opaque.declared and not (called | inside) & opaque.declared.keys():
        raise TraceError(
            f"{', '.join(map(repr, opaque.declared))} of {type(module).__name__} was given as opaque, but is not "
            "called on this sample: give the submodule whose call is to be one operation."
        )
