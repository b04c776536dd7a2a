"""PyTorch's automatic selective checkpointing: `torch.distributed._tools` chooses what a block saves for a share."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from benchmarks.peers.case import Built, Case, NotForThisModel, Peer
from benchmarks.peers.checkpointing import Contexts, saving_by_number, wrap
from benchmarks.peers.families import Family

ESTIMATE = "operator-level-cost-model"
SHARES = (0.5, 0.3)  # of what each block would save


PROBE = f"""
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.sac_estimator import SACEstimator
with FakeTensorMode(), SACEstimator()(estimate_mode_type={ESTIMATE!r}):
    torch.nn.Linear(4, 4, device=DEVICE)(torch.ones(2, 4, device=DEVICE))
"""


def tools(device: torch.device) -> tuple[Any, Any]:
    """The modules of the estimator and of the solver."""
    try:
        from torch.distributed._tools import sac_estimator, sac_ilp
    except ImportError as error:
        raise NotForThisModel(f"torch.distributed._tools.sac_ilp does not import: {error}") from error
    if not estimator_runs(device.type):
        raise NotForThisModel(f"its estimator ends the process on {device.type} with PyTorch {torch.__version__}")
    return sac_estimator, sac_ilp


@functools.cache
def estimator_runs(device: str) -> bool:
    """Whether the estimator does one layer, in a process of its own: in some versions it ends with an abort."""
    code = PROBE.replace("DEVICE", repr(device))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300, check=False).returncode == 0


def estimated(case: Case, sac_estimator: Any) -> dict[str, Any]:
    """What the estimator says of each module of a forward on fake tensors, by the module's path."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake = FakeTensorMode()
    memo: dict[int, Any] = {
        id(value): nn.Parameter(fake.from_tensor(value.detach()), value.requires_grad)
        for value in case.model.parameters()
    }
    memo |= {id(value): fake.from_tensor(value) for value in case.model.buffers()}
    model = copy.deepcopy(case.model, memo)
    faked = replace(case, sample=tree_map_only(torch.Tensor, fake.from_tensor, case.sample))
    estimator = sac_estimator.SACEstimator()
    try:
        with fake, estimator(estimate_mode_type=ESTIMATE):
            faked.forward(model)
    except Exception as error:
        raise NotForThisModel(f"its estimator does not run here: {str(error).splitlines()[0]}") from error
    prefix = f"{type(model).__name__}."
    return {name.removeprefix(prefix): stats for name, stats in estimator.sac_mod_stats.items()}


def following(decisions: Sequence[int], skipped: frozenset[Any]) -> Contexts:
    """What saves, of the operations of a block in their order, those whose decision is 1."""
    saved = frozenset(number for number, decision in enumerate(decisions) if decision == 1)
    return saving_by_number(lambda operator: operator not in skipped, lambda number: number in saved)


def automatic(case: Case, eager_peak_bytes: int, *, share: float) -> Built:
    """Each block under a selective checkpoint, whose operations the solver has chosen for that share."""
    sac_estimator, sac_ilp = tools(case.device)
    found = estimated(case, sac_estimator)
    model = case.fresh_model()
    skipped = frozenset(sac_estimator.OPS_TO_ALWAYS_SKIP)
    wrapped = 0
    for block in case.blocks:
        path = block[0]
        if len(block) > 1 or path not in found:
            continue
        decisions = sac_ilp.get_optimal_checkpointing_policy_per_module(found[path], share)
        if not decisions:
            raise NotForThisModel(f"its solver finds no policy for {path}")
        wrap(model, block, following(decisions, skipped))
        wrapped += 1
    if not wrapped:
        raise NotForThisModel("it estimates none of the blocks")
    return Built(model, model, note=f"{wrapped} blocks")


PEERS = tuple(
    Peer(f"auto-SAC, share {share:.1f}", Family.AUTO_SAC, functools.partial(automatic, share=share)) for share in SHARES
)
