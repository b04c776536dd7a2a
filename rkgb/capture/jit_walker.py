"""Walk the graphs of ``torch.jit.trace``: their C++ values become calls on named values.

Shape arithmetic is folded on the way, so that it leaves no operations behind.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch

from rkgb.capture.asked import ASKING_FILE, Asked
from rkgb.errors import TraceError
from rkgb.ir.bgraph import BNode, Leaf, LeafKind, Source
from rkgb.ir.call import Call, Ref, function_name, is_ref
from rkgb.ir.sample import Sample
from rkgb.opaque.jit import HandOn, Mark
from rkgb.recording.naming import Namer
from rkgb.sizes import Computed, SizeExpression, SizeQuestion, SizeRead, Unknown, cast, computed
from rkgb.source import OWN_FOLDER
from rkgb.state.generators import GeneratorsMet, is_generator, is_own_generator
from rkgb.torch_private.operations import OpOverload, parsed_schema
from rkgb.torch_private.tracers import graph_of_function, graph_of_method
from rkgb.tree import leaves, map_leaves

# The order of c10::ScalarType: traced graphs name a dtype by its place in that list.
_SCALAR_TYPES = (
    "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool "
    "qint8 quint8 qint32 bfloat16 quint4x2 quint2x4 bits1x8 bits2x4 bits4x2 bits8 bits16 "
    "float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz uint16 uint32 uint64"
).split()
_MEMORY_FORMATS = (
    torch.contiguous_format,
    torch.preserve_format,
    torch.channels_last,
    torch.channels_last_3d,
)
# The tracer notes their results as needing no gradient even where they do.
_UNRELIABLE_GRADIENT_FLAGS = frozenset({"aten::_convolution"})
_NUMBER_CASTS: dict[str, type | None] = {
    "aten::Int": int,
    "aten::IntImplicit": int,
    "aten::Float": float,
    "aten::FloatImplicit": float,
    "aten::Bool": bool,
    "aten::ScalarImplicit": None,  # to whatever it is
}


class _Number:
    """A tensor of the trace that only holds shape arithmetic: known now, on any input."""

    def __init__(self, tensor: torch.Tensor, expression: SizeExpression | None = None) -> None:
        self.tensor = tensor
        self.expression = expression  # where it comes of sizes


class _Size(int):
    """A number that comes of sizes."""

    expression: SizeExpression


class _SizeFloat(float):
    """Such a number that is no integer."""

    expression: SizeExpression


def _sized(value: Any, expression: SizeExpression | None) -> Any:
    """`value`, a number of Python's, with the expression that gives it."""
    if expression is None or isinstance(value, bool):
        return value
    number = _SizeFloat(value) if isinstance(value, float) else _Size(value)
    number.expression = expression
    return number


def _expression_of(value: Any) -> SizeExpression | None:
    return value.expression if isinstance(value, (_Number, _Size, _SizeFloat)) else None


def _comes_of_sizes(leaf: object) -> bool:
    return _expression_of(leaf) is not None


def _is_size(leaf: object) -> bool:
    return isinstance(leaf, (_Size, _SizeFloat))


def _without_expression(number: _Size | _SizeFloat) -> int | float:
    return int(number) if isinstance(number, _Size) else float(number)


def _sizes_in(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], _Size | _SizeFloat]]:
    """Numbers in arguments that come of sizes, each with its path."""
    if isinstance(tree, (_Size, _SizeFloat)):
        yield path, tree
    elif isinstance(tree, (list, tuple)):
        for place, item in enumerate(tree):
            yield from _sizes_in(item, (*path, place))
    elif isinstance(tree, dict):
        for key, item in tree.items():
            yield from _sizes_in(item, (*path, key))


def _is_operand(leaf: object) -> bool:
    return isinstance(leaf, (_Number, int, float))


def _operand(value: Any) -> Any:
    """A number as an operand of an expression."""
    expression = _expression_of(value)
    if expression is not None:
        return expression
    return value.tensor.item() if isinstance(value, _Number) and value.tensor.dim() == 0 else value


def _is_number(leaf: object) -> bool:
    return isinstance(leaf, _Number)


def _runs_later(leaf: object) -> bool:
    """Whether what reads `leaf` is an operation of the graph: no number can be made of it now."""
    return is_ref(leaf) or is_own_generator(leaf)


@dataclass(frozen=True, slots=True)
class _Submodule:
    path: str  # under the wrapper
    traced: torch.jit.ScriptModule


class JitWalker:
    """Walks the graph of the module once, and those of its submodules where they are called: C++ to Python data."""

    def __init__(self, module: torch.nn.Module, sample: Sample, generators: GeneratorsMet) -> None:
        self.module = module
        self.sample = sample
        self.generators = generators
        self.nodes: list[BNode] = []
        self.leaves: dict[str, Leaf] = {}
        self.output_refs: list[Ref] = []
        self._values: dict[str, Any] = {}  # by the C++ value's name, in the graph that is walked now
        self._leaf_of_tensor: dict[int, Ref] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._types: dict[str, Any] = {}  # of tensors by name: in other graphs they may be told less of
        self._namer = Namer()
        self._buffers = {id(buffer) for buffer in module.buffers()}
        self.questions: list[SizeQuestion] = []

    def walk(self, traced: torch.jit.ScriptModule) -> None:
        """Fill `nodes`, `leaves` and `output_refs`."""
        graph = graph_of_method(traced)
        inputs = []
        for index, value in enumerate(list(graph.inputs())[1:]):
            name = self._namer.plain(f"input_{index}")
            self.leaves[name] = Leaf(name, LeafKind.INPUT, index=index)
            self._shapes[name] = tuple(self.sample.tensors[index].shape)
            self._types[name] = value.type()
            inputs.append(Ref(name))
        self.output_refs = [self._as_ref(item) for item in self._walk(graph, [_Submodule("", traced), *inputs])]

    def _walk(self, graph: Any, inputs: Sequence[Any]) -> Any:
        """What a graph gives for what is read of its inputs."""
        calling = self._values
        self._values = {value.debugName(): read for value, read in zip(graph.inputs(), inputs, strict=True)}
        for node in graph.nodes():
            self._visit(node)
        (result,) = graph.outputs()
        read = self._read(result)
        self._values = calling
        return read

    def _visit(self, node: Any) -> None:
        kind = node.kind()
        if kind.startswith("prim::"):
            self._visit_prim(kind.removeprefix("prim::"), node)
        elif kind in _NUMBER_CASTS:
            self._define(node, self._cast(_NUMBER_CASTS[kind], node))
        elif kind in ("aten::size", "aten::dim", "aten::numel"):
            self._define(node, self._fold_shape(kind, node))
        else:
            self._visit_op(node)

    # ---- prim nodes: structure, constants, attributes -------------------------------------------

    def _visit_prim(self, kind: str, node: Any) -> None:
        inputs = list(node.inputs())
        if kind == "Constant":
            self._define(node, self._constant(next(iter(node.outputs())).toIValue()))
        elif kind == "GetAttr":
            self._visit_attribute(node, self._read(inputs[0]))
        elif kind == "CallMethod":
            read = [self._read(value) for value in inputs]
            self._define(node, self._walk(graph_of_method(read[0].traced, node.s("name")), read))
        elif kind == "CallFunction" and (graph := graph_of_function(node)) is not None:
            self._define(node, self._walk(graph, [self._read(value) for value in inputs[1:]]))
        elif kind == "ListConstruct":
            self._define(node, [self._read(value) for value in inputs])
        elif kind == "TupleConstruct":
            self._define(node, tuple(self._read(value) for value in inputs))
        elif kind in ("ListUnpack", "TupleUnpack"):
            for output, item in zip(node.outputs(), self._read(inputs[0]), strict=True):
                self._values[output.debugName()] = item
        elif kind == "NumToTensor":
            number = self._read(inputs[0])
            self._define(node, _Number(torch.tensor(number, device="cpu"), _expression_of(number)))
        elif kind in ("device", "dtype"):
            self._define(node, getattr(self._type_of(inputs[0]), kind)())
        elif kind == "PythonOp":
            self._visit_python_op(node)
        else:
            raise TraceError(
                f"the trace holds {kind} at {_source(node)}: a scripted function or control flow inside the "
                "graph. Call the plain Python function there."
            )

    def _constant(self, value: Any) -> Any:
        if isinstance(value, torch.Generator):
            return self.generators.own(value)
        if not isinstance(value, torch.Tensor):
            return value
        # Python numbers that meet tensors are traced as 0-dim tensors of these two dtypes; they must stay
        # numbers, for a 0-dim tensor takes part in type promotion and a number does not.
        if value.dim() == 0 and value.dtype in (torch.float64, torch.int64, torch.bool):
            return _Number(value)
        return self._constant_leaf(value)

    def _constant_leaf(self, value: torch.Tensor) -> Ref:
        name = self._namer.numbered("constant")
        self.leaves[name] = Leaf(name, LeafKind.CONSTANT, constant=value)
        self._shapes[name] = tuple(value.shape)
        return Ref(name)

    def _visit_attribute(self, node: Any, owner: _Submodule) -> None:
        path = f"{owner.path}.{node.s('name')}" if owner.path else node.s("name")
        output = next(iter(node.outputs()))
        kind = output.type().kind()
        if kind == "ClassType":
            self._define(node, _Submodule(path, getattr(owner.traced, node.s("name"))))
        elif kind == "TensorType":
            self._define(node, self._tensor_leaf(path.removeprefix("wrapped.")))
        else:
            self._define(node, _attribute(self.module, path.removeprefix("wrapped.")))

    def _tensor_leaf(self, path: str) -> Ref:
        tensor = _attribute(self.module, path)
        known = self._leaf_of_tensor.get(id(tensor))  # tied weights are one leaf
        if known is not None:
            return known
        registered = id(tensor) in self._buffers
        if isinstance(tensor, torch.nn.Parameter) or registered:
            name = self._namer.plain(path.replace(".", "_"))
            kind = LeafKind.PARAMETER if isinstance(tensor, torch.nn.Parameter) else LeafKind.BUFFER
            self.leaves[name] = Leaf(name, kind, path=path)
            self._shapes[name] = tuple(tensor.shape)
            ref = Ref(name)
        else:
            ref = self._constant_leaf(tensor)
        self._leaf_of_tensor[id(tensor)] = ref
        return ref

    # ---- operations -------------------------------------------------------------------------------

    def _visit_python_op(self, node: Any) -> None:
        values = iter(node.inputs())
        scalars = iter(node.scalar_args())
        read = tuple(self._read(next(values)) if kind == "d" else next(scalars) for kind in node.cconv())
        args = map_leaves(self.generators.own, read, is_generator)
        function = node.pyobj()
        owner = getattr(function, "__self__", function)  # the Function class; `function` is its bound apply
        if owner is HandOn:
            self._visit_opaque(read[0], read[1:], node)
            return
        if owner is Asked:
            self._visit_asked(read[0])
            return
        name = self._namer.numbered(getattr(owner, "__name__", "function").lower())
        pattern = self._bind_all(name, node)
        self._append(name, Call(owner.apply, self._arguments(args)), pattern, node)

    def _visit_asked(self, number: Any) -> None:
        """Python has made a number of its own of a tensor: it may decide by it, and what it makes of it is fixed."""
        expression = _expression_of(number)
        if expression is not None:
            self.questions.append(SizeQuestion(expression, number.tensor.item()))

    def _visit_opaque(self, mark: Mark, read: tuple[Any, ...], node: Any) -> None:
        function = mark.function
        name = self._namer.numbered(function.__name__)
        pattern = self._bind_all(name, node)
        around = _source(node)
        source = Source(function.path, around.location, (*around.modules, function.path))
        call = mark.call([self._as_ref(value) for value in read])
        self.nodes.append(BNode(name, call, _as_results(pattern), function.grad_enabled, source))

    def _bind_all(self, name: str, node: Any) -> Any:
        outputs = list(node.outputs())
        return self._bind_outputs(name, outputs) if len(outputs) > 1 else self._bind_output(name, outputs[0])

    def _visit_op(self, node: Any) -> None:
        read = [self._read(value) for value in node.inputs()]
        function = _overload(node, read)
        schema = function._schema.arguments
        if leaves(read, _is_number) and not leaves(read, _runs_later):
            numbers = map_leaves(lambda number: number.tensor, read, _is_number)
            result = function(**{a.name: _plain(v, a) for v, a in zip(numbers, schema, strict=True)})
            if isinstance(result, torch.Tensor):
                result = _Number(result, self._expression(function, read, result))
            elif leaves(read, _comes_of_sizes):
                self._fix(read)
            self._define(node, result)
            return
        values = self._arguments(read)
        pairs = [(argument, _plain(v, argument)) for argument, v in zip(schema, values, strict=True)]
        positional = tuple(value for argument, value in pairs if not argument.kwarg_only)
        keywords = {argument.name: value for argument, value in pairs if argument.kwarg_only and value is not None}
        name = self._namer.numbered(function_name(function).strip("_"))
        if not leaves(read, is_ref) and next(iter(node.outputs())).type().kind() != "TensorType":
            raise TraceError(f"{function} at {_source(node)} computes no tensor from no tensor: cannot be traced.")
        pattern = self._bind_all(name, node)
        self._append(name, Call(function, positional, keywords), pattern, node)

    def _expression(self, function: Any, read: list[Any], result: torch.Tensor) -> SizeExpression | None:
        """What gives `result`, of numbers some of which come of sizes; None where none does."""
        if not leaves(read, _comes_of_sizes):
            return None
        operands = tuple(_operand(value) for value in leaves(read, _is_operand))
        if result.dim() or any(isinstance(value, (list, tuple)) for value in read):
            return Unknown(str(function), operands)
        return computed(function, operands, result.item())

    def _fix(self, tree: Any) -> None:
        """What is made of these numbers is not followed: it is that of this trace for ever."""
        for number in leaves(tree, _comes_of_sizes):
            value = number.tensor.item() if isinstance(number, _Number) and number.tensor.dim() == 0 else number
            self.questions.append(SizeQuestion(number.expression, value))

    def _append(self, name: str, call: Call, pattern: Any, node: Any) -> None:
        sizes = {path: number.expression for path, number in _sizes_in((call.args, call.kwargs))}
        if sizes:
            args, kwargs = map_leaves(_without_expression, (call.args, call.kwargs), _is_size)
            call = replace(call, args=args, kwargs=kwargs)
        call = replace(call, sizes=sizes)
        self.nodes.append(BNode(name, call, pattern, self._grad_enabled(node, call), _source(node)))

    def _grad_enabled(self, node: Any, call: Call) -> bool:
        """Tracing does not record ``no_grad`` regions, but the requires_grad of every value shows them."""
        if node.kind() in _UNRELIABLE_GRADIENT_FLAGS:
            return True
        recorded = [v.type().requires_grad() for v in node.outputs() if v.type().kind() == "TensorType"]
        return any(recorded) or not recorded or not self._reads_gradient(node)

    def _reads_gradient(self, node: Any) -> bool:
        for value in node.inputs():
            read = self._read(value)
            leaf = self.leaves.get(read.name) if isinstance(read, Ref) else None
            if leaf is not None:  # leaves carry no reliable flag in the traced types
                if self._leaf_requires_grad(leaf):
                    return True
            elif isinstance(read, Ref) and self._types[read.name].requires_grad():
                return True
        return False

    def _leaf_requires_grad(self, leaf: Leaf) -> bool:
        if leaf.kind is LeafKind.INPUT:
            return self.sample.tensors[leaf.index].requires_grad
        return leaf.kind is LeafKind.PARAMETER and bool(_attribute(self.module, leaf.path).requires_grad)

    def _bind_outputs(self, name: str, outputs: list[Any]) -> tuple[Any, ...]:
        return tuple(self._bind_output(self._part(name, k), output) for k, output in enumerate(outputs))

    def _bind_output(self, name: str, output: Any) -> Any:
        if output.type().kind() == "ListType":
            unpack = next((use.user for use in output.uses() if use.user.kind() == "prim::ListUnpack"), None)
            if unpack is None:
                raise TraceError(f"%{name} returns a list whose length the trace does not tell. Unpack it in forward.")
            pattern = [self._bind_output(self._part(name, k), item) for k, item in enumerate(unpack.outputs())]
            self._values[output.debugName()] = pattern
            return pattern
        if output.type().kind() == "TupleType":  # what a custom function with several outputs returns
            unpack = next(use.user for use in output.uses() if use.user.kind() == "prim::TupleUnpack")
            items = self._bind_outputs(name, list(unpack.outputs()))
            self._values[output.debugName()] = items
            return items
        if output.type().kind() != "TensorType":
            raise TraceError(
                f"%{name} reads a number out of tensor data (a {output.type()}): the plan would be wrong for "
                "other data. Keep such values in tensors, or compute them outside the module."
            )
        ref = Ref(name)
        self._values[output.debugName()] = ref
        self._types[name] = output.type()
        sizes = output.type().sizes()
        if sizes is not None:
            self._shapes[name] = tuple(sizes)
        return ref

    # ---- values ------------------------------------------------------------------------------------

    def _read(self, value: Any) -> Any:
        return self._values[value.debugName()]

    def _define(self, node: Any, value: Any) -> None:
        self._values[next(iter(node.outputs())).debugName()] = value

    def _cast(self, kind: type | None, node: Any) -> Any:
        number = self._number(node)
        expression = _expression_of(self._read(next(iter(node.inputs()))))
        if kind is bool and expression is not None:
            self.questions.append(SizeQuestion(cast(bool, expression), bool(number)))
            return bool(number)
        if kind is None or expression is None:
            return _sized(number if kind is None else kind(number), expression)
        return _sized(kind(number), cast(kind, expression))

    def _number(self, node: Any) -> Any:
        value = self._read(next(iter(node.inputs())))
        if isinstance(value, _Number):
            return value.tensor.item()
        if not isinstance(value, Ref):
            return value
        leaf = self.leaves.get(value.name)
        if leaf is not None and leaf.constant is not None:
            return leaf.constant.item()
        raise TraceError(
            f"at {_source(node)} the module turns the tensor %{value.name} into a Python number: the graph would "
            "be wrong for other data. Keep the value in a tensor, or compute it outside the module."
        )

    def _fold_shape(self, kind: str, node: Any) -> Any:
        inputs = list(node.inputs())
        shape = self._shape_of(inputs[0], node)
        if kind == "aten::dim":
            return len(shape)
        read = self._read(inputs[0])
        if isinstance(read, Ref):
            shape = tuple(_sized(size, SizeRead(read.name, d, size)) for d, size in enumerate(shape))
        if kind == "aten::numel":
            read_sizes = [size.expression for size in shape if isinstance(size, _Size)]
            product = reduce(lambda one, other: Computed("*", (one, other)), read_sizes) if read_sizes else None
            return _sized(torch.Size(shape).numel(), product)
        return shape[self._read(inputs[1])] if len(inputs) > 1 else list(shape)

    def _shape_of(self, value: Any, node: Any) -> tuple[int, ...]:
        read = self._read(value)
        if isinstance(read, _Number):
            return tuple(read.tensor.shape)
        if read.name not in self._shapes:
            raise TraceError(f"at {_source(node)} the shape of %{read.name} depends on data: it cannot be planned.")
        return self._shapes[read.name]

    def _type_of(self, value: Any) -> Any:
        read = self._read(value)
        return self._types.get(read.name, value.type()) if isinstance(read, Ref) else value.type()

    def _arguments(self, values: Any) -> Any:
        """Numbers become Python scalars where a tensor is expected too: that is what eager was given."""
        return map_leaves(
            lambda number: (
                _sized(number.tensor.item(), number.expression) if not number.tensor.dim() else self._as_ref(number)
            ),
            values,
            _is_number,
        )

    def _as_ref(self, item: Any) -> Ref:
        if isinstance(item, Ref):
            return item
        if _comes_of_sizes(item):
            self._fix(item)
        return self._constant_leaf(item.tensor)

    def _part(self, name: str, place: int) -> str:
        return self._namer.plain(f"{name}_{place}")


def _as_results(pattern: Any) -> Any:
    return list(pattern) if isinstance(pattern, tuple) else pattern


def _attribute(module: torch.nn.Module, path: str) -> Any:
    owner: Any = module
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner


def _overload(node: Any, read: list[Any]) -> OpOverload:
    schema = parsed_schema(node.schema())
    namespace, name = schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    numbers = leaves(read, is_ref) and any(
        isinstance(value, (_Number, int, float)) and str(argument.type) == "Tensor"
        for value, argument in zip(read, schema.arguments, strict=True)
    )
    if numbers and "Scalar" in packet.overloads() and len(packet.Scalar._schema.arguments) == len(read):
        return packet.Scalar  # what eager was given: the tracer makes tensors of all numbers
    return getattr(packet, schema.overload_name or "default")


def _plain(value: Any, argument: Any) -> Any:
    """Enumerations are traced as integers: give them their Python names back."""
    kind = str(argument.real_type)
    if type(value) is not int:
        return value
    if "ScalarType" in kind:
        return getattr(torch, _SCALAR_TYPES[value])
    if "MemoryFormat" in kind:
        return _MEMORY_FORMATS[value]
    if "Layout" in kind:
        return torch.strided if value == 0 else value
    return value


def _source(node: Any) -> Source:
    # Scopes are the calls that an operation ran in, whatever module holds the one that is called.
    scopes = [scope.removeprefix("__module.") for scope in node.scopeName().split("/")]
    paths = ["" if scope == "wrapped" else scope.removeprefix("wrapped.") for scope in scopes]
    location = ""
    with contextlib.suppress(RuntimeError):
        frames = re.findall(r"^(.*)\((\d+)\): ", node.sourceRange(), re.MULTILINE)
        seen = [frame for frame in frames if frame[0] != ASKING_FILE]  # within which every function runs
        inside = itertools.takewhile(lambda frame: not frame[0].startswith(OWN_FOLDER), seen)
        outside = [frame for frame in inside if "/torch/" not in frame[0]]
        if outside:
            file, line = outside[0]
            location = f"{file.rsplit('/', maxsplit=1)[-1]}:{line}"
    return Source(paths[-1], location, tuple(dict.fromkeys(filter(None, paths))))
