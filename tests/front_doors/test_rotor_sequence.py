"""A plan told in rotor's words is what rotor's table says, and obeys rotor's rules on real models."""

import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import rk_solvers.chain.sequence
from rk_solvers import BackwardOp, Chain, Data, ForwardOp, Greedy, KeepAll, Problem, Rotor, normalise
from rk_solvers.chain.blocks import Block
from rk_solvers.chain.sequence import expand
from rockmate.compat.rotor.layers import LayerChain, chain_of_layers, going_back, layers_of
from rockmate.compat.rotor.sequence import Sequence, sequence_of
from rockmate.planning.measured import Measured
from tests.module.steps import measured_for


def chain_problem(seed: int, count: int = 7) -> tuple[Problem, LayerChain]:
    """Layers that save something of their own, and whose backward needs their input as well."""
    rng = random.Random(seed)
    data, forward, backward = list[Data](), list[ForwardOp](), list[BackwardOp]()
    for layer in range(count):
        data += [Data(f"a{layer}", rng.randint(1, 5), layer), Data(f"s{layer}", rng.randint(1, 9), layer, "phantom")]
        reads = (2 * layer - 2,) if layer else ()
        forward.append(ForwardOp(f"f{layer}", rng.randint(1, 4), reads, (2 * layer, 2 * layer + 1)))
        backward.append(BackwardOp(f"b{layer}", rng.randint(1, 4), (*reads, 2 * layer + 1), 1, 2))
    problem = Problem(tuple(data), tuple(forward), tuple(reversed(backward)))
    chain = Chain(tuple(range(i, i + 1) for i in range(count)), tuple(reversed(range(count))))
    return problem, LayerChain(chain, tuple(range(i, i + 1) for i in range(count)))


def spelt_out(said: rk_solvers.chain.sequence.Sequence, blocks: tuple[Block, ...]) -> Iterator[tuple[str, int]]:
    """A table has options that forget what the one operation of a layer saves, and run it again: in words, Fck and Fe.

    The last block of a table is the loss.
    """
    for operation in said:
        if operation.block == len(blocks) - 1:
            continue
        again = operation.option >= 0 and any(blocks[operation.block].options[operation.option].recompute)
        if again and operation.kind == "B":
            yield "Fe", operation.block
        yield "Fck" if again and operation.kind == "Fe" else operation.kind, operation.block


@pytest.mark.parametrize("seed", range(8))
def test_the_sequence_of_a_table_s_plan_is_that_of_the_table(seed):
    problem, layers = chain_problem(seed)
    table = Rotor(layers.chain).prepare(problem, 60)
    checked = 0
    for memory in range(table.table.numbers.slots):
        try:
            said = table.sequence(memory)
        except ValueError:  # nothing fits
            continue
        plan = normalise(problem, expand(problem, table.blocks, said))
        found = sequence_of(problem, plan, layers)
        assert [(o.kind, o.layers.start) for o in found] == list(spelt_out(said, table.blocks))
        assert not any(operation.in_part for operation in found)
        checked += 1
    assert checked > 10


def test_a_plan_that_recomputes_nothing_runs_every_layer_once():
    problem, layers = chain_problem(0, count=3)
    assert str(sequence_of(problem, KeepAll().solve(problem, 0).schedule, layers)) == "Fe 0; Fe 1; Fe 2; B 2; B 1; B 0"


def nested() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Dropout(0.1)),
        nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.GELU(), nn.Linear(16, 8)), nn.Tanh()),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


@pytest.fixture(scope="module")
def measured() -> Measured:
    torch.manual_seed(0)
    return measured_for(nested().train(), torch.randn(64, 8))


def test_nested_sequentials_have_the_layers_of_a_flat_one():
    assert layers_of(nested()) == ("0.0", "0.1", "0.2", "1.0", "1.1.0", "1.1.1", "1.2", "2", "3")
    flat = nn.Sequential(*(nested().get_submodule(path) for path in layers_of(nested())))
    assert layers_of(flat) == tuple("012345678")
    assert layers_of(nn.Linear(2, 2)) == ()


def test_a_sequential_with_a_forward_of_its_own_is_one_layer():
    class Residual(nn.Sequential):
        def forward(self, data):
            return data + super().forward(data)

    assert layers_of(nn.Sequential(nn.Linear(2, 2), Residual(nn.Linear(2, 2), nn.ReLU()))) == ("0", "1")
    assert layers_of(Residual(nn.Linear(2, 2))) == ()


def test_every_layer_is_in_one_block_and_the_blocks_are_in_order(measured):
    layers = chain_of_layers(measured, layers_of(nested()))
    layers.chain.check(measured.problem)
    numbers = [number for span in layers.numbers for number in span]
    assert numbers == sorted(set(numbers))
    assert [str(span) for span in layers.numbers][:2] == ["range(0, 2)", "range(2, 3)"]  # the ReLU writes in place
    assert numbers[-1] == 8


class Split(nn.Module):
    """Hands on what it makes and what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, data):
        return self.linear(data), data


class OnOne(nn.Module):
    def forward(self, pair):
        return pair[0].tanh(), pair[1]


class View(nn.Module):
    def forward(self, pair):
        return pair[0], pair[1].transpose(0, 1)


class Join(nn.Module):
    def forward(self, pair):
        return pair[0] + pair[1].transpose(0, 1)


@pytest.mark.parametrize(
    ("layers", "spans"),
    [
        # A layer that begins with a view of what the one before made is a layer all the same.
        ([nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(2)], [(0, 1), (1, 2)]),
        ([nn.Identity(), nn.Linear(8, 8), nn.Identity(), nn.Flatten(0), nn.Tanh(), nn.Identity()], [(1, 4), (4, 5)]),
        # Layer 2 makes nothing, but views what layer 0 was given; layer 1 is between.
        ([nn.Linear(8, 8), Split(), OnOne(), View(), Join()], [(0, 1), (1, 2), (2, 3), (4, 5)]),
        ([nn.Linear(8, 8), nn.Flatten(0), nn.ReLU(inplace=True), nn.Sigmoid()], [(0, 3), (3, 4)]),
    ],
    ids=["view at the start", "nothing to do", "passed on", "in place"],
)
def test_layers_are_told_apart_by_what_they_make(layers, spans):
    module = nn.Sequential(*layers).train()
    found = chain_of_layers(measured_for(module, torch.randn(2, 3, 8)), layers_of(module))
    assert [(numbers.start, numbers.stop) for numbers in found.numbers] == spans


def test_a_layer_that_stands_twice_has_two_numbers():
    shared = nn.Linear(8, 8)
    module = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh()).train()
    layers = chain_of_layers(measured_for(module, torch.randn(4, 8)), layers_of(module))
    assert [span.start for span in layers.numbers] == [0, 1, 2, 3]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.data())
def test_blocks_between_which_the_backward_goes_to_and_fro_become_one(sizes, data):
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    blocks = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    stages = data.draw(st.lists(st.integers(0, len(blocks) - 1), max_size=12))
    joined, joined_stages = going_back(blocks, stages)
    Chain(tuple(joined), tuple(joined_stages))  # raises where blocks or stages are not in order
    assert joined[-1].stop == ends[-1]
    for before, after in zip(stages, joined_stages, strict=True):
        assert blocks[before].start in joined[after]
    if all(first >= second for first, second in itertools.pairwise(stages)):
        assert (joined, joined_stages) == (blocks, stages)


def test_another_module_is_divided_by_the_blocks_of_its_graph(measured):
    layers = chain_of_layers(measured, ())
    assert layers.chain == measured.chain
    assert [span.start for span in layers.numbers] == list(range(len(measured.chain.blocks)))


@pytest.mark.parametrize("share", [0.95, 0.9, 0.85, 0.8])
def test_sequences_obey_the_rules_of_their_operations(measured, share):
    """Whoever made the plan: greedy does not know of layers."""
    problem = measured.problem
    layers = chain_of_layers(measured, layers_of(nested()))
    for solver in (Rotor(layers.chain), Greedy(tries=2, rounds=3)):
        solution = solver.solve(problem, int(share * measured.eager_peak_bytes))
        sequence = sequence_of(problem, solution.schedule, layers)
        assert_rules(sequence)
        backward = [operation.layers for operation in sequence if operation.kind == "B"]
        assert list(dict.fromkeys(backward)) == list(reversed(layers.numbers))
        forward = [operation for operation in sequence if operation.kind != "B"]
        assert [operation.layers for operation in forward[: len(layers.numbers)]] == list(layers.numbers)
        again = solution.schedule.recomputations
        assert (len(forward) > len(layers.numbers)) == (again > 0)


def assert_rules(sequence: Sequence) -> None:
    saved: set[range] = set()
    forgotten: dict[range, int] = {}  # layers without their input, and when it was forgotten
    ran: dict[int, int] = {}  # when each layer was run last
    for position, operation in enumerate(sequence):
        layers = operation.layers
        if operation.kind == "B":
            assert layers in saved
            continue
        if layers in forgotten and layers.start > 0 and not operation.in_part:
            assert ran[layers.start - 1] > forgotten.pop(layers)
        for number in layers:
            ran[number] = position
        if operation.kind == "Fe":
            saved.add(layers)
        elif operation.kind == "Fng":
            forgotten[layers] = position
