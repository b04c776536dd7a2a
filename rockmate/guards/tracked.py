"""What becomes of a number in a forward: run once with numbers in its place that note what is done with them."""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rkgb import Sample
from rkgb.ir.opaque import as_written
from rkgb.recording.record import nothing_saved
from rkgb.state.attributes import attributes_of
from rkgb.state.generators import GeneratorsMet, MeetingGenerators
from rkgb.state.module_state import module_state_kept, training_mode
from rkgb.tree import leaves, map_leaves
from rockmate.guards.numbers import Expression, Number, Question, Value, evaluated, setting_holder, with_values

_MOST_USES = 10_000  # of numbers in one forward: more are no settings
_DEEPEST = 40  # steps of arithmetic
_BINARY: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "add": ("+", operator.add),
    "sub": ("-", operator.sub),
    "mul": ("*", operator.mul),
    "truediv": ("/", operator.truediv),
    "floordiv": ("//", operator.floordiv),
    "mod": ("%", operator.mod),
    "pow": ("**", operator.pow),
}
_UNARY: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "neg": ("-", operator.neg),
    "pos": ("+", operator.pos),
    "abs": ("abs", operator.abs),
}
_QUESTIONS = ("eq", "ne", "lt", "le", "gt", "ge")
# After these, what is done with a number is not known: it counts as asked for itself.
_CONVERSIONS: Mapping[str, Callable[..., Any]] = {
    "__float__": float,
    "__int__": int,
    "__index__": operator.index,
    "__complex__": complex,
    "__hash__": hash,
    "__str__": str,
    "__repr__": repr,
    "__format__": format,
    "__round__": round,
    "__trunc__": int,
    "__floor__": lambda value: value.__floor__(),
    "__ceil__": lambda value: value.__ceil__(),
    "__divmod__": divmod,
    "is_integer": lambda value: value.is_integer(),
    "as_integer_ratio": lambda value: value.as_integer_ratio(),
    "hex": lambda value: value.hex(),
    "conjugate": lambda value: value,
}
# Functions to which a number is an operand, whatever it is: none makes a size, an index or a choice of it, but for the
# numbers of `numbers.kind_of`.
_OPERAND_OF = frozenset(
    """
    add sub subtract rsub mul multiply div divide true_divide pow float_power remainder fmod lerp clamp clip clamp_min
    clamp_max addcmul addcdiv addmm addmv addr addbmm baddbmm sub_ subtract_ mul_ multiply_ div_ divide_ true_divide_
    pow_ add_ lerp_ clamp_ clamp_min_ clamp_max_ addcmul_ addcdiv_ masked_fill masked_fill_ fill_ full full_like
    new_full where eq ne lt le gt ge atan2 floor_divide elu elu_ leaky_relu leaky_relu_ softplus hardtanh hardtanh_
    threshold threshold_ softshrink hardshrink logit layer_norm group_norm gumbel_softmax
    smooth_l1_loss huber_loss __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__
    __rmul__ __imul__ __div__ __truediv__ __rdiv__ __rtruediv__ __idiv__ __itruediv__ __floordiv__ __rfloordiv__
    __pow__ __rpow__ __ipow__ __mod__ __rmod__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
    """.split()
)
# What these have of their number beside it: the share that a dropout keeps.
_DROPOUTS = frozenset("dropout dropout_ dropout1d dropout2d dropout3d feature_dropout feature_dropout_".split())


class NotFollowed(Exception):
    """A forward does with its numbers what cannot be followed."""


@dataclass(eq=False, slots=True)
class Uses:
    """What a forward did with its numbers."""

    known: dict[Number, Value]
    questions: list[Question] = field(default_factory=list)
    # Of each use in a function of PyTorch: the expressions of which one must be found in the graph.
    given: list[tuple[Number | Expression, ...]] = field(default_factory=list)

    def ask(self, asked: Number | Expression) -> Any:
        """What the forward was told, which the plan's later calls must be told, too."""
        answer = evaluated(asked, self.known)
        self.questions.append(Question(asked, answer))
        self._count()
        return answer

    def give(self, *expressions: Number | Expression) -> None:
        """Note an operand, which is one of these in the graph."""
        self.given.append(expressions)
        self._count()

    def _count(self) -> None:
        if len(self.questions) + len(self.given) > _MOST_USES:
            raise NotFollowed


def uses_of(module: torch.nn.Module, sample: Sample, known: dict[Number, Value]) -> Uses:
    """Run the forward once, without gradients, with these numbers watched. All is given back.

    Raises `NotFollowed` where it does with them what cannot be followed.
    """
    uses = Uses(dict(known))
    numbers = {number: watched(number, value, uses, 0) for number, value in known.items()}
    arguments = {number.argument: tracked for number, tracked in numbers.items() if number.argument is not None}
    met = GeneratorsMet(module)
    with (
        training_mode(module),
        module_state_kept(module),
        met.given_back(),
        MeetingGenerators(met),
        nothing_saved(),  # with gradients, as training runs it: forward may ask whether they are on
        as_written(),
        warnings.catch_warnings(action="ignore"),
        _settings_watched(module, {n: tracked for n, tracked in numbers.items() if n.setting is not None}),
        _Watch(uses),
    ):
        try:
            output = with_values(sample.copy(), arguments).call(module)
        except Exception as error:
            raise NotFollowed from error
        held = [attributes_of(part) for part in module.modules()]
        given = [tracked for number, tracked in numbers.items() if number.setting is not None]
        kept = [tracked for tracked in leaves((output, held), is_watched) if all(tracked is not one for one in given)]
        if kept:
            raise NotFollowed  # as what is returned, or set
    return uses


@contextlib.contextmanager
def _settings_watched(module: torch.nn.Module, watched: Mapping[Number, Any]) -> Iterator[None]:
    holders = [
        (setting_holder(module, number), number.setting[2], tracked)
        for number, tracked in watched.items()
        if number.setting
    ]
    before = [holder[name] for holder, name, _ in holders]
    for holder, name, tracked in holders:
        holder[name] = tracked
    try:
        yield
    finally:
        for (holder, name, _), value in zip(holders, before, strict=True):
            holder[name] = value


class _Watch(TorchFunctionMode):
    """Gives the functions of PyTorch plain numbers, and notes which ones."""

    def __init__(self, uses: Uses) -> None:
        super().__init__()
        self._uses = uses

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = leaves((args, kwargs or {}), is_watched)
        if found:
            name = getattr(func, "__name__", "")
            for tracked in found:
                if name in _DROPOUTS:
                    kept = Expression(f"1 - {_text(tracked.expression)}", _kept_of, (tracked.expression,))
                    self._uses.give(tracked.expression, kept)
                elif name in _OPERAND_OF:
                    self._uses.give(tracked.expression)
                else:
                    self._uses.ask(tracked.expression)
            args, kwargs = map_leaves(lambda tracked: tracked.value, (args, kwargs or {}), is_watched)
        return func(*args, **(kwargs or {}))


def _kept_of(rate: Value) -> float:
    return 1.0 - rate


class _Watched:
    """A number that notes what is done with it; anything else is an `AttributeError`, and ends the watching."""

    expression: Number | Expression
    value: Value
    uses: Uses
    depth: int

    def __new__(cls, *_: Any) -> Any:
        return object.__new__(cls)

    def __init__(self, expression: Number | Expression, value: Value, uses: Uses, depth: int) -> None:
        self.expression = expression
        self.value = value
        self.uses = uses
        self.depth = depth

    def __bool__(self) -> bool:
        text = f"bool({self.expression})"
        return bool(self.uses.ask(Expression(text, bool, (self.expression,))))

    def __getnewargs__(self) -> Any:
        raise NotFollowed

    __reduce__ = __reduce_ex__ = __getnewargs__  # type: ignore[assignment]

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self


# PyTorch's argument parser takes instances of these two classes for numbers.
class _WatchedFloat(_Watched, torch.SymFloat):
    """In the place of a float."""

    __class__ = property(lambda self: float)


class _WatchedInt(_Watched, torch.SymInt):
    """In the place of an int."""

    __class__ = property(lambda self: int)


def is_watched(thing: object) -> bool:
    return type(thing) in (_WatchedFloat, _WatchedInt)


def watched(expression: Number | Expression, value: Value, uses: Uses, depth: int) -> Any:
    if depth > _DEEPEST or type(value) not in (int, float):
        raise NotFollowed
    return (_WatchedFloat if type(value) is float else _WatchedInt)(expression, value, uses, depth)


def _plain(thing: Any) -> Any:
    return thing.expression if is_watched(thing) else thing


def _text(thing: Any) -> str:
    return str(thing) if not isinstance(thing, Expression) else f"({thing})"


def _computed(sign: str, function: Callable[..., Any], *operands: Any) -> Any:
    """The result of arithmetic; NotImplemented where what is no number takes part."""
    if any(not is_watched(operand) and type(operand) not in (int, float, bool) for operand in operands):
        return NotImplemented
    uses = next(operand.uses for operand in operands if is_watched(operand))
    plain = tuple(map(_plain, operands))
    texts = [_text(operand) for operand in plain]
    text = f"{sign}({texts[0]})" if len(texts) == 1 else f"{texts[0]} {sign} {texts[1]}"
    expression = Expression(text, function, plain)
    depth = 1 + max(operand.depth for operand in operands if is_watched(operand))
    return watched(expression, evaluated(expression, uses.known), uses, depth)


def _asked(name: str, tracked: Any, other: Any) -> Any:
    if not is_watched(other) and type(other) not in (int, float, bool):
        # A tensor compares itself; of anything else it is not known what it does.
        return (
            NotImplemented
            if isinstance(other, torch.Tensor)
            else getattr(tracked.uses.ask(tracked.expression), f"__{name}__")(other)
        )
    function = getattr(operator, name)
    text = f"{name}({_plain(tracked)}, {_plain(other)})"
    return tracked.uses.ask(Expression(text, function, (tracked.expression, _plain(other))))


def _define() -> None:
    def both(name: str, sign: str, function: Callable[..., Any]) -> None:
        setattr(_Watched, f"__{name}__", lambda self, other: _computed(sign, function, self, other))
        setattr(_Watched, f"__r{name}__", lambda self, other: _computed(sign, function, other, self))

    def alone(name: str, sign: str, function: Callable[..., Any]) -> None:
        setattr(_Watched, f"__{name}__", lambda self: _computed(sign, function, self))

    def question(name: str) -> None:
        setattr(_Watched, f"__{name}__", lambda self, other: _asked(name, self, other))

    def conversion(name: str, function: Callable[..., Any]) -> None:
        setattr(_Watched, name, lambda self, *more: function(self.uses.ask(self.expression), *more))

    for name, (sign, function) in _BINARY.items():
        both(name, sign, function)
    for name, (sign, function) in _UNARY.items():
        alone(name, sign, function)
    for name in _QUESTIONS:
        question(name)
    for name, function in _CONVERSIONS.items():
        conversion(name, function)


_define()
