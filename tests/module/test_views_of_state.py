"""Views of parameters, buffers and inputs that take their shape or type from another value."""

import pytest
import torch
from torch import nn

from rkgb.passes import expand
from tests.module.steps import assert_trains_exactly, following, keep_every_other, keep_nothing, measured_for

ROWS, WIDTH = 12, 16

AS_ANOTHER = {
    "type_as": lambda module, value: module.table.type_as(value),
    "type_as-copies": lambda module, value: module.precise.type_as(value),
    "to": lambda module, value: module.table.to(value),
    "to-copies": lambda module, value: module.table.to(value, copy=True),
    "to-keywords": lambda module, value: module.precise.to(value, non_blocking=True),
    "expand_as": lambda module, value: module.row.expand_as(value),
    "view_as": lambda module, value: module.flat.view_as(value),
    "reshape_as": lambda module, value: module.flat.reshape_as(value),
    "reshape_as-copies": lambda module, value: module.turned.t().reshape_as(value),
    "of-a-buffer": lambda module, value: module.fixed.expand_as(value).type_as(value).detach().clone(),
    "of-a-value": lambda module, value: (value * module.row).flatten().view_as(value).to(value),
}
# Of these the trace has a view of a leaf that reads another value: the others copy, or give the tensor itself.
SEEN_THROUGH = ("type_as", "expand_as", "view_as", "reshape_as", "of-a-buffer")


class AsAnother(nn.Module):
    """Three layers, each followed by a use of such a view."""

    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.table = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.precise = nn.Parameter(torch.randn(ROWS, WIDTH, dtype=torch.float64))
        self.row = nn.Parameter(torch.randn(WIDTH))
        self.flat = nn.Parameter(torch.randn(ROWS * WIDTH))
        self.turned = nn.Parameter(torch.randn(6, 2 * WIDTH))
        self.register_buffer("fixed", torch.randn(1, WIDTH))
        self.kind = kind

    def forward(self, x):
        for layer in self.layers:
            hidden = torch.tanh(layer(x))
            view = AS_ANOTHER[self.kind](self, torch.sigmoid(hidden))
            x = (torch.sin(view) * hidden).cos() + x
        return x


@pytest.mark.parametrize("plan_of", [keep_nothing, keep_every_other], ids=["nothing", "every other"])
@pytest.mark.parametrize("kind", AS_ANOTHER)
def test_what_is_read_for_its_shape_alone_is_not_needed_again(kind, plan_of):
    torch.manual_seed(0)
    model = AsAnother(kind)
    costs = measured_for(model, torch.randn(ROWS, WIDTH))
    assert not any(op.call.op_name.endswith("_as") for op in costs.graphs.D_graph)
    assert not any(node.keep_reason for node in costs.graphs.S_graph)
    assert_trains_exactly(following(costs, model, plan_of(costs)), [torch.randn(ROWS, WIDTH) for _ in range(2)])


@pytest.mark.parametrize("plan_of", [keep_nothing, keep_every_other], ids=["nothing", "every other"])
@pytest.mark.parametrize("kind", AS_ANOTHER)
def test_where_a_shape_must_be_read_its_readers_run_once(kind, plan_of, monkeypatch):
    monkeypatch.setattr(expand, "without_shape_read", lambda call, result: call)
    torch.manual_seed(0)
    model = AsAnother(kind)
    costs = measured_for(model, torch.randn(ROWS, WIDTH))
    once = [node for node in costs.graphs.S_graph if "whose shape is that of another" in node.keep_reason]
    assert len(once) == (3 if kind in SEEN_THROUGH else 0)
    assert_trains_exactly(following(costs, model, plan_of(costs)), [torch.randn(ROWS, WIDTH) for _ in range(2)])
