"""Another way for forgotten tensors to come back is one class and one entry: planned, measured, written, run."""

import contextlib
import math
import zlib
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from rkgb import restore
from rkgb.ir.kgraph import KGraph
from rkgb.restore.packed_form import PackedForm
from rockmate import Rockmate
from tests.module.steps import assert_trains_exactly, following, keep_nothing, measured_for, peak_of_step, squares

WIDTH, ROWS = 128, 1024


@dataclass(frozen=True, slots=True)
class Zipped(PackedForm):
    """Signs compressed by zlib. Of four bytes each they take far less than one, but always as many are kept."""

    shape: tuple[int, ...]

    @classmethod
    def of(cls, graph, node):
        if [op.call.function for op in node.ops] != [torch.ops.aten.sign.default]:
            return None
        value = graph.values[node.ops[0].output_names[0]]
        return cls(tuple(value.shape)) if value.dtype is torch.float32 else None

    @property
    def packed_bytes(self):
        return math.prod(self.shape)

    def pack(self, tensor):
        content = zlib.compress(tensor.numpy().tobytes(), 1)
        packed = torch.zeros(self.packed_bytes, dtype=torch.uint8)
        packed[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return packed

    def unpack(self, packed):
        content = zlib.decompressobj().decompress(packed.numpy())
        return torch.frombuffer(bytearray(content), dtype=torch.float32).view(self.shape).clone()


@contextlib.contextmanager
def registered(kind):
    restore.KINDS.append(kind)
    try:
        yield
    finally:
        restore.KINDS.remove(kind)


class Signed(nn.Module):
    """Layers whose outputs are scaled by signs that are wanted again in the backward, with dropout between."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scales = nn.ParameterList(torch.randn(WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        for layer, scale in zip(self.layers, self.scales, strict=True):
            y = layer(x)
            x = self.dropout(torch.sign(y) * scale + torch.tanh(y))
        return x


def rows():
    return torch.randn(ROWS, WIDTH)


def zipped(graph: KGraph):
    return [node for node, ways in graph.restorations.items() for way in ways if isinstance(way, Zipped)]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Signed()


def test_it_is_found_where_it_is_registered(model):
    assert not zipped(measured_for(model, rows()).graphs.K_graph)
    with registered(Zipped):
        costs = measured_for(model, rows())
    nodes = {node.name for node in zipped(costs.graphs.K_graph)}
    assert len(nodes) == 4
    for op in costs.problem.forward:
        if op.name in nodes:
            assert op.replay_bytes == ROWS * WIDTH
            assert op.repeat_ms > 0


def test_training_under_a_budget_is_exact_and_takes_what_was_predicted(model):
    x = rows()
    with registered(Zipped):
        costs = measured_for(model, x)
        module = Rockmate(model, x, 0.35, loss=squares)
    names = [node.name for node in zipped(costs.graphs.K_graph)]
    assert any(f"step.unpack('{name} packed'" in module.code for name in names)
    assert peak_of_step(module, (x,)) == module.plan.peak_bytes
    assert_trains_exactly(module, [rows() for _ in range(3)])


def test_all_are_had_again_by_it(model):
    with registered(Zipped):
        costs = measured_for(model, rows())
    module = following(costs, model, keep_nothing(costs))
    for node in zipped(costs.graphs.K_graph):
        assert module.code.count(f"step.pack('{node.name} packed'") == 1
        assert f"step.unpack('{node.name} packed'" in module.code
    assert module.code.count("aten.sign.default(") == 4  # those of the forward
    assert_trains_exactly(module, [rows() for _ in range(3)])
