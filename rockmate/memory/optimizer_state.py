"""The bytes that an optimizer will hold beside the parameters, known before its first step."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch.optim import Optimizer

from rkgb.devices.allocation_log import AllocationLog
from rkgb.devices.registry import device_of
from rkgb.torch_private.identity import storage_key
from rkgb.tree import leaves
from rockmate.errors import OptimizerError

OptimizerLike = Optimizer | Callable[..., Optimizer]
"""An optimizer, or what makes one from a list of parameters: a class, or a function."""

# Ways to run a step, and not what it keeps. Stand-ins without data can follow only the plainest one.
_PLAIN_STEP = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}

_ADVICE = (
    "Give an optimizer of this model's parameters, a class such as torch.optim.AdamW, or a function that makes one "
    "from a list of parameters."
)


class StateRests(Optimizer):
    """An optimizer whose state is in a second memory, but for a part of it at a time."""

    in_backward: bool  # whether a parameter's step is made, and its gradient freed, as soon as that is complete
    optimizer: Optimizer  # which makes the steps

    def here_bytes(self, device: torch.device) -> tuple[int, int]:
        """What of state, and of what steps compute with, is on `device` at most; and what is there now."""
        raise NotImplementedError


def check_optimizer(optimizer: object) -> None:
    """Raise `OptimizerError` for what can be no optimizer."""
    if isinstance(optimizer, Optimizer):
        return
    is_class = isinstance(optimizer, type)
    if not callable(optimizer) or (is_class and not issubclass(cast(type, optimizer), Optimizer)):
        raise OptimizerError(f"optimizer is {optimizer!r}. {_ADVICE}")


def optimizer_state_bytes(
    optimizer: OptimizerLike | None, parameters: Iterable[torch.nn.Parameter], device: torch.device
) -> tuple[int, int]:
    """Bytes on `device` of the state for those of `parameters` that train; those allocated already among them.

    State that is there is counted as it is. Other state is counted from one step on stand-ins: parameters of the
    same shapes and types without data. The optimizer is left as it was.

    Raises `OptimizerError` where no such step can be made, and for an optimizer of none of the parameters.
    """
    if optimizer is None:
        return 0, 0
    check_optimizer(optimizer)
    if isinstance(optimizer, StateRests):
        return optimizer.here_bytes(device)
    trained = [parameter for parameter in parameters if parameter.requires_grad and parameter.device == device]
    if isinstance(optimizer, Optimizer):
        known = {id(parameter) for parameter in trained}
        groups = [[p for p in group["params"] if id(p) in known] for group in optimizer.param_groups]
        if trained and not any(groups):
            raise OptimizerError(
                f"the {type(optimizer).__name__} given as optimizer holds none of the parameters that the model trains "
                f"on {device}. Make it from model.parameters(), after the model was moved to its device."
            )
    else:
        optimizer = _made(optimizer, [_stand_in(parameter, "meta") for parameter in trained])
        groups = [list(group["params"]) for group in optimizer.param_groups]
    states = [optimizer.state.get(p) for members in groups for p in members if not p.is_meta]
    present = _storage_bytes(states, device)
    coming = 0
    seen: dict[tuple[Any, ...], int] = {}
    for index, members in enumerate(groups):
        for parameter in members:
            there = leaves(optimizer.state.get(parameter))
            if there and not parameter.is_meta:
                continue
            key = (index, parameter.shape, parameter.stride(), parameter.dtype)
            if key not in seen:
                tensors = there or _tensors_after_a_step(optimizer, index, parameter)
                seen[key] = _state_bytes(tensors, optimizer.param_groups[index], device)
            coming += seen[key]
    return present + coming, present


def state_sizes_of(optimizer: Optimizer, group: int, parameter: torch.Tensor) -> list[int]:
    """Bytes of each tensor of state that one step makes for a parameter of that group: `OptimizerError` if unknown."""
    tensors = _tensors_after_a_step(optimizer, group, parameter)
    return [_state_bytes([tensor], optimizer.param_groups[group], parameter.device) for tensor in tensors]


def step_bytes_of(optimizer: Optimizer, group: int, parameter: torch.Tensor) -> int:
    """What a step of one parameter computes with, and does not keep: as of one like it on the CPU."""
    stand_in = _stand_in(parameter, "cpu")
    with AllocationLog(torch.device("cpu")) as log:
        kept = _state_after_a_step(optimizer, group, stand_in)
    kept_bytes = sum(tensor.untyped_storage().nbytes() for tensor in leaves(kept))
    return max(0, log.peak_bytes - kept_bytes - stand_in.nbytes)  # which has a gradient


def with_parameters(optimizer: OptimizerLike | None, others: Mapping[int, torch.nn.Parameter]) -> OptimizerLike | None:
    """What is counted like `optimizer`, of other parameters: those that `others` names by the identities of its own.

    An optimizer becomes one without state, of the same groups and options; parameters that `others` does not name are
    left out of it. Whatever makes an optimizer makes one of any parameters, and is returned as it is.
    """
    if isinstance(optimizer, StateRests):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        return optimizer
    twin = object.__new__(type(optimizer))  # its constructor may do anything
    plain = {name: value for name, value in vars(optimizer).items() if not leaves(value) and not callable(value)}
    hooks = {name: OrderedDict[int, Any]() for name in plain if name.endswith("_hooks")}
    twin.__dict__ = {**plain, **hooks, "defaults": optimizer.defaults}
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": [others[id(parameter)] for parameter in group["params"] if id(parameter) in others]}
        for group in optimizer.param_groups
    ]
    return twin


def _made(make: Callable[..., Optimizer], stand_ins: list[torch.nn.Parameter]) -> Optimizer:
    try:
        optimizer = make(stand_ins)
    except Exception as error:
        raise OptimizerError(f"no optimizer could be made with {make!r}: {error}. {_ADVICE}") from error
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(f"{make!r} made a {type(optimizer).__name__} of a list of parameters. {_ADVICE}")
    return optimizer


def _stand_in(parameter: torch.Tensor, device: str) -> torch.nn.Parameter:
    """A parameter of the same shape, layout and type; on the device "meta" it has no data."""
    like = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
    return torch.nn.Parameter(like.zero_(), requires_grad=True)


def _tensors_after_a_step(optimizer: Optimizer, group: int, parameter: torch.Tensor) -> list[torch.Tensor]:
    """The state that one step makes for one parameter."""
    try:
        return leaves(_state_after_a_step(optimizer, group, _stand_in(parameter, "meta")))
    except Exception:  # noqa: BLE001  whatever an optimizer raises that reads values: they need be there
        try:
            return leaves(_state_after_a_step(optimizer, group, _stand_in(parameter, "cpu")))
        except Exception as error:
            raise OptimizerError(
                f"what {type(optimizer).__name__} keeps cannot be told: a step on a parameter of shape "
                f"{list(parameter.shape)} failed with {type(error).__name__}: {error}. Take one step with it, then "
                "give the optimizer itself: state that is there is counted as it is."
            ) from error


def _state_bytes(tensors: list[torch.Tensor], options: dict[str, Any], device: torch.device) -> int:
    """Bytes that the state of one parameter, made for a stand-in, takes on `device`."""
    on_device = bool(options.get("capturable") or options.get("fused")) or device_of(device).is_host
    # Counts of steps stay in host memory, unless the step runs as one kernel or is captured as a graph.
    counted = [tensor for tensor in tensors if on_device or tensor.is_meta or tensor.dim() > 0]
    unique = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in counted}
    return sum(device_of(device).allocated_bytes(size_bytes) for size_bytes in unique.values())


def _state_after_a_step(optimizer: Optimizer, group: int, stand_in: torch.nn.Parameter) -> Any:
    """What a copy of the optimizer, with one stand-in in place of all parameters, keeps after a step."""
    stand_in.grad = torch.zeros_like(stand_in)
    options = {name: _value(option) for name, option in optimizer.param_groups[group].items()}
    options |= {name: plain for name, plain in _PLAIN_STEP.items() if name in options}
    twin = object.__new__(type(optimizer))  # copy.copy would have it adapt the groups, which are the user's
    # A scheduler puts a `step` of its own on the object, which would advance the user's optimizer.
    twin.__dict__ = {name: value for name, value in vars(optimizer).items() if name != "step"}
    twin.__dict__ |= {name: OrderedDict() for name in vars(twin) if name.endswith("step_pre_hooks")}
    twin.__dict__ |= {name: OrderedDict() for name in vars(twin) if name.endswith("step_post_hooks")}
    twin.state = defaultdict(dict)
    twin.param_groups = [{**options, "params": [stand_in]}]
    with torch.random.fork_rng(devices=[]):  # some optimizers draw random numbers
        try:
            twin.step()
        except KeyError as error:  # state that the constructor makes, as that of Adagrad in PyTorch 2.9
            twin = _anew(optimizer, options, stand_in, error)
            twin.step()
    return dict(twin.state)


def _anew(optimizer: Optimizer, options: dict[str, Any], stand_in: torch.nn.Parameter, error: Exception) -> Optimizer:
    """An optimizer of that class and these options, for one parameter; raises `error` where it is made otherwise."""
    try:
        return type(optimizer)([stand_in], **{name: options[name] for name in optimizer.defaults})
    except Exception:  # noqa: BLE001  whatever a constructor raises that is given others' arguments
        raise error from None


def _value(option: Any) -> Any:
    """An option as a number where the user gave it as a tensor."""
    return option.item() if isinstance(option, torch.Tensor) and option.numel() == 1 else option


def _storage_bytes(tree: Any, device: torch.device) -> int:
    """Bytes of the storages of the tensors in `tree` that are on `device`, each once."""
    storages = {storage_key(t): t.untyped_storage() for t in leaves(tree) if t.device == device}
    return sum(device_of(device).allocated_bytes(storage.nbytes()) for storage in storages.values())
