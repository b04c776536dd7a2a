"""Threads: what planning changes for the whole process, only one thread does at a time, and no other one notices."""

import itertools
import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn

import rkgb
from rkgb.process.turns import TURNS, warnings_collected
from rockmate import Rockmate, verify
from tests.where import here, placed

WIDTH = 16
AMPLE_BYTES = 10**6
ENTER = torch.autograd.graph.saved_tensors_hooks.__enter__
IS_TRACING = torch._C._is_tracing


def squares(output):
    return output.square().mean()


def network(drop=0.0):
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(drop), nn.Linear(4 * WIDTH, WIDTH))
    return placed(nn.Sequential(*layers) if drop else nn.Sequential(*layers[:2], layers[3]))


def rows(seed=0, count=64):
    return placed(torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)))


def at_once(*jobs):
    """What they return, each in a thread of its own."""
    start = threading.Barrier(len(jobs))

    def run(job):
        start.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(60) for future in [pool.submit(run, job) for job in jobs]]


def assert_nothing_is_left():
    assert torch._C._is_tracing is IS_TRACING
    assert torch.autograd.graph.saved_tensors_hooks.__enter__ is ENTER
    assert not torch.autograd.profiler._is_profiler_enabled
    assert not TURNS.is_planner()


def gradients(module, batch):
    module.zero_grad()
    squares(module(batch)).backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


def assert_trains_as_itself(planned, batch):
    for one, other in zip(gradients(planned, batch), gradients(planned.original, batch), strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")
@pytest.mark.ci
def test_several_models_are_planned_in_several_threads():
    planned = at_once(*(partial(Rockmate, network(), rows(count=n), AMPLE_BYTES) for n in (64, 96, 128)))
    assert_nothing_is_left()
    for one, count in zip(planned, (64, 96, 128), strict=True):
        assert len(one.plans) == 1
        assert_trains_as_itself(one, rows(1, count))


def test_one_model_is_planned_in_several_threads():
    model = network()
    parameters = list(model.parameters())
    planned = at_once(*(lambda: Rockmate(model, rows(), AMPLE_BYTES) for _ in range(2)))
    assert_nothing_is_left()
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    for one in planned:
        assert_trains_as_itself(one, rows(1))


def draw_here(number):
    torch.rand(number, device=here())


class Disturbed(nn.Module):
    """While it runs, another thread draws random numbers: more in every run."""

    def __init__(self, draw, drop):
        super().__init__()
        self.layers = network(drop)
        self.draw, self.runs = draw, itertools.count(1)

    def forward(self, x):
        thread = threading.Thread(target=self.draw, args=(next(self.runs),))
        thread.start()
        thread.join()
        return self.layers(x)


@pytest.mark.parametrize("drop", [0.0, 0.1], ids=["plain", "dropout"])
@pytest.mark.parametrize("draw", [draw_here, torch.manual_seed], ids=["rand", "manual_seed"])
def test_a_thread_that_draws_random_numbers_is_told_from_the_module(draw, drop):
    model = Disturbed(draw, drop)
    with pytest.warns(rkgb.TraceWarning, match="another thread draws PyTorch's random numbers"):
        planned = Rockmate(model, rows(), AMPLE_BYTES)
    torch.manual_seed(1)
    found = gradients(planned, rows(1))
    torch.manual_seed(1)
    for one, other in zip(found, gradients(model.layers, rows(1)), strict=True):
        assert torch.equal(one, other)


class AsMuchAtOtherMoments(nn.Module):
    """In its first runs another thread draws as much each time, now before it and now after: later ones, never."""

    def __init__(self, disturbed_runs):
        super().__init__()
        self.layers = network(0.1)
        self.disturbed_runs, self.runs = disturbed_runs, itertools.count()

    def forward(self, x):
        run = next(self.runs)
        if run < self.disturbed_runs and run % 2:
            self.draw_elsewhere()
        y = self.layers(x)
        if run < self.disturbed_runs and not run % 2:
            self.draw_elsewhere()
        return y

    def draw_elsewhere(self):
        thread = threading.Thread(target=draw_here, args=(3,))
        thread.start()
        thread.join()


@pytest.mark.parametrize("disturbed_runs", [13, 24, 36])
def test_draws_of_another_thread_are_told_though_runs_have_as_many_of_them(disturbed_runs):
    model = AsMuchAtOtherMoments(disturbed_runs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rkgb.TraceWarning)  # that there is such a thread
        planned = Rockmate(model, rows(), AMPLE_BYTES)
    assert verify(planned, rows()).exact


def test_a_thread_that_draws_all_the_time_does_no_harm():
    over = threading.Event()

    def draw():
        while not over.wait(0.002):
            torch.rand(3, device=here())

    with ThreadPoolExecutor(1) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore", rkgb.TraceWarning)  # that there is such a thread
        drawing = pool.submit(draw)
        try:
            planned = Rockmate(network(0.1), rows(), AMPLE_BYTES)
        finally:
            over.set()
            drawing.result()
    assert verify(planned, rows()).exact


def test_planning_leaves_no_seed_for_devices_that_were_never_used():
    before = len(torch.cuda._queued_calls)
    Rockmate(network(0.1), rows(), AMPLE_BYTES)
    assert len(torch.cuda._queued_calls) == before


def test_warnings_of_other_threads_go_their_way():
    inside, told = threading.Event(), threading.Event()

    def warn():
        inside.wait(10)
        warnings.warn("of another thread", UserWarning, stacklevel=1)
        told.set()

    with ThreadPoolExecutor(1) as pool, pytest.warns(UserWarning, match="of another thread"):  # noqa: PT031
        other = pool.submit(warn)
        with warnings_collected() as collected:
            inside.set()
            told.wait(10)
            warnings.warn("of this one", UserWarning, stacklevel=1)
        other.result()
    assert [str(one.message) for one in collected] == ["of this one"]


def test_steps_of_other_modules_go_on_while_one_is_planned_and_those_of_its_parts_wait():
    shared = network()
    whole, other = nn.Sequential(shared, nn.Tanh()), network()

    def run(module):
        with TURNS.running(module):
            return True

    with ThreadPoolExecutor(2) as pool, TURNS.planning(whole):
        assert pool.submit(run, other).result(10)
        waiting = pool.submit(run, shared)
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
    assert waiting.result(10)


def test_hooks_that_another_thread_puts_around_its_saved_tensors_are_not_refused():
    class Meeting(nn.Module):
        def forward(self, x):
            if other:
                other.pop().join()
            return x * x

    def with_hooks():
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            done.append(torch.jit.is_tracing())

    done = []
    model = placed(nn.Sequential(nn.Linear(WIDTH, WIDTH), Meeting()))
    thread = threading.Thread(target=with_hooks)
    other = [thread]
    model[1].register_forward_pre_hook(lambda *_: thread.start() if other else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rkgb.TraceWarning)  # of the hook
        Rockmate(model, rows(), AMPLE_BYTES)
    assert done == [False]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_forked_while_another_thread_plans_may_run_what_it_planned():
    inside, over = threading.Event(), threading.Event()
    model = network()

    def plan():
        with TURNS.planning(model):
            inside.set()
            over.wait(10)

    with ThreadPoolExecutor(1) as pool:
        planning = pool.submit(plan)
        inside.wait(10)
        child = os.fork()
        if not child:
            with TURNS.running(model):
                os._exit(7)
        over.set()
        planning.result()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
