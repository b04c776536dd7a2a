"""Devices whose kernels add in another order each time: traces are believed there, and no more is than should be."""

import itertools
import re

import pytest
import torch
from torch import nn

from rkgb import TraceError, make_all_graphs
from rkgb.devices.cpu import Cpu
from rkgb.replay.order import fixed_order
from rockmate import Rockmate
from tests.graph.cases import program
from tests.graph.programs import rows

_COUNT = itertools.count()
_HAS_FIXED = {"in any order": False, "in a fixed order": True}


@torch.library.custom_op("rockmate_tests::summed", mutates_args=())
def summed(gradient: torch.Tensor, kind: str) -> torch.Tensor:
    """A gradient that is off by rounding, each time by another, where no fixed order was asked for or there is none."""
    if _HAS_FIXED[kind] and torch.are_deterministic_algorithms_enabled():
        return gradient.clone()
    return gradient * (1 + next(_COUNT) % 7 * 2e-7)


@torch.library.custom_op("rockmate_tests::spread", mutates_args=())
def spread(x: torch.Tensor, kind: str) -> torch.Tensor:
    """What has such a gradient."""
    return x.clone()


spread.register_autograd(
    lambda ctx, gradient: (summed(gradient, ctx.kind), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "kind", inputs[1]),
)


@pytest.fixture
def disorderly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU in the place of a device whose kernels add in another order each time."""
    monkeypatch.setattr(Cpu, "is_orderly", False)


@pytest.mark.usefixtures("disorderly")
@pytest.mark.parametrize("kind", _HAS_FIXED)
def test_a_module_that_differs_from_itself_by_rounding_is_traced_and_planned(kind):
    model = program(lambda m, x: spread(m.layer(x), kind).tanh())
    planned = Rockmate(model, rows(), 1.0)
    planned(rows()).sum().backward()
    assert planned.plan.measured_peak_bytes <= planned.plan.budget_bytes


@pytest.mark.parametrize("kind", _HAS_FIXED)
def test_elsewhere_it_is_refused(kind):
    with pytest.raises(TraceError, match="differs from itself between two runs"):
        make_all_graphs(program(lambda m, x: spread(m.layer(x), kind)), rows())


class Drifting(nn.Module):
    """Adds in another order each time, and besides counts its calls."""

    def __init__(self, step):
        super().__init__()
        self.layer, self.step, self.calls = nn.Linear(4, 4), step, itertools.count(1)

    def forward(self, x):
        return spread(self.layer(x), "in any order") * (1 + self.step * next(self.calls))


@pytest.mark.usefixtures("disorderly")
@pytest.mark.parametrize("step", [1e-1, 1e-3])
def test_what_is_off_by_more_than_rounding_is_refused_there_too(step):
    with pytest.raises(TraceError, match="differs from itself between two runs"):
        make_all_graphs(Drifting(step), rows())


@pytest.mark.usefixtures("disorderly")
def test_a_wrong_trace_is_refused_there_too():
    model = program(lambda m, x: spread(m.layer(x), "in any order") * float(x[0, 0]))
    with pytest.raises(TraceError, match=re.compile("differs|reads|does not hold")):
        make_all_graphs(model, rows())


@pytest.mark.parametrize("strict", [False, True])
def test_flags_are_put_back(strict):
    torch.use_deterministic_algorithms(strict)
    torch.backends.cudnn.benchmark = True
    try:
        with fixed_order():
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.is_deterministic_algorithms_warn_only_enabled() is not strict
            assert torch.backends.cudnn.deterministic
            assert not torch.backends.cudnn.benchmark
        assert torch.are_deterministic_algorithms_enabled() is strict
        assert not torch.backends.cudnn.deterministic
        assert torch.backends.cudnn.benchmark
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False
