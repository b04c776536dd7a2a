"""Threads: what planning changes for the whole process, only one thread does at a time, and no other one notices."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn

from rkgb.turns import TURNS
from rockmate import Rockmate

WIDTH = 16
AMPLE_BYTES = 10**6
ENTER = torch.autograd.graph.saved_tensors_hooks.__enter__
IS_TRACING = torch._C._is_tracing


def squares(output):
    return output.square().mean()


def network(drop=0.0):
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(drop), nn.Linear(4 * WIDTH, WIDTH))
    return nn.Sequential(*layers) if drop else nn.Sequential(*layers[:2], layers[3])


def rows(seed=0, count=64):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


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
