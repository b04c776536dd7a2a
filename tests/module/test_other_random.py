"""Forwards that draw from random numbers of Python or NumPy: what goes by them runs by itself, or is refused."""

import copy
import random
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rkgb import ReplayMismatch, TraceError
from rkgb.recording.draws import OtherRandom
from rkgb.state.other_random import comparable, state_of
from rockmate import Rockmate, verify
from tests.module.steps import FEW_ROUNDS

WIDTH = 16


class Draws(nn.Module):
    """A layer, and what is done by numbers that are drawn."""

    def __init__(self, draw):
        super().__init__()
        self.draw, self.layer, self.rate = draw, nn.Linear(WIDTH, WIDTH), 0.3

    def forward(self, x):
        return self.draw(self, x)


def drops_by_python(m, x):
    return x if random.random() < m.rate else x + torch.tanh(m.layer(x))


def drops_by_uniform(m, x):
    return x if random.uniform(0, 1) < m.rate else x + torch.tanh(m.layer(x))


def drops_by_numpy(m, x):
    return x if np.random.uniform(0, 1) < m.rate else x + torch.tanh(m.layer(x))


def scales(m, x):
    return torch.tanh(m.layer(x)) * float(np.random.rand())


def masks_spans(m, x):
    mask = torch.zeros(len(x), 1)
    start = np.random.randint(0, len(x) - 8)
    mask[start : start + 8] = 1
    return torch.tanh(m.layer(x)) * (1 - mask)


def chooses(m, x):
    return random.choice([torch.sin, torch.tanh])(m.layer(x))


def shuffles(m, x):
    order = list(range(len(x)))
    random.shuffle(order)
    return torch.tanh(m.layer(x))[order]


def notes_only(m, x):
    m.drawn = torch.tensor(random.random())
    return torch.tanh(m.layer(x))


DECIDE = [drops_by_python, drops_by_uniform, drops_by_numpy, scales, masks_spans, chooses, shuffles, notes_only]


def network(*draws):
    torch.manual_seed(0)
    parts = [part for draw in draws for part in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), Draws(draw))]
    return nn.Sequential(*parts, nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 4))


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def streams():
    return torch.get_rng_state().sum().item(), hash(random.getstate()), int(np.random.get_state()[1].sum())


def steps(module, count=12):
    """Training from one seed, with all that it leaves."""
    seed(3)
    optimizer, found = torch.optim.SGD(module.parameters(), 0.1), []
    for _ in range(count):
        optimizer.zero_grad()
        output = module(torch.randn(64, WIDTH))
        output.square().mean().backward()
        found += [output.detach().clone(), *(None if p.grad is None else p.grad.clone() for p in module.parameters())]
        optimizer.step()
    return found, streams()


def assert_same_training(planned, eager):
    (found, ends), (expected, other_ends) = steps(planned), steps(eager)
    assert ends == other_ends
    for one, other in zip(found, expected, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("draw", DECIDE, ids=lambda draw: draw.__name__)
def test_a_submodule_that_goes_by_them_is_one_operation_and_training_is_the_modules(draw):
    model = network(draw)
    eager = copy.deepcopy(model)
    before = streams()
    match = r"submodule '3' is one operation .* draws from (Python|NumPy)'s random"
    with pytest.warns(UserWarning, match=match) as told:
        planned = Rockmate(model, torch.randn(64, WIDTH), 1.0, cache=False, limits=FEW_ROUNDS)
    assert streams()[1:] == before[1:]
    assert len([one for one in told if "draws from" in str(one.message)]) == 1
    assert planned.plans
    assert_same_training(planned, eager)
    assert not planned.fallbacks


def test_several_submodules_that_go_by_them_under_a_budget():
    model = network(drops_by_python, scales, masks_spans)
    eager = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="is one operation"):
        planned = Rockmate(model, torch.randn(64, WIDTH), 0.95, cache=False, limits=FEW_ROUNDS)
    assert_same_training(planned, eager)


@pytest.mark.parametrize("draw", DECIDE, ids=lambda draw: draw.__name__)
def test_a_root_that_goes_by_them_is_refused_and_says_what_to_do(draw):
    model, sample = Draws(draw), torch.randn(64, WIDTH)
    before = streams()
    with pytest.raises(TraceError, match=r"submodule '\(root\)' draws from .*torch.rand.*into a submodule"):
        Rockmate(model, sample, 1.0, cache=False)
    assert streams() == before


@pytest.mark.filterwarnings("ignore::rkgb.TraceWarning")
def test_verify_draws_alike_for_both():
    assert verify(network(scales, drops_by_numpy), torch.randn(64, WIDTH), 1.0).exact


# ---- what decides nothing ----------------------------------------------------------------------------------


def seeds_itself(m, x):
    np.random.seed(0)
    order = np.random.permutation(len(x))
    return torch.tanh(m.layer(x))[torch.as_tensor(order)]


@pytest.mark.filterwarnings("ignore:submodule '3' is one operation:rkgb.TraceWarning")
@pytest.mark.parametrize("draw", [drops_by_python, drops_by_uniform, drops_by_numpy], ids=lambda draw: draw.__name__)
def test_a_draw_that_is_held_against_nothing_is_told_and_planned(draw):
    model = network(draw)
    model[3].rate = 0.0
    eager = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"submodule '3' draws from .*, which decides nothing as it is set"):
        planned = Rockmate(model, torch.randn(64, WIDTH), 0.9, cache=False, limits=FEW_ROUNDS)
    for one, other in zip(steps(planned)[0], steps(eager)[0], strict=True):
        assert torch.equal(one, other)
    model[3].rate = eager[3].rate = 0.3  # and then the plan is none of this module any more
    with pytest.warns(UserWarning, match=r"rate is 0.3, but was 0.0"):
        assert_same_training(planned, eager)


def test_a_forward_that_sets_the_seed_itself_draws_the_same_at_every_call():
    model = network(seeds_itself)
    eager = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="decides nothing"):
        planned = Rockmate(model, torch.randn(64, WIDTH), 0.9, cache=False, limits=FEW_ROUNDS)
    for one, other in zip(steps(planned)[0], steps(eager)[0], strict=True):
        assert torch.equal(one, other)


# ---- other threads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("often", [True, False])
@pytest.mark.ci
def test_what_another_thread_draws_meanwhile_is_no_draw_of_the_models(often):
    stop = threading.Event()

    def draw():
        while not stop.wait(0.0 if often else 0.005):
            random.random()
            np.random.rand()

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        for _ in range(3):
            assert Rockmate(model, torch.randn(64, WIDTH), 1.0, cache=False, solver="greedy").plans  # no warning
        with pytest.raises(OtherRandom):
            Rockmate(Draws(drops_by_python), torch.randn(64, WIDTH), 1.0, cache=False)
    finally:
        stop.set()
        thread.join()


# ---- streams that are objects ------------------------------------------------------------------------------

OBJECTS = {"Generator": np.random.default_rng, "RandomState": np.random.RandomState, "Random": random.Random}
GLOBAL = random.Random(0)


def drops_by_a_global(m, x):
    return x if GLOBAL.random() < m.rate else x + torch.tanh(m.layer(x))


def drops_by_its_own(m, x):
    number = m.own.random_sample() if isinstance(m.own, np.random.RandomState) else m.own.random()
    return x if number < m.rate else x + torch.tanh(m.layer(x))


def with_its_own(own, rate):
    model = network(drops_by_its_own)
    model[3].own, model[3].rate = own, rate
    return model


@pytest.mark.parametrize("rate", [0.3, 0.01])  # at 0.01, whatever planning runs goes one way
@pytest.mark.parametrize("kind", OBJECTS)
def test_a_submodule_that_goes_by_a_stream_it_holds_is_one_operation(kind, rate):
    model = with_its_own(OBJECTS[kind](7), rate)
    eager = copy.deepcopy(model)
    before = comparable(state_of(model[3].own))
    with pytest.warns(UserWarning, match=f"submodule '3' is one operation .* draws from 'own', a {kind}"):
        planned = Rockmate(model, torch.randn(64, WIDTH), 1.0, cache=False, limits=FEW_ROUNDS)
    assert comparable(state_of(model[3].own)) == before
    assert_same_training(planned, eager)
    assert comparable(state_of(model[3].own)) == comparable(state_of(eager[3].own)) != before


@pytest.mark.parametrize("kind", OBJECTS)
def test_a_root_that_goes_by_a_stream_it_holds_is_refused(kind):
    model = with_its_own(OBJECTS[kind](7), 0.01)[3]
    before = comparable(state_of(model.own))
    with pytest.raises(OtherRandom, match=rf"submodule '\(root\)' draws from 'own', a {kind}"):
        Rockmate(model, torch.randn(64, WIDTH), 1.0, cache=False)
    assert comparable(state_of(model.own)) == before


def closed_over(own):
    return lambda m, x: x if own.random() < m.rate else x + torch.tanh(m.layer(x))


class Names(nn.Module):
    """Its method names the stream."""

    def __init__(self):
        super().__init__()
        self.layer, self.rate = nn.Linear(WIDTH, WIDTH), 0.01

    def forward(self, x):
        return self.dropped(x)

    def dropped(self, x):
        return x if GLOBAL.random() < self.rate else x + torch.tanh(self.layer(x))


IN_A_CLOSURE = random.Random(0)
NAMED = {
    "by a method": (Names, GLOBAL),
    "by a function that is held": (lambda: Draws(drops_by_a_global), GLOBAL),
    "in a closure": (lambda: Draws(closed_over(IN_A_CLOSURE)), IN_A_CLOSURE),
}


@pytest.mark.parametrize("place", NAMED)
def test_a_stream_that_functions_of_the_module_name(place):
    make, own = NAMED[place]
    model = network(drops_by_python)
    model[3] = make()
    model[3].rate = 0.01
    eager, start = copy.deepcopy(model), own.getstate()
    with pytest.warns(UserWarning, match="submodule '3' is one operation .* a Random,"):
        planned = Rockmate(model, torch.randn(64, WIDTH), 1.0, cache=False, limits=FEW_ROUNDS)
    assert own.getstate() == start
    found = steps(planned)[0]
    own.setstate(start)
    for one, other in zip(found, steps(eager)[0], strict=True):
        assert torch.equal(one, other)


def test_verify_draws_alike_from_streams_that_are_held():
    model = with_its_own(np.random.default_rng(3), 0.3)
    before = comparable(state_of(model[3].own))
    with pytest.warns(UserWarning, match="is one operation"):
        assert verify(model, torch.randn(64, WIDTH), 1.0).exact
    assert comparable(state_of(model[3].own)) == before


def test_a_stream_that_only_a_function_elsewhere_names_is_seen_by_the_replay_check():
    own = random.Random()

    def scaled(values):
        return values * own.random()

    with pytest.raises(ReplayMismatch, match=r"%mul_0 .*not deterministic"):
        Rockmate(network(lambda m, x: scaled(m.layer(x))), torch.randn(64, WIDTH), 1.0, cache=False)


def test_dropout_of_the_whole_is_no_draw_of_these():
    Rockmate(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.GELU()), F.relu(torch.randn(64, WIDTH)), 1.0)
