"""A planned module looks like the module behind it from every side, to whoever asks."""

import copy
import inspect
import io
import pickle
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rockmate import ModelError, NotPlanned, PickleWarning, Rockmate
from tests.module.models import WIDTH, Layers, Tied, built, rows
from tests.module.steps import (
    FEW_ROUNDS,
    assert_same,
    assert_same_training,
    assert_trains_exactly,
    seen,
    squares,
    train,
)


class Documented(Layers):
    """With a forward that trainers read the signature of."""

    def forward(self, hidden: Tensor, scale: float = 1.0, *, labels: Tensor | None = None) -> Tensor:
        """What it computes."""
        hidden = super().forward(hidden) * scale
        return hidden if labels is None else F.mse_loss(hidden, labels)


@pytest.fixture(scope="module")
def planned() -> Rockmate:
    return Rockmate(built(Layers), rows(), 0.7, loss=squares, limits=FEW_ROUNDS)


@pytest.fixture
def model(planned) -> Rockmate:
    return copy.deepcopy(planned)


# ---- class and signature ------------------------------------------------------------------------------


def test_it_is_an_instance_of_both_classes(model):
    assert isinstance(model, Layers)
    assert isinstance(model, Rockmate)
    assert model.__class__ is Layers
    assert not isinstance(model, Tied)
    assert type(model) is not Layers
    assert repr(model).startswith("Rockmate(")


def test_the_forward_has_the_signature_and_the_text_of_the_original_s():
    network = built(Documented)
    model = Rockmate(network)
    for of in (lambda one: one.forward, lambda one: one.__class__.forward, lambda one: type(one).forward):
        assert inspect.signature(of(model)).replace(return_annotation=0) == inspect.signature(of(network)).replace(
            return_annotation=0
        )
    assert model.forward.__doc__ == "What it computes."
    assert model.forward.__self__ is model
    assert list(inspect.signature(model.forward).parameters) == ["hidden", "scale", "labels"]


def test_a_class_made_of_the_one_that_is_seen_and_a_mixin_is_mixed_in(model):
    """As torch.distributed.fsdp.fully_shard does."""

    class Mixin:
        def mixed_in(self) -> str:
            return "mixed in"

    model.__class__ = type("MixedLayers", (Mixin, model.__class__), {"noted": 3})
    assert model.mixed_in() == "mixed in"
    assert model.noted == 3
    assert isinstance(model, Mixin)
    assert isinstance(model, Rockmate)
    assert isinstance(model, Layers)
    assert type(model).__name__ == "MixedLayers"
    assert_trains_exactly(model, [rows(1)])


def test_a_subclass_of_one_s_own_overrides_the_forward():
    class Doubled(Rockmate):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) * 2

    model = Doubled(built(Layers), rows(), 0.9)
    twin = copy.deepcopy(model)
    for one in (model, twin):
        assert isinstance(one, Doubled)
        torch.manual_seed(0)
        found = one(rows(1))
        torch.manual_seed(0)
        assert torch.equal(found, one.original(rows(1)) * 2)


# ---- attributes -----------------------------------------------------------------------------------------


def test_attributes_that_are_set_on_it_are_the_model_s(model):
    model.note = "mine"
    assert model.original.note == "mine"
    model.dropout.p = 0.5
    assert model.original.dropout.p == 0.5
    del model.note
    assert not hasattr(model.original, "note")
    model.head = nn.Linear(WIDTH, 1)
    assert model.original.head is model.head
    assert "head.weight" in model.state_dict()
    model.offset = nn.Parameter(torch.zeros(1))
    assert dict(model.original.named_parameters())["offset"] is model.offset
    assert {"head", "offset", "plan", "dropout"} <= set(dir(model))


def test_a_container_is_one_still():
    network = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    model = Rockmate(network)
    assert len(model) == 2
    assert list(model) == [network[0], network[1]]
    model[1] = nn.GELU()
    assert isinstance(network[1], nn.GELU)
    assert not hasattr(Rockmate(built(Layers)), "__len__")


def test_a_forward_put_on_it_is_called_and_may_be_taken_off(model):
    """As Accelerate does, which keeps the old one under a private name."""
    before = model.forward
    model._before = before
    model.forward = lambda *args: before(*args) * 3
    assert "_before" in model.__dict__
    assert "forward" not in vars(model.original)
    torch.manual_seed(1)
    tripled = model(rows(1))
    del model.forward
    torch.manual_seed(1)
    assert torch.equal(tripled, model(rows(1)) * 3)


def test_methods_of_the_model_act_on_it_and_give_back_the_wrapper(model):
    for name in ("train", "eval", "float", "double", "float", "cpu", "requires_grad_", "train"):
        assert getattr(model, name)() is model, name
    assert model.to(torch.float32) is model
    assert model.apply(lambda part: None) is model
    seen_by_apply = []
    model.apply(seen_by_apply.append)
    assert seen_by_apply[-1] is model.original


def test_a_planned_module_is_not_planned_again(model):
    with pytest.raises(ModelError, match="Layers is planned already. Plan model.original instead"):
        Rockmate(model, rows(), 0.5)


# ---- saving and loading ---------------------------------------------------------------------------------


class Stamped(Layers):
    def get_extra_state(self) -> dict[str, int]:
        return {"stamp": getattr(self, "stamp", 0)}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.stamp = state["stamp"]


def test_state_dicts_with_extra_state_and_hooks_are_the_model_s_inside_another_module():
    network = built(Stamped)
    network.stamp = 7
    outer = nn.ModuleDict({"part": Rockmate(network)})
    called = []
    network.register_state_dict_post_hook(lambda *_: called.append("saved"))
    outer["part"].register_load_state_dict_post_hook(lambda *_: called.append("loaded"))
    state = outer.state_dict()
    assert list(state) == [f"part.{name}" for name in network.state_dict()]
    network.stamp = 0
    outer.load_state_dict(state)
    assert network.stamp == 7
    assert called == ["saved", "saved", "loaded"]


@pytest.mark.parametrize("way", ["pickle", "torch.save", "deepcopy"])
def test_a_copy_trains_as_the_model_does(model, way):
    if way == "deepcopy":
        twin = copy.deepcopy(model)
    elif way == "pickle":
        with pytest.warns(PickleWarning, match="the loss given for planning cannot be pickled"):
            twin = pickle.loads(pickle.dumps(with_a_lambda(model)))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert isinstance(twin, Layers)
    assert isinstance(twin, Rockmate)
    batches = [rows(1), rows(2)]
    expected = train(copy.deepcopy(model.original), batches)
    assert_same_training(train(twin, batches), expected)
    assert twin.plan.budget_bytes == model.plan.budget_bytes
    assert_same_training(train(model, batches), expected)


def with_a_lambda(model: Rockmate) -> Rockmate:
    return Rockmate(
        model.original, rows(), model.plan.budget_bytes, loss=lambda output: squares(output), limits=FEW_ROUNDS
    )


def test_what_is_loaded_follows_the_decisions_that_were_saved(model):
    searched = []
    twin = pickle.loads(pickle.dumps(model))
    assert twin.plans == ()
    twin._family.progress = lambda *told: searched.append(told[0])
    squares(twin(rows(1))).backward()
    assert twin.plan.schedule == model.plan.schedule
    assert not [stage for stage in searched if stage.startswith("solve (")]


# ---- hooks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["original", "wrapper"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_hooks_on_the_whole_module_fire_once_in_a_call(on, before):
    network, fired = built(Layers), []

    def hook_on(module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda _, args: fired.append("pre"))
        module.register_forward_hook(lambda _, args, output: fired.append("post"))
        module.register_full_backward_hook(lambda *_: fired.append("backward"))

    if before:
        hook_on(network)
    model = Rockmate(network, rows().requires_grad_(), 0.9, loss=squares)
    if not before:
        hook_on(network if on == "original" else model)
    assert fired == []
    squares(model(rows(1).requires_grad_())).backward()
    assert fired == ["pre", "post", "backward"]
    model.eval()(rows(1))
    assert fired[3:] == ["pre", "post"]


def test_no_hook_on_a_parameter_fires_while_it_is_planned():
    network, fired = built(Layers), []
    for parameter in network.parameters():
        parameter.register_hook(lambda gradient: fired.append("gradient"))
        parameter.register_post_accumulate_grad_hook(lambda parameter: fired.append("accumulated"))
    squares(network(rows(1))).backward()
    held = {name: parameter.grad for name, parameter in network.named_parameters()}
    values = {name: gradient.clone() for name, gradient in held.items()}
    count = len(fired)
    assert count == 2 * len(held)
    model = Rockmate(network, rows(), 0.7, loss=squares, limits=FEW_ROUNDS)
    assert len(fired) == count
    for name, parameter in network.named_parameters():
        assert parameter.grad is held[name]
        assert torch.equal(parameter.grad, values[name])
    squares(model(rows(1))).backward()
    assert len(fired) == 2 * count


def test_parameters_in_lists_of_a_module_s_own_are_trained():
    """torch.nn.LSTM calls its kernels with a list that it keeps beside its parameters."""
    model = Rockmate(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), torch.randn(2, 5, WIDTH), 1.0, loss=squares)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_trains_exactly(model, [torch.randn(2, 5, WIDTH)])
    assert all(one is other for one, other in zip(model._flat_weights, model.parameters(), strict=True))


# ---- planned with the first batch ------------------------------------------------------------------------


def test_without_a_sample_it_is_planned_with_the_first_training_batch():
    network = built(Layers)
    model = Rockmate(network, budget=0.7, loss=squares, limits=FEW_ROUNDS)
    assert model.plans == ()
    with pytest.raises(NotPlanned, match="Layers is planned with its first training batch, which has not come yet"):
        _ = model.plan
    model.eval()(rows(1))
    with torch.no_grad():
        model.train()(rows(1))
    assert model.plans == ()
    assert_trains_exactly(model, [rows(seed) for seed in range(3)])
    assert len(model.plans) == 1
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes
    assert model.plan.recomputations > 0


def test_the_first_batch_may_be_what_another_module_computed_in_the_middle_of_training():
    class Larger(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.first, self.part, self.last = nn.Linear(WIDTH, WIDTH), part, nn.Linear(WIDTH, 1)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.last(self.part(self.first(hidden)))

    eager = built(Larger, built(Layers))
    records = []
    for lazily in (False, True):
        network = copy.deepcopy(eager)
        if lazily:
            network.part = Rockmate(network.part, budget=0.8, limits=FEW_ROUNDS)
        torch.manual_seed(4)
        squares(network(rows(1))).backward()  # gradients are there, and the second batch adds to them
        output = network(rows(2))
        squares(output).backward()
        records.append(seen(network, (), output))
    assert_same(records[1], records[0])


@dataclass
class Result:
    loss: Tensor
    hidden: dict[str, Tensor]


class WithResult(Layers):
    def forward(self, hidden: Tensor) -> Result:
        hidden = super().forward(hidden)
        return Result(hidden.square().mean(), {"last": hidden})


def test_outputs_keep_their_type_when_it_is_planned_with_the_first_batch():
    model = Rockmate(built(WithResult), budget=0.9)
    output = model(rows(1))
    assert type(output) is Result
    assert list(output.hidden) == ["last"]
    output.loss.backward()


class Enclosing(nn.Module):
    """Calls its layer through a closure, which copies of it share: they go on with the layer of the first."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = lambda h: self.layer(h)

    def forward(self, x):
        return torch.tanh(self.last(torch.tanh(self.function(x))))


@pytest.mark.filterwarnings("ignore::rockmate.errors.ReplanWarning")
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_has_in_its_closures_what_eager_s_has(copied):
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Enclosing()
        twin = copied(Rockmate(model, torch.randn(4, 8), 1.0) if planned else model)
        optimizer = torch.optim.SGD(twin.parameters(), 0.1)
        for seed in range(3):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            twin(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
        tensors = [*twin.parameters(), *model.parameters()]
        found.append([(tensor.detach().clone(), tensor.grad) for tensor in tensors])
    for (one, its), (other, others) in zip(*found, strict=True):
        assert torch.equal(one, other)
        assert (its is None and others is None) or torch.equal(its, others)
