"""From a planned module to the records of a plan file."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from collections.abc import Callable
from typing import Any

import torch

from rkgb import AllGraphs, DGraph, DNode, Leaf, SGraph
from rkgb.devices.registry import device_of
from rkgb.export.json_form.functions import name_of
from rkgb.export.json_form.names import operation_name
from rkgb.ir.call import Ref, function_name
from rkgb.ir.compiled import CompiledCall
from rkgb.ir.opaque import OpaqueCall
from rkgb.ir.values import ValueInfo
from rkgb.passes.equivalence import canonical_form
from rkgb.profile.measure import MeasuredBlocks
from rkgb.recording.digest import digest
from rkgb.recording.guard import Guard
from rkgb.state.generators import OwnGenerator
from rkgb.torch_private.operations import OpOverload
from rkgb.tree import map_leaves
from rockmate.guards.flags import BackEndFlags
from rockmate.offload.option import Offload
from rockmate.plan_files.content import (
    FORMAT,
    VERSION,
    Asked,
    ChainRecord,
    GraphRecord,
    LeafRecord,
    LossRecord,
    Made,
    MeasuredBlock,
    Measurements,
    OffloadRecord,
    OperationRecord,
    PlanFile,
    Promise,
    ValueRecord,
)
from rockmate.planning.costs import LossCost
from rockmate.planning.measured import Measured
from rockmate.planning.plan import Plan
from rockmate.planning.request import PlanRequest

_DISTRIBUTION = "rockmate-rk"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+|0x[0-9a-f]{6,}")


def plan_file_of(model: torch.nn.Module, measured: Measured, plan: Plan, request: PlanRequest) -> PlanFile:
    """Everything that is known of `plan`, which was made for `request` of what was `measured` of `model`."""
    numbers = {name: getattr(plan, name) for name in Promise.__struct_fields__}
    return PlanFile(
        format=FORMAT,
        version=VERSION,
        made=made_here(measured.device),
        asked=Asked(
            scope=request.scope,
            pinned=measured.pinned,
            opaque=request.opaque,
            gradients=tuple(sorted(measured.gradients)),
            trained=_trained(measured.graphs.D_graph),
            assumed=tuple(sorted(measured.graphs.D_graph.assumed)),
            offload=None if request.tiers is None else _offload(request.tiers.option),
        ),
        graph=graph_record(model, str(measured.pattern), measured.graphs.S_graph),
        measured=_measurements(measured),
        problem=measured.problem,
        chain=ChainRecord(
            blocks=tuple((block.start, block.stop) for block in measured.chain.blocks),
            backward_block=measured.chain.backward_block,
        ),
        promise=Promise(**numbers),
        schedule=tuple(map(str, plan.schedule.ops)),
    )


def made_here(device: torch.device) -> Made:
    """This process, planning for `device`."""
    return Made(
        rockmate=_own_version(),
        torch=str(torch.__version__),
        device=device_of(device).name,
        threads=torch.get_num_threads(),
        processor=device_of(device).processor,
        flags=BackEndFlags([device]).texts(),
    )


def _own_version() -> str:
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "0"  # run from a checkout that is not installed


def _offload(option: Offload) -> OffloadRecord:
    return OffloadRecord(where=option.where, path=option.path, limit_bytes=option.limit_bytes)


def _trained(graph: DGraph) -> tuple[str, ...] | None:
    return None if graph.trained is None else tuple(sorted(graph.trained))


def _measurements(measured: Measured) -> Measurements:
    loss = measured.loss
    return Measurements(
        blocks=tuple(
            MeasuredBlock(digest=key, names=names, profile=profile)
            for key, (names, profile) in _distinct_blocks(measured.graphs).items()
        ),
        stages=tuple((comp.resident_bytes, comp.peak_bytes) for comp in measured.graphs.K_graph.backward),
        loss=None if loss is None else _loss(loss),
        eager_peak_bytes=measured.eager_peak_bytes,
        drawn_sooner_ms=measured.drawn_sooner_ms,
    )


def _loss(loss: LossCost) -> LossRecord:
    return LossRecord(time_ms=loss.time_ms, peak_bytes=loss.peak_bytes, is_seen=loss.is_seen)


def _distinct_blocks(graphs: AllGraphs) -> MeasuredBlocks:
    found: MeasuredBlocks = {}
    for block, profile in zip(graphs.blocks, graphs.profiles, strict=True):
        form = canonical_form(graphs.D_graph, block)
        found.setdefault(form.digest, (form.names, profile))
    return found


# ---- the graph ---------------------------------------------------------------------------------------


def graph_record(model: torch.nn.Module, calls: str, graph: SGraph) -> GraphRecord:
    """The operations of `graph`, traced of `model` for such `calls`."""
    dgraph = graph.dgraph
    node_of = {op.name: node for node in graph for op in node.ops}
    operations = []
    for op in dgraph:
        node = node_of.get(op.name)
        operations.append(_operation(dgraph, op, *(("", "") if node is None else (node.name, node.keep_reason))))
    leaves = tuple(_leaf(dgraph, leaf) for leaf in dgraph.leaves.values())
    output = _text(dgraph.output)
    return GraphRecord(
        digest=_digest_of(leaves, tuple(operations), output, dgraph),
        model=type(model).__name__,
        calls=calls,
        leaves=leaves,
        operations=tuple(operations),
        output=output,
        attributes=tuple(f"{write}: {write.kind.value} {_text(write.value)}" for write in dgraph.attributes),
    )


def _digest_of(
    leaves: tuple[LeafRecord, ...], operations: tuple[OperationRecord, ...], output: str, graph: DGraph
) -> str:
    """Of all that decides what the graph computes; where it stands in the user's source does not."""
    exact = hashlib.sha256()
    for leaf in leaves:
        exact.update(f"{leaf}\n".encode())
    for op in operations:
        exact.update(f"{op.name} {op.node} {op.function} {op.arguments} {op.makes} {op.facts}\n".encode())
    for name, info in graph.values.items():
        exact.update(f"{name} {info}\n".encode())
    fingerprints = [op.call.function.traits.fingerprint for op in graph if isinstance(op.call.function, OpaqueCall)]
    exact.update(f"{output} {sorted(graph.trained or ())} {graph.trained is None} {fingerprints}".encode())
    for write in graph.attributes:
        exact.update(f"{write} {write.kind} {_text(write.value)} {write.detached}\n".encode())
    return exact.hexdigest()


def _leaf(graph: DGraph, leaf: Leaf) -> LeafRecord:
    held = "" if leaf.constant is None else digest(leaf.constant).hex()
    return LeafRecord(
        kind=leaf.kind.value,
        path=leaf.path,
        index=leaf.index,
        value=_value(leaf.name, graph.values[leaf.name]),
        digest=held,
    )


def _operation(graph: DGraph, op: DNode, node: str, keep_reason: str) -> OperationRecord:
    facts = {"no gradient": not op.grad_enabled, "random": op.is_random, "guard": op.is_guard}
    return OperationRecord(
        name=op.name,
        function=_function(op.call.function),
        arguments=", ".join([*map(_text, op.call.args), *(f"{k}={_text(v)}" for k, v in op.call.kwargs.items())]),
        makes=tuple(_value(name, graph.values[name]) for name in op.output_names),
        node=node,
        module=op.source.module_path,
        source=op.source.location,
        facts=", ".join(word for word, holds in facts.items() if holds),
        keep_reason=keep_reason,
    )


def _value(name: str, info: ValueInfo) -> ValueRecord:
    return ValueRecord(name=name, text=info.describe(), size_bytes=info.storage_bytes, storage=info.owner)


def _function(function: Callable[..., Any]) -> str:
    if isinstance(function, OpOverload):
        return operation_name(function)
    if isinstance(function, Guard):
        return f"guard: {function_name(function.read)} is {_text(function.expected)}"
    if isinstance(function, CompiledCall):
        return f"{function.name}, compiled: {function.fingerprint}"
    if isinstance(function, OpaqueCall):
        return f"call of {function.name}"
    return name_of(function)


def _text(tree: Any) -> str:
    """Arguments as people read them; equal for equal ones, whichever process wrote them."""
    shown = map_leaves(_Shown, tree, lambda leaf: isinstance(leaf, Ref | torch.Tensor | OwnGenerator))
    return _ADDRESS.sub("", repr(shown))


class _Shown:
    """A leaf, as text in the place of the object."""

    def __init__(self, leaf: Any) -> None:
        self._leaf = leaf

    def __repr__(self) -> str:
        leaf = self._leaf
        if isinstance(leaf, torch.Tensor):
            return f"tensor {leaf.dtype} {list(leaf.shape)} {digest(leaf).hex()[:12]}"
        return repr(leaf) if isinstance(leaf, Ref) else f"generator {leaf.name}"
