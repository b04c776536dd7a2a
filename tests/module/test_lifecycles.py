"""What users do to a module in the middle of its training: each step is eager's, before and after."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rockmate import ExportWarning, Rockmate
from tests.module.steps import assert_same, seen, squares
from tests.where import placed

pytestmark = pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")
AMPLE_BYTES = 10**7
WIDTH = 16


class Configuration:
    """Not called so for its name, but for what it holds: plain values."""

    offset = 0.0

    def __init__(self, factor: float) -> None:
        self.factor = factor


class OwnConfig:
    def __init__(self, factor: float) -> None:
        self.factor = factor


class Network(nn.Module):
    """Reads everything that a forward may read, and holds some parts and tensors twice."""

    power = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.again = self.second
        self.second.weight = self.first.weight
        self.dropout = nn.Dropout(0.1)
        self.settings = Configuration(2.0)
        self.config = OwnConfig(1.5)
        self.space = types.SimpleNamespace(factor=0.5)
        self.table = torch.ones(WIDTH)
        self.tables = [torch.ones(WIDTH), torch.ones(WIDTH)]
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("shift", self.scale)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x) * self.settings.factor + self.settings.offset)
        x = torch.tanh(self.second(x) * self.config.factor) * self.table
        x = torch.tanh(self.again(x) * self.scale + self.shift) * self.tables[0] + self.tables[1]
        return self.head(self.dropout(x) * self.space.factor) / self.power


def _replace_dropout(model: Any) -> None:
    model.dropout = nn.Dropout(0.5)


def _replace_head_by_an_equal_one(model: Any) -> None:
    torch.manual_seed(5)
    model.head = nn.Linear(WIDTH, WIDTH)


def _untie(model: Any) -> None:
    model.second.weight = nn.Parameter(model.first.weight.detach() * 2)


def _tie(model: Any) -> None:
    model.head.weight = model.first.weight


def _put_another_part_there_again(model: Any) -> None:
    model.again = model.first


def _replace_configuration(model: Any) -> None:
    model.config = OwnConfig(3.0)


def _change_plain_object(model: Any) -> None:
    model.settings.factor = 3.0


def _give_plain_object_a_value_of_its_own(model: Any) -> None:
    model.settings.offset = 0.25


def _change_namespace(model: Any) -> None:
    model.space.factor = 3.0


def _replace_tensor(model: Any) -> None:
    model.table = torch.full((WIDTH,), 3.0)


def _replace_part_and_tensor(model: Any) -> None:
    torch.manual_seed(5)
    model.head = nn.Linear(WIDTH, WIDTH)
    model.table = torch.full((WIDTH,), 3.0)


def _replace_tensor_in_list(model: Any) -> None:
    model.tables[1] = torch.full((WIDTH,), 3.0)


def _write_into_tensor(model: Any) -> None:
    model.table.mul_(3)


def _untie_buffers(model: Any) -> None:
    model.shift = torch.full((WIDTH,), 3.0)


def _rename(model: Any) -> None:
    parts = model._modules
    parts["first"], parts["head"] = parts["head"], parts["first"]


def _hide_class_attribute(model: Any) -> None:
    model.power = 4.0


CHANGES = [
    _replace_dropout,
    _replace_head_by_an_equal_one,
    _untie,
    _tie,
    _put_another_part_there_again,
    _replace_configuration,
    _change_plain_object,
    _give_plain_object_a_value_of_its_own,
    _change_namespace,
    _replace_tensor,
    _replace_part_and_tensor,
    _replace_tensor_in_list,
    _write_into_tensor,
    _untie_buffers,
    _rename,
    _hide_class_attribute,
]


def _step(model: nn.Module, batch: Tensor) -> dict[str, Tensor | None]:
    torch.manual_seed(1)
    output = model(batch)
    squares(output).backward()
    return seen(model, (), output)


@pytest.fixture(scope="module")
def planned() -> Rockmate:
    """Copies of it have its plan."""
    torch.manual_seed(0)
    model = Rockmate(Network(), budget=AMPLE_BYTES)
    model(torch.randn(8, WIDTH))
    return model


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_what_is_changed_in_the_middle_of_training_is_followed(
    planned: Rockmate, change: Callable[[Any], None]
) -> None:
    model, batch = copy.deepcopy(planned), torch.randn(8, WIDTH)
    eager = copy.deepcopy(model.original)
    assert_same(_step(model, batch), _step(eager, batch))
    assert len(model.plans) == 1
    change(model)
    change(eager)
    for _ in range(2):
        assert_same(_step(model, batch), _step(eager, batch))
    assert len(model.plans) <= 2


def test_what_is_changed_on_a_class_is_followed(monkeypatch: pytest.MonkeyPatch, planned: Rockmate) -> None:
    model, batch = copy.deepcopy(planned), torch.randn(8, WIDTH)
    eager = copy.deepcopy(model.original)
    monkeypatch.setattr(Network, "power", 8.0)
    monkeypatch.setattr(Configuration, "offset", 0.5)
    assert_same(_step(model, batch), _step(eager, batch))


def test_a_part_that_was_replaced_is_not_kept_by_the_plans(planned: Rockmate) -> None:
    model, batch = copy.deepcopy(planned), torch.randn(8, WIDTH)
    old = [weakref.ref(model.dropout), weakref.ref(model.head), weakref.ref(model.head.weight)]
    model.dropout, model.head = nn.Dropout(0.3), nn.Linear(WIDTH, 2)
    squares(model(batch)).backward()
    gc.collect()
    assert [one() for one in old] == [None, None, None]


class Fluent(nn.Sequential):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x * 2) * 3

    def frozen(self, *, which: int = 0) -> Fluent:
        self[which].requires_grad_(False)
        return self


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_a_call_of_the_class_s_own_is_around_the_forward(mode: bool) -> None:
    fired = []
    eager = Fluent(nn.Linear(WIDTH, WIDTH), nn.Tanh()).train(mode)
    model = Rockmate(copy.deepcopy(eager), budget=AMPLE_BYTES)
    model.register_forward_hook(lambda *_: fired.append(1))
    batch = torch.randn(4, WIDTH)
    assert_same(_step(model, batch), _step(eager, batch))
    assert fired == [1]


def test_methods_that_return_the_module_return_the_planned_one() -> None:
    model = Rockmate(Fluent(nn.Linear(WIDTH, WIDTH), nn.Tanh()), budget=AMPLE_BYTES)
    assert model.frozen() is model
    assert inspect.signature(model.frozen) == inspect.signature(model.original.frozen)
    assert inspect.ismethod(model.frozen)
    assert model.frozen.__self__ is model
    assert not model[0].weight.requires_grad


class Noted(Rockmate):
    """Keeps something of its own."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._note = ["kept"]

    @property
    def note(self) -> list[str]:
        return self._note

    @note.setter
    def note(self, value: list[str]) -> None:
        self._note = value


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_what_a_class_made_of_it_keeps_is_copied(copied: Callable[[Any], Any]) -> None:
    model = Noted(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), budget=AMPLE_BYTES)
    model.note = ["changed"]
    assert copied(model).note == ["changed"]


def test_a_shallow_copy_shares_the_parameters_and_the_plans(planned: Rockmate) -> None:
    model = Rockmate(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), torch.ones(2, WIDTH), 10**6, loss=lambda y: y.sum()
    )
    twin = copy.copy(model)
    assert twin.original is not model.original
    assert twin[0] is model[0]
    assert [plan.schedule for plan in twin.plans] == [plan.schedule for plan in model.plans]
    twin.extra = 1
    assert not hasattr(model, "extra")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "recorded",
    [
        lambda model, batch: torch.jit.trace(model, batch),
        lambda model, _: torch.jit.script(model),
        lambda model, batch: torch.export.export(model, (batch,)).module(),
    ],
    ids=["jit.trace", "jit.script", "export"],
)
def test_who_traces_it_gets_the_module_itself(recorded: Callable[[Any, Tensor], Any]) -> None:
    batch = torch.randn(4, WIDTH)
    model = Rockmate(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), batch, AMPLE_BYTES)
    with pytest.warns(ExportWarning, match="records Sequential, which is planned, as the module itself"):
        assert torch.equal(recorded(model, batch)(batch), model.original(batch))
    model.eval()
    recorded(model, batch)  # for inference: nobody misses a plan
    model.train()
    squares(model(batch)).backward()
    assert len(model.plans) == 1


def test_plans_are_made_ahead_in_inference_mode() -> None:
    model = Rockmate(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), budget=AMPLE_BYTES)
    with torch.inference_mode():
        plan = model.plan_for(torch.randn(4, WIDTH))
    squares(model(torch.randn(4, WIDTH))).backward()
    assert model.plans == (plan,)


@pytest.mark.parametrize("trained", [False, True], ids=["planned", "trained"])
def test_a_module_goes_with_the_last_reference_to_it(trained):
    """Without the collector of cycles: its parameters are most of the memory that there is."""
    planned = Rockmate(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), torch.randn(4, WIDTH), AMPLE_BYTES)
    gc.collect()
    gc.disable()
    try:
        if trained:
            squares(planned(torch.randn(4, WIDTH))).backward()
        held = [weakref.ref(one) for one in (planned.original, planned[0], planned[0].weight)]
        del planned
        assert [reference() for reference in held] == [None, None, None]
    finally:
        gc.enable()


@pytest.mark.ci
def test_threads_that_share_a_module_plan_it_one_after_the_other() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    model = Rockmate(placed(network), budget=AMPLE_BYTES)
    batches = [placed(torch.randn(rows, WIDTH, requires_grad=True)) for rows in (4, 5, 6, 4, 5, 6)]
    parameters = list(map(id, model.parameters()))
    outputs: list[Tensor | None] = [None] * len(batches)

    def run(index: int) -> None:
        outputs[index] = model(batches[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(map(id, model.parameters())) == parameters
    assert len(model.plans) == 3  # whoever waited for its turn found the plan that was made meanwhile
    for batch, output in zip(batches, outputs, strict=True):
        assert output is not None
        held = [batch, *model.parameters()]
        expected = model.original(batch)
        found = torch.autograd.grad(squares(output), held)
        for one, other in zip(found, torch.autograd.grad(squares(expected), held), strict=True):
            assert torch.equal(one, other)
