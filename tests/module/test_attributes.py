"""What a forward leaves in attributes is there after a planned call, too: values, gradients, plain values."""

import collections
import copy
import io
import types
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from rk_solvers import peak_and_time
from rk_solvers.groups import normalise
from rkgb import TraceError, make_B, make_sample
from rkgb.export.json_form import from_json, to_json
from rkgb.state.attributes import Snapshot, outline
from rkgb.tree import leaves
from rockmate import BudgetTooSmall, Rockmate
from rockmate.errors import PlanFileMismatch, ReplanWarning
from rockmate.planning.trying.real_step import peak_of
from tests.module.steps import FEW_ROUNDS, measured_for, peak_of_step, runner_for

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
STEPS = 3
ROWS = 256


class Collector:
    """A plain object that several submodules hold."""

    def __init__(self):
        self.losses = []
        self.last = None


@dataclass
class Statistics:
    """What a layer tells of its call."""

    mean: torch.Tensor
    count: int = 0
    names: list = field(default_factory=list)


class Inner(nn.Module):
    """A layer that leaves something behind."""

    def __init__(self, leave, collector):
        super().__init__()
        self.leave, self.collector = leave, collector
        self.layer = nn.Linear(64, 64)
        self.register_buffer("scale", torch.ones(64))
        self.aux, self.calls, self.items, self.table = None, 0, [], {}
        self.box = types.SimpleNamespace(value=None)

    def forward(self, x):
        return self.leave(self, F.dropout(torch.tanh(self.layer(x)), 0.1, self.training))


class Outer(nn.Module):
    """Two such layers, one of them called twice, and layers to be recomputed."""

    def __init__(self, leave):
        super().__init__()
        collector = Collector()
        self.collector = collector
        self.first, self.second = Inner(leave, collector), Inner(leave, collector)
        self.last = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, x):
        return self.last(self.second(self.first(self.second(x))))


def leaves_aux(m, h):
    m.aux = h.abs().mean()
    return h


def leaves_large(m, h):
    m.aux = h * 2
    return h + 1


def reads_it_later(m, h):
    m.aux = h.sigmoid()
    return h * m.aux


def leaves_detached(m, h):
    m.aux = h.detach()
    return h


def leaves_without_gradient(m, h):
    with torch.no_grad():
        m.aux = h.exp().mean(0)
    return h


def leaves_alias_of_the_output(m, h):
    m.aux = h
    return h


def leaves_view(m, h):
    m.aux = h[:, :3]
    return h


def leaves_input_and_state(m, h):
    m.items = [h, m.layer.weight, m.scale]
    return h


def changes_what_it_left(m, h):
    m.aux = h * 1.5
    m.aux.add_(1)
    return h


def appends(m, h):
    m.items.append(h.square().mean())
    return h


def extends_fresh(m, h):
    m.items = []
    m.items.append(h.mean())
    m.items.extend([h.std(), "text", 3])
    return h


def clears_and_appends(m, h):
    m.items.clear()
    m.items.append(h.mean())
    return h


def fills_dict(m, h):
    m.table["mean"], m.table["shape"] = h.mean(), h.shape
    m.table.pop("gone", None)
    return h


def leaves_structures(m, h):
    m.aux = {"pair": (h.mean(), h.std()), "statistics": Statistics(h.sum(), m.calls and 1, ["mean"])}
    return h


def of_a_shared_object(m, h):
    m.collector.losses.append(h.mean())
    m.collector.last = h.max()
    m.box.value = h.min()
    return h


def in_a_deque(m, h):
    if not isinstance(m.items, collections.deque):
        m.items = collections.deque([torch.zeros(())], maxlen=3)
    m.items.append(h.mean())
    return h


def counts(m, h):
    m.calls += 1
    m.box.value = 2.5
    m.collector.last = "seen"
    return h


def averages_a_number(m, h):
    m.calls = 0.9 * m.calls + 0.1 * h.shape[0]
    m.table["steps"] = m.table.get("steps", 0) + 2
    return h


def toggles(m, h):
    m.flag = True
    m.box.value = not m.box.value
    return h


def makes_at_first(m, h):
    if m.aux is None:
        m.aux = torch.arange(64).to(h.dtype) / 64
    return h * m.aux


def within_a_checkpoint(m, h):
    def inside(h):
        m.aux = h.sigmoid().mean()
        return h * 2

    return checkpoint(inside, h, use_reentrant=False)


def within_a_reentrant_checkpoint(m, h):
    def inside(h):
        m.aux = h.sigmoid().mean()
        return h * 2

    return checkpoint(inside, h, use_reentrant=True)


def in_training_alone(m, h):
    if m.training:
        m.aux = h.mean()
    return h


def sets_none(m, h):
    m.aux = h.mean()
    m.aux = None
    m.box.value = None
    return h


def deletes(m, h):
    m.temporary = h * 2
    h = h + m.temporary
    del m.temporary
    return h


HABITS = [
    leaves_aux,
    leaves_large,
    reads_it_later,
    leaves_detached,
    leaves_without_gradient,
    leaves_alias_of_the_output,
    leaves_view,
    leaves_input_and_state,
    changes_what_it_left,
    appends,
    extends_fresh,
    clears_and_appends,
    fills_dict,
    leaves_structures,
    of_a_shared_object,
    in_a_deque,
    counts,
    averages_a_number,
    toggles,
    makes_at_first,
    within_a_checkpoint,
    within_a_reentrant_checkpoint,
    in_training_alone,
    sets_none,
    deletes,
]


def held(module):
    """What the modules hold, by place: outlines, tensors, which require gradients."""
    found = {}
    for one in Snapshot(module.named_modules()).held.values():
        if isinstance(one.thing, (nn.Module, Collector, types.SimpleNamespace)):
            for name, value in one.content.items():
                if not callable(value) and not isinstance(value, (Collector, types.SimpleNamespace)):
                    tensors = leaves(value)
                    place = f"{one.path} {one.steps} {name}"
                    found[place] = (outline(value), [(t.detach().clone(), t.requires_grad) for t in tensors])
    return found


def losses_of(module, before):
    """All that attributes hold that takes a gradient and is new."""
    tensors = {id(t): t for t in Snapshot(module.named_modules()).tensors() if t.grad_fn is not None}
    return [t for key, t in tensors.items() if key not in before]


def train(model, original, sample, steps=STEPS):
    """What each step leaves: everything that a training loop can see."""
    found = []
    for step in range(steps):
        model.eval()
        with torch.set_grad_enabled(step % 2 == 0):
            model(sample)
        model.train()
        for parameter in model.parameters():
            parameter.grad = None
        if step == 1:  # as loops do
            original.collector.losses.clear()
            for part in (original.first, original.second):
                part.items.clear()
        before = {id(t): t for t in Snapshot(original.named_modules()).tensors()}
        output = model(sample)
        left = held(original)
        loss = output.square().mean() + sum(t.float().square().mean() for t in losses_of(original, before))
        loss.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        found.append((output.detach(), loss.detach(), gradients, left, torch.get_rng_state()))
    return found


def same(one, other):
    """Equal to the bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return bool(one == other)


def compared(leave, budget=0.8, steps=STEPS, **kwargs):
    """Train by a plan and eagerly, and compare."""
    sample = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(3))
    model, eager = called(leave, sample), called(leave, sample)
    before = held(model)
    planned = Rockmate(model, sample, budget, limits=FEW_ROUNDS, **kwargs)
    assert same(held(model), before), "planning leaves no trace"
    torch.manual_seed(1)
    expected = train(eager, eager, sample, steps)
    torch.manual_seed(1)
    found = train(planned, model, sample, steps)
    for step, (one, other) in enumerate(zip(expected, found, strict=True)):
        for key, value in one[3].items():
            assert same(value, other[3].get(key)), f"step {step}: {key}: {other[3].get(key)} instead of {value}"
        assert same(one, other), f"step {step} differs"
    return planned, sample


def called(leave, sample):
    """A model that has been called once: what a first call makes is there."""
    torch.manual_seed(0)
    model = Outer(leave)
    model(sample)
    return model


@pytest.mark.parametrize("leave", HABITS, ids=lambda leave: leave.__name__)
def test_what_forward_leaves_in_attributes_is_the_module_s(leave):
    planned, _ = compared(leave)
    assert len(planned.plans) == 1


def sets_what_was_so(m, h):
    m.flag, m.note = True, "trained"
    return h


def test_plain_values_are_set_though_they_were_so_when_the_module_was_planned():
    """Nothing changes while it is planned: that forward sets them is seen."""
    planned, sample = compared(sets_what_was_so)
    planned.first.flag, planned.first.note = False, "evaluated"
    planned(sample)
    assert (planned.first.flag, planned.first.note, len(planned.plans)) == (True, "trained", 1)


# ---- what no plan writes ------------------------------------------------------------------------------------


def starts_from_the_last(m, h):
    m.aux = h.detach() if m.aux is None else h.detach() + 0.5 * m.aux
    return h + m.aux


def accumulates(m, h):
    m.aux = (0 if m.aux is None else m.aux) + h.detach().mean()
    return h


def goes_by_a_counter(m, h):
    m.calls += 1
    return h * 2 if m.calls % 3 == 0 else h


def multiplies_by_a_counter(m, h):
    m.calls += 1
    return h * m.calls


def keeps_three(m, h):
    m.items.append(h.mean())
    if len(m.items) > 3:
        m.items.pop(0)
    return h


def clears_when_full(m, h):
    if len(m.items) > 1:
        m.items.clear()
    m.items.append(h.mean())
    return h


def keeps_the_one_before(m, h):
    m.box.value, m.aux = m.aux, h.detach().mean()
    return h


def joins_lists(m, h):
    m.items = [*m.items, h.mean()]
    return h


def grows_a_text(m, h):
    m.note = getattr(m, "note", "") + "x"
    return h


CARRYING = [
    starts_from_the_last,
    accumulates,
    goes_by_a_counter,
    multiplies_by_a_counter,
    keeps_three,
    clears_when_full,
    keeps_the_one_before,
    joins_lists,
    grows_a_text,
]


@pytest.mark.filterwarnings("ignore:submodule .* is one operation of the graph:rkgb.TraceWarning")
@pytest.mark.parametrize("leave", CARRYING, ids=lambda leave: leave.__name__)
def test_a_submodule_that_carries_state_in_attributes_is_one_operation(leave):
    compared(leave, budget=0.97, steps=5)


@pytest.mark.parametrize("leave", CARRYING, ids=lambda leave: leave.__name__)
def test_a_module_that_carries_state_in_an_attribute_is_refused_by_its_name(leave):
    model, sample = Inner(leave, Collector()), torch.randn(8, 64)
    model(sample)
    before = held(model)
    with pytest.raises(TraceError, match=r"attribute '(aux|calls|items|box.value|note)' of submodule '\(root\)'"):
        Rockmate(model, sample, 0.8)
    assert same(held(model), before)


LISTED = []


def into_a_global(m, h):
    LISTED.append(h.mean())
    return h


def into_a_class(m, h):
    Classed.losses.append(h.mean())
    return h


class Classed:
    losses: ClassVar[list] = []


def into_a_variable():
    found = {}

    def leave(m, h):
        found["aux"] = [h.mean()]
        return h

    return leave


@pytest.mark.parametrize(
    ("leave", "name"),
    [
        (into_a_global, "global 'LISTED'"),
        (into_a_class, "attribute of the class Classed"),
        (into_a_variable(), "variable 'found'"),
    ],
    ids=["global", "class", "variable"],
)
@pytest.mark.ci
def test_tensors_that_outlive_forward_elsewhere_are_refused_by_the_name_of_the_place(leave, name):
    model = Outer(leave)
    with pytest.raises(TraceError, match=f"puts the tensor %mean_.*{name}"):
        Rockmate(model, torch.randn(8, 64), 0.8)
    assert not LISTED
    assert not Classed.losses


# ---- graphs, files, bytes -----------------------------------------------------------------------------------


def test_both_front_ends_record_what_is_left_and_files_of_graphs_hold_it():
    for tracer in ("jit", "record"):
        model, sample = Outer(of_a_shared_object).eval(), torch.randn(8, 64)
        graph = make_B(model, sample, tracer=tracer)
        assert graph.tracer == tracer
        again = from_json(to_json(graph))
        assert [str(write) for write in graph.attributes] == [
            "attribute 'collector.last' of submodule '(root)'",
            "attribute 'collector.losses' of submodule '(root)'",
            "attribute 'box.value' of submodule 'first'",
            "attribute 'box.value' of submodule 'second'",
        ]
        assert again.attributes == graph.attributes


@pytest.mark.ci
def test_a_plan_file_holds_for_a_module_that_leaves_the_same_and_for_no_other():
    planned, sample = compared(fills_dict)
    file = planned.plan_file()
    assert any("table['mean']" in write for write in file.graph.attributes)
    again = Rockmate(called(fills_dict, sample), sample, plan=file)
    again(sample)
    assert again.first.table["mean"].requires_grad

    def fills_another(m, h):
        m.table["other"], m.table["shape"] = h.mean(), h.shape
        m.table.pop("gone", None)
        return h

    with pytest.raises(PlanFileMismatch, match=r"it writes the attribute \"?table\['other'\]"):
        Rockmate(called(fills_another, sample), sample, plan=file)


@pytest.mark.parametrize("with_loss", [False, True])
@pytest.mark.parametrize("leave", [leaves_aux, leaves_large, appends])
def test_a_step_that_takes_gradients_through_attributes_is_within_the_budget(leave, with_loss):
    """Larger ones have gradients where the loss reads them."""
    sample = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(3))
    model = called(leave, sample)

    def loss(output):
        tensors = [part.aux for part in (model.first, model.second) if part.aux is not None]
        tensors += [item for part in (model.first, model.second) for item in part.items[-1:]]
        return output.square().mean() + sum(tensor.square().mean() for tensor in tensors)

    planned = Rockmate(model, sample, 0.85, loss=loss if with_loss else None, limits=FEW_ROUNDS)
    assert planned.plan.recomputations > 0
    for _ in range(3):
        planned.zero_grad()
        for part in (model.first, model.second):
            part.items.clear()
        assert (
            peak_of(planned, make_sample(model, sample), loss, torch.device("cpu")).allocated_bytes
            <= planned.plan.budget_bytes
        )


class Regularised(nn.Module):
    """Leaves a loss in an attribute, which keeps what it is of until the next call."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(10))
        self.auxiliary = None

    def forward(self, x):
        h = x
        for number, layer in enumerate(self.layers):
            h = torch.tanh(layer(h))
            if number == 8:
                self.auxiliary = h.abs().mean()
        return h


@pytest.mark.parametrize("with_loss", [False, True])
def test_what_a_loss_in_an_attribute_saved_is_counted_to_the_end_where_it_may_not_be_trained(with_loss):
    """It keeps that until the next call, which a later moment of the backward has no room for."""
    model, sample = Regularised(), torch.randn(ROWS, 64)

    def loss(output):
        return output.mean()

    measured = measured_for(model, sample, loss if with_loss else None)
    problem = measured.problem
    early = range([op.name for op in problem.forward].index("tanh_6") + 1)
    stage = [op.name for op in problem.backward].index("tanh_6.backward")
    groups = tuple(tuple(early) if place == stage else () for place in range(len(problem.no_recompute)))
    recompute = normalise(problem, groups)
    predicted_bytes, _ = peak_and_time(problem, recompute)
    found_bytes = {}
    for is_trained in (False, True):
        model.zero_grad()

        def whole(output, is_trained=is_trained):
            return output.mean() + model.auxiliary if is_trained else output.mean()

        found_bytes[is_trained] = peak_of_step(runner_for(measured, model, recompute), (sample,), whole)
    assert found_bytes[True] < found_bytes[False] == predicted_bytes


def test_a_loss_in_an_attribute_that_the_loss_is_seen_to_train_keeps_nothing_after_its_backward():
    model, sample = Regularised(), torch.randn(ROWS, 64)
    known, assumed = (
        Rockmate(model, sample, 1.0, loss=loss, solver="keep-all")
        for loss in (lambda out: out.mean() + model.auxiliary, lambda out: out.mean())
    )
    assert [plan.plan_file().asked.assumed for plan in (known, assumed)] == [(), ("mean_0",)]


def test_copies_and_pickles_of_a_planned_module_leave_things_in_their_own_attributes():
    planned, sample = compared(counts)
    calls = planned.original.first.calls
    twin = copy.deepcopy(planned)
    file = io.BytesIO()
    torch.save(planned, file)
    file.seek(0)
    for other in (twin, torch.load(file, weights_only=False)):
        other(sample).sum().backward()
        assert other.original.first.calls == calls + 1
    assert planned.original.first.calls == calls


def test_an_object_put_in_the_place_of_another_is_written_into():
    """What forward writes into is looked for at every call."""
    planned, sample = compared(of_a_shared_object)
    planned.original.second.box = types.SimpleNamespace(value=3)
    planned(sample)
    assert planned.original.second.box.value.requires_grad
    assert len(planned.plans) == 1


def goes_by_an_entry(m, h):
    m.table["mean"] = h.mean()
    return h * m.table.setdefault("scale", 2.0)


@pytest.mark.ci
def test_other_entries_of_a_dictionary_that_forward_writes_into_are_settings():
    planned, sample = compared(goes_by_an_entry)
    planned.first.table.pop("mean")
    planned(sample)
    assert len(planned.plans) == 1
    planned.first.table["scale"] = 3.0
    with pytest.warns(ReplanWarning, match="first.table"):
        planned(sample)


def test_planning_leaves_lists_and_objects_as_they_were():
    model, sample = Outer(of_a_shared_object), torch.randn(8, 64)
    model.collector.losses.append("mine")
    with pytest.raises(BudgetTooSmall):
        Rockmate(model, sample, 1)
    assert model.collector.losses == ["mine"]
    assert model.collector.last is None
    assert model.first.box.value is None


def test_a_parameter_or_module_that_is_not_registered_is_refused():
    """No plan would give it a gradient."""
    layer = nn.Linear(64, 64)
    hidden = [nn.Linear(64, 64)]

    class Holding(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.layer, self.function = layer, function

        def forward(self, x):
            return self.layer(self.function(x).tanh())

    weight = layer.weight
    for function in (lambda x: F.linear(x, weight), lambda x: hidden[0](x)):
        with pytest.raises(TraceError, match=r"test_attributes.py:\d+ forward uses a tensor of shape \[64, 64\]"):
            Rockmate(Holding(function), torch.randn(8, 64), 0.8)
    assert hidden[0].weight.grad is None
