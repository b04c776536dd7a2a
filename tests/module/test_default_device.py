"""Default devices and types are the user's, for tensors of the user's: what planning makes is where it is needed."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

import rkgb
from rkgb.export.json_form import from_json, to_json
from rockmate import Rockmate, max_batch, verify
from rockmate.queries.profiling import profile
from tests.module.steps import FEW_ROUNDS

WIDTH = 32
AMPLE_BYTES = 10**7


@contextmanager
def by_setting():
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)
        # Of PyTorch 2.9, `torch.get_default_device` fails where this None is, and other tests of the process ask it.
        vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)


@contextmanager
def by_type():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


every_default = pytest.mark.parametrize(
    "default", [by_setting, lambda: torch.device("meta"), by_type], ids=["set", "with", "float64"]
)


class Images(nn.Module):
    """Batch normalisation, dropout, pooling and numbers of shapes: all of which planning has code of its own for."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.1)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.pool(self.drop(self.relu(self.norm(self.conv(x)))))
        scale = (x.shape[-2] * 2 / x.shape[-1]) ** 0.5
        return self.head(hidden.mean((2, 3))) * scale


def built():
    torch.manual_seed(0)
    return Images(), torch.randn(8, 3, 32, 32)


def squares(output):
    return output.square().mean()


@every_default
@pytest.mark.ci
def test_planning_checking_and_training(default, tmp_path):
    model, sample = built()
    with default():
        result = verify(model, sample, 0.8, loss=squares)
        assert result.exact, result
        planned = Rockmate(model, sample, 0.8, loss=squares)
        planned.save_plan(tmp_path / "plan.json")
        again = Rockmate(model, sample, plan=tmp_path / "plan.json")
        squares(again(sample)).backward()
        assert verify(again, sample, loss=squares).exact
        profile(planned, sample, loss=squares, steps=1, operations=True)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def test_graphs_by_both_front_ends_and_on_disk():
    model, sample = built()
    with by_setting():
        for tracer in ("jit", "record"):
            graphs = rkgb.make_all_graphs(model, sample, tracer=tracer, low_memory=True)
            from_json(to_json(graphs.D_graph))
            rkgb.test_rkgb(model, sample, tracer=tracer)


@pytest.mark.ci
def test_the_largest_batch():
    model, sample = built()
    with by_setting():
        assert max_batch(model, sample, "2MiB", loss=squares, limits=FEW_ROUNDS).batch >= 8


def test_tensors_that_a_forward_makes_are_on_the_default_device_as_ever():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(16, WIDTH)

        def forward(self, x):
            return x + self.table(torch.arange(x.shape[1]))

    model = Positions()
    with torch.device("cpu"):
        assert verify(model, torch.randn(2, 8, WIDTH), 0.99).exact
