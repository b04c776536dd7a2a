"""Submodules that read something else out of every batch are one operation each: exact, and never repeated."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rkgb import ReplayMismatch, TraceWarning, make_all_graphs
from rockmate import Rockmate, verify
from tests.module.models import WIDTH, built, rows
from tests.module.steps import assert_same_training, peak_of_step, squares, train

EXPERTS = 4


class Router(nn.Module):
    """Which expert each row is for: their order, and how many rows each expert has, in Python."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, EXPERTS)

    def forward(self, hidden):
        scores, chosen = self.layer(hidden).softmax(-1).max(-1)
        return scores, chosen.sort(stable=True).indices, torch.bincount(chosen, minlength=EXPERTS).tolist()


class Experts(nn.Module):
    """As many rows as the router says go through each of the experts."""

    def __init__(self):
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, hidden):
        scores, order, counts = self.router(hidden)
        parts = hidden[order].split(counts)
        found = torch.cat([F.gelu(expert(part)) for expert, part in zip(self.experts, parts, strict=True)])
        return torch.zeros_like(hidden).index_copy(0, order, found) * scores[:, None]


class Network(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.before = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.experts = nn.ModuleList(Experts() for _ in range(depth))

    def forward(self, hidden):
        for layer, experts in zip(self.before, self.experts, strict=True):
            for _ in range(3):
                hidden = torch.tanh(F.dropout(layer(hidden), 0.1, self.training))
            hidden = hidden + experts(hidden)
        return hidden


OPAQUE = pytest.mark.filterwarnings("ignore:submodule 'experts:rkgb.TraceWarning")


def called(graph):
    return [node.call.function.path for node in graph if hasattr(node.call.function, "path")]


def test_what_holds_the_reads_and_what_becomes_of_them_is_one_operation():
    """The router's counts go to Python: its own call is too little to be one operation."""
    with pytest.warns(TraceWarning, match=r"submodule 'experts.[01]' is one operation .* depends on its data"):
        graph = make_all_graphs(built(Network), rows()).D_graph
    assert called(graph) == ["experts.0", "experts.1"]


@OPAQUE
@pytest.mark.ci
def test_training_is_eager_s_to_the_bit_on_batches_that_go_other_ways():
    network = built(Network)
    eager = copy.deepcopy(network)
    model = Rockmate(network, rows(), 0.85, loss=squares)
    assert model.plan.recomputations > 0
    batches = [rows(seed) for seed in range(4)]
    assert_same_training(train(model, batches), train(eager, batches))
    assert len(model.plans) == 1
    model.zero_grad()
    assert peak_of_step(model, (rows(),)) <= model.plan.budget_bytes
    assert verify(model, rows(5), loss=squares).exact


def test_a_root_that_reads_so_is_refused():
    class Scaled(Network):
        def forward(self, hidden):
            return super().forward(hidden) * float(hidden.sum())

    with pytest.raises(ReplayMismatch, match="does not hold for other data"):
        make_all_graphs(built(Scaled), rows())


def test_a_branch_that_masks_choose_stays_a_branch():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, hidden, mask):
            return self.layer(hidden) if bool(mask.all()) else self.layer(hidden) * mask[:, None]

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Masked()

        def forward(self, hidden, mask):
            return torch.tanh(self.inner(hidden, mask))

    graph = make_all_graphs(built(Outer), (rows(), torch.ones(len(rows()), dtype=torch.bool))).D_graph
    assert called(graph) == []
    assert [node.is_guard for node in graph].count(True) == 1
