"""Training with opaque operations: exact whatever is recomputed, and whatever the submodules do inside."""

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rkgb
from rockmate import Rockmate
from rockmate.errors import PinError, PlanMismatch, ReplanWarning
from rockmate.planning.measured import measure
from rockmate.planning.request import PlanRequest
from tests.module.models import ROWS, WIDTH, built, rows
from tests.module.steps import (
    assert_same_training,
    assert_trains_exactly,
    following,
    keep_every_other,
    keep_nothing,
    peak_of_step,
    squares,
    train,
)


def three_batches() -> list[Tensor]:
    return [rows(seed) for seed in range(3)]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(F.gelu(self.up(x))))


class Stack(nn.Module):
    def __init__(self, make: type[nn.Module] = Layer, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.first(x))
        for layer in self.layers:
            x = self.call(layer, x)
        return x

    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)


def whole(model: Stack, recompute=keep_nothing) -> Rockmate:
    """Planned with every layer called whole, following a plan that recomputes what may be recomputed."""
    paths = tuple(f"layers.{index}" for index in range(len(model.layers)))
    measured = measure(model, three_batches()[0], PlanRequest(None, squares, opaque=paths))
    return following(measured, model, recompute(measured))


@dataclass
class State:
    hidden: Tensor
    mask: Tensor
    scale: float


class Structured(Layer):
    def forward(self, state: State, *, extra: dict[str, Tensor]) -> dict[str, object]:
        hidden = super().forward(state.hidden) * state.scale + extra["bias"] * state.mask
        return {"state": State(hidden, state.mask, state.scale), "count": 1}


class CallsStructured(Stack):
    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(State(x, (x > 0).to(x.dtype), 0.5), extra={"bias": x.exp()})["state"].hidden


class Checkpointed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2 + ctx.saved_tensors[0]


class Custom(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(super().forward(x))


class Several(Layer):
    """Two outputs, one of which looks at the storage of its input, and one without a gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().forward(x), x.view(-1, WIDTH), x.argmax(1)


class CallsSeveral(Stack):
    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        found, view, places = layer(x)
        return found * view + places[:, None]


class Normalised(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.relu_(self.norm(x)))


class Quiet(Stack):
    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = layer(x)
        return x * torch.sigmoid(gate)


@pytest.mark.parametrize("recompute", [keep_nothing, keep_every_other])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Stack(Layer),
        lambda: CallsStructured(Structured),
        lambda: Stack(Checkpointed),
        lambda: Stack(Custom),
        lambda: CallsSeveral(Several),
        lambda: Stack(Normalised),
        lambda: Quiet(Layer),
    ],
    ids=["plain", "structured", "checkpointed", "custom", "several", "normalised", "quiet"],
)
def test_training_is_exact(make, recompute):
    assert_trains_exactly(whole(built(make), recompute), three_batches())


def test_a_layer_is_recomputed_as_a_whole():
    model = whole(built(Stack))
    assert "layers_1(as_leaf(" in model.code.partition("def recompute_0")[2]
    assert "gelu" not in model.code


def test_names_that_are_none_in_python():
    original = nn.Sequential(nn.Linear(WIDTH, WIDTH), built(Layer), nn.Sequential(built(Layer)))
    original.add_module("a part-of it", built(Layer))
    measured = measure(original, three_batches()[0], PlanRequest(None, squares, opaque=("1", "2.0", "a part-of it")))
    model = following(measured, original, keep_nothing(measured))
    assert "submodule_1(" in model.code
    assert_trains_exactly(model, three_batches())


def test_frozen_and_tied_parameters():
    def made() -> Stack:
        model = built(Stack)
        model.layers[0].requires_grad_(False)
        model.layers[2].up.weight = model.layers[1].up.weight
        return model

    assert_same_training(train(whole(made()), three_batches()), train(made(), three_batches()))


def test_a_budget_is_met_with_layers_called_whole():
    original = built(Stack)
    model = Rockmate(original, three_batches()[0], 0.7, loss=squares, opaque=original.layers)
    assert_trains_exactly(model, three_batches())
    for parameter in model.parameters():
        parameter.grad = None
    assert peak_of_step(model, (three_batches()[0],)) <= model.plan.budget_bytes


def test_copies_call_their_own_layers():
    original = built(Stack)
    model = Rockmate(original, three_batches()[0], 0.7, loss=squares, opaque=original.layers)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.zero_()
    assert_same_training(train(twin, three_batches()), train(built(Stack), three_batches()))
    assert len(twin.plans) == 1


@pytest.mark.filterwarnings("ignore:Stack was planned once more")
def test_other_shapes_are_planned_with_the_same_layers_whole():
    original = built(Stack)
    model = Rockmate(original, three_batches()[0], 0.7, loss=squares, opaque=original.layers)
    batches = [three_batches()[0], three_batches()[1][: ROWS // 2], three_batches()[2]]
    assert_trains_exactly(model, batches)
    assert len(model.plans) == 2
    assert "layers_0(" in model.code


class Routed(nn.Module):
    """Each row goes to the expert that its data choose; an expert that none chooses does not run."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(Layer() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            found = (chosen == index).nonzero().flatten()
            if found.numel() > 0:
                result = result.index_add(0, found, expert(x[found]) * weights[found, None])
        return x + result


class Mixture(Stack):
    def __init__(self) -> None:
        super().__init__(Layer, 2)
        self.routed = Routed()

    def forward(self, x: Tensor) -> Tensor:
        return self.routed(super().forward(x)).tanh()


def test_routed_experts_train_exactly_on_data_that_take_other_ways():
    original = built(Mixture)
    with pytest.warns(rkgb.TraceWarning, match="'routed' is one operation.*never recomputed"):
        model = Rockmate(original, three_batches()[0], 0.9, loss=squares, opaque=original.routed)
    batches = [rows(seed) * scale for seed in range(4) for scale in (1.0, -3.0)]
    batches[3] = three_batches()[0][:1].expand(ROWS, WIDTH).contiguous()  # all to one expert
    assert_trains_exactly(model, batches)
    assert len(model.plans) == 1
    assert model.plan.recomputations > 0
    assert "never repeated: what routed runs depends on its data" in model.code


def test_what_routed_experts_save_is_never_forgotten():
    original = built(Mixture)
    with pytest.warns(rkgb.TraceWarning):
        measured = measure(original, three_batches()[0], PlanRequest(None, squares, opaque=("routed",)))
    model = following(measured, original, keep_nothing(measured))
    assert "step.forgets('routed" not in model.code
    assert_trains_exactly(model, [rows(seed) * scale for seed in range(3) for scale in (1.0, -3.0)])


def test_a_layer_that_comes_to_run_other_code_keeps_what_it_saves():
    """But where it does so between a forward and its backward: what that forward saved is not to be had again."""
    way = ["as planned"]

    class PlanLock(Layer):
        def forward(self, x: Tensor) -> Tensor:
            if way[0] == "more":
                x = x.exp()
            if way[0] == "other":
                return x + self.down(F.gelu(self.up(x[: ROWS // 2])).repeat(2, 1) * self.dropout(x).mean())
            return super().forward(x)

    model = whole(built(lambda: Stack(PlanLock)))
    assert_trains_exactly(model, three_batches())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ReplanWarning)
        for other in ("more", "other", "as planned", "more"):
            way[0] = other
            assert_trains_exactly(model, three_batches())
    texts = [str(one.message) for one in told if "saves other tensors" in str(one.message)]
    assert texts
    assert len(set(texts)) == len(texts)  # once for each layer
    way[0] = "as planned"
    output = model(three_batches()[0])
    way[0] = "more"
    with pytest.raises(PlanMismatch, match="when it was recomputed"):
        output.sum().backward()


@pytest.mark.ci
def test_an_opaque_layer_can_be_pinned_and_nothing_inside_it():
    original = built(Stack)
    model = Rockmate(original, three_batches()[0], 1.0, opaque=original.layers, pin=[original.layers[1]])
    assert "never repeated: layers_1_0 is pinned with submodule 'layers.1'" in model.code
    with pytest.raises(PinError, match="no operation ran"):
        Rockmate(original, three_batches()[0], 1.0, opaque=original.layers, pin=[original.layers[1].up])
