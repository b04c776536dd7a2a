"""A budget for all of training: what it counts, what it leaves to the step, and that real training stays within it."""

import copy
import gc
import pickle
import re
import tracemalloc
from functools import partial

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from rkgb.devices.allocation_log import AllocationLog
from rockmate import BudgetError, BudgetTooSmall, Rockmate, max_batch
from rockmate.errors import OptimizerError
from rockmate.memory.optimizer_state import optimizer_state_bytes
from rockmate.memory.split import count_residents
from rockmate.reports.comparison import split_table
from tests.free_memory import free_is
from tests.module.models import WIDTH, Layers, Normalised, Tied, built, images, rows, tokens
from tests.module.steps import CPU, FEW_ROUNDS, assert_trains_exactly, squares
from tests.where import placed

ADAMW = torch.optim.AdamW
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.01),
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": ADAMW,
    "amsgrad": partial(ADAMW, amsgrad=True),
    "adagrad": torch.optim.Adagrad,  # has its state from the start
    "adafactor": torch.optim.Adafactor,  # reads values: cannot be followed without data
    "nadam": torch.optim.NAdam,
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
USUAL = ["sgd", "momentum", "adam", "adamw"]


class Wide(nn.Module):
    """Layers whose parameters outweigh the activations of a small batch."""

    def __init__(self, width: int = 96, depth: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = torch.tanh(nn.functional.gelu(layer(hidden)))
        return hidden


MODELS = {
    "activations": (Layers, rows),
    "convolutions": (Normalised, images),
    "tied": (Tied, tokens),
    "parameters": (Wide, lambda seed=0: placed(torch.randn(64, 96, generator=torch.Generator().manual_seed(seed)))),
}


def net_bytes(log: AllocationLog) -> int:
    return sum(event.size_bytes for event in log.events)


def storages_alive() -> set[int]:
    """The storages of all tensors that Python knows, but for single numbers."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (Tensor, torch.nn.Parameter) and item.numel() > 1]
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided and tensor.device == CPU]
    return {tensor.untyped_storage().data_ptr() for tensor in dense}


def planned(budget, make=Layers, batch=rows, **options) -> Rockmate:
    return Rockmate(built(make), batch(), budget, loss=squares, scope="total", **options)


# ---- counting -----------------------------------------------------------------------------------------


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_state_is_known_to_the_byte_before_the_first_step(make, dtype):
    model = nn.Sequential(nn.Linear(32, 48), nn.Conv2d(3, 4, 3), nn.Linear(5, 7, bias=False)).to(dtype)
    model[0].bias.requires_grad_(False)
    estimated, _ = optimizer_state_bytes(make, model.parameters(), CPU)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    with AllocationLog(CPU) as log:
        optimizer = make(model.parameters())
        from_instance, _ = optimizer_state_bytes(optimizer, model.parameters(), CPU)
        optimizer.step()
    frozen = [tensor for tensor in optimizer.state[model[0].bias].values() if torch.is_tensor(tensor)]
    assert estimated == from_instance == net_bytes(log) - sum(tensor.nbytes for tensor in frozen)
    assert optimizer_state_bytes(optimizer, model.parameters(), CPU) == (estimated, estimated)


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}, {"capturable": True}])
def test_the_state_is_known_as_the_device_rounds_it(options):
    device = torch.device("cuda", torch.cuda.current_device())
    model = nn.Sequential(nn.Linear(33, 47), nn.Linear(47, 3)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), **options)
    estimated, _ = optimizer_state_bytes(optimizer, model.parameters(), device)
    model(torch.randn(2, 33, device=device)).sum().backward()
    before = torch.cuda.memory_allocated(device)
    optimizer.step()
    assert estimated == torch.cuda.memory_allocated(device) - before
    assert optimizer_state_bytes(optimizer, model.parameters(), device) == (estimated, estimated)


def test_groups_have_state_by_their_own_options():
    first, second = nn.Parameter(torch.ones(100)), nn.Parameter(torch.ones(100))
    groups = [{"params": [first], "momentum": 0.9}, {"params": [second], "momentum": 0.0}]
    assert optimizer_state_bytes(torch.optim.SGD(groups, lr=0.1), [first, second], CPU) == (400, 0)


def test_an_optimizer_is_left_as_it_was_with_its_scheduler_and_hooks():
    model, calls = nn.Linear(3, 3), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before, values = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    stream = torch.get_rng_state()
    assert optimizer_state_bytes(optimizer, model.parameters(), CPU)[0] > 0
    assert optimizer.state_dict() == before
    assert not calls
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), stream)
    optimizer.step()
    scheduler.step()


def test_storages_count_once_and_what_is_frozen_has_no_gradient():
    model = nn.Module()
    flat = torch.zeros(1000)
    model.left, model.right = nn.Parameter(flat[:600]), nn.Parameter(flat[600:])  # one storage
    model.again = model.left  # one parameter
    model.frozen = nn.Parameter(torch.zeros(50), requires_grad=False)
    model.register_buffer("table", torch.zeros(10, dtype=torch.float64))
    model.register_buffer("view", model.table[2:])
    found = count_residents(model, [flat[3:], torch.zeros(5)], [model.view], CPU, (7, 3))
    assert (found.parameter_bytes, found.gradient_bytes, found.buffer_bytes) == (4200, 4000, 80)
    assert (found.input_bytes, found.optimizer_bytes, found.total_bytes) == (20, 7, 8307)
    assert found.present_bytes == 4200 + 80 + 20 + 3
    model.left.grad = torch.zeros(600)
    assert count_residents(model, [], [], CPU, (0, 0)).present_bytes == 4200 + 80 + 2400


# ---- plans --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "batch"), MODELS.values(), ids=MODELS)
def test_the_parts_add_up_and_the_step_is_what_is_left(make, batch):
    model = planned(0.9, make, batch, optimizer=ADAMW)
    split, plan = model.memory_split, model.plan
    assert sum(size_bytes for _, size_bytes in split.parts()) == split.total_bytes
    assert plan.budget_bytes == split.step_bytes
    assert split.total_bytes == round(0.9 * (split.residents.total_bytes + plan.baseline_peak_bytes))
    assert plan.measured_peak_bytes <= plan.budget_bytes
    assert abs(plan.measured_peak_bytes - plan.peak_bytes) <= 0.01 * plan.peak_bytes
    assert f"of {split}".count("left for the step") == 1
    assert "in all" in str(plan)
    assert_trains_exactly(model, [batch(1), batch(2)])


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])
@pytest.mark.parametrize(
    ("model_name", "name"),
    [
        *(("activations", name) for name in USUAL),
        ("parameters", "adamw"),
        *(pytest.param("parameters", name, marks=pytest.mark.slow) for name in USUAL[:-1]),
    ],
)
@pytest.mark.ci
def test_real_training_stays_within_the_total(model_name, name, set_to_none):
    """Everything that is allocated from before the model is there: its bytes, then training's highest level."""
    (make, batch), make_optimizer = MODELS[model_name], OPTIMIZERS[name]
    with AllocationLog(CPU) as construction:
        network, sample = built(make), batch()
    before = storages_alive()
    model = Rockmate(network, sample, 0.85, loss=squares, scope="total", optimizer=make_optimizer, limits=FEW_ROUNDS)
    assert storages_alive() <= before, "planning holds on to tensors that nobody counts"
    with AllocationLog(CPU) as training:
        optimizer = make_optimizer(model.parameters())
        for _ in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            output = model(sample)
            loss = squares(output)
            loss.backward()
            del output, loss
            optimizer.step()
    split = model.memory_split
    held = net_bytes(construction)
    assert held == split.residents.parameter_bytes + split.residents.buffer_bytes + split.residents.input_bytes
    assert net_bytes(training) == split.residents.gradient_bytes + split.residents.optimizer_bytes
    assert held + training.peak_bytes <= split.total_bytes
    if not set_to_none:  # gradients are there all the time, as was planned for
        used = split.residents.total_bytes + model.plan.measured_peak_bytes
        assert held + training.peak_bytes == pytest.approx(used, rel=0.01)


def test_gradients_are_not_counted_twice():
    """Where parameters outweigh activations, a step above its gradients takes far less than one that makes them."""
    sample = torch.ones(8, 96)
    above = planned(1.0, Wide, lambda: sample).plan.baseline_peak_bytes
    making = Rockmate(built(Wide), sample, 1.0, loss=squares).plan.baseline_peak_bytes
    gradients = sum(parameter.nbytes for parameter in Wide().parameters())
    assert making - gradients <= above < making - gradients // 2


class Viewed(nn.Module):
    """Uses its parameters through a view, a cast, or as they are; each is as large as a value, of 256 KiB."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weights = nn.ParameterList(torch.randn(256, 256) / 16 for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        before = last = x = torch.sin(x)
        for weight in self.weights:
            before, last = last, x
            if self.kind == "view":
                x = torch.tanh(x @ weight.view(128, 512).view(256, 256))
            elif self.kind == "cast":
                x = torch.tanh(x.bfloat16() @ weight.bfloat16()).float()
            else:
                x = torch.tanh(x @ weight.to(torch.float32)) * torch.sigmoid(weight.type_as(x))
            x = x + before
        return x


@pytest.mark.parametrize(("kind", "values"), [("view", 7), ("cast", 7), ("itself", 8)])
@pytest.mark.ci
def test_a_gradient_that_goes_through_a_view_or_a_cast_is_not_counted_twice(kind, values):
    torch.manual_seed(0)
    model, x = Viewed(kind), torch.randn(256, 256)
    with pytest.raises(BudgetTooSmall) as refusal:
        Rockmate(model, x, 1, scope="total", loss=squares)
    plan = Rockmate(model, x, refusal.value.smallest_budget_bytes, scope="total", loss=squares).plan
    assert plan.peak_bytes == pytest.approx(plan.measured_peak_bytes, abs=4096)
    assert plan.peak_bytes <= values * x.nbytes + 4096


def test_a_frozen_model_part_leaves_its_bytes_to_the_step():
    network = built(Layers)
    network.layers[0].requires_grad_(False)
    frozen_bytes = sum(parameter.nbytes for parameter in network.layers[0].parameters())
    options = {"loss": squares, "scope": "total", "optimizer": torch.optim.Adam}
    some = Rockmate(network, rows(), "8MiB", **options).memory_split
    every = Rockmate(built(Layers), rows(), "8MiB", **options).memory_split
    assert some.residents.parameter_bytes == every.residents.parameter_bytes
    state_bytes = 2 * frozen_bytes + 2 * torch.tensor(0.0).nbytes  # two averages, and a count of steps per parameter
    assert some.step_bytes - every.step_bytes == frozen_bytes + state_bytes


def test_what_is_free_counts_what_is_there_already(monkeypatch):
    monkeypatch.setattr("rockmate.memory.budget.device_of", free_is(10 << 20))
    split = planned(None, optimizer=ADAMW).memory_split
    there = split.residents.parameter_bytes + split.residents.buffer_bytes + split.residents.input_bytes
    assert split.total_bytes == int(0.9 * (10 << 20)) + there


def test_without_a_total_there_is_no_split():
    assert Rockmate(built(Layers), rows(), 0.9, loss=squares).memory_split is None


def test_a_copy_keeps_the_split():
    model = planned(0.9)
    assert copy.deepcopy(model).memory_split == model.memory_split


# ---- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [10_000, "250 KiB"])
@pytest.mark.ci
def test_a_total_that_is_too_small_tells_its_parts_and_what_would_do(budget):
    with pytest.raises(BudgetTooSmall) as refusal:
        planned(budget, depth_of(5), optimizer=ADAMW, limits=FEW_ROUNDS)
    text = str(refusal.value)
    for part in ("parameters", "gradients", "optimizer state", "left for the step, and at least"):
        assert part in text
    assert ("nothing is left" in text) == (budget == 10_000)
    model = planned(refusal.value.smallest_budget_bytes, depth_of(5), optimizer=ADAMW, limits=FEW_ROUNDS)
    assert model.memory_split.total_bytes == refusal.value.smallest_budget_bytes


def depth_of(depth: int):
    return lambda: Layers(depth)


def test_a_budget_of_reserved_bytes_is_refused_where_nothing_is_reserved():
    with pytest.raises(BudgetError, match=re.escape('that of cpu does not. Give scope="step"')):
        Rockmate(Layers(2), torch.randn(4, WIDTH), 0.5, scope="reserved")
    with pytest.raises(BudgetError, match="measured of one batch at a time"):
        max_batch(Layers(2), torch.randn(4, WIDTH), "1 GiB", scope="reserved")
    with pytest.raises(OptimizerError, match='scope is "reserved": a budget of the step'):
        Rockmate(Layers(2), torch.randn(4, WIDTH), 0.5, scope="reserved", optimizer=ADAMW)


@pytest.mark.parametrize("scope", ["all", None, "Total", 1, ["total"]])
def test_other_scopes_are_refused_before_anything_runs(scope):
    with pytest.raises(BudgetError, match=re.escape('give "step", for a budget of what a step takes')):
        Rockmate(nn.Linear(1, 1), object(), 0.5, scope=scope)


def test_an_optimizer_that_would_not_be_counted_is_refused():
    with pytest.raises(OptimizerError, match='Say scope="total" to count it'):
        Rockmate(nn.Linear(1, 1), object(), 0.5, optimizer=ADAMW)


@pytest.mark.parametrize(
    "optimizer",
    ["adam", 3, nn.Linear, lambda parameters: parameters, lambda: None],
    ids=["a name", "a number", "a module", "returns parameters", "takes nothing"],
)
def test_what_is_no_optimizer_is_refused(optimizer):
    with pytest.raises(OptimizerError, match=r"a class such as torch\.optim\.AdamW"):
        planned(0.5, optimizer=optimizer)


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(OptimizerError, match="holds none of the parameters that the model trains"):
        planned(0.5, optimizer=torch.optim.SGD(nn.Linear(WIDTH, 1).parameters(), 0.1))


def test_an_optimizer_whose_state_cannot_be_told_is_refused_with_advice():
    with pytest.raises(OptimizerError, match=r"what LBFGS keeps cannot be told.*Take one step with it"):
        planned(0.5, optimizer=torch.optim.LBFGS)


def test_the_table_shows_every_part():
    split = planned(0.9, optimizer=ADAMW).memory_split
    console = Console(width=80)
    with console.capture() as capture:
        console.print(split_table(split.parts(), split.total_bytes))
    text = capture.get()
    assert all(name in text for name, _ in split.parts())
    assert "100 %" in text


# ---- copies of a module whose budget counts an optimizer ---------------------------------------------------


def planned_with_an_optimizer(**options):
    model = Wide()
    groups = [{"params": model.layers[:2].parameters(), "lr": 0.1}, {"params": model.layers[2:].parameters()}]
    optimizer = ADAMW(groups, **options)
    sample = MODELS["parameters"][1]()
    return Rockmate(model, sample, "4MiB", loss=squares, scope="total", optimizer=optimizer, cache=False), optimizer


@pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")
@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deep", "shallow", "pickle"],
)
def test_a_copy_counts_an_optimizer_like_the_one_that_was_given(copied, trained):
    model, optimizer = planned_with_an_optimizer(amsgrad=True)
    if trained:
        squares(model(torch.randn(64, 96))).backward()
        optimizer.step()
    groups, states = copy.deepcopy(optimizer.param_groups), len(optimizer.state)
    twin = copied(model)
    squares(twin(torch.randn(32, 96))).backward()  # another shape: planned anew
    assert twin.memory_split.residents.optimizer_bytes == model.memory_split.residents.optimizer_bytes > 0
    assert len(optimizer.state) == states
    assert [sorted(group) for group in optimizer.param_groups] == [sorted(group) for group in groups]


def test_pickling_neither_saves_nor_copies_what_an_optimizer_keeps():
    model, optimizer = planned_with_an_optimizer()
    before = len(pickle.dumps(model))
    squares(model(torch.randn(64, 96))).backward()
    optimizer.step()
    optimizer.zero_grad()
    state_bytes = sum(held.nbytes for state in optimizer.state.values() for held in state.values())
    assert state_bytes > before // 2
    tracemalloc.start()
    try:
        after = pickle.dumps(model)
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(after) < before + 1000
    # The module's own bytes, and the pickler's buffer, which grows by doubling.
    assert most_bytes < 3.5 * before
