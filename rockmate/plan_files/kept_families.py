"""Plans for calls of any size, kept between processes: a second start of a training may begin with a batch of any size.

They are found before anything is traced, by what can be told of the module and of what was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import msgspec
import torch

from rkgb import Sample
from rkgb.process.ranks import has_other_ranks
from rkgb.state.module_state import main_device, module_devices
from rockmate.guards.checkpointing import is_switched_off
from rockmate.memory.budget import is_what_is_free, read_budget
from rockmate.plan_files import cache
from rockmate.plan_files.content import PlanFile
from rockmate.plan_files.rank_agreement import solver_text
from rockmate.plan_files.record import made_here
from rockmate.plan_files.reuse import code_digest, digest_of
from rockmate.planning.costs import LossFunction
from rockmate.planning.request import PlanRequest


def kept_family(model: torch.nn.Module, call: Sample, request: PlanRequest) -> PlanFile | None:
    """What the user's cache has of calls of any size of such a module."""
    key = _key_of(model, call.tensors, request)
    return None if key is None else cache.get(key)


def keep_family(model: torch.nn.Module, call: Sample, request: PlanRequest, file: Callable[[], PlanFile]) -> None:
    """Have the user's cache keep a `file` that tells of calls of any size, which is made where it is to be kept."""
    key = _key_of(model, call.tensors, request)
    if key is not None and (made := file()).family is not None:
        cache.put(key, made)


def _key_of(model: torch.nn.Module, tensors: Sequence[torch.Tensor], request: PlanRequest) -> str | None:
    if not cache.is_enabled() or has_other_ranks():
        return None
    return _family_key(model, main_device(module_devices(model, list(tensors))), request)


def _family_key(model: torch.nn.Module, device: torch.device, request: PlanRequest) -> str | None:
    """A digest of all that decides what calls of any size of `model` are planned by, but for the traced graph.

    None where a plan of before would not do: the budget is a share, or for all of training, or something of the request
    cannot be told. The file is compared with what is traced, and a first step by it with the module's own.
    """
    solver = request.solver if isinstance(request.solver, str) else solver_text(request.solver)
    budget = None if is_what_is_free(request.budget) else read_budget(request.budget)
    loss = _text_of(request.loss)
    if solver is None or loss is None or type(budget) is not int or request.scope != "step" or request.pin:
        return None
    tensors = [*model.named_parameters(), *model.named_buffers()]
    content = [
        "family",
        code_digest(),
        msgspec.to_builtins(made_here(device)),
        f"{type(model).__module__}.{type(model).__qualname__}",
        str(model),
        [(name, list(held.shape), str(held.dtype), held.requires_grad) for name, held in tensors],
        [(path, part.training) for path, part in model.named_modules()],
        [budget, solver, asdict(request.limits), request.opaque, loss],
        is_switched_off(),
    ]
    return digest_of(content)


def _text_of(loss: LossFunction | None) -> str | None:
    """The same for losses of the same code; None where nobody can tell."""
    if loss is None:
        return ""
    code = getattr(loss, "__code__", None)
    if code is None:
        return f"{type(loss).__qualname__} {loss!r}" if isinstance(loss, torch.nn.Module) else None
    return f"{code.co_code.hex()} {code.co_names} {[one for one in code.co_consts if not hasattr(one, 'co_code')]}"
