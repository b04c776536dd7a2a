"""What runs when, in the user's words: the operation, the line of code, the module, and the phase of the step."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import record_function
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rkgb.process.uncompiled import DispatchMode
from rkgb.torch_private.autograd import next_sequence_number, running_node, sequence_number
from rkgb.torch_private.modules import arguments_of_hook
from rockmate.observing.largest_calls import LargestCalls

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer step"
_OURS = tuple(str(Path(folder)) for folder in (Path(torch.__file__).parent, Path(__file__).parent.parent))
_OURS = (*_OURS, str(Path(__file__).parent.parent.parent / "rkgb"))
_MODELS = str(Path(__file__).parent.parent / "zoo")
_MOST_FRAMES = 60


class Label(NamedTuple):
    """One operation. Texts are empty where nothing is known."""

    operation: str
    line: str  # of the user's code; of the forward's, where it is in the backward
    module: str  # the innermost that is called, by its path
    phase: str


UNSEEN = Label("", "", "", "")


class Labels(DispatchMode):
    """Mode that notes each operation with its times; `at` tells which ran at a time.

    Also notes the modules that are called without another around them, and the optimizers that step.
    """

    def __init__(self, tick_ns: int = 0) -> None:
        """With `tick_ns`, times that are asked for may be that much too early."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._tick_ns = tick_ns
        self.roots: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.calls = LargestCalls()
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._labels: list[Label] = []
        self._of_node: dict[int, Label] = {}
        self._called: list[torch.nn.Module] = []
        self._paths: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._steps = False
        self._hooks: list[Any] = []
        self._ranges = 0  # of `record_function` that are open
        self._between: Callable[[], None] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        label = self._label(func)
        started = time.time_ns()
        made = func(*args, **(kwargs or {}))
        self._starts.append(started)
        self._ends.append(time.time_ns())
        self._labels.append(label)
        return made

    def watch(self, between: Callable[[], None]) -> None:
        """Begin, for all modules and optimizers of this process.

        `between` is called where a module is called by none, outside of ranges of profilers, of a backward too: a
        profiler that ends within one leaves that with what is gone, and the process may crash when it is left.
        """
        self._between = between
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self.__enter__()  # type: ignore[no-untyped-call]

    @contextmanager
    def counting_ranges(self) -> Iterator[None]:
        """Context: it is known how many ranges of Python's `record_function` are open, such as an optimizer's step."""
        enter, leave = record_function.__enter__, record_function.__exit__

        def entered(range_: Any) -> Any:
            self._ranges += 1
            return enter(range_)  # type: ignore[no-untyped-call]

        def left(range_: Any, *error: Any) -> Any:
            self._ranges -= 1
            return leave(range_, *error)

        record_function.__enter__, record_function.__exit__ = entered, left  # type: ignore[method-assign]
        try:
            yield
        finally:
            record_function.__enter__, record_function.__exit__ = enter, leave  # type: ignore[method-assign]

    def end(self) -> None:
        """No more."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def forget(self, until_ns: int, until_node: int) -> None:
        """What ran until then, and nodes of the backward with smaller numbers."""
        count = bisect_right(self._ends, until_ns)
        for noted in (self._starts, self._ends, self._labels):
            del noted[:count]
        self._of_node = {number: label for number, label in self._of_node.items() if number >= until_node}

    def at(self, time_ns: int) -> Label:
        """What ran then."""
        place = bisect_left(self._ends, time_ns)
        if place < len(self._ends) and self._starts[place] < time_ns + max(1, self._tick_ns):
            return self._labels[place]
        return UNSEEN

    @property
    def first_backward_ns(self) -> int | None:
        """When the first operation of a backward began, of those noted."""
        found = (started for started, label in zip(self._starts, self._labels, strict=True) if label.phase == BACKWARD)
        return next(found, None)

    @staticmethod
    def next_node() -> int:
        """The number of the next node of a backward."""
        return next_sequence_number()

    def _label(self, func: Any) -> Label:
        operation = _name(func)
        node = running_node()
        if node is not None:
            made = self._of_node.get(sequence_number(node), UNSEEN)
            return Label(operation, made.line, made.module, BACKWARD)
        phase = OPTIMIZER if self._steps else FORWARD
        label = Label(operation, _line(), self._path(), phase)
        if torch.is_grad_enabled():  # the node of this operation, if it has one, was just numbered
            self._of_node.setdefault(next_sequence_number() - 1, label)
        return label

    # ---- modules and optimizers --------------------------------------------------------------------------------

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        if not self._called:
            if self._between is not None and not self._ranges and running_node() is None:
                self._between()
            self.roots.add(module)
            arguments = arguments_of_hook(sys._getframe(1))
            if arguments is not None and running_node() is None:
                with contextlib.suppress(Exception):  # of tensors that are none: then it is not known, and runs on
                    self.calls.note(module, *arguments)
            for path, part in module.named_modules():
                self._paths.setdefault(part, path or type(module).__name__)
        self._called.append(module)

    def _leave(self, module: torch.nn.Module, *_: Any) -> None:
        if module in self._called:
            while self._called.pop() is not module:
                pass

    def _path(self) -> str:
        return self._paths.get(self._called[-1], type(self._called[-1]).__name__) if self._called else ""

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.optimizers.add(optimizer)
        self._steps = True

    def _after_step(self, *_: Any) -> None:
        self._steps = False


def _line() -> str:
    """The innermost line of code that is neither PyTorch's nor ours."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        name = _file_of_user(frame.f_code.co_filename)
        if name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@functools.cache
def _name(func: Any) -> str:
    return str(func).removeprefix("aten.")


@functools.cache
def _file_of_user(file: str) -> str:
    """Its name; empty where it is PyTorch's or ours."""
    is_users = not file.startswith("<") and (not file.startswith(_OURS) or file.startswith(_MODELS))
    return Path(file).name if is_users else ""
