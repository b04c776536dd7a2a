"""torch.compile and planned modules, in both orders: exact, compiled once, one graph break around a planned body."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import rkgb
from rockmate import Rockmate, verify
from tests.module.models import WIDTH, Layers, built, rows
from tests.module.steps import (
    assert_same_training,
    keep_every_other,
    measured_for,
    peak_of_step,
    recomputing,
    squares,
    train,
)
from tests.where import CPU, here

# Dynamo looks at `.grad` of whatever it is given, which warns for tensors that are no leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def three_batches() -> list[Tensor]:
    return [rows(seed) for seed in range(3)]


INDUCTOR = pytest.param(
    "inductor", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
)


@pytest.fixture(autouse=True)
def dynamo_reset() -> Iterator[None]:
    """Each test compiles for itself, and leaves nothing compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module] = Layer, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(self.first(x))
        for layer in self.layers:
            x = layer(x)
        return x


def in_place(model: Stack, backend: Any) -> Stack:
    for layer in model.layers:
        layer.compile(backend=backend)
    return model


def wrapped(model: Stack, backend: Any) -> Stack:
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend=backend)
    return model


ORDERS = pytest.mark.parametrize("compile_layers", [in_place, wrapped])


# ---- compiled submodules of a planned module --------------------------------------------------------------------


@ORDERS
@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
def test_compiled_layers_stay_compiled_and_exact(compile_layers: Callable[..., Stack], backend: str):
    if backend == "inductor" and here() != CPU:
        pytest.skip("inductor compiles for no device of this kind")
    eager = train(compile_layers(built(Stack), backend), three_batches())
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    model = recomputing(compile_layers(built(Stack), counter), three_batches()[0])
    assert_same_training(train(model, three_batches()), eager)
    assert counter.frame_count == 1  # for planning, training and recomputing, of all three
    assert "layers_0(" in model.code
    assert "layers_0(as_leaf(" in model.code


@ORDERS
@pytest.mark.ci
def test_a_budget_is_met_by_recomputing_compiled_layers(compile_layers: Callable[..., Stack]):
    eager = train(compile_layers(built(Stack), "aot_eager"), three_batches())
    model = Rockmate(compile_layers(built(Stack), "aot_eager"), three_batches()[0], 0.7, loss=squares)
    assert_same_training(train(model, three_batches()), eager)
    assert model.plan.recomputations > 0
    for parameter in model.parameters():
        parameter.grad = None
    assert peak_of_step(model, (three_batches()[0],)) <= model.plan.budget_bytes


def test_values_kept_for_compiled_layers_serve_them():
    eager = train(in_place(built(Stack), "aot_eager"), three_batches())
    model = recomputing(in_place(built(Stack), "aot_eager"), three_batches()[0], keep_every_other)
    assert_same_training(train(model, three_batches()), eager)


def test_equal_compiled_layers_are_measured_once():
    graphs = measured_for(in_place(built(Stack, Layer, 5), "aot_eager"), three_batches()[0]).graphs
    assert len(graphs.blocks) - len(graphs.equivalent_classes) >= 3


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.linear(x)))


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_running_statistics_of_compiled_layers_count_each_batch_once(backend: str):
    eager = train(in_place(built(Stack, Normalised), backend), three_batches())
    model = recomputing(in_place(built(Stack, Normalised), backend), three_batches()[0])
    assert_same_training(train(model, three_batches()), eager)
    assert "never repeated: layers.0 writes into the state of the module" in model.code


class Breaks(Layer):
    """Two compiled graphs, between which it runs as it is written."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.norm(x))
        torch._dynamo.graph_break()
        return self.down(self.dropout(F.gelu(x)))


def test_graph_breaks_inside_a_layer_change_nothing():
    eager = train(in_place(built(Stack, Breaks), "aot_eager"), three_batches())
    assert_same_training(
        train(recomputing(in_place(built(Stack, Breaks), "aot_eager"), three_batches()[0]), three_batches()), eager
    )


class Reads(Layer):
    """Takes another way where the data say so."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        if found.sum() > 0:
            return found * 2
        return found + self.norm(found)


@pytest.mark.filterwarnings("ignore:submodule.*depends on its data")
@pytest.mark.ci
def test_a_compiled_layer_may_read_its_data():
    batches = [*three_batches(), *(-batch for batch in three_batches())]
    eager = train(in_place(built(Stack, Reads), "aot_eager"), batches)
    model = Rockmate(in_place(built(Stack, Reads), "aot_eager"), three_batches()[0], 1.0, loss=squares)
    assert_same_training(train(model, batches), eager)
    assert "never repeated: what layers.0 runs depends on its data" in model.code


class Several(Stack):
    """Compiled parts inside compiled parts, and one that is called twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](super().forward(x))


def test_parts_within_compiled_parts_and_parts_called_twice():
    def made() -> Several:
        model = built(Several)
        model.layers[0].up.compile(backend="aot_eager")
        return in_place(model, "aot_eager")

    eager = train(made(), three_batches())
    assert_same_training(train(recomputing(made(), three_batches()[0]), three_batches()), eager)


def test_compiled_layers_under_autocast():
    def stepping(model: nn.Module) -> Any:
        def forward(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(x)

        return train(model, three_batches(), forward=forward)

    eager = stepping(in_place(built(Stack), "aot_eager"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model = recomputing(in_place(built(Stack), "aot_eager"), three_batches()[0], loss=None)
    assert_same_training(stepping(model), eager)
    assert "with autocast(cpu=torch.bfloat16):" in model.code


@ORDERS
@pytest.mark.ci
def test_what_is_verified_is_compiled_as_the_model_is(compile_layers: Callable[..., Stack]):
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:  # a function: copies of a module share it
        compiled.append(graph)
        return graph.forward

    model = compile_layers(built(Stack), backend)
    result = verify(model, three_batches()[0], 0.7, loss=squares)
    assert result.exact, result
    assert len(compiled) == 1
    assert verify(Rockmate(model, three_batches()[0], 0.7, loss=squares), three_batches()[0], loss=squares).exact


@pytest.mark.filterwarnings("ignore:Stack was planned once more")
@pytest.mark.ci
def test_what_is_compiled_after_planning_is_planned_once_more():
    eager = train(in_place(built(Stack), "aot_eager"), three_batches())
    model = Rockmate(built(Stack), three_batches()[0], 0.8, loss=squares)
    in_place(model, "aot_eager")
    assert_same_training(train(model, three_batches()), eager)
    assert len(model.plans) == 2


@pytest.mark.parametrize("compile_whole", [torch.compile, lambda model: model.compile() or model])
def test_a_model_compiled_as_a_whole_is_refused(compile_whole: Callable[[nn.Module], nn.Module]):
    model = compile_whole(built(Stack))
    with pytest.raises(
        rkgb.TraceError, match=r"compiled as a whole.*layer.compile\(\).*torch.compile\(Rockmate\(model\)\)"
    ):
        Rockmate(model, three_batches()[0], 1.0)


def test_evaluation_runs_the_compiled_layers():
    counter = CompileCounter()
    model = Rockmate(in_place(built(Stack), counter), three_batches()[0], 1.0, loss=squares)
    planned = counter.frame_count
    model.eval()
    with torch.no_grad():
        found = model(three_batches()[0])
        assert torch.equal(found, model.original(three_batches()[0]))
    assert counter.frame_count == planned + 1  # without gradients and dropout


# ---- a planned module that is compiled -----------------------------------------------------------------------------


def planned(budget: float = 0.8) -> Rockmate:
    return Rockmate(built(Layers), three_batches()[0], budget, loss=squares)


@pytest.mark.parametrize("compiled", [torch.compile, lambda model, **options: model.compile(**options) or model])
def test_a_compiled_planned_module_trains_exactly(compiled: Callable[..., nn.Module]):
    eager = train(built(Layers), three_batches())
    counter = CompileCounter()
    model = planned()
    module = compiled(model, backend=counter)
    assert_same_training(train(model, three_batches(), forward=lambda *args: module(*args)), eager)
    assert model.plan.recomputations > 0
    assert counter.frame_count == 0  # nothing is left to compile


def test_evaluation_of_a_compiled_planned_module_is_compiled():
    counter, model = CompileCounter(), planned()
    module = torch.compile(model, backend=counter)
    module.eval()
    with torch.no_grad():
        assert torch.equal(module(three_batches()[0]), model.original(three_batches()[0]))
    assert counter.frame_count == 1


class Around(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.body = body
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.before(x).relu())).tanh()


def whole(plans: bool) -> Around:
    model = built(Around, built(Layers))
    if plans:
        model.body = Rockmate(model.body, three_batches()[0].clone().requires_grad_(), 0.8, loss=squares)
    return model


def test_a_planned_body_is_one_graph_break_of_a_compiled_model():
    eager = train(whole(plans=False), three_batches())
    model, counter = whole(plans=True), CompileCounter()
    module = torch.compile(model, backend=counter)
    assert_same_training(train(model, three_batches(), forward=module), eager)
    assert counter.frame_count == 2  # before the body, and after it
    torch._dynamo.reset()
    explained = torch._dynamo.explain(model)(three_batches()[0])
    assert explained.graph_break_count == 1


def test_a_compiled_training_step_leaves_the_backward_of_the_plan_alone():
    def stepped(model: nn.Module, compiled: Callable[[Any], Any]) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = squares(model(x))
            loss.backward()
            optimizer.step()
            return loss

        run = compiled(step)
        torch.manual_seed(1)
        losses = [run(batch).detach().clone() for batch in three_batches()]
        return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]

    # Some releases of PyTorch compile the optimizer's step into one that rounds otherwise.
    eager = stepped(built(Layers), lambda step: torch.compile(step, backend="eager"))
    torch._dynamo.reset()
    counter = CompileCounter()
    found = stepped(recomputing(built(Layers), three_batches()[0]), lambda step: torch.compile(step, backend=counter))
    assert all(torch.equal(one, other) for one, other in zip(found, eager, strict=True))
    assert counter.frame_count <= 2


def test_one_graph_for_all_is_refused_with_advice():
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile without fullgraph=True"):
        torch.compile(planned(1.0), backend="eager", fullgraph=True)(three_batches()[0])


def test_compiled_layers_of_a_compiled_planned_module():
    eager = train(in_place(built(Stack), "aot_eager"), three_batches())
    model = recomputing(in_place(built(Stack), "aot_eager"), three_batches()[0])
    module = torch.compile(model, backend="aot_eager")
    assert_same_training(train(model, three_batches(), forward=lambda *args: module(*args)), eager)
