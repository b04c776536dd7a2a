"""`torch.compile`, told a share of the activations to keep by `activation_memory_budget`."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch import nn

from benchmarks.peers.case import Built, Case, Peer
from benchmarks.peers.families import Family

BUDGETS = (1.0, 0.7, 0.5, 0.3, 0.0)
BACKENDS = ("aot_eager", "inductor")
MOST_COMPILATIONS = 1 << 12  # of one code object, by all contenders together


@contextlib.contextmanager
def compiling(budget: float) -> Iterator[None]:
    """Compile with this memory budget, from nothing: what others or earlier runs have compiled is not read."""
    with (
        torch._functorch.config.patch(activation_memory_budget=budget, enable_autograd_cache=False),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        yield


def set_up() -> None:
    """Have the code of all contenders stay compiled: beyond a limit it would run eagerly, and nobody would know."""
    torch._dynamo.config.recompile_limit = MOST_COMPILATIONS
    torch._dynamo.config.accumulated_recompile_limit = MOST_COMPILATIONS
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def compiled(case: Case, eager_peak_bytes: int, *, backend: str, budget: float) -> Built:
    """The model as it is, compiled with that budget."""
    return compiled_model(case.fresh_model(), backend=backend, budget=budget)


def compiled_model(
    model: nn.Module, *, backend: str, budget: float, settings: Mapping[str, Any] | None = None
) -> Built:
    """This `model`, which is compiled in its first step, with these settings of the backend."""
    set_up()
    options: dict[str, Any] = {}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # PyTorch 2.14 and later
        options["isolate_recompiles"] = True
    if settings is not None:
        options["options"] = dict(settings)
    call = torch.compile(model, backend=backend, **options)
    return Built(model, call, first_step=functools.partial(compiling, budget), own_numbers=True)


PEERS = tuple(
    Peer(
        f"compile {backend}, budget {budget:.1f}",
        Family.COMPILE,
        functools.partial(compiled, backend=backend, budget=budget),
    )
    for backend in BACKENDS
    for budget in BUDGETS
)
