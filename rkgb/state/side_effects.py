"""What a forward does besides computing: hooks, other random numbers, attributes that it sets.

But for the attributes, nothing of it happens when a graph runs. Whatever it changes in the results, the replay check
finds; the rest is told in warnings, or refused where a later run could be wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from rkgb.errors import TraceError
from rkgb.process.turns import replaced_here
from rkgb.source import caller_is_torch, opaque_advice, python_location
from rkgb.state.attributes import Snapshot, accesses_noted
from rkgb.state.other_random import comparable, other_random_states, set_state, state_of
from rkgb.torch_private.modes import is_wrapper_subclass, without_dispatch_modes

_SHOWN = 3  # submodules named in a message


class Unrepeatable(TraceError):
    """A forward does what no run of its graph repeats; `path` is that of the submodule which does it."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


class SideEffects:
    """Watches one forward; afterwards `told` says what of it no graph repeats."""

    def __init__(self, submodules: Iterable[tuple[str, torch.nn.Module]]) -> None:
        """`submodules` are those whose own code no graph runs, by path: all but what is within opaque ones."""
        parts = list(submodules)
        self.was_set: set[tuple[int, str]] = set()  # by the object's identity and name: attributes that forward set
        self.told: list[str] = []
        # Streams of Python and NumPy, by the path of the submodule that draws: the process's, and objects.
        self.drawn: dict[str, str] = {}
        self.drawn_from_objects: dict[str, str] = {}
        self._paths = {submodule: path for path, submodule in parts}
        self.held = Snapshot(parts)
        self._hooks = _hooks_now(self._paths)
        self._streams = list(self.held.streams().values())
        self._states = self._states_now()
        self._running: list[str] = []  # paths of the modules that are in their forward
        self._passes_over = False
        self._hooked = [path for submodule, path in self._paths.items() if has_hooks_of_its_own(submodule)]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Run the forward inside."""
        entering = torch.nn.modules.module.register_module_forward_pre_hook(self._entered)
        leaving = torch.nn.modules.module.register_module_forward_hook(self._left, always_call=True)
        kinds = {type(one.thing) for one in self.held.held.values()} | {torch.nn.Module}
        plain = [kind for kind in kinds if kind is torch.nn.Module or not issubclass(kind, torch.nn.Module)]
        note = accesses_noted(plain, lambda holder, name, _: self.was_set.add((id(holder), name)), reads=False)
        try:
            with self._no_packing_of_its_own(), note:
                yield
        finally:
            entering.remove()
            leaving.remove()
        self._note_draws("")

    def passed_over(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which runs something that a run of the graph repeats as it is: nothing of it is told."""

        def called(*args: Any, **kwargs: Any) -> Any:
            self._note_draws(self._path)
            before, self._passes_over = self._passes_over, True
            try:
                return function(*args, **kwargs)
            finally:
                self._passes_over = before
                self._states = self._states_now()

        return called

    @property
    def has_hooks(self) -> bool:
        """Whether there are forward hooks, of which nothing happens when a graph runs: that is told."""
        return bool(self._hooked)

    @property
    def made_hooks(self) -> bool:
        """Whether the forward has put hooks on modules."""
        return any(held.keys() - before.keys() for held, before in self._hooks)

    def take_back(self) -> None:
        """Put what modules hold back as it was before the forward, and take away the hooks that it has made."""
        _give_hooks_back(self._hooks)
        self.held.restore()

    def tell(self) -> None:
        """Fill `told`."""
        if self._hooked:
            self.told.append(
                f"submodule {_several(self._hooked)} has forward hooks: what they computed while the module was traced "
                "is part of the graph, but they do not fire when it runs. Use the module itself where they must."
            )

    @property
    def _path(self) -> str:
        """Of the module that is in its forward."""
        return self._running[-1] if self._running else ""

    @contextlib.contextmanager
    def _no_packing_of_its_own(self) -> Iterator[None]:
        """Refuse a forward that packs its saved tensors with hooks: they may change what its backward reads."""
        kind: Any = torch.autograd.graph.saved_tensors_hooks
        enter = kind.__enter__

        def checked(hooks: Any) -> None:
            is_user_s = type(hooks) is kind and not caller_is_torch(2)  # above what tells threads apart
            if is_user_s and not self._passes_over:
                raise Unrepeatable(
                    f"{_here(self._path)} forward packs its saved tensors with hooks of its own: the graph would run "
                    f"without them. Put them around the call of the module{_or_within(self._path)}.",
                    self._path,
                )
            enter(hooks)

        with replaced_here(kind, "__enter__", checked):
            yield

    def _entered(self, submodule: torch.nn.Module, *_: Any) -> None:
        if submodule in self._paths:
            self._note_draws(self._path)
            self._running.append(self._paths[submodule])

    def _left(self, submodule: torch.nn.Module, *_: Any) -> None:
        if submodule in self._paths and self._running:
            self._note_draws(self._running.pop())

    def _states_now(self) -> tuple[dict[str, Any], list[Any]]:
        return other_random_states(), [comparable(state_of(stream)) for _, stream in self._streams]

    def _note_draws(self, path: str) -> None:
        (process, objects), self._states = self._states, self._states_now()
        for name, state in self._states[0].items():
            if state != process[name]:
                self.drawn.setdefault(path, name)
        for (name, stream), before, after in zip(self._streams, objects, self._states[1], strict=True):
            if before != after:
                self.drawn_from_objects.setdefault(path, f"{name!r}, a {type(stream).__name__}")


def _several(names: list[str]) -> str:
    return ", ".join(map(repr, names[:_SHOWN])) + (", …" if len(names) > _SHOWN else "")


def has_hooks_of_its_own(module: torch.nn.Module) -> bool:
    """Whether `module` has forward hooks that are not PyTorch's."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not is_torchs_own(hook) for hook in hooks)


def _hooks_of(module: torch.nn.Module) -> list[dict[int, Any]]:
    return [held for name, held in vars(module).items() if "_hooks" in name and isinstance(held, dict)]


def _hooks_now(modules: Iterable[torch.nn.Module]) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """Where these modules hold hooks, and a copy of what is there now."""
    return [(held, dict(held)) for module in modules for held in _hooks_of(module)]


def _give_hooks_back(hooks: Iterable[tuple[dict[int, Any], dict[int, Any]]]) -> None:
    for held, before in hooks:
        if held.keys() != before.keys():
            held.clear()
            held.update(before)


def is_torchs_own(hook: Any) -> bool:
    """Such as those of `torch.nn.utils.weight_norm`, which only compute."""
    return str(getattr(hook, "__module__", type(hook).__module__)).startswith("torch.")


@contextlib.contextmanager
def attributes_kept(module: torch.nn.Module) -> Iterator[None]:
    """Take back what a forward leaves in the module and its submodules.

    That is attributes, what is in the lists, dictionaries and objects that they hold, states of generators and of
    streams of Python and NumPy, and hooks.
    """
    before = Snapshot(module.named_modules())
    states = [(held, held.get_state()) for held in before.generators()]
    streams = [(stream, state_of(stream)) for _, stream in before.streams().values()]
    # Together: models that add hooks at their first call note in an attribute that they have.
    hooks = _hooks_now(module.modules())
    try:
        yield
    finally:
        _give_hooks_back(hooks)
        before.restore()
        for generator, state in states:
            generator.set_state(state)
        for stream, state in streams:
            set_state(stream, state)


_ON_GRADIENTS = {
    "register_hook": (
        "registers a hook on a tensor: the graph would run without it. Put what it does to the gradient into a "
        "torch.autograd.Function"
    ),
    "retain_grad": "has a tensor keep its gradient: no tensor of a run of the graph would. Use a hook on a parameter",
}


class Places(Protocol):
    """Tells where a forward is."""

    @property
    def module_path(self) -> str:
        """The module that runs now."""

    def path_around(self, tensor: torch.Tensor) -> str:
        """The innermost of the modules that run now in whose call `tensor` was made."""


def refuse_function(name: str, args: Any, places: Places) -> None:
    """Raise `Unrepeatable` for calls whose effect no graph can hold, by the function's name.

    It names the module that is to be one operation then. All that used the tensor so far must be within it: its
    gradient is the sum of what they send.
    """
    if name in _ON_GRADIENTS and args[0].grad_fn is not None:
        whole = places.path_around(args[0])
        raise Unrepeatable(f"{_here(places.module_path)} forward {_ON_GRADIENTS[name]}{_or_within(whole)}.", whole)


def refuse_attribute(getter: Any, args: Any, places: Places) -> None:
    """Raise `Unrepeatable` for access to what no graph can follow: nodes of the autograd graph."""
    owner = getattr(getter, "__self__", None)
    if owner is torch.Tensor.grad_fn and not caller_is_torch(2):
        with without_dispatch_modes():
            differentiable = args[0].grad_fn is not None
        if differentiable:
            whole = places.path_around(args[0])
            raise Unrepeatable(
                f"{_here(places.module_path)} forward takes the grad_fn of a tensor: what it does to that node would "
                f"not happen when the graph runs. Use a torch.autograd.Function{_or_within(whole)}.",
                whole,
            )


def _here(path: str) -> str:
    return f"at {python_location()}" + (f", in {path!r}," if path else "")


def _or_within(whole: str) -> str:
    return "" if whole else ", or move it into a submodule, with what makes the tensor: its call is one operation then"


def refuse_collective(function: Any, place: str) -> None:
    """Raise the error for a collective whose end Python waits for, unseen by the dispatcher."""
    raise TraceError(
        f"at {place} forward calls {function}, a collective: nobody would wait for its end when the graph runs. "
        "Call it in a torch.autograd.Function of your own: such functions run whole, and once."
    )


def refuse_drawn(value: object, place: str) -> None:
    """Raise the error for a forward that reads, into Python, the random numbers that it draws."""
    dropped = "where that drops layers, and a setting such as layerdrop is above 0, say layerdrop=0; "
    others = f"{dropped if isinstance(value, bool) else ''}or {opaque_advice(place)}"
    raise TraceError(
        f"at {place} forward reads {value!r} out of random numbers that it drew, and so may go another way at every "
        f"call: a graph holds for one way. Decide in tensors (torch.where); {others}."
    )


def refuse_wrappers(tensors: list[Any], source: Callable[[], object]) -> None:
    """Raise the error for tensors that hold others and no bytes of their own, as functional collectives return them.

    `source` tells the place; it is asked only for the error.
    """
    for tensor in tensors:
        if is_wrapper_subclass(tensor):
            raise TraceError(
                f"at {source()} forward makes a tensor of class {type(tensor).__name__}, which holds no bytes of its "
                "own: the graph could not tell when they are there. Use plain tensors; call a functional collective, "
                "and wait for it, in a torch.autograd.Function of your own."
            )


def refuse_storage(place: str) -> None:
    """Raise the error for a raw storage that depends on data."""
    raise TraceError(
        f"at {place} forward takes the raw storage of a tensor: the graph cannot follow what becomes of it. Use the "
        "tensor itself."
    )


def refuse_unregistered(tensor: torch.Tensor, place: str) -> None:
    """Raise the error for a tensor that takes a gradient, and is no parameter that the module holds."""
    raise TraceError(
        f"at {place} forward uses a tensor of shape {list(tensor.shape)} that requires a gradient, and comes neither "
        "from the arguments nor from the module's parameters (a function that holds a parameter itself, or a module in "
        "a plain list): a planned step would give it none. Read parameters from the modules that hold them, and "
        "register those (nn.ModuleList, nn.Parameter)."
    )
