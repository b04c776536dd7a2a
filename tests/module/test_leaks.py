"""Memory goes when its last user goes: without the garbage collector, step after step, and without a backward."""

import contextlib
import copy
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from rkgb.devices.allocation_log import AllocationLog
from rkgb.devices.registry import device_of
from rockmate import Rockmate, zoo
from rockmate.runtime.step import Handle, Step
from tests.module.models import (
    ROWS,
    WIDTH,
    Layers,
    Normalised,
    Smooth,
    Tied,
    TwoHeads,
    built,
    images,
    rows,
    tokens,
)
from tests.module.steps import assert_same_training, keep_every_other, keep_nothing, recomputing, squares, train
from tests.where import here, placed

MODELS = {
    "layers": (Layers, rows),
    "normalised": (Normalised, images),
    "tied": (Tied, tokens),
    "two-heads": (TwoHeads, rows),
}
every_model = pytest.mark.parametrize(("make", "batch"), MODELS.values(), ids=MODELS)
every_plan = pytest.mark.parametrize("recompute", [keep_nothing, keep_every_other])


@pytest.fixture(autouse=True)
def without_collector():
    """What only the garbage collector frees counts as a leak."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def net_bytes(log: AllocationLog) -> int:
    return sum(event.size_bytes for event in log.events)


def living_bytes() -> int:
    """Of all tensors there are, by the device's count, or else of the plain ones by Python's."""
    if here().type != "cpu":
        return torch.accelerator.memory.memory_allocated(here())
    plain = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]
    found: dict[int, int] = {}
    for one in plain:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # some have no memory: undefined ones, sparse ones
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return sum(found.values())


@every_plan
@every_model
def test_twenty_steps_leave_nothing(make, batch, recompute):
    sample = batch()
    model = recomputing(built(make), sample, recompute)
    squares(model(sample)).backward()
    model.zero_grad()
    with AllocationLog(here()) as log:
        for _ in range(20):
            squares(model(sample)).backward()
            model.zero_grad()
    assert net_bytes(log) == 0


@every_plan
@every_model
def test_a_forward_without_a_backward_leaves_nothing(make, batch, recompute):
    sample = batch()
    model = recomputing(built(make), sample, recompute)
    with AllocationLog(here()) as log:
        for _ in range(3):
            model(sample)
    assert net_bytes(log) == 0


def test_a_forward_with_only_a_part_of_its_backward_leaves_nothing():
    model = recomputing(built(TwoHeads), rows())
    with AllocationLog(here()) as log:
        output = model(rows(1))
        squares(output["left"]).backward(inputs=[model.left.weight], retain_graph=True)
        del output
        model.zero_grad()
    assert net_bytes(log) == 0


@pytest.mark.filterwarnings("ignore::rockmate.errors.DoubleBackwardWarning")
def test_a_second_order_step_leaves_nothing():
    model = recomputing(built(Smooth), rows())
    with AllocationLog(here()) as log:
        for _ in range(3):
            gradients = torch.autograd.grad(squares(model(rows(1))), list(model.parameters()), create_graph=True)
            sum(gradient.square().sum() for gradient in gradients).backward()
            del gradients
            model.zero_grad()
    assert net_bytes(log) == 0


def test_plans_of_these_tests_keep_values_of_the_forward():
    model = recomputing(built(Layers), rows(), keep_every_other)
    assert len(model._member.planned.program.forward_keeps) > 2


def living(kind: type) -> list[object]:
    return [thing for thing in gc.get_objects() if type(thing) is kind]


@every_plan
@pytest.mark.ci
def test_steps_and_handles_die_with_the_graph(recompute):
    model = recomputing(built(Layers), rows(), recompute)
    before = len(living(Step)), len(living(Handle))
    output = model(rows(1))
    assert len(living(Step)) == before[0] + 1
    del output
    assert (len(living(Step)), len(living(Handle))) == before
    loss = squares(model(rows(1)))
    loss.backward()
    assert (len(living(Step)), len(living(Handle))) == before


def test_outputs_die_when_the_user_drops_them():
    model = recomputing(built(Layers), rows())
    output = model(rows(1))
    reference = weakref.ref(output)
    squares(output).backward()
    del output
    assert reference() is None


def test_a_backward_frees_as_it_goes():
    """With the output dropped, a second step does not find the first one's memory taken."""
    model = recomputing(built(Layers), rows())
    with AllocationLog(here()) as first:
        squares(model(rows(1))).backward()
    model.zero_grad()
    with AllocationLog(here()) as second:
        for _ in range(5):
            squares(model(rows(1))).backward()
            model.zero_grad()
    assert second.peak_bytes <= first.peak_bytes


def test_planning_leaves_nothing_but_the_plan():
    network = built(Layers)
    recomputing(network, rows())  # what is imported or cached at the first time
    with AllocationLog(here()) as log:
        model = copy.deepcopy(network)
        kept = sum(device_of(here()).allocated_bytes(parameter.nbytes) for parameter in model.parameters())
    assert net_bytes(log) == kept


def test_a_module_dies_with_its_last_reference():
    model = recomputing(built(Layers), rows())
    squares(model(rows(1))).backward()
    reference = weakref.ref(model.original)
    del model
    gc.collect()
    assert reference() is None


class Table(Layers):
    """Has a tensor that is neither a parameter nor a buffer: a constant of what is traced."""

    def __init__(self):
        super().__init__()
        self.table = placed(torch.ones(ROWS, WIDTH))

    def forward(self, hidden):
        return super().forward(hidden + self.table)


class Penalised(Layers):
    """Its forward takes a gradient, with which it goes on."""

    def forward(self, hidden):
        (gradient,) = torch.autograd.grad(self.layers[0](hidden).sum(), self.layers[0].weight)
        return super().forward(hidden @ gradient)


class EndsInItsOutput(nn.Sequential):
    """Called as a whole; its last operation saves what it gives."""

    def __init__(self):
        super().__init__(
            nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
        )


@pytest.mark.parametrize(
    ("make", "opaque"),
    [(Layers, ""), (Layers, "layers.1"), (Table, ""), (Penalised, ""), (EndsInItsOutput, "1")],
    ids=["plain", "called whole", "table", "gradient inside", "saves its output"],
)
def test_nothing_is_left_of_a_model_that_was_planned_and_is_gone(make, opaque):
    def plan():
        model = built(make)
        whole = [model.get_submodule(opaque)] if opaque else []
        Rockmate(model, rows(), 1.0, loss=squares, solver="greedy", opaque=whole)
        del model, whole
        gc.collect()

    plan()  # what is imported or cached at the first time
    before = living_bytes()
    plan()
    assert living_bytes() == before


@pytest.mark.parametrize("frozen", [False, True])
def test_planning_collects_its_own_garbage_and_leaves_frozen_what_was(frozen):
    Rockmate(built(Layers), rows(), 0.7, solver="greedy")  # what is imported or cached at the first time
    gc.collect()
    model = built(Layers)
    if frozen:
        gc.freeze()
    try:
        reference = weakref.ref(Rockmate(model, rows(), 0.7, solver="greedy").original)
        assert (gc.get_freeze_count() > 0) == frozen
        del model
        assert reference() is None  # without a collection after it
    finally:
        gc.unfreeze()


# ---- threads ----------------------------------------------------------------------------------------


@pytest.mark.ci
def test_two_modules_train_in_two_threads():
    """Without random operations: all threads of a process draw from one random stream."""
    entry = zoo.get("mixer-tiny", device=here())
    models = [
        recomputing(built(Smooth), rows()),
        recomputing(built(Normalised), images()),
        recomputing(entry.model, entry.sample, loss=entry.loss),
    ]
    work = [([rows(1)] * 5, squares), ([images(1)] * 5, squares), ([entry.sample] * 5, entry.loss)]
    expected = [train(copy.deepcopy(m.original), *job) for m, job in zip(models, work, strict=True)]
    start = threading.Barrier(len(models))

    def run(model, batches, loss):
        start.wait()
        return train(model, batches, loss)

    with ThreadPoolExecutor(len(models)) as pool:
        jobs = [pool.submit(run, model, *job) for model, job in zip(models, work, strict=True)]
        found = [job.result() for job in jobs]
    for one, other in zip(found, expected, strict=True):
        for record in (*one.steps, *other.steps):
            record.pop("random stream")
        assert_same_training(one, other)


def test_one_module_runs_in_two_threads_at_once():
    model = recomputing(built(Smooth), rows())
    expected = [torch.autograd.grad(squares(model.original(rows(s))), list(model.parameters())) for s in (1, 2)]
    start = threading.Barrier(2)

    def run(seed):
        start.wait()
        return [torch.autograd.grad(squares(model(rows(seed))), list(model.parameters())) for _ in range(10)]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, (1, 2)))
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for gradients in one for a, b in zip(gradients, other, strict=True))


def test_the_backward_may_run_in_another_thread_than_the_forward():
    model = recomputing(built(Layers), rows())
    torch.manual_seed(0)
    squares(model.original(rows(1))).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    torch.manual_seed(0)
    loss = squares(model(rows(1)))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loss.backward).result()
    assert all(torch.equal(p.grad, other) for p, other in zip(model.parameters(), expected, strict=True))


@pytest.mark.ci
def test_the_sample_is_not_kept_alive():
    sample = rows()
    data = weakref.ref(sample.untyped_storage())
    network = built(Layers)
    model = Rockmate(network, sample, 0.9, loss=squares)
    assert data() is not None
    del sample
    gc.collect()
    assert data() is None
    squares(copy.deepcopy(model)(rows(1))).backward()
