"""The largest batch and the smallest budget: answers are measured to hold, and the next step beyond does not."""

import re

import pytest
import torch
from torch import nn

from rk_solvers import Problem, evaluate
from rkgb import make_sample, pipeline
from rockmate import ArgumentError, BatchError, BudgetError, BudgetTooSmall, Rockmate, max_batch, smallest_budget
from rockmate.planning.measured import measure
from rockmate.planning.request import PlanRequest
from rockmate.queries.batches import find_batch, interpolated
from tests.module.models import Layers, built, rows
from tests.module.steps import assert_trains_exactly, peak_of_step, squares

GREEDY = {"solver": "greedy", "time_limit": 0.5}


class Mlp(nn.Module):
    """Layers whose activations outweigh the parameters for all but small batches."""

    def __init__(self, dropout=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden):
        for layer in self.layers:
            hidden = self.dropout(torch.tanh(layer(hidden)))
        return hidden


def make(batch):
    return Mlp(), torch.randn(batch, 16), squares


# ---- the largest batch -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def largest():
    return max_batch(make, budget=40_000, **GREEDY)


def test_the_largest_batch_fits_and_the_next_one_does_not(largest):
    assert largest.is_largest
    fits = [trial.batch for trial in largest.trials if trial.fits]
    refused = [trial.batch for trial in largest.trials if not trial.fits]
    assert largest.batch == max(fits)
    assert largest.batch + 1 == min(refused)
    assert max(fits) < min(refused)
    for trial in largest.trials:
        if trial.fits:
            assert trial.plan.measured_peak_bytes <= 40_000
        else:
            assert int(trial.why.split()[1]) > 40_000


def test_what_was_learned_spares_measurements(largest):
    assert len(largest.trials) <= 6  # bisection from 4 would take three times as many
    batches = [trial.batch for trial in largest.trials]
    assert len(set(batches)) == len(batches)


def test_the_answer_s_plan_trains_within_the_budget(largest):
    model, sample, loss = make(largest.batch)
    planned = Rockmate(model, sample, plan=largest.plan_file, loss=loss)
    assert peak_of_step(planned, (sample,), loss) <= 40_000
    assert largest.budget_bytes == planned.plan.budget_bytes == 40_000


def test_the_batch_that_fits_without_a_plan_is_told(largest):
    for batch, fits in (
        (largest.eager_batch, True),
        (largest.eager_batch + 2, False),
    ):  # by interpolation: give or take one
        model, sample, loss = make(batch)
        assert (peak_of_step(model, (sample,), loss) <= 40_000) == fits
    assert largest.eager_batch < largest.batch


def test_the_search_ends_at_the_most_that_may_be_tried():
    found = max_batch(make, budget="1GiB", most=9, **GREEDY)
    assert (found.batch, found.is_largest) == (9, False)
    assert all(trial.fits for trial in found.trials)


@pytest.mark.ci
def test_only_batches_that_may_be_tried_are(largest):
    among = range(8, 1 << 20, 8)
    found = max_batch(make, budget=40_000, among=among, **GREEDY)
    assert all(trial.batch in among for trial in found.trials)
    assert (found.batch, found.is_largest) == (largest.batch // 8 * 8, True)
    assert found.ended == f"{found.batch + 8} does not fit"
    found = max_batch(make, budget=40_000, among=[1, 3, largest.batch + 1], start=2, **GREEDY)
    assert [trial.batch for trial in found.trials] == [1, 3, largest.batch + 1] or found.batch == 3


def test_as_many_batches_are_measured_as_are_allowed(largest):
    found = max_batch(make, budget=40_000, measurements=2, **GREEDY)
    assert len(found.trials) == 2
    assert found.batch <= largest.batch
    assert not found.is_largest
    assert found.ended.startswith("after 2 measurements; a little more may fit")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"measurements": 0}, "measurements is 0: give a positive number"),
        ({"among": [9], "most": 8}, "no batch may be tried: of [9], none is from 1 to 8"),
        ({"among": range(0, 8, 2)}, "no batch may be tried"),
    ],
)
def test_batches_that_cannot_be_tried_are_refused(said, words):
    with pytest.raises(ArgumentError, match=re.escape(words)):
        max_batch(make, budget=40_000, **said, **GREEDY)


@pytest.mark.slow
def test_the_search_goes_down_where_the_first_batch_does_not_fit(largest):
    found = max_batch(make, budget=40_000, start=4 * largest.batch, **GREEDY)
    assert not found.trials[0].fits
    assert found.batch == largest.batch


@pytest.mark.ci
def test_a_budget_that_not_even_one_row_fits_is_too_small():
    with pytest.raises(BudgetTooSmall) as error:
        max_batch(make, budget=2_000, **GREEDY)
    assert error.value.smallest_budget_bytes > 2_000
    assert error.value.__notes__ == ["with a batch of 1, the smallest that was tried"]


@pytest.mark.slow
def test_budgets_for_all_of_training_leave_room_for_the_rest():
    budget_bytes = 60_000
    found = max_batch(make, budget=budget_bytes, scope="total", optimizer=torch.optim.Adam, **GREEDY)
    split = found.plan_file.plan.memory_split
    assert split.total_bytes == found.budget_bytes == budget_bytes
    assert found.is_largest
    model, sample, loss = make(found.batch + 1)
    with pytest.raises(BudgetTooSmall):
        Rockmate(
            model, sample, budget_bytes, loss=loss, scope="total", optimizer=torch.optim.Adam, cache=False, **GREEDY
        )


def test_a_part_of_the_eager_peak_is_no_budget_for_a_batch():
    with pytest.raises(BudgetError, match="which grows with the batch"):
        max_batch(make, budget=0.5)
    with pytest.raises(ValueError, match="a sample is given, '1MiB', beside a function .* say budget="):
        max_batch(make, "1MiB")
    with pytest.raises(ValueError, match="cannot begin with a batch of 9 and end at 3"):
        max_batch(make, budget=40_000, start=9, most=3)


# ---- the batch dimension ---------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, steps, scale):
        return self.head(self.rnn(steps)[0]) * scale


class Attention(nn.Module):
    """Rows of a sequence are no batch: each looks at all of them."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, tokens):
        return torch.softmax(self.mix(tokens) @ tokens.transpose(1, 2) * tokens.shape[1], -1).cumsum(1) @ tokens


class Contrastive(nn.Module):
    def forward(self, one, other):
        return one @ other.T


class Drawn(nn.Module):
    def forward(self, hidden):
        return hidden * torch.rand_like(hidden)


@pytest.mark.parametrize(
    ("model", "sample", "dimension", "inputs", "size"),
    [
        (Mlp(), torch.randn(5, 16), 0, (0,), 5),
        (Recurrent(), (torch.randn(7, 3, 4), torch.ones(3)), 1, (0,), 3),
        (Attention(), torch.randn(2, 6, 8), 0, (0,), 2),
        (nn.BatchNorm1d(4), torch.randn(6, 4), 0, (0,), 6),
        (Drawn(), torch.randn(6, 4), 0, (0,), 6),
        (nn.Bilinear(4, 5, 2), (torch.randn(3, 4), torch.randn(3, 5)), 0, (0, 1), 3),
    ],
)
def test_the_batch_dimension_is_the_one_along_which_outputs_repeat(model, sample, dimension, inputs, size):
    if isinstance(model, Recurrent):
        sample = (sample[0], torch.ones(1))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    stream = torch.get_rng_state()
    found = find_batch(model, sample)
    assert (found.dimension, found.inputs, found.size) == (dimension, inputs, size)
    assert found.tried[-1].startswith(f"dimension {dimension} of input")
    assert model.training
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for batch in (1, size, 3 * size + 1):
        _, resized, _ = found.make(batch)
        tensors = make_sample(model, resized).tensors
        assert all(tensors[place].shape[dimension] == batch for place in inputs)
        with torch.no_grad():
            resized.call(model.eval())
    model.train()
    same = make_sample(model, found.make(size)[1]).tensors
    assert all(torch.equal(one, other) for one, other in zip(same, make_sample(model, sample).tensors, strict=True))


def test_samples_without_a_batch_are_refused_with_what_was_tried():
    with pytest.raises(BatchError, match=r"dimension 0 of inputs 0, 1 \(size 3\): output 0 is \[6, 6\] after \[3, 3\]"):
        find_batch(Contrastive(), (torch.randn(3, 4), torch.randn(3, 4)))


def test_a_loss_for_one_batch_alone_is_refused():
    target = torch.randn(5, 16)
    with pytest.raises(BatchError, match="takes a batch of 5 only"):
        find_batch(Mlp(), torch.randn(5, 16), lambda output: (output * target).sum())


@pytest.mark.slow
def test_a_module_whose_batch_is_found_is_searched():
    found = max_batch(Mlp(), torch.randn(8, 16), 40_000, loss=squares, **GREEDY)
    assert found.is_largest
    assert found.trials[0].batch == 8
    assert "dimension 0 of input 0 (size 8)" in found.found


# ---- bytes of other batches ------------------------------------------------------------------------------


def problem_of(batch) -> Problem:
    model, sample, loss = make(batch)
    return measure(model, sample, PlanRequest(None, loss)).problem


@pytest.mark.ci
def test_steps_of_other_batches_are_those_between_and_beyond():
    problems = {batch: problem_of(batch) for batch in (16, 32, 48, 96)}
    for batch in (48, 96):
        guess = interpolated(batch, (16, problems[16]), (32, problems[32]))
        expected = problems[batch]
        assert [data.size_bytes for data in guess.data] == [data.size_bytes for data in expected.data]
        peaks = [evaluate(one, one.no_recompute).peak_bytes for one in (guess, expected)]
        assert peaks[0] == pytest.approx(peaks[1], rel=0.01)  # of temporaries, some are not affine
    assert interpolated(16, (16, problems[16]), (32, problems[32])).data == problems[16].data


def test_steps_of_other_models_are_not_mixed():
    other = measure(built(Layers), rows(), PlanRequest(None, squares)).problem
    assert interpolated(3, (1, problem_of(1)), (2, other)) is None
    assert interpolated(3, (2, other), (2, other)) is None


# ---- the smallest budget ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cheapest():
    model, sample, loss = make(64)
    return {slowdown: smallest_budget(model, sample, slowdown, loss=loss, **GREEDY) for slowdown in (1, 1.1, 2)}


@pytest.mark.ci
@pytest.mark.slow
def test_the_plan_of_the_smallest_budget_is_fast_enough_and_was_measured_to_fit(cheapest):
    for slowdown, found in cheapest.items():
        assert 1 <= found.slowdown <= slowdown * (1 + 1e-6)
        plan = found.plan_file.plan
        assert plan.measured_peak_bytes <= plan.budget_bytes == found.budget_bytes
        assert found.budget_bytes <= found.eager_peak_bytes
        fast = [attempt for attempt in found.attempts if attempt.is_fast_enough]
        assert all(attempt.is_fast_enough == (attempt.slowdown <= slowdown * (1 + 1e-6)) for attempt in found.attempts)
        assert all(attempt.fits == (attempt.peak_bytes <= attempt.budget_bytes) for attempt in found.attempts)
        assert all(plan.peak_bytes <= attempt.peak_bytes for attempt in fast)
    assert cheapest[2].budget_bytes <= cheapest[1.1].budget_bytes <= cheapest[1].budget_bytes


def test_a_smaller_budget_has_a_slower_plan(cheapest):
    found = cheapest[1.1]
    model, sample, loss = make(64)
    below = round(0.97 * found.budget_bytes)
    try:
        planned = Rockmate(model, sample, below, loss=loss, cache=False, **GREEDY)
    except BudgetTooSmall:
        return
    # The times are another measurement's: by counts of what is recomputed, more has to be.
    assert planned.plan.recomputations > found.plan_file.plan.recomputations


def test_a_slowdown_below_one_is_refused():
    with pytest.raises(ValueError, match="would be a speed-up"):
        smallest_budget(Mlp(), torch.randn(4, 16), 0.9)


class OtherWay(nn.Module):
    """Many rows take another way than few."""

    def __init__(self, limit):
        super().__init__()
        self.layers, self.limit = nn.ModuleList(nn.Linear(32, 32) for _ in range(4)), limit

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh() if x.size(0) > self.limit else layer(x).relu()
        return x


@pytest.mark.parametrize(("limit", "checks"), [(10_000, 1), (100, 2)])
def test_each_way_through_the_module_is_compared_with_it_once(limit, checks, monkeypatch):
    compared, check = [], pipeline.replay_check

    def noted(graph, module, sample, *how):
        compared.append(sample.tensors[0].size(0))
        return check(graph, module, sample, *how)

    monkeypatch.setattr(pipeline, "replay_check", noted)
    model = OtherWay(limit)
    found = max_batch(model, torch.randn(16, 32), "600 KiB", **GREEDY)
    assert found.batch > 100
    assert len(found.trials) > 2
    assert len(compared) == checks
    assert compared[0] == 16
    planned = Rockmate(model, torch.randn(found.batch, 32), plan=found.plan_file)  # compares again
    assert len(compared) == checks + 1
    assert_trains_exactly(planned, [torch.randn(found.batch, 32)])
