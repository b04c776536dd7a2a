"""Program to Python source, and source to functions: the one place in the project that compiles code."""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from rkgb import DNode, Leaf, LeafKind
from rkgb.devices.registry import device_of
from rkgb.ir.call import Ref, is_ref
from rkgb.ir.opaque import OpaqueCall
from rkgb.ir.profiles import SavedKind, SavedTensor
from rkgb.ir.values import ValueInfo
from rkgb.passes.b_to_d import statistics_written
from rkgb.process.autocast import OFF
from rkgb.state.generators import OwnGenerator, is_own_generator
from rkgb.tree import leaves
from rockmate.guards.numbers import RunTimeNumbers
from rockmate.runtime.expressions import Expressions
from rockmate.runtime.lowering import Program, Segment, Slot, again, dropped_after, is_whole, may_rest, rests_of
from rockmate.runtime.resting import Rests
from rockmate.runtime.sized import SizedCode
from rockmate.runtime.tables import ForgottenTensor, SavingOp, SegmentCode, StepTables

FILE_NAME = "<rockmate"  # how the names of files of generated code begin
_file_numbers = itertools.count(1)  # every compiled source needs a file name of its own


@dataclass(frozen=True, slots=True)
class GeneratedCode:
    """Source text, and the objects that its names stand for."""

    source: str
    namespace: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """The functions made from generated code."""

    code: GeneratedCode
    forward: Callable[..., tuple[torch.Tensor, ...]]  # (step, *input tensors) -> output tensors
    tables: StepTables
    rests: Rests | None = None  # parameters that are in a second memory until they are read


def compile_program(
    program: Program,
    module: torch.nn.Module,
    header: str,
    numbers: RunTimeNumbers | None = None,
    sized: SizedCode | None = None,
) -> CompiledProgram:
    """Generate the source of `program` for `module`, and compile it; `numbers` are computed anew in each call.

    What is `sized` is read from the tables, which have no sizes yet.
    """
    rests = rests_of(program, _parameters(program, module))
    writer = _Writer(program, module, numbers, sized, rests)
    code = GeneratedCode(writer.source(header), writer.expressions.namespace)
    functions = execute(code)
    dgraph = program.graph.sgraph.dgraph
    repeated = [op for op in dgraph if op.name in program.random_marks and _own_generator(op) is None]
    devices = {str(_device_of(program, op)) for op in repeated}
    profiled = [op for op in dgraph if op.name in program.graph.op_profiles]
    whole = {op.name for op in profiled if is_whole(op)}
    tables = StepTables(
        saving={
            op: _saving(program, op, op in whole)
            for op in sorted({*program.slots, *whole, *_with_moves(program), *(() if rests is None else rests.saved)})
        },
        segments=[
            SegmentCode(
                functions[_function_name(segment)],
                segment.is_random,
                makes=frozenset(kept.key for kept in segment.keeps),
                takes=frozenset(
                    [kept.key for kept, _ in segment.takes]
                    + [key for one in segment.restores.values() for key in one.kept]
                ),
                repeats=frozenset(op.name for op in segment.ops if op.is_random),
                reads=_leaves_read(program, segment),
            )
            for segment in program.segments
        ],
        generators={device: device_of(torch.device(device)).generator for device in devices},
        places={
            name: _place(module, dgraph.leaves[name])
            for segment in program.segments
            for name in _leaves_read(program, segment)
            if dgraph.leaves[name].kind is not LeafKind.INPUT
        },
        packs={one.key: one.way.pack for one in program.restored.values()},
        unpacks={one.key: (one.way.unpack, one.kept) for one in program.restored.values()},
    )
    return CompiledProgram(code, functions["forward"], tables, rests)


def _parameters(program: Program, module: torch.nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Where the parameters are found that may rest."""
    graph = program.graph
    return {name: _place(module, graph.sgraph.dgraph.leaves[name]) for name in may_rest(graph)}


def _with_moves(program: Program) -> Iterable[str]:
    """Operations that save what moves."""
    return () if program.moves is None else program.moves.places


def _saving(program: Program, op: str, is_whole: bool) -> SavingOp:
    graph, slots = program.graph, program.slots.get(op, ())
    return SavingOp(
        saved_count=len(graph.op_profiles[op].saved),
        forgotten={s.index: ForgottenTensor(s.segment, s.tensor.size, s.tensor.stride, s.tensor.offset) for s in slots},
        kept=tuple(place for place, _ in program.restored[op].way.saved) if op in program.restored else (),
        is_whole=is_whole,
    )


def execute(code: GeneratedCode) -> dict[str, Any]:
    """The functions of generated source, by name; its lines show in tracebacks and in the debugger."""
    file_name = f"{FILE_NAME} {next(_file_numbers)}>"
    functions: dict[str, Any] = {}  # apart from what they read, or each would hold itself, and the model with it
    # Entries without a modification time stay until they are taken out: here, with the functions.
    linecache.cache[file_name] = (len(code.source), None, code.source.splitlines(keepends=True), file_name)
    exec(compile(code.source, file_name, "exec"), dict(code.namespace), functions)
    weakref.finalize(functions["forward"], linecache.cache.pop, file_name, None)
    return functions


def _own_generator(op: DNode) -> OwnGenerator | None:
    """The generator of the user's own that `op` draws from; None if it draws from its device's."""
    found: list[OwnGenerator] = leaves((op.call.args, op.call.kwargs), is_own_generator)
    return found[0] if found else None


def _device_of(program: Program, op: DNode) -> torch.device:
    return program.graph.sgraph.dgraph.values[op.output_names[0]].device


def _leaves_read(program: Program, segment: Segment) -> tuple[str, ...]:
    """Parameters, buffers and inputs that a segment reads. Running statistics are not read again."""
    dgraph = program.graph.sgraph.dgraph
    written = {name for op in dgraph for name in op.written}
    read = dict.fromkeys(name for op in segment.ops for name in op.call.inputs if name in dgraph.leaves)
    return tuple(n for n in read if n not in written and dgraph.leaves[n].kind is not LeafKind.CONSTANT)


def _place(module: torch.nn.Module, leaf: Leaf) -> tuple[dict[str, Any], str]:
    """The dictionary of a submodule in which a parameter or buffer is, and its name there."""
    owner, _, name = leaf.path.rpartition(".")
    submodule = module.get_submodule(owner)
    return (submodule._parameters if leaf.kind is LeafKind.PARAMETER else submodule._buffers), name


def _function_name(segment: Segment) -> str:
    return f"recompute_{segment.index}"


@dataclass(frozen=True, slots=True)
class _Fill:
    """A forgotten tensor is given back after the operation at `position`, from the expression `value`."""

    position: int
    slot: Slot
    name: str  # of the variable
    value: str


class _Writer:
    """Writes the forward function and one function per segment."""

    def __init__(
        self,
        program: Program,
        module: torch.nn.Module,
        numbers: RunTimeNumbers | None,
        sized: SizedCode | None,
        rests: Rests | None,
    ) -> None:
        self.program = program
        self.graph = program.graph.sgraph.dgraph
        self.expressions = Expressions(self.graph, module, numbers, sized)
        self._sized = sized
        self._reads = {} if rests is None else rests.reads
        self._saved_resting = {} if rests is None else rests.saved
        self._savers = program.graph.savers()
        self._lines: list[str] = []

    def source(self, header: str) -> str:
        symbols = () if self._sized is None else self._sized.symbols
        self._lines = [f"# {line}" for line in (*header.splitlines(), *symbols)]
        self._write_forward()
        for segment in self.program.segments:
            self._write_segment(segment)
        return "\n".join(self._lines) + "\n"

    # ---- functions --------------------------------------------------------------------------------

    def _write_forward(self) -> None:
        inputs = [name for name, leaf in self.graph.leaves.items() if leaf.kind is LeafKind.INPUT]
        inputs.sort(key=lambda name: self.graph.leaves[name].index)
        self._lines += ["", "", f"def forward({', '.join(['step: Step', *inputs])}):"]
        for name in inputs:
            if name in self.program.forward_keeps:
                self._line(1, f"step.keep_input({name!r}, {name})")
        outputs = self.graph.output_names
        dropped = dropped_after(self.graph.nodes, outputs, self.graph.leaves)
        reasons = {node.ops[0]: node.keep_reason for node in self.program.graph.sgraph if node.keep_reason}
        source = None
        for op, names in zip(self.graph.nodes, dropped, strict=True):
            if op.source.module_path != source:
                source = op.source.module_path
                self._line(1, f"# {op.source}")
            if op in reasons:
                self._line(1, f"# never repeated: {reasons[op]}")
            indent = 1
            if op.is_random:
                stream = f", {self._stream(op)}" if op.name in self.program.random_marks else ""
                self._line(indent, f"with step.draws({op.name!r}{stream}):")
                indent += 1
            if op.name in self._reads:
                self._line(indent, f"with step.reads({op.name!r}):")
                indent += 1
            forgets = op.name in self.program.slots or op.name in self._saved_resting
            forgets = forgets or op.name in _with_moves(self.program)
            if forgets:
                self._line(indent, f"with step.forgets({op.name!r}):")
                indent += 1
            if not op.grad_enabled:
                self._line(indent, "with torch.no_grad():")
                indent += 1
            if entered := self._autocast_around(op):
                self._line(indent, entered)
                indent += 1
            self._line(indent, self._assignment(op, self.expressions.call(op, repeated=False, tracked=False)))
            if forgets and is_whole(op):
                self._line(1, f"step.settle({op.name!r}, {{{self._sources(op)}}})")
            if is_whole(op) and op.grad_enabled:
                for name in op.output_names:
                    self._line(1, f"step.check_gradient({name!r}, {name}, {self.graph.values[name].requires_grad})")
            if self._sized is not None and self._sized.is_checked:
                for name in op.output_names:
                    self._line(1, f"step.check_shape({name!r}, {name})")
            for name in op.output_names:
                if name in self.program.forward_keeps:
                    keep = "keep_output" if self._is_returned(name) else "keep"
                    self._line(1, f"step.{keep}({name!r}, {name})")
            if restored := self.program.restored.get(op.name):
                line = restored.way.forward_line(restored.key, op.output_names[0])
                self._lines += [f"    {line}"] if line is not None else []
            self._watch(op)
            self._delete(names)
            if self.program.moves is not None:
                self._move(self.program.moves.after_op.get(op.name, []))
        if self.program.moves is not None:
            self._move(self.program.moves.at_end)
        self._line(1, f"return ({', '.join(self.expressions.leaves.get(name, name) for name in outputs)},)")

    def _sources(self, op: DNode) -> str:
        """By the place of what an operation saves of the graph's values: one that has its storage."""
        at_hand = {self.graph.owner(name): name for name in (*op.inputs, *op.output_names)}
        saved = enumerate(self.program.graph.op_profiles[op.name].saved)
        found = {place: at_hand.get(one.source) for place, one in saved if one.kind is SavedKind.DATA}
        return ", ".join(f"{place}: {name}" for place, name in found.items() if name is not None)

    def _watch(self, op: DNode) -> None:
        """Have the step told before the backward of `op`, where something is to be done then."""
        if self.program.moves is None or op.name not in self.program.moves.before_stage:
            return
        for name in op.output_names:
            if self.graph.values[name].requires_grad:
                self._line(1, f"step.watch({op.name!r}, {name})")
                return

    def _move(self, lines: Iterable[tuple[str, str]]) -> None:
        for verb, name in lines:
            self._line(1, f"step.{verb}({name!r})")

    def _is_returned(self, name: str) -> bool:
        """Whether the user is given the storage of `name`, into which the forward itself writes nothing more."""
        owner = self.graph.owner(name)
        returned = any(self.graph.owner(output) == owner for output in self.graph.output_names)
        return returned and not any(self.graph.owner(target) == owner for op in self.graph for target in op.written)

    def _write_segment(self, segment: Segment) -> None:
        self._lines += ["", "", f"def {_function_name(segment)}(step: Step):"]
        self._line(1, f'"""Just before {segment.stage}."""')
        for kept, last in segment.takes:
            self._line(1, f"{kept.value} = step.take({kept.key!r}, last={last})")
        keeps = {kept.value: kept.key for kept in segment.keeps}
        fills = self._fills(segment)
        dropped = self._dropped(segment, fills)
        for position, op in enumerate(segment.ops):
            indent = "    "
            if again(op, segment.index) in self._reads:
                self._line(1, f"with step.reads({again(op, segment.index)!r}):")
                indent *= 2
            self._lines += [f"{indent}{line}" for line in self._lines_again(op, segment)]
            for fill in fills:
                if fill.position == position:
                    self._line(1, f"step.fill({fill.slot.op!r}, {fill.slot.index}, {fill.value})")
            for name in op.output_names:
                if name in keeps:
                    self._line(1, f"step.keep({keeps[name]!r}, {name})")
            restored = segment.restores.get(op.name)
            has_saved = op.name in segment.captured or (restored is not None and restored.way.saved)
            self._delete((["saved"] if has_saved else []) + dropped.get(position, []))
        if not segment.ops:
            self._line(1, "pass")

    def _lines_again(self, op: DNode, segment: Segment) -> list[str]:
        code = _InSegment(self, segment)
        restored = segment.restores.get(op.name)
        if restored is None:
            return code.repeated(op)
        return restored.way.lines(op, restored.key, restored.last, code)

    def lines_repeated(self, op: DNode, segment: Segment) -> list[str]:
        """The lines that run `op` again in a segment, on the random numbers that it drew, for what it saves too."""
        lines = []
        if op.is_random:
            last = segment.index == self.program.random_marks[op.name]
            lines.append(f"step.rewind({op.name!r}, {self._stream(op)}, last={last})")
        tracked = op.name in segment.captured
        call = self._assignment(op, self.expressions.call(op, repeated=True, tracked=tracked))
        if not tracked:
            return [*lines, call]
        detached = [f"{name} = {name}.detach()" for name in op.output_names if self.graph.values[name].requires_grad]
        entered = self._autocast_around(op)
        inner = [call] if entered is None else [entered, f"    {call}"]
        return [
            *lines,
            f"with step.captures({op.name!r}) as saved:",
            *(f"    {line}" for line in inner),
            *detached,
        ]

    def _autocast_around(self, op: DNode) -> str | None:
        """The autocast in which an opaque call was traced: of other operations, casts are operations of their own."""
        function = op.call.function
        if not isinstance(function, OpaqueCall) or function.autocast == OFF:
            return None
        texts = [f"{kind}={dtype}" for kind, dtype in function.autocast.regions]
        if function.autocast.off:
            texts.append("off={" + ", ".join(f"{kind!r}: {dtype}" for kind, dtype in function.autocast.off) + "}")
        texts += [] if function.autocast.caches else ["caches=False"]
        return f"with autocast({', '.join(texts)}):"

    def _fills(self, segment: Segment) -> list[_Fill]:
        """How forgotten tensors are given back: each as soon as its storage is complete."""
        complete = {
            self.graph.owner(name): position
            for position, op in enumerate(segment.ops)
            for name in (*op.output_names, *op.written)
        }
        place = {op.name: position for position, op in enumerate(segment.ops)}
        fills = []
        for slot in segment.fills:
            source = slot.tensor.source
            if slot.tensor.kind is SavedKind.PHANTOM:
                maker = self._savers[source]
                at, name = place[maker], "saved"
                if maker in segment.restores:
                    index = [phantom for _, phantom in segment.restores[maker].way.saved].index(source)
                else:
                    index = self._phantom_index(source, segment.ops[at])
                made: SavedTensor | ValueInfo = self._phantom(source)
                value = f"saved[{index}]"
            else:
                at, name, made, value = complete[source], source, self.graph.values[source], source
            fills.append(_Fill(at, slot, name, value + self._looked_at(made, slot)))
        return fills

    def _looked_at(self, made: SavedTensor | ValueInfo, slot: Slot) -> str:
        """What makes the saved tensor of that tensor, in whose storage it is: nothing where it is that one."""
        saved = slot.tensor
        if self._sized is None:
            shape = made.size if isinstance(made, SavedTensor) else made.shape
            lies, wanted = (tuple(shape), tuple(made.stride), made.offset), (saved.size, saved.stride, saved.offset)
        else:
            lies, wanted = self._sized.values[saved.source], self._sized.saved[slot.op, slot.index]
        return "" if lies == wanted else f".as_strided({', '.join(map(self.expressions.value, wanted))})"

    def _phantom(self, name: str) -> SavedTensor:
        """The tensor that autograd saves as the phantom `name`."""
        return next(t for t in self.program.graph.op_profiles[self._savers[name]].saved if t.source == name)

    def _phantom_index(self, phantom: str, op: DNode) -> int:
        """Place of a phantom among what the repeated operation packs: running statistics are not there."""
        left_out: set[str] = set()
        statistics = statistics_written(op.call)
        if statistics is not None:
            left_out = {self.graph.owner(ref.name) for ref in leaves([op.call.args[i] for i in statistics], is_ref)}
        packed = [t.source for t in self.program.graph.op_profiles[op.name].saved if t.source not in left_out]
        return packed.index(phantom)

    def _dropped(self, segment: Segment, fills: list[_Fill]) -> dict[int, list[str]]:
        """Variables to delete after each operation: once read and given back for the last time."""
        last = {
            name: position
            for position, names in enumerate(dropped_after(segment.ops, [], self.graph.leaves))
            for name in names
        }
        for fill in fills:
            if fill.name in last:
                last[fill.name] = max(last[fill.name], fill.position)
        positions: dict[int, list[str]] = {}
        for name, position in last.items():
            positions.setdefault(position, []).append(name)
        return positions

    # ---- lines --------------------------------------------------------------------------------------

    def _stream(self, op: DNode) -> str:
        own = _own_generator(op)
        return repr(str(_device_of(self.program, op))) if own is None else self.expressions.generator(own)

    def _assignment(self, op: DNode, text: str) -> str:
        return text if op.outputs is None else f"{_pattern(op.outputs)} = {text}"

    def _delete(self, names: list[str]) -> None:
        if names:
            self._line(1, f"del {', '.join(names)}")

    def _line(self, indent: int, text: str) -> None:
        self._lines.append("    " * indent + text)


@dataclass(frozen=True, slots=True)
class _InSegment:
    """What a way to have data again asks of who writes a segment."""

    writer: _Writer
    segment: Segment

    def argument(self, value: Any) -> str:
        return self.writer.expressions.value(value)

    def repeated(self, op: DNode) -> list[str]:
        return self.writer.lines_repeated(op, self.segment)


def _pattern(outputs: Any) -> str:
    if isinstance(outputs, Ref):
        return outputs.name
    if outputs is None:
        return "_"  # what a backward within forward was not asked for
    return "[" + ", ".join(_pattern(item) for item in outputs) + "]"
