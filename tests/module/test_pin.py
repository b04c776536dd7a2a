"""What is pinned is saved and never computed a second time, whatever the budget; all else stays eager's to the bit."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rockmate import BudgetTooSmall, PinError, Rockmate, TraceError
from rockmate.planning.measured import Measured, measure
from rockmate.planning.request import PlanRequest
from tests.module.steps import assert_trains_exactly, following, keep_nothing, squares
from tests.where import placed

aten = torch.ops.aten
WIDTH = 64
EXPERTS = 4


class Router(nn.Module):
    """Sends every row to two experts: their positions, and how much each counts."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, EXPERTS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        best = self.score(x).topk(2)
        return best.indices, best.values.softmax(-1)


class Mixture(nn.Module):
    """A mixture of experts, added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        chosen, weights = self.router(x)
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(1, keepdim=True)
            x = x + share * expert(x)
        return x


class Model(nn.Module):
    """Two mixtures with a normalisation between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = Mixture(), nn.LayerNorm(WIDTH), Mixture()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).tanh())


class Calls(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def calls(module: nn.Module, x: Tensor) -> Counter[str]:
    """How often each operation runs in one step."""
    with Calls() as counted:
        squares(module(x)).backward()
    return counted.count


def rows() -> Tensor:
    return placed(torch.randn(128, WIDTH))


def measured_with(model: nn.Module, x: Any, *pin: Any) -> Measured:
    return measure(model, x, PlanRequest(None, squares, pin=pin))


def repeating_all_it_may(model: nn.Module, x: Any, *pin: Any) -> Rockmate:
    """A plan that computes again, before each stage of the backward, all that leads to it and is not pinned."""
    measured = measured_with(model, x, *pin)
    return following(measured, model, keep_nothing(measured))


def repeated(module: Rockmate) -> set[str]:
    """Names of the operations that the plan computes again."""
    return {name for names in module.plan.schedule.recomputed.values() for name in names}


def of_modules(module: Rockmate, *prefixes: str) -> set[str]:
    """Names of the S nodes whose first operation ran under one of these paths."""
    nodes = module._member.measured.graphs.S_graph
    return {node.name for node in nodes if node.ops[0].source.module_path.startswith(prefixes)}


PINS: dict[str, tuple[Callable[[Model], Any], tuple[str, ...]]] = {
    # what is pinned, and which operations then run as often as in eager training
    "module": (lambda m: m.first.router, ()),
    "modules": (lambda m: (m.first.router, m.second.router), ("aten::topk", "aten::_softmax")),
    "list of modules": (lambda m: (m.first.experts, m.second.experts), ("aten::gelu",)),
    "overload": (lambda m: aten.topk.default, ("aten::topk",)),
    "packet": (lambda m: aten.softmax, ("aten::_softmax",)),
    "name": (lambda m: "tanh_0", ("aten::tanh",)),
    "several kinds": (lambda m: [m.norm, aten.gelu, "tanh_0"], ("aten::native_layer_norm", "aten::gelu", "aten::tanh")),
    "the model": (lambda m: m, ("aten::topk", "aten::_softmax", "aten::gelu", "aten::tanh", "aten::native_layer_norm")),
}


@pytest.mark.parametrize("kind", PINS)
@pytest.mark.ci
def test_what_is_pinned_runs_as_often_as_in_eager_training(kind):
    """Under a plan that repeats all that it may; without a pin it repeats these operations, too."""
    model, x = Model(), rows()
    pin, once = PINS[kind]
    pinned = pin(model)
    planned = repeating_all_it_may(model, x, *(pinned if isinstance(pinned, (list, tuple)) else (pinned,)))
    eager, found = calls(model, x), calls(planned, x)
    free = calls(repeating_all_it_may(model, x), x)
    assert [found[name] for name in once] == [eager[name] for name in once]
    assert all(free[name] > eager[name] for name in once)
    assert_trains_exactly(planned, [x, rows()])


def test_a_pinned_module_is_no_part_of_the_plan_and_its_twin_still_is():
    model, x = Model(), rows()
    planned = repeating_all_it_may(model, x, model.first.router)
    assert of_modules(planned, "first.router")
    assert repeated(planned).isdisjoint(of_modules(planned, "first.router"))
    assert not repeated(planned).isdisjoint(of_modules(planned, "second.router"))


def test_a_plan_under_a_small_budget_repeats_only_what_is_not_pinned():
    model, x = placed(Model()), rows()
    planned = Rockmate(model, x, 0.6, loss=squares, solver="greedy", pin=(model.first.router, model.norm, aten.topk))
    names = [op.name for op in planned.plan.schedule.ops if type(op).__name__ == "Compute"]
    assert planned.plan.recomputations == sum(names.count(name) - 1 for name in set(names)) > 0
    pinned = of_modules(planned, "first.router", "norm") | {
        node.name
        for node in planned._member.measured.graphs.S_graph
        if any(op.call.op_name == "topk" for op in node.ops)
    }
    assert all(names.count(name) == 1 for name in pinned)
    assert planned.plan.measured_peak_bytes <= planned.plan.budget_bytes
    assert_trains_exactly(planned, [x, rows()])


@pytest.mark.ci
def test_a_budget_below_what_pins_save_is_refused_with_the_smallest():
    model, x = Model(), rows()
    without = Rockmate(model, x, 0.6, loss=squares, solver="greedy")
    with pytest.raises(BudgetTooSmall) as refused:
        Rockmate(model, x, 0.6, loss=squares, solver="greedy", pin=model)
    assert refused.value.smallest_budget_bytes > without.plan.budget_bytes


def test_the_graphs_say_what_is_pinned_and_by_what():
    model, x = Model(), rows()
    graphs = measured_with(model, x, model.norm, aten.topk.default, "tanh_0").graphs
    reasons = {comp.node.keep_reason for comp in graphs.K_graph.forward}
    assert reasons == {
        "",
        "layer_norm_0 is pinned with submodule 'norm'",
        "topk_0 is pinned as aten.topk.default",
        "topk_1 is pinned as aten.topk.default",
        "tanh_0 is pinned by name",
    }


def test_the_generated_code_says_why_an_operation_is_never_repeated():
    lines = repeating_all_it_may(Model(), rows(), "tanh_0").code.splitlines()
    (place,) = [place for place, line in enumerate(lines) if "never repeated: tanh_0 is pinned by name" in line]
    assert any("tanh_0 = " in line for line in lines[place : place + 3])
    assert "\n".join(lines).count("tanh_0 = aten.tanh") == 1


def test_views_at_the_border_of_a_pinned_module_pin_nothing_outside():
    """What the module looks at was computed before it."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Unflatten(1, (8, 8)), nn.Tanh(), nn.Flatten(), nn.GELU())
    pinned = nn.Sequential(*list(model)[1:3])
    model = nn.Sequential(model[0], pinned, model[3], model[4])
    graph = measured_with(model, rows(), pinned).graphs.S_graph
    assert {node.name for node in graph if node.keep_reason} == {"tanh_0"}


# ---- where operations ran --------------------------------------------------------------------------------


class Wired(nn.Module):
    """Modules called twice, held twice, and called by another than their holder."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.one = Holder(shared, torch.sin)
        self.two = Holder(shared, torch.exp)
        self.caller = Caller(self.one)

    def forward(self, x: Tensor) -> Tensor:
        return self.caller(self.one(self.two(self.one(x)).sigmoid())).cos()


class Holder(nn.Module):
    def __init__(self, held: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.held, self.function = held, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.held(x))


class Caller(nn.Module):
    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other = [other]  # in a list: it calls a module that it does not hold

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(self.other[0](x))


WIRED = {
    "one": ["tanh", "sin", "tanh", "sin", "tanh", "sin"],
    "two": ["tanh", "exp"],
    "caller": ["tanh", "sin", "softplus"],
    "one.held": ["tanh"] * 4,
    "two.held.1": ["tanh"] * 4,
    "": ["tanh", "sin", "tanh", "exp", "sigmoid", "tanh", "sin", "tanh", "sin", "softplus", "cos"],
}


class Reading(nn.Module):
    """What it holds, with a number read out of the data: that cannot be traced by torch.jit.trace."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) if x.isfinite().all() else x


@pytest.mark.parametrize("wrap", [nn.Sequential, Reading], ids=["jit", "record"])
@pytest.mark.parametrize("path", WIRED)
def test_all_that_runs_while_a_module_is_called_is_pinned_with_it(path, wrap):
    """Not what its submodules do where others call them."""
    model = Wired()
    measured = measured_with(wrap(model), rows(), model.get_submodule(path))
    assert measured.graphs.B_graph.tracer == ("record" if wrap is Reading else "jit")
    kept = [node.ops[0].call.op_name for node in measured.graphs.S_graph if node.keep_reason]
    assert [name for name in kept if name not in ("linear", "addmm")] == WIRED[path]


# ---- collectives -------------------------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path) -> Iterator[str]:
    """A world of this process alone: the name of its group."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this build of PyTorch has no gloo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'world'}", rank=0, world_size=1)
    try:
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()


class Summed(torch.autograd.Function):
    """The sum over all processes, and of the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Summed.forward(ctx, gradient)


class Collective(nn.Module):
    """Multiplies by what `reduce` makes of a part of itself."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.reduce = [reduce]

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x).tanh()
        return self.after((h * self.reduce[0](h.sigmoid()).exp()).sin())


def test_a_collective_runs_once(world):
    ops = torch.ops._c10d_functional
    model, x = Collective(lambda h: ops.wait_tensor(ops.all_reduce(h.detach(), "sum", world))), rows()
    planned = repeating_all_it_may(model, x)
    assert any("collective" in node.keep_reason for node in planned._member.measured.graphs.S_graph)
    found, eager = calls(planned, x), calls(model, x)
    assert found["_c10d_functional::all_reduce"] == eager["_c10d_functional::all_reduce"] == 1
    assert found["aten::exp"] > eager["aten::exp"]
    assert_trains_exactly(planned, [x, rows()])


def test_a_functional_collective_that_returns_what_waits_for_itself_is_refused(world):
    from torch.distributed._functional_collectives import all_reduce

    with pytest.raises(TraceError, match="makes a tensor of class AsyncCollectiveTensor"):
        Rockmate(Collective(lambda h: all_reduce(h.detach(), "sum", dist.group.WORLD)), rows(), 0.9)


def test_a_collective_within_a_custom_function_runs_once(world):
    model, x = Collective(Summed.apply), rows()
    planned = repeating_all_it_may(model, x)
    assert [node.name for node in planned._member.measured.graphs.S_graph if node.keep_reason] == ["summed_0"]
    assert_trains_exactly(planned, [x, rows()])


def test_a_collective_whose_end_the_graph_could_not_wait_for_is_refused(world):
    def reduced(h: Tensor) -> Tensor:
        total = h.detach().clone()
        dist.all_reduce(total)
        return total

    with pytest.raises(TraceError, match=r"test_pin.py:\d+ forward calls c10d.allreduce_.default, a collective"):
        Rockmate(Collective(reduced), rows(), 0.9)


# ---- errors ------------------------------------------------------------------------------------------------


def no_forward(*_: Any) -> None:
    raise AssertionError("the model was run before its pins were looked at")


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        (3, "pin is 3, a int"),
        ([3], "3 cannot be pinned: it is a int"),
        ([torch.topk], "cannot be pinned: it is a builtin"),
        ([nn.Linear], "cannot be pinned: it is a type"),
        (nn.Linear(2, 2), "the Linear to be pinned is no submodule of this Model"),
        ([Router()], "the Router to be pinned is no submodule of this Model"),
    ],
)
def test_what_can_never_be_pinned_is_refused_before_the_model_runs(pin, message):
    model = Model()
    model.forward = no_forward
    with pytest.raises(PinError, match=message):
        Rockmate(model, rows(), 0.9, pin=pin)


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ("topk_7", r"no operation is called 'topk_7' .* Near it: topk_\d, topk_\d\. Give"),
        ("??", r"no operation is called '\?\?' .* There are: \w+, .*…"),
        (aten.relu.default, r"no operation calls aten\.relu\.default .* Near it: .*aten\.gelu\.default"),
        (aten.relu, r"no operation calls aten\.relu .* Near it: .*aten\.gelu"),
    ],
)
def test_an_operation_that_is_not_there_is_refused_with_what_is_near(pin, message):
    with pytest.raises(PinError, match=message):
        Rockmate(Model(), rows(), 0.9, pin=pin)


def test_a_module_that_is_not_called_is_refused():
    model = Model()
    model.unused = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(PinError, match="submodule 'unused', a Sequential, is to be pinned, but no operation ran"):
        Rockmate(model, rows(), 0.9, pin=model.unused)


def test_pins_are_looked_up_before_anything_is_measured():
    stages: set[str] = set()
    with pytest.raises(PinError):
        Rockmate(Model(), rows(), 0.9, pin="nothing", progress=lambda stage, done, total: stages.add(stage))
    assert stages == {"trace"}


def test_a_module_that_can_be_iterated_over_is_one_pin():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh(), nn.GELU()))
    planned = Rockmate(model, rows(), 1.0, loss=squares, pin=model[1])
    reasons = [node.keep_reason for node in planned._member.measured.graphs.S_graph]
    assert reasons == ["", "tanh_0 is pinned with submodule '1'", "gelu_0 is pinned with submodule '1'"]
