"""Predicted peaks are those of graphs that are run, where no loop is joined; joined loops fill nothing."""

import pytest
import torch
from torch import Tensor, nn

from rockmate import PeakMemory
from rockmate.compile import Partitioner
from rockmate.compile.choose import chain_cuts
from rockmate.division.liveness import Liveness
from tests.compile.joint_graphs import divided, joint_of

EVERYTHING = 1 << 50
SIDE = 64
BYTES = 4 * SIDE * SIDE


class Products(nn.Module):
    """Nothing but products, so that nothing is joined."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIDE, SIDE, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("share", [1.0, 0.7])
def test_a_step_takes_what_is_predicted(share):
    module, x = Products(8), torch.randn(8 * SIDE, SIDE)
    gradient = torch.randn(8 * SIDE, SIDE)

    def step(run) -> None:
        module.zero_grad()
        run(x).backward(gradient)

    free = Partitioner(EVERYTHING)
    step(divided(module, free))
    partitioner = Partitioner(int(share * free.divisions[0].predicted_peak_bytes))
    run = divided(module, partitioner)
    step(run)
    module.zero_grad()
    with PeakMemory("cpu") as memory:
        step(run)
    # The gradient of the output is the caller's here, and was there before.
    predicted_bytes = partitioner.divisions[0].predicted_peak_bytes
    assert predicted_bytes - gradient.nbytes <= memory.peak_bytes <= predicted_bytes
    assert predicted_bytes <= share * free.divisions[0].predicted_peak_bytes


def test_a_chain_of_loops_fills_its_end_alone():
    def chain(x: Tensor) -> Tensor:
        return torch.exp(torch.sin(torch.cos(x) * 2) + 1) @ x.detach()

    graph = joint_of(chain, torch.rand(SIDE, SIDE, requires_grad=True))
    liveness = Liveness(graph)
    everything = frozenset(node for node in graph.needed if node not in graph.given)
    # What a product reads is filled, and its output.
    assert liveness.peaks(frozenset()).forward_bytes == 2 * BYTES
    assert liveness.peaks(everything).forward_bytes > 2 * BYTES


def test_a_value_among_several_is_filled_though_a_loop_alone_reads_it():
    def dropped(x: Tensor) -> Tensor:
        return torch.native_dropout(x, 0.5, True)[0] * 2

    graph = joint_of(dropped, torch.rand(SIDE, SIDE, requires_grad=True))
    mask = next(node for node in graph.needed if node not in graph.given)
    # The dropped value, its product, and the mask of one byte for each element, which is saved.
    assert Liveness(graph).peaks(frozenset([mask])).forward_bytes == 2 * BYTES + BYTES // 4


def test_cuts_are_where_nothing_else_of_the_batch_is_alive():
    def residual(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + torch.sin(x @ x)
        return x

    graph = joint_of(residual, torch.rand(8, 8, requires_grad=True))
    batch = frozenset(node for node in graph.nodes if node.op == "placeholder" and node not in graph.tangents)
    wanted = [node for node in graph.nodes if node in graph.forward]
    found = {node.name for node in chain_cuts(graph, wanted, batch)}
    assert {"add", "add_1"} <= found
    assert found.isdisjoint({"mm_1", "sin_1", "mm_2", "sin_2"})  # what they are added to is alive beside them
