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


def test_a_chain_of_loops_that_is_summed_up_fills_nothing():
    def summed(x: Tensor) -> Tensor:
        return (torch.exp(torch.sin(x)) * 2).sum(0)

    assert Liveness(joint_of(summed, torch.rand(SIDE, SIDE, requires_grad=True))).peaks(frozenset()).forward_bytes == (
        BYTES // SIDE
    )


@pytest.mark.parametrize(("threads", "filled"), [(1, 2), (2, 3)])
def test_what_threads_add_up_by_indices_is_filled_before(monkeypatch, threads, filled):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    places = torch.randint(SIDE, (SIDE, SIDE))

    def scattered(x: Tensor, places: Tensor) -> Tensor:
        return torch.zeros_like(x).scatter_add(0, places, torch.exp(torch.sin(x)))

    graph = joint_of(scattered, torch.rand(SIDE, SIDE, requires_grad=True), places)
    # Zeros, sums of them, and with several threads what is added.
    assert Liveness(graph).peaks(frozenset()).forward_bytes == filled * BYTES


@pytest.mark.parametrize(("is_multiplied", "filled"), [(False, 6), (True, 5)])
def test_what_is_concatenated_lies_there_as_long_as_any_of_it_is_read(is_multiplied, filled):
    def joined(x: Tensor, y: Tensor, square: Tensor) -> Tensor:
        read_later = torch.exp(x)
        product = torch.cat([read_later, torch.exp(y)]) @ square @ square
        return read_later @ product[:SIDE] if is_multiplied else read_later * product[:SIDE]

    halves = (torch.rand(SIDE, SIDE, requires_grad=True) for _ in range(2))
    graph = joint_of(joined, *halves, torch.rand(SIDE, SIDE))
    # Both products, and what they are of: while one of its halves is read, all of it is there. A half that a product
    # reads is copied there, and beside it until then: what is joined is gone when the second product is made.
    assert Liveness(graph).peaks(frozenset()).forward_bytes == filled * BYTES


def test_a_concatenation_is_filled_though_a_loop_alone_reads_it():
    def summed(x: Tensor) -> Tensor:
        return torch.cat([torch.exp(x), torch.sin(x)]).sum(0)

    graph = joint_of(summed, torch.rand(SIDE, SIDE, requires_grad=True))
    assert Liveness(graph).peaks(frozenset()).forward_bytes == 2 * BYTES + BYTES // SIDE


def test_weights_and_images_are_copied_to_channels_last_for_the_whole_step():
    images, weight = torch.randn(2, 8, 16, 16), torch.randn(8, 8, 3, 3)

    def peaks(memory_format):
        x, w = (one.clone(memory_format=memory_format) for one in (images, weight))
        graph = joint_of(lambda x, w: torch.conv2d(x, w, padding=1), x, w.requires_grad_())
        return Liveness(graph).peaks(frozenset())

    as_given, last = peaks(torch.contiguous_format), peaks(torch.channels_last)
    assert as_given.forward_bytes - last.forward_bytes == images.nbytes + weight.nbytes
    assert as_given.backward_bytes - last.backward_bytes == images.nbytes + weight.nbytes
    # Its output, and the weight as a library wants it. Then that of both gradients, and once more of the weight's.
    assert last.forward_bytes == images.nbytes + weight.nbytes
    assert last.backward_bytes == 2 * images.nbytes + 3 * weight.nbytes


class Twice(torch.autograd.Function):
    """Its backward computes what needs no gradient."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(y)
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient @ (y @ y), None


def test_what_needs_no_gradient_is_computed_just_before_it_is_read():
    def chain(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(6):
            x = Twice.apply(x, y * 1.5)
        return x

    graph = joint_of(chain, torch.rand(SIDE, SIDE, requires_grad=True), torch.rand(SIDE, SIDE))
    apart = [node for node in graph.nodes if node not in graph.forward and node not in graph.late]
    assert len([node for node in apart if "mm" in node.name]) == 6
    order = graph.backward_order(frozenset())
    for node in apart:
        after = order[order.index(node) + 1 :]
        readers = set(node.users)
        between = after[: min(after.index(reader) for reader in readers if reader in after)]
        assert graph.late.isdisjoint(between)
    # The gradient, a product that it is multiplied with, what that is made of, and the next gradient.
    assert Liveness(graph).peaks(frozenset()).backward_bytes <= 4 * BYTES


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
