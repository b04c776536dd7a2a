"""What the user has put around a call, taken aside while a module is planned in the midst of it.

A first batch, or one of a new shape, is planned where it comes: within the user's hooks on saved tensors, modes that
count or log, anomaly detection, a profiler. All these belong to the user's step. What planning runs, traces and
measures is not to be seen, slowed down or changed by them: the plan is the one that would be made without them.

Some decide what a step computes, and stay: autocast, default devices, flags of back ends, deterministic algorithms.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch.autograd import profiler
from torch.profiler.profiler import PROFILER_STEP_NAME
from torch.utils.module_tracker import ModuleTracker

from rkgb.process.autocast import Autocast
from rkgb.process.turns import acting_for, current_thread
from rkgb.torch_private.autograd import (
    allow_saved_hooks,
    forbid_saved_hooks,
    pop_saved_hooks,
    push_saved_hooks,
    saved_hooks_refusal,
    top_saved_hooks,
)
from rkgb.torch_private.modes import (
    DefaultDevice,
    dispatch_mode_count,
    function_modes,
    function_modes_are_on,
    pop_function_mode,
    push_function_mode,
    without_dispatch_modes,
)
from rkgb.torch_private.modules import (
    hooks_after_calls,
    hooks_before_calls,
    parametrizations_are_cached,
    parametrizations_uncached,
)
from rkgb.torch_private.profilers import a_profiler_runs, counting_steps, is_profiled, record_operations

Result = TypeVar("Result")

_found_prepared: contextvars.ContextVar[bool | None] = contextvars.ContextVar("found_prepared", default=None)


@contextlib.contextmanager
def surroundings_aside() -> Iterator[None]:
    """Run what is inside as if nothing of the user's was around it that looks on; all is put back as it was."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_unrecorded())
        stack.enter_context(profiler_looked_for())
        stack.enter_context(without_anomaly_detection())
        stack.enter_context(saved_tensors_hooks_aside())
        if dispatch_mode_count() or function_modes_are_on():
            stack.enter_context(_function_modes_aside())
            stack.enter_context(without_dispatch_modes())
        stack.enter_context(_trackers_aside())
        if parametrizations_are_cached():
            stack.enter_context(parametrizations_uncached())
        yield


@contextlib.contextmanager
def saved_tensors_hooks_aside() -> Iterator[None]:
    """No hooks on saved tensors but those that are put there inside, which is allowed."""
    message = saved_hooks_refusal()
    if message is not None:
        allow_saved_hooks()
    hooks = []
    top = top_saved_hooks(True)
    while top is not None:
        hooks.append(top)
        pop_saved_hooks()
        top = top_saved_hooks(True)
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            push_saved_hooks(pack, unpack)
        if message is not None:
            forbid_saved_hooks(message)


@contextlib.contextmanager
def hooks_allowed() -> Iterator[None]:
    """Where the user has disabled hooks on saved tensors, no others are wanted: ours are part of the step."""
    message = saved_hooks_refusal()
    if message is None:
        yield
        return
    allow_saved_hooks()
    try:
        yield
    finally:
        forbid_saved_hooks(message)


@contextlib.contextmanager
def without_anomaly_detection() -> Iterator[None]:
    """Anomaly detection takes the stack of every operation, and makes a step several times as long."""
    if not torch.is_anomaly_enabled():
        yield
        return
    checks_nan = torch.is_anomaly_check_nan_enabled()
    torch.set_anomaly_enabled(False)
    try:
        yield
    finally:
        torch.set_anomaly_enabled(True, checks_nan)


@contextlib.contextmanager
def _function_modes_aside() -> Iterator[None]:
    """No `TorchFunctionMode` but PyTorch's own for default devices, which says where tensors are made."""
    modes = function_modes()
    for _ in modes:
        pop_function_mode()
    kept = [mode for mode in modes if isinstance(mode, DefaultDevice)]
    for mode in kept:
        push_function_mode(mode)
    try:
        yield
    finally:
        for _ in kept:
            pop_function_mode()
        for mode in modes:
            push_function_mode(mode)


@contextlib.contextmanager
def _trackers_aside() -> Iterator[None]:
    """Without the hooks of `ModuleTracker` on calls of all modules, by which `FlopCounterMode` knows where it is."""
    held = [(hooks, dict(hooks)) for hooks in (hooks_before_calls, hooks_after_calls)]
    for hooks, before in held:
        for key, hook in before.items():
            if isinstance(getattr(hook, "__self__", None), ModuleTracker):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in held:
            added = {key: hook for key, hook in hooks.items() if key not in before}
            hooks.clear()
            hooks.update(before | added)


@contextlib.contextmanager
def _unrecorded() -> Iterator[None]:
    """No operation is told to a profiler of this thread: its user's are not between ours."""
    if not is_profiled():
        yield
        return
    record_operations(False)
    try:
        yield
    finally:
        record_operations(True)


# ---- profilers --------------------------------------------------------------------------------------


def profiler_is_taken() -> bool:
    """Whether a profiler of the user's runs in some thread, or is about to: a second one of its kind ends the process.

    One that is only prepared, as in the warm-up of a schedule, is seen within `surroundings_aside`.
    """
    return bool(is_profiled() or a_profiler_runs() or _found_prepared.get())


def profiler_is_prepared() -> bool:
    """Whether a profiler has been prepared and does not run yet. Nothing but the objects themselves tells.

    They are looked for where there is one with a schedule, which counts its steps where its class does: no other is
    prepared some time before it runs, and looking through a million objects takes a while.
    """
    if PROFILER_STEP_NAME not in counting_steps():
        return False
    objects = gc.get_objects()
    if profiler.profile not in set(map(type, objects)):  # of a million objects, several times as quick as a loop
        return False
    found = (one for one in objects if type(one) is profiler.profile)
    return any(one.enabled and one.entered and one.kineto_results is None for one in found)


@contextlib.contextmanager
def profiler_looked_for() -> Iterator[None]:
    """Look once for what takes a while to be found."""
    if _found_prepared.get() is not None:
        yield
        return
    token = _found_prepared.set(profiler_is_prepared())
    try:
        yield
    finally:
        _found_prepared.reset(token)


def unprofiled(run: Callable[[], Result]) -> Result:
    """What `run` gives, which logs the memory of the CPU.

    A profiler tells it. Where one of the user's watches this thread, `run` is run in a thread of its own,
    so that another may watch it there; autocast, default devices and gradients are there as they are here.
    """
    if not is_profiled():
        return run()
    devices = [mode for mode in function_modes() if isinstance(mode, DefaultDevice)]
    cast, grad, caller, context = Autocast.now(), torch.is_grad_enabled(), current_thread(), contextvars.copy_context()
    results: list[Result] = []
    errors: list[BaseException] = []

    def there() -> None:
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(acting_for(caller))
                stack.enter_context(cast.entered())
                for mode in devices:
                    stack.enter_context(torch.device(mode.device))
                stack.enter_context(torch.set_grad_enabled(grad))
                results.append(run())
        except BaseException as error:  # noqa: BLE001  it is raised in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=context.run, args=(there,), name="rockmate measures")
    thread.start()
    interrupt = _waited_for(thread)
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()
    if interrupt is not None:
        raise interrupt
    return results.pop()


def _waited_for(thread: threading.Thread) -> KeyboardInterrupt | None:
    """Wait to the end: what runs there may hold the user's module. An interrupt is for afterwards."""
    interrupt = None
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt as error:
            interrupt = error
    return interrupt
