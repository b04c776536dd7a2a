"""Threads that plan and train on the device at the same time: each as if it were alone."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from rockmate import PeakMemory, Rockmate
from tests.accelerator.shared import shared_from
from tests.module import conftest, test_faults, test_generators, test_leaks, test_lifecycles, test_threads
from tests.module.models import Smooth, built, rows
from tests.module.steps import FEW_ROUNDS, assert_same_training, assert_trains_exactly, squares, train

pytestmark = [
    pytest.mark.ci,
    pytest.mark.filterwarnings("ignore::rockmate.FragmentationWarning"),
    pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning"),
]

globals().update(shared_from(conftest))
globals().update(
    shared_from(
        test_threads,
        but={
            "test_planning_leaves_no_seed_for_devices_that_were_never_used": "it is about CUDA alone",
            "test_a_process_forked_while_another_thread_plans_may_run_what_it_planned": "it runs nothing on a device",
        },
    )
)
globals().update(
    shared_from(
        test_faults,
        "test_a_fault_in_one_thread_leaves_a_module_in_another_alone",
        "test_threads_that_share_a_random_stream_repeat_each_its_own_numbers",
    )
)
globals().update(
    shared_from(
        test_leaks,
        "test_two_modules_train_in_two_threads",
        "test_one_module_runs_in_two_threads_at_once",
        "test_the_backward_may_run_in_another_thread_than_the_forward",
    )
)
globals().update(shared_from(test_lifecycles, "test_threads_that_share_a_module_plan_it_one_after_the_other"))
globals().update(shared_from(test_generators, "test_threads_that_share_a_generator_each_repeat_their_own_numbers"))


class Meanwhile:
    """Does something again and again in another thread, from its first time on to the end of the block."""

    def __init__(self, work):
        self.work, self.times = work, 0
        self._over, self._begun = threading.Event(), threading.Event()

    def __enter__(self):
        self._pool = ThreadPoolExecutor(1)
        self._done = self._pool.submit(self._repeat)
        assert self._begun.wait(60)
        return self

    def _repeat(self):
        while not self._over.is_set():
            self.work()
            self.times += 1
            self._begun.set()

    def __exit__(self, *_):
        self._over.set()
        self._pool.shutdown()
        self._done.result()


def trains(module, batch):
    def step():
        module.zero_grad()
        squares(module(batch)).backward()

    return step


@pytest.mark.parametrize("other", ["eager", "planned"])
def test_a_module_is_planned_while_another_one_trains(device, other):
    """The allocator's history does not tell threads apart: what others allocate is measured, too, and the budget holds.

    Nor could it: the backward of all threads runs on autograd's one thread for the device.
    """
    busy = built(Smooth, 2, seed=1)
    if other == "planned":
        busy = Rockmate(busy, rows(1), 0.9, loss=squares, limits=FEW_ROUNDS)
    expected = train(copy.deepcopy(getattr(busy, "original", busy)), [rows(1)] * 2)
    with PeakMemory(device) as beside:
        trains(busy, rows(1))()
    alone = Rockmate(built(Smooth), rows(), 0.7, loss=squares, limits=FEW_ROUNDS).plan
    with Meanwhile(trains(busy, rows(1))) as meanwhile:
        planned = Rockmate(
            built(Smooth), rows(), alone.baseline_peak_bytes + beside.peak_bytes, loss=squares, limits=FEW_ROUNDS
        )
    assert meanwhile.times > 1
    assert_trains_exactly(planned, [rows(1), rows(2)])
    planned.zero_grad()
    batch = rows(1)
    with PeakMemory(device) as memory:
        squares(planned(batch)).backward()
    assert memory.peak_bytes <= planned.plan.measured_peak_bytes <= planned.plan.budget_bytes
    busy.zero_grad()
    assert_same_training(train(busy, [rows(1)] * 2), expected)


def test_threads_on_streams_of_their_own_train_each_as_if_alone(device, extension):
    """Each waits for its own stream alone; copies take their time."""
    models = [Rockmate(built(Smooth, seed=seed), rows(), 0.7, loss=squares, limits=FEW_ROUNDS) for seed in range(2)]
    expected = [train(copy.deepcopy(model.original), [rows(1), rows(2)]) for model in models]
    start = threading.Barrier(2)
    extension.set_operation_us(20.0)

    def run(model):
        stream = torch.Stream(device)
        stream.wait_stream(torch.accelerator.current_stream())
        start.wait()
        with stream:
            found = train(model, [rows(1), rows(2)])
        stream.synchronize()
        return found

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, models))
    for mine, theirs in zip(found, expected, strict=True):
        for record in (*mine.steps, *theirs.steps):
            record.pop("random stream")
        assert_same_training(mine, theirs)


def test_a_module_on_one_device_is_planned_while_another_device_trains(device):
    """Histories are of devices: nothing that the second one does is seen."""
    second = torch.device(device.type, 1)
    busy = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)).to(second)
    alone = Rockmate(built(Smooth), rows(), 0.7, loss=squares, limits=FEW_ROUNDS).plan
    with Meanwhile(trains(busy, torch.randn(512, 32).to(second))):
        planned = Rockmate(built(Smooth), rows(), 0.7, loss=squares, limits=FEW_ROUNDS)
    plan = planned.plan
    assert (plan.baseline_peak_bytes, plan.budget_bytes) == (alone.baseline_peak_bytes, alone.budget_bytes)
    assert plan.measured_peak_bytes == plan.peak_bytes <= plan.budget_bytes
    assert_trains_exactly(planned, [rows(1)])
