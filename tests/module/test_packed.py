"""What is kept in a smaller form for a recomputation: exact, counted, and forgotten in time."""

import pytest
import torch
from torch import nn

from rk_solvers import schedule_of, simulate
from rk_solvers.groups import normalise
from rockmate import Rockmate
from tests.module.packed_models import ROWS, WIDTH, Dropped, Pools, images, rows, volumes
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


def measured(make, sample):
    """The model, and what was measured of it."""
    torch.manual_seed(0)
    model = make()
    return model, measured_for(model, sample())


@pytest.fixture
def masks():
    return measured(Dropped, rows)


@pytest.fixture
def indices():
    return measured(Pools, images)


@pytest.fixture(params=[(Dropped, rows), (Pools, images)], ids=["masks", "indices"])
def either(request):
    """The model, what was measured of it, and what makes its samples."""
    return *measured(*request.param), request.param[1]


# ---- masks and indices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan_of", [keep_nothing, keep_every_other], ids=["nothing", "every other"])
def test_training_is_exact(either, plan_of):
    model, costs, sample = either
    module = following(costs, model, plan_of(costs))
    assert "step.pack(" in module.code
    assert "step.unpack(" in module.code
    assert_trains_exactly(module, [sample() for _ in range(3)])


def test_what_is_recomputed_several_times_is_read_from_its_form_each_time(either):
    _, costs, _ = either
    plan = normalise(costs.problem, keep_nothing(costs))
    program = program_of(costs, plan)
    uses = [(taken.node, taken.last) for segment in program.segments for taken in segment.restores.values()]
    assert {taken.node for taken in program.restored.values()} == set(costs.graphs.K_graph.restorations)
    for node in costs.graphs.K_graph.restorations:
        lasts = [last for other, last in uses if other is node]
        assert lasts == [False] * (len(lasts) - 1) + [True]


def test_a_form_is_counted_from_the_forward_to_the_last_recomputation(either):
    _, costs, _ = either
    packed = {node.name: form.packed_bytes for node, (form,) in costs.graphs.K_graph.restorations.items()}
    assert len(packed) == 3
    for op in costs.problem.forward:
        if op.name in packed:
            assert op.replay_bytes == packed[op.name]
            assert op.recompute_ms == op.repeat_ms
            assert op.inputs == ()


def test_nothing_is_packed_where_nothing_is_recomputed(either):
    model, costs, sample = either
    module = following(costs, model, costs.problem.no_recompute)
    assert "step.pack(" not in module.code
    assert_trains_exactly(module, [sample()])


def test_a_graph_is_walked_twice(either):
    model, costs, sample = either
    assert_same_walk(following(costs, model, keep_nothing(costs)), walk_twice(sample()))


def test_two_calls_keep_their_own_forms(either):
    model, costs, sample = either
    batches = sample(), sample()

    def walk(forward):
        for loss in [squares(forward(x)) for x in batches]:
            loss.backward()

    assert_same_walk(following(costs, model, keep_nothing(costs)), walk)


def convolutions():
    return nn.Sequential(nn.Conv2d(8, 16, 3), nn.Dropout(0.2), nn.Conv2d(16, 4, 3), nn.Dropout(0.2))


def channels_last(thing):
    return thing.to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (lambda: Dropped().double(), lambda: rows().double()),
        (lambda: Dropped().bfloat16(), lambda: rows().bfloat16()),
        (lambda: channels_last(convolutions()), lambda: channels_last(torch.randn(4, 8, 36, 36))),
        (lambda: Pools().double(), lambda: images().double()),
        (lambda: Pools().bfloat16(), lambda: images().bfloat16()),
        (lambda: channels_last(Pools()), lambda: channels_last(images())),
        (volumes, lambda: torch.randn(3, 2, 32, 32, 32)),
    ],
    ids=[*(f"masks, {kind}" for kind in ("float64", "bfloat16", "channels last")),
         *(f"indices, {kind}" for kind in ("float64", "bfloat16", "channels last", "volumes"))],
)  # fmt: skip
def test_other_types_and_layouts_are_exact(model, x):
    torch.manual_seed(0)
    module, batch = model(), x()
    costs = measured_for(module, batch)
    planned = following(costs, module, keep_nothing(costs))
    assert "step.unpack(" in planned.code
    assert_trains_exactly(planned, [batch, -batch])


# ---- masks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan_of", [keep_nothing, keep_every_other], ids=["nothing", "every other"])
def test_a_small_mask_alone_is_drawn_again(masks, plan_of):
    model, costs = masks
    code = following(costs, model, plan_of(costs)).code
    assert code.count("step.pack(") == (3 if plan_of is keep_nothing else 1)
    assert ("step.rewind(" in code) == (plan_of is keep_nothing)


def test_the_peak_is_as_simulated_to_the_byte_of_the_masks(masks):
    model, costs = masks
    plan = normalise(costs.problem, keep_nothing(costs))
    module = following(costs, model, plan)
    simulated = simulate(costs.problem, schedule_of(costs.problem, plan)).peak_bytes
    found = peak_of_step(module, (rows(),))
    assert abs(found - simulated) <= 4096  # of the small dropout's state, while it is repeated


def test_a_mask_takes_a_bit_an_element(masks):
    _, costs = masks
    assert {form.packed_bytes for (form,) in costs.graphs.K_graph.restorations.values()} == {ROWS * WIDTH // 8}


@pytest.mark.ci
def test_a_planned_module_reads_bits_and_stays_in_its_budget():
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.Dropout(0.1), nn.GELU())))
    x = torch.randn(512, 512)
    module = Rockmate(model, x, 0.6, loss=squares)
    assert "step.unpack(" in module.code
    assert_fits_and_trains_exactly(module, x)


# ---- indices of pooling -----------------------------------------------------------------------------------------


def only(costs, chosen):
    """The plan that has just these computations again, each right before the first backward that needs its data."""
    problem = costs.problem
    place = {op.name: index for index, op in enumerate(problem.forward)}
    plan = [list[int]() for _ in problem.backward]
    for name in chosen:
        outputs = set(problem.forward[place[name]].outputs)
        first = next(stage for stage, op in enumerate(problem.backward) if outputs.intersection(op.needs))
        plan[first].append(place[name])
    return normalise(problem, tuple(tuple(sorted(group)) for group in plan))


def test_indices_alone_are_had_again_without_their_pooling(indices):
    model, costs = indices
    names = [node.name for node in costs.graphs.K_graph.restorations]
    module = following(costs, model, only(costs, names))
    _, *recomputations = module.code.split("def recompute_")
    assert sum(code.count("step.unpack(") for code in recomputations) == len(names)
    assert not any("aten." in code for code in recomputations)
    assert_trains_exactly(module, [images(), images()])


@pytest.mark.parametrize("plan_of", [keep_nothing, keep_every_other], ids=["nothing", "every other"])
def test_the_peak_with_indices_is_no_higher_than_simulated(indices, plan_of):
    model, costs = indices
    plan = normalise(costs.problem, plan_of(costs))
    simulated = simulate(costs.problem, schedule_of(costs.problem, plan)).peak_bytes
    assert peak_of_step(following(costs, model, plan), (images(),)) <= simulated


def test_indices_that_the_forward_reads_too_are_eagers():
    class Back(nn.Module):
        def __init__(self):
            super().__init__()
            self.pools = Pools()

        def forward(self, x):
            maxima, places = nn.functional.max_pool2d_with_indices(torch.tanh(self.pools(x)), 2, 1)
            return nn.functional.max_unpool2d(maxima, places, 2, 1)

    model, costs = measured(Back, images)
    assert_trains_exactly(following(costs, model, keep_nothing(costs)), [images(), images()])


def test_a_planned_module_reads_indices_and_stays_in_its_budget():
    torch.manual_seed(0)
    module = Rockmate(Pools(), images(), 0.6, loss=squares)
    assert "step.unpack(" in module.code
    assert_fits_and_trains_exactly(module, images())
