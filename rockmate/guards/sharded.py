"""What of a module is not on this rank alone, and can therefore not be planned here."""

from __future__ import annotations

from typing import Any

import torch

from rkgb import Sample
from rkgb.errors import TraceError
from rkgb.passes.nondeterminism import COLLECTIVES
from rkgb.process.ranks import has_other_ranks
from rkgb.process.uncompiled import DispatchMode
from rkgb.recording.record import call_saving_nothing
from rkgb.state.module_state import for_planning, module_state_kept
from rkgb.torch_private.modes import is_wrapper_subclass

_INSTEAD = (
    "Plan the module that is sharded, and shard what is planned: fully_shard(Rockmate(block)) for each block, as "
    "rockmate.distributed.apply does it."
)


def refuse_what_spans_ranks(model: Any) -> None:
    """Raise `TraceError` for sharded parameters, and for synchronised batch normalisations in training mode.

    A plan would wait for other ranks while it is made, and again whenever it recomputes; they would not be there.
    """
    if not isinstance(model, torch.nn.Module):
        return  # refused elsewhere, as what it is
    for name, parameter in model.named_parameters():
        if _is_sharded(parameter):
            raise TraceError(
                f"{name!r} of {type(model).__name__} is a {type(parameter).__name__}, of which this rank has a part "
                f"alone: its module is sharded by itself. {_INSTEAD}"
            )
    for name, submodule in model.named_modules():
        if isinstance(submodule, torch.nn.SyncBatchNorm) and (submodule.training or not model.training):
            if _is_alone(submodule.process_group):
                continue
            raise TraceError(
                f"{name!r} of {type(model).__name__} is a SyncBatchNorm: its statistics are of all ranks, and a plan "
                "of this rank cannot compute them. Plan the parts of the model that have none (Rockmate(model.block) "
                "in place of model.block), use BatchNorm, or put the layer in eval mode."
            )


def refuse_collectives(model: torch.nn.Module, sample: Sample) -> None:
    """Raise `TraceError` where a forward on `sample` takes part in a collective, and there are other ranks to do so.

    Planning runs parts of a module as often as it takes to measure them, and one rank may plan what another does not:
    they would wait for each other for ever. One forward tells; `model` is left as it was.
    """
    if not has_other_ranks():
        return
    with for_planning(model), module_state_kept(model), _NoCollectives(model):
        try:
            call_saving_nothing(model, sample.copy())
        except TraceError:
            raise
        except Exception:  # noqa: BLE001, S110  whatever it is: tracing will tell it in its own words
            pass


class _NoCollectives(DispatchMode):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = type(model).__name__

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "namespace", "") in COLLECTIVES:
            raise TraceError(
                f"the forward of {self._name} calls {function}, a collective: to plan it, it has to be run by itself, "
                "and more often than on other ranks. Plan the parts of the model between its collectives: "
                "model.block = Rockmate(model.block, ...)."
            )
        return function(*args, **(kwargs or {}))


def _is_sharded(parameter: torch.Tensor | None) -> bool:
    """Whether only a part of `parameter` is here: it is a `DTensor`, or another wrapper of tensors."""
    return type(parameter) is not torch.nn.Parameter and is_wrapper_subclass(parameter)


def _is_alone(group: Any) -> bool:
    """Whether no other rank is in `group`, now; where no group is there yet, it may have any number of them."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_world_size(group) == 1
