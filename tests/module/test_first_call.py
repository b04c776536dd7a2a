"""State that a first call makes, and what planning leaves behind: nothing, also where it ends in an error."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rkgb import ModelError, RockmateError, TraceError, make_all_graphs
from rkgb.ir.sample import make_sample
from rkgb.replay import first_call
from rockmate import ReplanWarning, Rockmate, max_batch, verify
from rockmate.queries.measured_rockmate import MeasuredRockmate
from tests.module.steps import FEW_ROUNDS

BUDGET = 0.95


class Layers(nn.Module):
    """Two layers, with something between them."""

    budget = BUDGET

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def between(self, h):
        return h

    def forward(self, x):
        return self.second(self.between(F.gelu(self.first(x))))


class Registers(Layers):
    def between(self, h):
        if not hasattr(self, "positions"):
            self.register_buffer("positions", torch.arange(len(h))[:, None] * 0.01)
        return h + self.positions


class FillsAPlace(Layers):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", None)

    def between(self, h):
        if self.mask is None:
            self.mask = torch.ones(len(h), 1).tril()
        return h * self.mask


class RequiresGradient(Layers):
    def __init__(self):
        super().__init__()
        self.register_buffer("zero", torch.tensor(0.0), persistent=False)

    def forward(self, x):
        loss = self.zero
        loss.requires_grad_()
        h = F.gelu(self.first(x))
        return self.second(h), loss + h.square().mean()


class ActNorm(Layers):
    """The scale and the location of the first batch, as flows start from."""

    def __init__(self):
        super().__init__()
        self.location, self.scale = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.ones(16))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def between(self, h):
        if self.initialized.item() == 0:
            with torch.no_grad():
                self.location.data.copy_(-h.mean(0))
                self.scale.data.copy_(1 / (h.std(0) + 1e-6))
            self.initialized.fill_(1)
        return self.scale * (h + self.location)


class Codebook(Layers):
    """A codebook that starts from random rows of the first batch, and follows the others."""

    budget = 1 << 20

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.zeros(3, 16))
        self.register_buffer("started", torch.tensor(False))

    def between(self, h):
        if not self.started:
            self.codes.copy_(h.detach()[torch.randperm(len(h))[:3]])
            self.started.fill_(True)
        chosen = torch.cdist(h, self.codes).argmin(-1)
        with torch.no_grad():
            self.codes.mul_(0.9).add_(0.1 * F.one_hot(chosen, 3).float().T @ h / len(h))
        return h + (self.codes[chosen] - h).detach()


class Attribute(Layers):
    centre = None

    def between(self, h):
        if self.centre is None:
            self.centre = h.detach().mean(0)
        return h - self.centre


class AddsALayer(Layers):
    def between(self, h):
        if not hasattr(self, "extra"):
            self.extra = nn.Dropout(0.5)
        return self.extra(h)


KINDS = [Registers, FillsAPlace, RequiresGradient, ActNorm, Codebook, Attribute, AddsALayer]


def everything(module):
    """All of a module that planning could change, with what is where."""
    held = {name: (id(t), t.detach().clone(), t.requires_grad, t.grad) for name, t in module.named_parameters()}
    held |= {name: (id(t), t.detach().clone(), t.requires_grad, t.grad) for name, t in module.named_buffers()}
    plain = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    hooks = [len(value) for name, value in vars(module).items() if name.endswith("_hooks") and isinstance(value, dict)]
    return held, plain, hooks, list(module.state_dict()), [part for part, _ in module.named_modules()]


def assert_left(module, before):
    after = everything(module)
    assert before[0].keys() == after[0].keys()
    for name, (identity, value, flag, gradient) in before[0].items():
        assert (identity, flag) == (after[0][name][0], after[0][name][2])
        assert gradient is after[0][name][3]
        assert torch.equal(value, after[0][name][1]), name
    assert before[1:] == after[1:]


def steps(module, batches):
    """Training, with all that it leaves."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    found = []
    for batch in batches:
        optimizer.zero_grad()
        output = module(batch)
        outputs = output if isinstance(output, tuple) else (output,)
        sum(one.square().mean() for one in outputs).backward()
        found += [one.detach().clone() for one in outputs]
        found += [parameter.grad.clone() for parameter in module.parameters()]
        optimizer.step()
        found += [t.detach().clone() for t in (*module.parameters(), *module.buffers())]
        found += [t.grad.clone() for t in module.buffers() if t.grad is not None]
        found.append(torch.get_rng_state())
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning", "ignore::rkgb.TraceWarning")
def test_the_first_call_is_eagers_and_planning_leaves_nothing_behind(kind):
    eager = kind()
    module, batches = copy.deepcopy(eager), [torch.randn(64, 16) for _ in range(3)]
    before = everything(module)
    planned = Rockmate(module, torch.randn(64, 16), kind.budget, cache=False)
    assert_left(module, before)
    expected, found = steps(eager, batches), steps(planned, batches)
    assert len(expected) == len(found)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert eager.state_dict().keys() == module.state_dict().keys()


def test_that_the_first_call_runs_by_itself_is_told_once_with_what_it_makes():
    planned = Rockmate(Registers(), torch.randn(64, 16), BUDGET, cache=False)
    with pytest.warns(ReplanWarning, match=r"first training call of Registers .* makes buffer 'positions'.*no_grad"):
        planned(torch.randn(64, 16))
    planned(torch.randn(64, 16)).sum().backward()


def test_what_was_called_once_has_no_first_call_any_more():
    module = ActNorm()
    with torch.no_grad():
        module(torch.randn(64, 16))
    planned = Rockmate(module, torch.randn(64, 16), BUDGET, cache=False)
    assert "no plan" not in str(planned.plan)
    planned(torch.randn(64, 16)).sum().backward()


@pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")
def test_planned_with_the_first_batch_the_first_call_is_eagers_too():
    eager = ActNorm()
    planned, batches = Rockmate(copy.deepcopy(eager), budget=BUDGET, cache=False), [torch.randn(64, 16) for _ in "12"]
    expected, found = steps(eager, batches), steps(planned, batches)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")
def test_verify_sees_such_a_module_as_exact():
    assert verify(RequiresGradient(), torch.randn(64, 16), BUDGET).exact


@pytest.mark.parametrize("calls", [0, 1, 2, 3, 5, 8])
def test_an_error_in_the_middle_of_planning_leaves_the_module_as_it_was(calls):
    class Fails(RequiresGradient):
        def forward(self, x):
            result = super().forward(x)
            self.first.weight.data.mul_(0.5)
            counted.append(None)
            if len(counted) > calls:
                raise KeyError("no more")
            return result

    counted, module = [], Fails()
    module.first.weight.grad = torch.ones(16, 16)
    before = everything(module)
    with pytest.raises((RockmateError, KeyError)):
        Rockmate(module, torch.randn(64, 16), BUDGET, cache=False)
    assert_left(module, before)


def test_parameters_that_every_call_writes_are_given_back():
    class Clamped(Layers):
        def between(self, h):
            self.second.weight.data.mul_(0.5)
            return h

    module = Clamped()
    before = everything(module)
    with pytest.raises(TraceError) as caught:
        Rockmate(module, torch.randn(64, 16), 1 << 20, cache=False)
    assert "writes into its parameter 'second.weight'" in str(caught.value.__notes__)
    assert_left(module, before)


def test_parameters_without_a_shape_are_refused_with_what_to_do():
    module = nn.Sequential(nn.LazyLinear(16), nn.GELU(), nn.LazyBatchNorm1d(), nn.Linear(16, 4))
    with pytest.raises(ModelError, match=r"'0.weight' of Sequential has no shape yet.*Call the module once"):
        Rockmate(module, torch.randn(64, 16), BUDGET)
    with pytest.raises(ModelError, match=r"'0.weight' of Sequential has no shape yet.*Call the module once"):
        make_all_graphs(module, torch.randn(64, 16))
    planned = Rockmate(module, budget=BUDGET, cache=False)
    with pytest.warns(ReplanWarning, match="makes the shapes of its parameters"):
        planned(torch.randn(64, 16))
    planned(torch.randn(64, 16)).sum().backward()
    assert len(planned.plans) == 1


def test_graphs_alone_say_what_the_first_call_makes():
    with pytest.raises(TraceError) as caught:
        make_all_graphs(ActNorm(), torch.randn(64, 16))
    assert "its first call makes" in str(caught.value.__notes__)


@pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")
@pytest.mark.parametrize("kind", [Registers, ActNorm])
def test_a_module_that_is_measured_by_itself_is_planned_as_it_is_after_its_first_call(kind):
    model, sample = kind(), torch.randn(64, 16)
    expected = copy.deepcopy(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    staged = MeasuredRockmate(model, budget=None)
    staged.measure(sample)
    staged.plan_within(1 << 20)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for _ in range(3):
        outputs = [module(sample) for module in (staged, expected)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.square().mean().backward()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_the_largest_batch_of_a_module_with_a_first_call_leaves_its_parameters():
    model = ActNorm()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TraceError) as refused:
        max_batch(model, torch.randn(8, 16), budget=1 << 20, most=16, limits=FEW_ROUNDS)
    assert "Call it once before" in "".join(refused.value.__notes__)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# ---- tables that are kept ----------------------------------------------------------------------------------


class Kept(Layers):
    """A table that is made where there is none of this size."""

    table = None

    def between(self, h):
        if self.table is None or len(self.table) != len(h):
            self.table = torch.arange(len(h))[:, None] * 0.01
        return h + self.table


class KeptBySize(Layers):
    def __init__(self):
        super().__init__()
        self.tables = {}

    def between(self, h):
        if len(h) not in self.tables:
            self.tables[len(h)] = torch.linspace(0, 1, len(h))[:, None]
        return h + self.tables[len(h)]


class KeptTogether(Layers):
    tables = None

    def between(self, h):
        if self.tables is None or len(self.tables[0]) != len(h):
            angles = torch.arange(len(h))[:, None] * 0.1
            self.tables = (angles.cos(), angles.sin())
        cosine, sine = self.tables
        return h * cosine + h * sine


@pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")
@pytest.mark.parametrize("kind", [Kept, KeptBySize, KeptTogether])
@pytest.mark.parametrize("sizes", [(64, 64, 64), (64, 48, 48, 64, 64, 48)], ids=["one size", "two sizes"])
@pytest.mark.parametrize("called", [False, True])
def test_a_table_that_is_kept_for_later_calls_is_where_the_module_keeps_it(kind, sizes, called):
    eager = kind()
    if called:
        eager(torch.randn(48, 16))
    module = copy.deepcopy(eager)
    before = everything(module)
    planned = Rockmate(module, torch.randn(64, 16), 1 << 20, cache=False, limits=FEW_ROUNDS)
    assert_left(module, before)
    for size in sizes:
        batch = torch.randn(size, 16)
        expected, found = steps(eager, [batch]), steps(planned, [batch])
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
        assert_alike(held(module), held(eager))
    assert not planned.fallbacks


def held(module):
    return {name: value for name, value in vars(module).items() if name.startswith("table")}


def assert_alike(found, expected):
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, (dict, tuple)):
        assert len(found) == len(expected)
        for key, value in expected.items() if isinstance(expected, dict) else enumerate(expected):
            assert_alike(found[key], value)
    else:
        assert found == expected


# ---- hooks that a first call makes -------------------------------------------------------------------------


class Captures(Layers):
    """As libraries of transformers do: hooks that hand on what layers give, made where they are first needed."""

    def __init__(self):
        super().__init__()
        self.captured = []
        self.passes = None

    def between(self, h):
        return h + self.captured.pop().sin()

    def forward(self, x):
        if not getattr(self, "has_hooks", False):
            self.first.register_forward_hook(lambda _, given, output: self.captured.append(output * 0.5))
            self.has_hooks = True
        return super().forward(x)


@pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning", "ignore::rkgb.TraceWarning")
@pytest.mark.parametrize("evaluated", [False, True])
def test_hooks_that_a_first_call_makes_are_there_whenever_the_module_itself_runs(evaluated):
    eager = Captures()
    module, batches = copy.deepcopy(eager), [torch.randn(64, 16) for _ in range(2)]
    before = everything(module)
    planned = Rockmate(module, torch.randn(64, 16), 1 << 20, cache=False, limits=FEW_ROUNDS)
    assert_left(module, before)
    for _ in range(2):
        expected, found = steps(eager, batches), steps(planned, batches)
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
        if evaluated:
            with torch.no_grad():
                assert torch.equal(planned.eval()(batches[0]), eager.eval()(batches[0]))
            planned.train(), eager.train()
    assert not planned.fallbacks


@pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning", "ignore::rkgb.TraceWarning")
@pytest.mark.ci
def test_a_flag_that_decides_more_than_hooks_is_written():
    class Warms(Captures):
        def between(self, h):
            h = super().between(h)
            if self.passes is None:
                self.passes = 1
                return h * 0.5
            return h

    eager = Warms()
    planned = Rockmate(copy.deepcopy(eager), torch.randn(64, 16), 1 << 20, cache=False, limits=FEW_ROUNDS)
    batches = [torch.randn(64, 16) for _ in range(3)]
    assert all(
        torch.equal(one, other) for one, other in zip(steps(eager, batches), steps(planned, batches), strict=True)
    )


class Growing(nn.Module):
    """Keeps a table for the longest rows so far, as rotary embeddings do."""

    def __init__(self, persistent):
        super().__init__()
        self.first, self.last, self.persistent = nn.Linear(16, 16), nn.Linear(16, 16), persistent

    def forward(self, x):
        length = x.shape[1]
        if not hasattr(self, "table") or len(self.table) < length:
            self.register_buffer("table", torch.arange(length)[:, None] * 0.01, persistent=self.persistent)
        return torch.tanh(self.last(torch.tanh(self.first(x) + self.table[:length])))


@pytest.mark.filterwarnings("ignore::rockmate.errors.ReplanWarning")
@pytest.mark.parametrize("persistent", [False, True])
def test_a_buffer_that_grows_with_the_longest_rows_is_that_of_eager_training(persistent):
    model = Growing(persistent)
    eager = copy.deepcopy(model)
    planned = Rockmate(model, torch.randn(8, 12, 16), 1.0, loss=lambda output: output.square().mean())
    for length in (12, 9, 15, 15, 12, 20, 10, 20):
        batch = torch.randn(8, length, 16)
        for one in (planned, eager):
            one.zero_grad()
            one(batch).square().mean().backward()
        assert all(map(torch.equal, (p.grad for p in model.parameters()), (p.grad for p in eager.parameters())))
        assert torch.equal(model.table, eager.table)
    assert planned.state_dict().keys() == eager.state_dict().keys()


class Averages(Layers):
    """Batch normalisation, and something that its first call alone may change."""

    def __init__(self, change=lambda module: None, norm=nn.BatchNorm1d):
        super().__init__()
        self.norm, self.change = norm(16), change
        self.register_buffer("started", torch.zeros(()))

    def between(self, h):
        self.change(self)
        return self.norm(h)


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x)


def start(module):
    with torch.no_grad():
        module.started.fill_(1.0)


@pytest.mark.parametrize(
    ("given", "calls", "made"),
    [((), 1, False), ((start,), 2, True), ((lambda module: None, OwnNorm), 2, False)],
    ids=["averages alone", "a flag", "one of the user's own"],
)
def test_a_second_call_is_made_where_the_first_changes_more_than_averages(monkeypatch, given, calls, made):
    seen, call = [], first_call.call_saving_nothing
    monkeypatch.setattr(first_call, "call_saving_nothing", lambda *given: seen.append(1) or call(*given))
    module = Averages(*given)
    before = copy.deepcopy(module.state_dict())
    with first_call.left_as_it_was(module, make_sample(module, torch.randn(8, 16))) as first:
        assert bool(first.made) == made
        assert not first.is_still
    assert len(seen) == calls
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
