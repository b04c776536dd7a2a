"""A submodule called as one operation: found in the graph with all that it reads and writes, and exact."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import rkgb
from rkgb.export.json_form import from_json, to_json
from rkgb.ir.sample import make_sample
from rkgb.replay.replay import record_step, run_graph
from tests.graph.called_whole import WIDTH, Around, Mix, calls, reasons, sample, traced

# ---- what the graph knows ------------------------------------------------------------------------------------


def test_each_call_is_one_operation_that_reads_what_the_submodule_holds():
    graphs = traced(Around(Mix(), Mix()))
    first, second = calls(graphs)
    parameters = [f"inner_0_{name}" for name in ("up_weight", "up_bias", "down_weight", "down_bias")]
    assert first.inputs[1:] == parameters
    assert second.inputs[0] == first.output_names[0]
    assert first.is_random
    assert first.source.modules == ("inner.0",)
    assert [op.call.op_name for op in graphs.D_graph].count("gelu") == 0
    assert reasons(graphs) == ["", ""]
    assert graphs.B_graph.tracer == "jit"


def test_a_tied_weight_is_one_leaf_inside_and_outside():
    model = Around(Mix())
    model.inner[0].up.bias = model.inner[0].up.bias
    model.first.weight = model.inner[0].extra = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
    graphs = traced(model)
    (call,) = calls(graphs)
    assert "first_weight" in call.inputs
    assert sum(leaf.path.endswith("extra") for leaf in graphs.D_graph.leaves.values()) == 0


def test_frozen_parameters_take_no_gradient():
    model = Around(Mix(), Mix())
    model.inner[0].requires_grad_(False)
    graphs = traced(model)
    first, second = calls(graphs)
    assert not any(graphs.D_graph.values[name].requires_grad for name in first.inputs[1:])
    assert all(graphs.D_graph.values[name].requires_grad for name in second.inputs)


@dataclass
class Pair:
    left: Tensor
    right: Tensor
    scale: float


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: dict[str, Tensor], pair: Pair, names: tuple[str, ...], mask: Tensor | None = None):
        left = self.layer(given["x"]) * pair.scale
        return {"out": Pair(left, pair.right + 1, 0.5), "n": len(names), "nothing": mask}


class CallsStructured(Around):
    def call(self, inner: nn.Module, x: Tensor) -> Tensor:
        found = inner({"x": x}, Pair(x, x.cos(), 2.0), names=("a", "b"))
        return found["out"].left * found["out"].scale + found["out"].right * found["n"]


def test_arguments_and_outputs_may_have_any_structure():
    graphs = traced(CallsStructured(Structured()))
    (call,) = calls(graphs)
    assert len(call.output_names) == 2


def test_an_output_that_looks_at_an_input_belongs_to_its_storage():
    class Viewing(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.view(-1, 2).t(), x.exp()

    class Calls(Around):
        def call(self, inner: nn.Module, x: Tensor) -> Tensor:
            view, other = inner(x)
            return view.t().reshape(x.shape) + other

    graphs = traced(Calls(Viewing()))
    (call,) = calls(graphs)
    view, fresh = call.output_names
    assert graphs.D_graph.owner(view) == "silu_0"
    assert graphs.D_graph.owner(fresh) == fresh


def test_regions_without_gradients_stay_so():
    class Quiet(Around):
        def call(self, inner: nn.Module, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = inner(x)
            return x * scale

    (call,) = calls(traced(Quiet(Mix())))
    assert not call.grad_enabled


# ---- what it does besides computing ---------------------------------------------------------------------------


def test_running_statistics_are_written_and_counted_once():
    model = Around(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    graphs = traced(model)
    (call,) = calls(graphs)
    assert set(call.written) == {f"inner_0_1_{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert reasons(graphs) == ["inner.0 writes into the state of the module"]


def test_writes_into_a_value_are_found():
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            return x.sin()

    class Calls(Around):
        def call(self, inner: nn.Module, x: Tensor) -> Tensor:
            return inner(x) + x

    graphs = traced(Calls(Writes()))
    (call,) = calls(graphs)
    assert call.written == ["silu_0"]
    assert reasons(graphs) == ["inner.0 writes into its inputs"]


def test_writes_into_the_inputs_of_the_model_are_refused():
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.writes = Writes()
            self.layer = nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.writes(x))

    model = Model()
    with pytest.raises(rkgb.TraceError, match="writes into input 0"):
        rkgb.make_all_graphs(model, sample(), opaque=[model.writes])


class Counts(Mix):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(x)


class Appends(Mix):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return super().forward(x)


class Throws(Mix):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


class Draws(Mix):
    def __init__(self) -> None:
        super().__init__()
        self.generators = [torch.Generator().manual_seed(5)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(x.shape, generator=self.generators[0])


class Hooked(Mix):
    def __init__(self) -> None:
        super().__init__()
        self.up.register_forward_hook(lambda *_: None)
        self.down.register_full_backward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        (Counts, "inner.0 sets attributes"),
        (Appends, "inner.0 sets attributes"),
        (Throws, "inner.0 draws from random numbers of Python or NumPy"),
        (Draws, "inner.0 draws from a random generator of its own, or of another device than its output"),
        (Hooked, "inner.0 has hooks, which would fire again"),
    ],
)
def test_what_a_second_run_would_do_again_runs_once(inner: type[nn.Module], reason: str):
    assert reasons(traced(Around(inner()))) == [reason]


def test_attributes_and_generators_are_given_back():
    model, given = Around(Counts(), Draws()), sample()
    states = [model.inner[1].generators[0].get_state(), torch.get_rng_state()]
    random.seed(3)
    python = random.getstate()
    rkgb.make_all_graphs(model, given, opaque=[model.inner])
    assert model.inner[0].calls == 0
    assert torch.equal(model.inner[1].generators[0].get_state(), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])
    assert random.getstate() == python
    assert all(part._compiled_call_impl is None for part in model.modules())


def test_scripted_submodules_may_be_opaque():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    model = Around(nn.Identity())
    model.inner[0] = scripted
    with pytest.raises(rkgb.TraceError, match="opaque"):
        rkgb.make_all_graphs(model, sample())
    assert len(calls(traced(model))) == 1


# ---- what depends on data ----------------------------------------------------------------------------------------


class Routed(nn.Module):
    """Each expert gets the rows that choose it, if any do."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(Mix(0.0) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().flatten()
            if rows.numel() > 0:
                result = result.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return result


def test_what_reads_its_data_is_planned_whole_and_told():
    model = Around(Routed())
    with pytest.warns(rkgb.TraceWarning, match=r"'inner.0' is one operation.*depends on its data"):
        graphs = traced(model)
    assert reasons(graphs) == ["what inner.0 runs depends on its data"]
    for _ in range(5):
        other = make_sample(model, sample())
        expected = record_step(model, other.copy(), lambda data: data.call(model))
        found = record_step(model, other.copy(), lambda data: run_graph(graphs.D_graph, model, data))
        assert found.first_difference(expected) is None


def test_numbers_in_the_output_are_compared_at_every_run():
    class Counting(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            return x.sin(), int((x > 0).sum())

    class Calls(Around):
        def call(self, inner: nn.Module, x: Tensor) -> Tensor:
            found, count = inner(x)
            return found * count

    model = Calls(Counting())
    with pytest.raises(rkgb.ReplayMismatch, match=r"submodule 'inner.0', which is one operation of the graph, returns"):
        rkgb.make_all_graphs(model, sample(), opaque=[model.inner])


# ---- equal ones ------------------------------------------------------------------------------------------------


def test_equal_calls_are_measured_once_and_unequal_ones_apart():
    class Act(Mix):
        def __init__(self, act) -> None:
            super().__init__()
            self.act = act

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.act(self.up(x)))

    graphs = traced(Around(Act(torch.relu), Act(torch.relu), Act(torch.sigmoid), Act(torch.relu)))
    place = {op.name: index for index, block in enumerate(graphs.blocks) for op in block.ops}
    first, second, third, fourth = (place[op.name] for op in calls(graphs))
    of = {index: number for number, members in enumerate(graphs.equivalent_classes) for index in members}
    assert of[second] == of[fourth] != of[third]
    assert of[first] != of[third]


# ---- other forms of the graph ----------------------------------------------------------------------------------


def test_files_and_tables_name_the_submodule():
    graphs = traced(Around(Mix()))
    form = to_json(graphs.D_graph)
    assert to_json(from_json(form)) == form
    assert "submodule inner.0" in str(form)
    assert "inner_0" in rkgb.describe(graphs.S_graph)
    assert rkgb.to_networkx(graphs.D_graph).nodes["inner_0_0"]
