"""After the first plan, training goes on: what cannot be planned within the budget runs otherwise, counted and told."""

import copy
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from rockmate import (
    BudgetTooSmall,
    FallbackWarning,
    GuardError,
    InputMismatch,
    ReplanWarning,
    ReplayMismatch,
    Rockmate,
    TraceError,
)
from rockmate.calls.specialization import Specialization
from rockmate.plan_files.reuse import plan_or_reuse
from tests.module.models import WIDTH, Layers, built, rows
from tests.module.steps import FEW_ROUNDS, assert_same, assert_same_training, peak_of_step, seen, squares, train

pytestmark = pytest.mark.filterwarnings("ignore::rockmate.TraceWarning")


def planned(model: nn.Module, sample: Any, budget: Any = 1.0, **options: Any) -> Rockmate:
    return Rockmate(model, sample, budget, loss=squares, limits=FEW_ROUNDS, **options)


def trained_beside_eager(model: Rockmate, batches: list[Any]) -> list[warnings.WarningMessage]:
    """Train both, compare every bit, and return what was told of fallbacks."""
    return [one for one in all_told(model, batches) if issubclass(one.category, FallbackWarning)]


def all_told(model: Rockmate, batches: list[Any]) -> list[warnings.WarningMessage]:
    """Train both, compare every bit, and return all that was told."""
    eager = copy.deepcopy(model.original)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = train(model, batches)
    assert_same_training(found, train(eager, batches))
    return told


def assert_told_once(told: list[warnings.WarningMessage], text: str) -> None:
    assert len([one for one in told if re.search(text, str(one.message))]) == 1, [str(one.message) for one in told]


def calls_of(model: Rockmate) -> dict[tuple[str, str], int]:
    return {(record.cause, record.ran): record.calls for record in model.fallbacks}


# ---- the known cases -----------------------------------------------------------------------------------


class Packed(nn.Module):
    """A recurrent network over packed sequences: the root reads the lengths of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.rnn = nn.RNN(8, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=tokens.shape[1])
        return self.head(hidden)


class Encoded(nn.Module):
    """The same as a part of a larger model: a submodule reads the lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Packed()
        self.wide = nn.Linear(3, 32)
        self.out = nn.Linear(32, 2)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        return self.out(torch.tanh(self.wide(self.encoder(tokens, lengths))))


def sentences(count: int) -> list[tuple[Tensor, Tensor]]:
    found = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 6, (6,), generator=generator)
        lengths[0] = 6
        found.append((torch.randint(11, (6, 6), generator=generator), lengths))
    return found


def test_packed_sequences_go_on_though_every_batch_takes_another_branch(monkeypatch):
    monkeypatch.setattr("rockmate.calls.specializations._MOST_BRANCHES", 2)
    batches = sentences(7)
    model = planned(built(Packed), batches[0], "1MiB")
    told = trained_beside_eager(model, batches)
    assert len(model.plans) == 2
    assert calls_of(model) == {("GuardError", "by itself"): 5}
    assert len(told) == 1
    assert "Packed runs by itself, without a plan, in calls such as int64[6, 6]" in str(told[0].message)
    assert "within the budget of 1.00 MiB" in str(told[0].message)


@pytest.mark.slow
def test_packed_sequences_go_on_for_many_batches_under_the_limits_as_they_are():
    batches = sentences(14)
    model = planned(built(Packed), batches[0], "1MiB")
    trained_beside_eager(model, batches)
    assert len(model.plans) <= 8
    assert [record.cause for record in model.fallbacks] == ["GuardError"]


@pytest.mark.ci
def test_where_its_own_step_does_not_fit_each_branch_is_planned_within_the_budget_and_few_are_kept(monkeypatch):
    monkeypatch.setattr("rockmate.calls.specializations._MOST_BRANCHES", 2)
    batches = [rows(seed) for seed in range(6)]
    model = planned(built(CheckedCodes), rows(), 0.7)
    told = all_told(model, batches)
    assert_told_once(told, r"CheckedCodes is planned for nearly every call now: 2 plans for such calls")
    assert len(model.plans) == 2
    assert not model.fallbacks
    assert all(plan.measured_peak_bytes <= plan.budget_bytes for plan in model.plans)


@pytest.mark.ci
def test_a_submodule_that_reads_something_else_of_every_batch_becomes_one_operation(monkeypatch):
    monkeypatch.setattr("rockmate.calls.specializations._MOST_BRANCHES", 2)
    batches = sentences(6)
    model = planned(built(Encoded), batches[0], "1MiB")
    told = all_told(model, batches)
    assert_told_once(told, "submodule 'encoder' of Encoded reads something else .* is one operation from now on")
    assert len(model.plans) == 1
    assert "encoder(" in model.code
    assert not model.fallbacks


class CheckedCodes(Layers):
    """A vector quantiser that checks which of its codes are in use, as some do."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(64, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        indices = torch.cdist(hidden.detach(), self.codes.detach()).argmin(-1)
        first, last = int(indices[:9].min()), int(indices[:9].max())
        if first < 0 or last >= len(self.codes):
            raise IndexError(f"codes {first} to {last}")
        return super().forward(hidden) + self.codes[indices]


@pytest.mark.ci
def test_a_quantiser_whose_check_reads_another_number_in_every_batch_goes_on(monkeypatch):
    monkeypatch.setattr("rockmate.calls.specializations._MOST_BRANCHES", 3)
    batches = [rows(seed) for seed in range(9)]
    model = planned(built(CheckedCodes), rows(), "8MiB")
    told = trained_beside_eager(model, batches)
    assert len(told) == 1
    assert "3 plans for such calls are there, each for other data or settings" in str(told[0].message)
    assert calls_of(model)[("GuardError", "by itself")] >= 4


@pytest.mark.parametrize("frozen", [False, True], ids=["training", "frozen"])
@pytest.mark.parametrize("budget", [0.75, 1.0])
def test_a_discriminator_planned_on_real_images_gives_its_generator_a_gradient(frozen, budget):
    discriminator = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.LeakyReLU(0.2))))
    generator = nn.Linear(4, 32)
    for parameter in (*discriminator.parameters(), *generator.parameters()):
        nn.init.normal_(parameter, std=0.2)
    model = planned(discriminator, rows(), budget)
    seen_by = []
    for critic, maker in ((copy.deepcopy(discriminator), copy.deepcopy(generator)), (model, generator)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReplanWarning)
            for seed in range(3):
                fake = maker(rows(seed)[:, :4])
                squares(critic(rows(seed))).backward()
                squares(critic(fake.detach())).backward()
                critic.requires_grad_(not frozen)
                (-squares(critic(fake))).backward()
                critic.requires_grad_(True)
        seen_by.append({**seen(critic, (), ()), **seen(maker, (), ())})
    assert_same(seen_by[1], seen_by[0])
    assert len({plan.calls for plan in model.plans}) == 2
    assert all(record.ran == "above the budget" for record in model.fallbacks)


class Graphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, nodes: Tensor, edges: Tensor, graph_of: Tensor) -> Tensor:
        hidden = torch.relu(self.first(nodes))
        hidden = torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]])
        return torch.zeros(3, 4).index_add(0, graph_of, self.second(hidden))


def graphs(count: int, least: int = 20) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        nodes = least + 7 * seed % 31
        edges = torch.randint(nodes, (2, 3 * nodes), generator=generator)
        yield torch.randn(nodes, 8, generator=generator), edges, torch.arange(nodes) % 3


def no_family(members):
    """As of modules whose sizes are not followed."""


@pytest.mark.ci
def test_mini_batches_of_graphs_are_a_family():
    batches = list(graphs(12))
    model = planned(built(Graphs), batches[0], "1MiB")
    trained_beside_eager(model, batches)
    assert sum(plan.measured_peak_bytes is not None for plan in model.plans) <= 6
    assert not model.fallbacks


@pytest.mark.ci
def test_mini_batches_of_graphs_of_which_each_has_another_size_are_not_planned_for_ever(monkeypatch):
    monkeypatch.setattr("rockmate.calls.by_size.family_of", no_family)
    monkeypatch.setattr("rockmate.calls.specializations._MOST_UNUSED", 3)
    batches = list(graphs(9))
    model = planned(built(Graphs), batches[0], "1MiB")
    told = trained_beside_eager(model, batches)
    assert len(model.plans) == 4
    assert calls_of(model) == {("InputMismatch", "by itself"): 5}
    assert len(told) == 1
    assert "3 plans or more are there that no later call has used" in str(told[0].message)


@pytest.mark.ci
def test_graphs_whose_own_steps_do_not_fit_are_planned_and_the_oldest_plans_go(monkeypatch):
    monkeypatch.setattr("rockmate.calls.by_size.family_of", no_family)
    monkeypatch.setattr("rockmate.calls.specializations._MOST_UNUSED", 2)
    monkeypatch.setattr("rockmate.calls.specializations._MOST_PLANS", 4)
    model = planned(built(Layers), rows()[:100], "120 KiB")
    batches = [rows(seed)[: 100 + seed] for seed in range(8)]
    told = all_told(model, batches)
    assert_told_once(told, "Layers has 4 plans, as many as are kept")
    assert_told_once(told, "Layers is planned for nearly every call now: 2 plans or more")
    assert len(model.plans) == 4


@pytest.mark.ci
def test_more_lengths_than_plans_are_kept_go_on_and_few_of_them_are_compared_with_a_call(monkeypatch):
    monkeypatch.setattr("rockmate.calls.by_size.family_of", no_family)
    monkeypatch.setattr("rockmate.calls.specializations._MOST_PLANS", 6)
    model = planned(nn.Sequential(nn.Linear(32, 8), nn.Tanh()), rows()[:100])
    with warnings.catch_warnings(action="ignore"):
        for length in range(99, 92, -1):
            model.plan_for(rows()[:length])
    assert len(model.plans) == 6
    compared: list[Specialization] = []
    mismatch = Specialization.mismatch
    monkeypatch.setattr(
        Specialization, "mismatch", lambda member, *call: compared.append(member) or mismatch(member, *call)
    )
    told = trained_beside_eager(model, [rows(1)[:length] for length in (96, 93, 98)])
    assert not told
    assert len(compared) == 3
    trained_beside_eager(model, [rows(1)[:length] for length in (100, 99, 70)])  # two of which were dropped
    assert len(model.plans) == 6


# ---- what planning may end with ---------------------------------------------------------------------------

ENDS: dict[str, Callable[[], BaseException]] = {
    "trace": lambda: TraceError("the operation foo cannot be traced. Plan the module otherwise."),
    "replay": lambda: ReplayMismatch("output 0 differs"),
    "key": lambda: KeyError("gelu_3"),
    "assertion": lambda: AssertionError(),
    "recursion": lambda: RecursionError("maximum recursion depth exceeded"),
    "not implemented": lambda: NotImplementedError("no rule for prim::foo"),
    "no memory": lambda: MemoryError(),
    "no memory on a device": lambda: torch.OutOfMemoryError("CUDA out of memory"),
}


def ending_with(monkeypatch, error: Callable[[], BaseException]) -> list[int]:
    """Planning fails from here on; the list grows with each attempt."""
    attempts: list[int] = []

    def fail(*_: Any) -> Any:
        attempts.append(1)
        raise error()

    monkeypatch.setattr("rockmate.calls.specializations.plan_by_faster_kernels", fail)
    return attempts


@pytest.mark.parametrize("end", ENDS)
def test_whatever_planning_ends_with_the_module_itself_runs_and_the_cause_is_told_once(end, monkeypatch):
    model = planned(built(Layers), rows(), "8MiB")
    attempts = ending_with(monkeypatch, ENDS[end])
    told = trained_beside_eager(model, [rows(1)[:200], rows(2), rows(3)[:200], rows(4)[:200]])
    assert len(attempts) == 1, "what failed once is not tried again"
    (warning,) = told
    expected = ENDS[end]()
    assert type(warning.message.__cause__) is type(expected)
    assert warning.filename == __file__.replace("test_goes_on", "steps")
    assert "float32[200, 32] on cpu" in str(warning.message)
    assert str(expected).partition(". ")[0] in str(warning.message)
    assert "within the budget of 8.00 MiB" in str(warning.message)
    assert calls_of(model) == {(type(expected).__name__, "by itself"): 3}
    if end == "key":
        assert "(raised at test_goes_on.py:" in str(warning.message)


def test_a_step_above_the_budget_is_told_with_both_numbers(monkeypatch):
    model = planned(built(Layers), rows()[:100], 1.0)
    ending_with(monkeypatch, ENDS["trace"])
    (warning,) = trained_beside_eager(model, [rows(1)])
    (record,) = model.fallbacks
    assert record.peak_bytes == peak_of_step(copy.deepcopy(model.original), (rows(1),))
    assert "1.00 MiB, above the budget of 200 KiB" in str(warning.message)
    assert str(record).startswith("1 call by itself, up to 1.00 MiB: TraceError: the operation foo cannot be traced")


def test_what_no_plan_fits_runs_by_the_least_plan_and_is_told_with_both_numbers():
    model = planned(built(Layers), rows()[:100], 1.0)
    (warning,) = trained_beside_eager(model, [rows(1), rows(2)])
    plan = model.plan
    assert plan.budget_bytes < plan.measured_peak_bytes < plan.baseline_peak_bytes
    assert peak_of_step(model, (rows(3),)) == plan.measured_peak_bytes
    assert "no plan was found within the budget of 200 KiB, and the least that was found takes" in str(warning.message)
    (record,) = model.fallbacks
    assert (record.cause, record.ran, record.calls) == ("BudgetTooSmall", "above the budget", 3)
    assert record.peak_bytes == plan.measured_peak_bytes


def test_an_interrupt_ends_planning_and_is_not_taken_for_a_failure(monkeypatch):
    model = planned(built(Layers), rows(), "8MiB")
    ending_with(monkeypatch, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        model(rows()[:100])
    assert not model.fallbacks


def test_before_the_first_plan_and_if_so_asked_errors_are_raised(monkeypatch):
    model = planned(built(Layers), rows(), "8MiB", shapes="error")
    ending_with(monkeypatch, ENDS["key"])
    with pytest.raises(KeyError):
        planned(built(Layers), None, "8MiB")(rows())
    with pytest.raises(InputMismatch):
        model(rows()[:100])
    with pytest.raises(KeyError):
        planned(built(Layers), rows(), "8MiB").plan_for(rows()[:100])


@pytest.mark.ci
def test_what_was_not_planned_is_when_asked_for_again(monkeypatch):
    model = planned(built(Layers), rows(), "8MiB")
    with monkeypatch.context() as failing:
        ending_with(failing, ENDS["key"])
        trained_beside_eager(model, [rows(1)[:100]])
        with pytest.raises(KeyError):
            model.plan_for(rows()[:100])
    model.zero_grad()
    plan = model.plan_for(rows()[:100])
    assert not trained_beside_eager(model, [rows(2)[:100]])
    assert model.plan is plan
    assert calls_of(model) == {("KeyError", "by itself"): 1}


# ---- the module's own errors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model(torch.randn(8, WIDTH + 1)),
        lambda model: model(rows(), rows()),
        lambda model: model(hiden=rows()),
        lambda model: model(3),
    ],
    ids=["width", "arguments", "name", "type"],
)
def test_what_the_module_itself_refuses_is_refused_in_its_own_words(call):
    model = planned(built(Layers), rows(), "8MiB")
    before = torch.get_rng_state()
    with pytest.raises(Exception) as expected:  # noqa: PT011  whatever the module raises
        call(model.original)
    torch.set_rng_state(before)
    with pytest.raises(expected.type) as found:
        call(model)
    assert str(found.value) == str(expected.value)
    assert not model.fallbacks
    assert not trained_beside_eager(model, [rows(1)])


def test_a_call_without_a_tensor_runs_if_the_module_takes_it():
    class Tabled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4)

        def forward(self, ids: Any) -> Tensor:
            return torch.tanh(self.table(torch.as_tensor(ids)))

    model = planned(built(Tabled), torch.arange(8), "1MiB")
    trained_beside_eager(model, [([1, 2, 3],), torch.arange(8), ([3, 2],), ([1, 2, 3],)])
    assert calls_of(model) == {("SampleError", "by itself"): 3}


def test_an_array_that_changes_in_place_is_another_argument():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, scale: Any) -> Tensor:
            return torch.tanh(self.layer(x)) * float(scale[0])

    scale = np.array([1.0, 2.0])
    model = planned(built(Scaled), (rows(), scale), "4MiB")
    eager = copy.deepcopy(model.original)
    for value in (1.0, 3.0):
        scale[0] = value
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReplanWarning)
            assert torch.equal(model(rows(), scale), eager(rows(), scale))


# ---- what comes between steps --------------------------------------------------------------------------------


def test_transforms_of_torch_func_between_steps_run_by_themselves():
    model = planned(nn.Sequential(nn.Linear(32, 8), nn.Tanh()), rows())

    batch = rows(1)

    def loss(weights: Any, module: nn.Module = model) -> Tensor:
        return functional_call(module, weights, (batch,)).square().mean()

    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    expected = grad(lambda weights: loss(weights, model.original))(weights)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            assert_same(grad(loss)(weights), expected)
    assert_told_once(told, r"runs by itself, without a plan, in calls: .*torch\.func")
    assert calls_of(model) == {("TransformError", "by itself"): 3}
    assert not trained_beside_eager(model, [rows(1)])


class Adapted(nn.Module):
    def __init__(self, *extra: nn.Module) -> None:
        super().__init__()
        hidden = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())]
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), *extra, *hidden, nn.Linear(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def adapted(module: nn.Module, second_order: bool) -> list[Tensor]:
    """Steps of MAML: what the weights become after two steps within, and gradients through these."""
    optimizer, found = torch.optim.SGD(module.parameters(), 0.1), []
    torch.manual_seed(5)
    for step in range(4):
        optimizer.zero_grad()
        weights = dict(module.named_parameters())
        for inner in range(2):
            loss = squares(functional_call(module, weights, (rows(10 * step + inner),)))
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=second_order)
            pairs = zip(weights.items(), gradients, strict=True)
            weights = {name: weight - 0.1 * gradient for (name, weight), gradient in pairs}
        loss = squares(functional_call(module, weights, (rows(step),)))
        loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in module.parameters())]
        optimizer.step()
    return [*found, *(buffer.clone() for buffer in module.buffers()), torch.get_rng_state()]


@pytest.mark.parametrize("second_order", [False, True])
@pytest.mark.parametrize("extra", [nn.Dropout(0.2), nn.BatchNorm1d(64)], ids=["dropout", "batch norm"])
@pytest.mark.filterwarnings("ignore::rockmate.DoubleBackwardWarning")
def test_weights_that_functional_call_puts_there_are_those_of_the_step(extra, second_order):
    model = planned(built(Adapted, extra), rows(), 0.8)
    eager = copy.deepcopy(model.original)
    found, expected = adapted(model, second_order), adapted(eager, second_order)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert not model.fallbacks


def test_plain_tensors_in_the_places_of_parameters_take_the_gradients():
    model = planned(built(Adapted), rows(), 0.8)
    assert model.plan.recomputations
    taken = []
    for module in (model, model.original):
        weights = {name: held.detach().clone().requires_grad_() for name, held in model.named_parameters()}
        for seed in range(4):
            squares(functional_call(module, weights, (rows(seed),))).backward()
        taken.append([weight.grad for weight in weights.values()])
    assert all(map(torch.equal, *taken))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.fallbacks


def test_evaluation_between_steps_is_no_fallback():
    model = planned(built(Layers), rows(), "8MiB")
    eager = copy.deepcopy(model.original)
    for module in (eager, model):
        torch.manual_seed(1)
        squares(module(rows(1))).backward()
        module.eval()
        module(rows()[:7])
        module.train()
        with torch.no_grad():
            module(rows()[:9])
        with torch.inference_mode():
            module(rows()[:9])
        squares(module(rows(2))).backward()
    assert_same(seen(model, (), ()), seen(eager, (), ()))
    assert not model.fallbacks
    assert len(model.plans) == 1


# ---- the record -----------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_the_record_is_copied_and_pickled_with_the_module(monkeypatch):
    model = Rockmate(built(Layers), rows(), "8MiB", limits=FEW_ROUNDS)
    attempts = ending_with(monkeypatch, ENDS["replay"])
    trained_beside_eager(model, [rows(1)[:200]] * 2)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.fallbacks == model.fallbacks
        assert trained_beside_eager(twin, [rows(1)[:200]]), "who uses the copy is told"
        assert twin.fallbacks[0].calls == 3
    assert model.fallbacks[0].calls == 2
    assert len(attempts) == 3


@pytest.mark.ci
def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr("rockmate.calls.by_itself._MOST_SETTLED", 5)
    model = planned(nn.Sequential(nn.Linear(32, 8), nn.Tanh()), rows())
    attempts = ending_with(monkeypatch, lambda: ReplayMismatch(f"output {len(attempts)} is {'x' * len(attempts)}"))
    monkeypatch.setattr("rockmate.calls.specializations._MOST_FAILED", 100)
    monkeypatch.setattr("rockmate.calls.fallbacks._MOST_REASONS", 4)
    trained_beside_eager(model, [rows(1)[: 10 + step] for step in range(9)])
    assert len(model._family._settled._settled) == 5
    assert len(model.fallbacks) == 5
    assert sum(record.calls for record in model.fallbacks) == 9


@pytest.mark.ci
def test_planning_that_fails_for_every_size_is_not_tried_for_ever(monkeypatch):
    monkeypatch.setattr("rockmate.calls.specializations._MOST_FAILED", 3)
    model = planned(nn.Sequential(nn.Linear(32, 8), nn.Tanh()), rows())
    with monkeypatch.context() as failing:
        attempts = ending_with(failing, ENDS["replay"])
        trained_beside_eager(model, [rows(1)[: 10 + step] for step in range(6)])
        assert len(attempts) == 3
        model.original[0].bias.requires_grad_(False).grad = None  # another module, so to speak
        trained_beside_eager(model, [rows(1)[:20]])
        assert len(attempts) == 4
    trained_beside_eager(model, [rows(1)[:30]])
    assert calls_of(model) == {("ReplayMismatch", "by itself"): 7}


def test_shapes_run_eagerly_are_counted_too():
    model = planned(built(Layers), rows(), "8MiB", shapes="eager")
    trained_beside_eager(model, [rows(1)[:50], rows(2)])
    assert calls_of(model) == {("InputMismatch", "by itself"): 1}


@pytest.mark.ci
def test_a_plan_that_exceeds_is_not_kept_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ROCKMATE_CACHE", str(tmp_path))
    kept: list[Any] = []
    monkeypatch.setattr("rockmate.plan_files.cache.put", lambda key, file: kept.append(file))
    model = planned(built(Layers), rows()[:100], 1.0)
    trained_beside_eager(model, [rows(1)])
    assert model.fallbacks
    assert all(file.promise.measured_peak_bytes <= file.promise.budget_bytes for file in kept)
    with pytest.raises(BudgetTooSmall):
        planned(built(Layers), rows(1), model.plan.budget_bytes)


def test_a_module_that_reads_something_else_even_as_it_runs_after_planning_goes_on(monkeypatch):
    model = planned(built(Layers), rows(), "8MiB")

    def planned_for_other_data(*given: Any) -> Any:
        measured, planned = plan_or_reuse(*given)
        monkeypatch.setattr(
            "rockmate.runtime.runner.Runner.run", lambda *_: (_ for _ in ()).throw(GuardError("another number"))
        )
        return measured, planned

    with monkeypatch.context() as failing:
        failing.setattr("rockmate.calls.specializations.plan_by_faster_kernels", planned_for_other_data)
        trained_beside_eager(model, [rows(1)[:50]])
    assert calls_of(model) == {("GuardError", "by itself"): 1}
