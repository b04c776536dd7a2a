"""What is kept as bits for a recomputation: exact, counted, and forgotten in time."""

import pytest
import torch
from torch import nn

from rk_solvers import normalise, schedule_of
from rockmate import Rockmate
from rockmate.planning.simulator import simulate
from tests.module.steps import (
    assert_fits_and_trains_exactly,
    assert_same_walk,
    assert_trains_exactly,
    following,
    keep_every_other,
    keep_nothing,
    measured_for,
    peak_of_step,
    program_of,
    squares,
    walk_twice,
)

WIDTH = 256
ROWS = 96  # of so many, each mask is 12 KiB of bits


class Dropped(nn.Module):
    """Layers with dropouts that are worth a smaller form, and one that is not."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.narrow = nn.Linear(WIDTH, 8)
        self.dropout, self.other = nn.Dropout(0.1), nn.Dropout(0.3)

    def forward(self, x):
        y = self.dropout(torch.tanh(self.first(x)))
        y = self.other(torch.tanh(self.second(y)) + y)
        return self.other(torch.tanh(self.narrow(self.dropout(self.third(y)))))


def sample():
    return torch.randn(ROWS, WIDTH)


@pytest.fixture
def measured():
    torch.manual_seed(0)
    model = Dropped()
    return model, measured_for(model, sample())


@pytest.mark.parametrize("plan_of", [keep_nothing, keep_every_other], ids=["nothing", "every other"])
def test_training_is_exact_and_the_random_stream_is_eagers(measured, plan_of):
    model, costs = measured
    module = following(costs, model, plan_of(costs))
    code = module.code
    assert code.count("step.pack(") == (3 if plan_of is keep_nothing else 1)
    assert "step.unpack(" in code
    assert ("step.rewind(" in code) == (plan_of is keep_nothing)  # the small one
    assert_trains_exactly(module, [sample() for _ in range(3)])


def test_the_peak_is_as_simulated_to_the_byte_of_the_masks(measured):
    model, costs = measured
    plan = normalise(costs.problem, keep_nothing(costs))
    module = following(costs, model, plan)
    simulated = simulate(costs.problem, schedule_of(costs.problem, plan)).peak_bytes
    found = peak_of_step(module, (sample(),))
    assert abs(found - simulated) <= 4096  # of the small dropout's state, while it is repeated


def test_a_form_is_counted_from_the_forward_to_the_last_recomputation(measured):
    _, costs = measured
    packed = {node.name: form.packed_bytes for node, form in costs.graphs.K_graph.forms.items()}
    assert len(packed) == 3
    for op in costs.problem.forward:
        if op.name in packed:
            assert op.replay_bytes == packed[op.name] == ROWS * WIDTH // 8
            assert op.recompute_ms == op.repeat_ms
            assert op.inputs == ()


def test_what_is_recomputed_several_times_is_read_from_its_bits_each_time(measured):
    _, costs = measured
    plan = normalise(costs.problem, keep_nothing(costs))
    program = program_of(costs, plan)
    uses = [(taken.node, taken.last) for segment in program.segments for taken in segment.unpacks.values()]
    assert set(program.packs.values()) == set(costs.graphs.K_graph.forms)
    for node in program.packs.values():
        lasts = [last for name, last in uses if name == node.name]
        assert lasts == [False] * (len(lasts) - 1) + [True]


def test_nothing_is_packed_where_nothing_is_recomputed(measured):
    model, costs = measured
    module = following(costs, model, costs.problem.no_recompute)
    assert "step.pack(" not in module.code


def test_a_graph_is_walked_twice(measured):
    model, costs = measured
    assert_same_walk(following(costs, model, keep_nothing(costs)), walk_twice(sample()))


def test_two_calls_keep_their_own_bits(measured):
    model, costs = measured
    batches = sample(), sample()

    def walk(forward):
        for loss in [squares(forward(x)) for x in batches]:
            loss.backward()

    assert_same_walk(following(costs, model, keep_nothing(costs)), walk)


def convolutions():
    return nn.Sequential(nn.Conv2d(8, 16, 3), nn.Dropout(0.2), nn.Conv2d(16, 4, 3), nn.Dropout(0.2))


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (lambda: Dropped().double(), lambda: sample().double()),
        (lambda: Dropped().bfloat16(), lambda: sample().bfloat16()),
        (
            lambda: convolutions().to(memory_format=torch.channels_last),
            lambda: torch.randn(4, 8, 36, 36).contiguous(memory_format=torch.channels_last),
        ),
    ],
    ids=["float64", "bfloat16", "channels last"],
)
def test_other_types_and_layouts_are_exact(model, x):
    torch.manual_seed(0)
    module, batch = model(), x()
    costs = measured_for(module, batch)
    planned = following(costs, module, keep_nothing(costs))
    assert "step.unpack(" in planned.code
    assert_trains_exactly(planned, [batch, -batch])


def test_a_planned_module_reads_bits_and_stays_in_its_budget():
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.Dropout(0.1), nn.GELU())))
    x = torch.randn(512, 512)
    module = Rockmate(model, x, 0.6, loss=squares)
    assert "step.unpack(" in module.code
    assert_fits_and_trains_exactly(module, x)
