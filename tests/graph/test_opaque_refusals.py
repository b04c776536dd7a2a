"""Submodules whose calls cannot be one operation are refused with a message, and left as they were."""

import time

import pytest
import torch
from torch import Tensor, nn

import rkgb
from tests.graph.called_whole import WIDTH, Around, Mix, sample


def test_what_cannot_be_opaque_is_refused():
    model = Around(Mix(), nn.Identity())
    spare = nn.Linear(1, 1)
    model.spare = spare
    for given, told in (
        (model, "nothing would be left to plan"),
        (nn.Linear(1, 1), "is no submodule of this Around"),
        ("inner", "is no submodule of this Around"),
        (spare, "'spare' of Around was given as opaque, but is not called"),
    ):
        with pytest.raises(rkgb.TraceError, match=told):
            rkgb.make_all_graphs(model, sample(), opaque=[given])


def test_a_cache_filled_inside_is_refused():
    class Cache:
        def __init__(self) -> None:
            self.kept: list[Tensor] = []

    class Fills(Mix):
        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            cache.kept.append(x)
            return super().forward(x)

    class Calls(Around):
        def call(self, inner: nn.Module, x: Tensor) -> Tensor:
            return inner(x, Cache())

    model = Calls(Fills())
    with pytest.raises(rkgb.TraceError, match="changes an object in its arguments"):
        rkgb.make_all_graphs(model, sample(), opaque=[model.inner])


def test_a_replaced_buffer_is_refused():
    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return x - self.mean

    model = Around(Replaces())
    with pytest.raises(rkgb.TraceError, match="puts another tensor in the place of a buffer"):
        rkgb.make_all_graphs(model, sample(), opaque=[model.inner])
    assert torch.equal(model.inner[0].mean, torch.zeros(WIDTH))


def test_an_error_inside_leaves_the_module_as_it_was():
    class Fails(Mix):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    model = Around(Fails())
    with pytest.raises(ValueError, match="no"):
        rkgb.make_all_graphs(model, sample(), opaque=[model.inner])
    assert "_compiled_call_impl" not in vars(model.inner[0])
    assert not torch.nn.modules.module._global_forward_hooks


class Reseeded(nn.Module):
    """Goes by a number that it keeps, and draws other numbers in each call, whoever calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.count = 0

    def forward(self, x):
        self.count += 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(time.monotonic_ns())
            return self.layer(x) * torch.rand(()) * self.count


def test_what_is_not_even_itself_as_one_operation_is_refused_for_its_first_cause():
    with pytest.raises(rkgb.TraceError, match=r"goes by a number .* attribute 'count' of submodule '1'") as caught:
        rkgb.make_all_graphs(nn.Sequential(nn.Linear(4, 4), Reseeded()), torch.rand(2, 4))
    assert not isinstance(caught.value, rkgb.ReplayMismatch)
