"""An optimizer whose state lives in a second memory: it comes for one parameter after another, and leaves again."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal
from weakref import ref

import torch
from torch.optim import LBFGS, Optimizer

from rkgb.tree import leaves
from rockmate.errors import OptimizerError
from rockmate.memory.optimizer_state import StateRests, check_optimizer, state_sizes_of, step_bytes_of
from rockmate.offload.option import Offload, as_offload
from rockmate.offload.tier import Tier
from rockmate.offload.tiers import Tiers
from rockmate.resting.tensor import Rested, rested_of
from rockmate.resting.tensors import SMALLEST_BYTES, RestingTensors
from rockmate.resting.window import UseOrder

_AT_ONCE = 3  # parameters whose state is here: one leaves, one is stepped, one comes


class OffloadedOptimizer(StateRests):
    """`optimizer`, stepped as ever, with its state in `tier` but for `window_bytes` of it at a time.

        optimizer = OffloadedOptimizer(torch.optim.AdamW(model.parameters()), "disk")

    Values are those of the optimizer to the bit: its own code makes the step, of one parameter at a time. It has its
    groups, options, schedulers, hooks and `state_dict`; whoever reads its state is given the values, which come back
    for that. Copies and pickles of it are ordinary optimizers.

    With `in_backward`, the step of a parameter is made as soon as its gradient is complete, which is freed at once:
    gradients take next to nothing then. `step` and `zero_grad` have nothing more to do. So there is no place between
    for what needs all gradients: each backward is a step of its own (no accumulation over several), gradients are not
    clipped (`clip_grad_norm_` finds none), and a `GradScaler` is refused. Not for DistributedDataParallel either.

    Args:
        optimizer: any of `torch.optim` but LBFGS, or another one that treats each parameter by itself.
        offload: the second memory: "auto", "disk", "host", or an `Offload`, as for `rockmate.Rockmate`.
        window_bytes: most state here at a time; by default three times the most that one parameter has.
        in_backward: whether steps are made within the backward.

    Raises:
        OptimizerError: for what is no optimizer, or does not treat parameters one by one.
        OffloadError: in a step, where state can be neither stored nor read. It is not lost; parameters that came before
            have made the step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        offload: Offload | Tier | Literal["auto", "disk", "host"] = "auto",
        window_bytes: int | None = None,
        in_backward: bool = False,
    ) -> None:
        check_optimizer(optimizer)
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, (LBFGS, OffloadedOptimizer)):
            raise OptimizerError(
                f"the state of {type(optimizer).__name__} cannot rest: give an optimizer, made of its parameters, that "
                "treats each of them by itself, such as torch.optim.AdamW."
            )
        self.optimizer = optimizer
        self.in_backward = in_backward
        self._bytes: dict[torch.Tensor, int] = {}
        found = [self._state_bytes(index, p) for index, p in self._members() if p.requires_grad]
        if window_bytes is None:
            window_bytes = _AT_ONCE * max(found, default=0)
        self.resting = RestingTensors(self._tier(offload), window_bytes)
        self._round: dict[torch.Tensor, None] = {}  # parameters stepped since the round began, in order
        self._places: dict[torch.Tensor, int] = {}  # where their state is used in the order of the last round
        self._hooks: dict[torch.Tensor, Any] = {}
        self._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks
        self._patch_step_function()  # which has `step` call them
        self._rest()
        self._listen()

    def _tier(self, offload: Offload | Tier | str) -> Tier:
        if isinstance(offload, Tier):
            return offload
        option = as_offload(offload)
        assert option is not None
        devices = {parameter.device for _, parameter in self._members()}
        if len(devices) != 1:
            names = ", ".join(sorted(map(str, devices))) or "none"
            raise OptimizerError(f"parameters of one device can have their state elsewhere; these are on {names}.")
        return Tiers(option).on(devices.pop())

    # ---- what it is of the optimizer's -------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The optimizer's."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The optimizer's: tensors in it are wherever they are, and here when they are read."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The optimizer's."""
        return self.optimizer.defaults

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What a `GradScaler` asks before its step."""
        if self.in_backward:
            raise OptimizerError(
                "a GradScaler scales gradients that are taken back once all are there, and this optimizer has stepped "
                "in the backward, with scaled ones. Leave in_backward out, or use bfloat16, which needs no scaler."
            )
        return False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _ordinary, (self.optimizer,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimizer:
        return copy.deepcopy(self.optimizer, memo)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, with the values that are away."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer's; what it loads rests then."""
        self.optimizer.load_state_dict(state_dict)
        self._round, self._places = {}, {}
        for _, parameter in self._members():
            state = self.state.get(parameter, {})
            for name, value in state.items():  # what comes from a file is of memory that is not PyTorch's to free
                if isinstance(value, torch.Tensor) and not value.untyped_storage().resizable():
                    state[name] = value.clone()
        self._rest()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's."""
        self.optimizer.add_param_group(param_group)
        self._listen()

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """As the optimizer's."""
        return self.optimizer.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """As the optimizer's."""
        return self.optimizer.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """As the optimizer's."""
        return self.optimizer.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """As the optimizer's."""
        return self.optimizer.register_load_state_dict_post_hook(hook, prepend)

    # ---- steps -------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One of all parameters that have a gradient: with `in_backward`, none has any more."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, parameter in self._members():
            if parameter.grad is not None:
                self._step_of(index, parameter)
        return loss

    def here_bytes(self, device: torch.device) -> tuple[int, int]:
        """The window, state that is too small to rest, and what one step computes with."""
        members = [(index, p) for index, p in self._members() if p.requires_grad and p.device == device]
        small_bytes = 0
        for index, parameter in members:
            sizes = state_sizes_of(self.optimizer, index, parameter)
            small_bytes += sum(size_bytes for size_bytes in sizes if size_bytes < SMALLEST_BYTES)
        largest = max(members, key=lambda member: member[1].nbytes, default=None)
        working_bytes = 0 if largest is None else step_bytes_of(self.optimizer, *largest)
        known = {id(parameter) for _, parameter in members}
        state = [t for _, p in self._members() if id(p) in known for t in self._tensors(p)]
        there_bytes = self.resting.held_bytes + sum(t.nbytes for t in state if rested_of(t) is None)
        most_bytes = min(self.resting.window_bytes, sum(self._bytes.values()))
        return most_bytes + small_bytes + working_bytes + self.resting.tier.staging_bytes, there_bytes

    def close(self) -> None:
        """Have all state here, and none rest: the optimizer itself is to be used from now on."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self.resting.wake_all()

    def _members(self) -> Iterable[tuple[int, torch.Tensor]]:
        """All parameters, with the numbers of their groups."""
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                yield index, parameter

    def _listen(self) -> None:
        """Have each parameter step as soon as its gradient is complete."""
        if not self.in_backward:
            return
        itself = ref(self)

        def complete(parameter: torch.Tensor) -> None:
            optimizer = itself()
            if optimizer is not None:
                optimizer._step_in_backward(parameter)

        for _, parameter in self._members():
            if parameter not in self._hooks and parameter.requires_grad:
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(complete)

    def _step_in_backward(self, parameter: torch.Tensor) -> None:
        for index, group in enumerate(self.param_groups):
            if any(parameter is member for member in group["params"]):
                self._step_of(index, parameter)
                parameter.grad = None
                return

    def _step_of(self, index: int, parameter: torch.Tensor) -> None:
        if parameter in self._round:
            self._begin_round()
        self._round[parameter] = None
        used = [rested for t in self._tensors(parameter) if (rested := rested_of(t)) is not None]
        used = [rested for rested in used if rested.owner is self.resting]
        if not used:
            self.resting.room_for(self._state_bytes(index, parameter))
        with self._here(parameter), self.resting.used_at(used, self._places.get(parameter)):
            self._one_step(index, parameter)
        tensors = self._tensors(parameter)
        self.resting.take(tensors)
        self.resting.written(tensors)

    @contextlib.contextmanager
    def _here(self, parameter: torch.Tensor) -> Iterator[None]:
        """A parameter may rest itself, with others of its model."""
        rested = rested_of(parameter)
        if rested is None:
            yield
            return
        with rested.owner.used_at([rested], None):
            yield
        rested.owner.written([parameter])

    def _one_step(self, index: int, parameter: torch.Tensor) -> None:
        """The optimizer's own step of one parameter."""
        group = self.param_groups[index]
        alone = object.__new__(type(self.optimizer))
        alone.__dict__ = {name: value for name, value in vars(self.optimizer).items() if name != "step"}
        alone.__dict__ |= {
            name: OrderedDict() for name in vars(alone) if name.endswith(("step_pre_hooks", "step_post_hooks"))
        }
        options = {name: value for name, value in group.items() if name != "params"}
        alone.param_groups = [{**options, "params": [parameter]}]
        with torch.enable_grad():  # as where the user calls it; it switches them off itself
            alone.step()
        after = alone.param_groups[0]
        changed = [name for name in after if name != "params" and after[name] is not options.get(name)]
        if changed:
            raise OptimizerError(
                f"{type(self.optimizer).__name__} changes {', '.join(changed)} of a group in its step, and so does not "
                "treat each parameter by itself: its state cannot rest."
            )

    def _begin_round(self) -> None:
        """What comes now has come in this order before."""
        order: list[Rested] = []
        places: dict[torch.Tensor, int] = {}
        for parameter in self._round:
            places[parameter] = len(order)
            order += [rested for t in self._tensors(parameter) if (rested := rested_of(t)) is not None]
        self._round, self._places = {}, places
        self.resting.follow(UseOrder(order))

    def _tensors(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        return leaves(self.state[parameter]) if parameter in self.state else []

    def _rest(self) -> None:
        """Have all state rest that is there."""
        self.resting.take(t for _, parameter in self._members() for t in self._tensors(parameter))

    def _state_bytes(self, index: int, parameter: torch.Tensor) -> int:
        if parameter not in self._bytes:
            self._bytes[parameter] = sum(state_sizes_of(self.optimizer, index, parameter))
        return self._bytes[parameter]


def _ordinary(optimizer: Optimizer) -> Optimizer:
    """What an offloaded optimizer is where it is loaded."""
    return optimizer
