"""One operation as data: what is called, on which named values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rkgb.ir.opaque import OpaqueCall
from rkgb.kernels import KERNELS
from rkgb.sizes import SizeExpression
from rkgb.state.generators import OwnGenerator
from rkgb.torch_private.operations import OpOverload
from rkgb.tree import leaves, map_leaves


def function_name(function: Callable[..., Any]) -> str:
    """Short name of a function, without namespace and overload: ``linear``, ``add_``."""
    if isinstance(function, OpOverload):
        return str(function._schema.name.split("::")[-1])
    return str(getattr(function, "__name__", type(function).__name__))


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of that name, wherever it stands in a call's arguments."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


def is_ref(leaf: object) -> bool:
    """Whether `leaf` is a `Ref`."""
    return isinstance(leaf, Ref)


def ref_names(tree: Any) -> list[str]:
    """Names of the `Ref`s in `tree`, each once, in order of first appearance."""
    if isinstance(tree, Ref):  # as most values that are asked for
        return [tree.name]
    return list(dict.fromkeys(ref.name for ref in leaves(tree, is_ref)))


@dataclass(frozen=True, slots=True)
class Call:
    """``function(*args, **kwargs)`` where arguments may hold a `Ref` for a value, an `OwnGenerator` for a generator."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    # Of the numbers in ``(args, kwargs)`` those that come of sizes, by their paths; None where nobody has looked.
    sizes: Mapping[tuple[Any, ...], SizeExpression] | None = field(default=None, compare=False, repr=False)
    _inputs: tuple[str, ...] | None = field(default=None, init=False, compare=False, repr=False)  # once asked for

    @property
    def inputs(self) -> list[str]:
        """Names of the values read, each once, in argument order."""
        if self._inputs is None:
            object.__setattr__(self, "_inputs", tuple(ref_names((self.args, self.kwargs))))
        return list(self._inputs or ())

    @property
    def op_name(self) -> str:
        """Short name of what is called: ``linear``, ``add_``."""
        return function_name(self.function)

    @property
    def written(self) -> list[str]:
        """Names of the values that are written in place: as the schema says, or as an opaque call showed."""
        if isinstance(self.function, OpaqueCall):
            given = leaves(self.args, is_ref)
            return list(dict.fromkeys(given[place].name for place in self.function.traits.written))
        return [
            ref.name
            for argument, value in self.schema_pairs()
            if argument.alias_info is not None and argument.alias_info.is_write
            for ref in leaves(value, is_ref)
        ]

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        """Call the function on the values of that environment.

        It may hold other generators and opaque submodules than the trace's, by their names.
        """

        def given(named: Any) -> Any:
            return values[named.name] if isinstance(named, Ref) else values.get(named.name, named.generator)

        args, kwargs = map_leaves(given, (self.args, self.kwargs), _is_named)
        function = self.function
        if isinstance(function, OpaqueCall):
            function = function.on(values.get(function.name, function.submodule))
        elif isinstance(function, OpOverload):
            function = KERNELS.get(function, function)
        return function(*args, **kwargs)

    def schema_pairs(self) -> list[tuple[Any, Any]]:
        """Each argument of the operation's schema with what is given for it; None where nothing is."""
        if not isinstance(self.function, OpOverload):
            return []
        arguments = self.function._schema.arguments
        return [
            (argument, self.args[position] if position < len(self.args) else self.kwargs.get(argument.name))
            for position, argument in enumerate(arguments)
        ]


def _is_named(leaf: object) -> bool:
    return isinstance(leaf, Ref | OwnGenerator)


def opaque_calls(nodes: Iterable[Any]) -> list[OpaqueCall]:
    """What `nodes` call, of those that are calls of opaque submodules."""
    return [node.call.function for node in nodes if isinstance(node.call.function, OpaqueCall)]


def bind(pattern: Any, result: Any, values: dict[str, Any]) -> None:
    """Store `result` under the names of `pattern`, a `Ref` or nested sequences of `Ref`s."""
    if isinstance(pattern, Ref):
        values[pattern.name] = result
    elif isinstance(pattern, (list, tuple)):
        for part, item in zip(pattern, result, strict=True):
            bind(part, item, values)
