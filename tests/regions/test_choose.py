"""`Rockmate(..., compile=True)`: parts are compiled where that pays, and training is exact in what it then is."""

import copy
import itertools
import pickle
from dataclasses import replace

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn

from rkgb.replay.step_record import bitwise_equal
from rockmate import (
    ArgumentError,
    BudgetTooSmall,
    CompileError,
    CompileWarning,
    Offload,
    PlanFileMismatch,
    PlanOptions,
    Rockmate,
    distributed,
    max_batch,
    plan_files,
    smallest_budget,
    verify,
    zoo,
)
from rockmate.choices import parts
from rockmate.plan_files import reuse
from rockmate.planning.request import PlanRequest
from rockmate.planning.trying import turns
from rockmate.queries.batch_search import BatchSearch
from rockmate.queries.sweep import sweep
from rockmate.regions import build, choose, code
from rockmate.regions.option import CompiledRegions, RegionTrial
from tests.module.models import Layers, Normalised, built, rows
from tests.module.random_networks import random_case
from tests.module.steps import BRIEFLY, squares, train
from tests.regions.conftest import interpreted_graph

COMPILED = PlanOptions(loss=squares, compile=True, limits=BRIEFLY, plan_in_background=False)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def gradients_of(batch: torch.Tensor, *models: nn.Module) -> list[list[torch.Tensor]]:
    """Of each model, after a step with the same random numbers."""
    found = []
    for one in models:
        torch.manual_seed(5)
        squares(one(batch)).backward()
        found.append([parameter.grad for parameter in one.parameters()])
    return found


def compiled_parts(model: Rockmate) -> CompiledRegions:
    assert model.plan.compiled is not None
    return model.plan.compiled


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("budget", [1.0, 0.85, 0.75])
@pytest.mark.parametrize("make", [Layers, Normalised])
def test_training_is_that_of_the_parts_compiled_without_a_plan(make, budget):
    sample = rows() if make is Layers else torch.randn(4, 3, 16, 16)
    found = verify(built(make), sample, budget, options=COMPILED)
    assert found.exact, found
    assert found.from_eager is not None
    assert found.from_eager < 1e-5
    assert found.plan.compiled.chosen
    assert "those without a plan" in str(found)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("seed", range(12))
def test_random_networks_are_exact(seed):
    case = random_case(seed)
    with case.casting():
        options = PlanOptions(loss=case.loss, compile=True, limits=BRIEFLY, plan_in_background=False)
        found = verify(case.network, case.batch(0), 0.9, options=options, steps=2)
    assert found.exact or not found.eager_is_deterministic, f"{found}\n{case}"


@pytest.mark.usefixtures("fresh")
@pytest.mark.ci  # half a minute for each
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny", "resnet18-tiny", "bert-tiny", "vit-tiny"])
def test_models_are_exact_and_within_their_budget(name):
    entry = zoo.get(name)
    options = PlanOptions(loss=entry.loss, compile=True, plan_in_background=False)
    try:
        found = verify(entry.model, entry.sample, 0.7, options=options)
    except BudgetTooSmall as error:  # what the kernels of this processor work with is in it
        found = verify(entry.model, entry.sample, error.smallest_budget_bytes, options=options)
    assert found.exact, found
    assert found.from_eager is None or found.from_eager < 1e-4
    assert found.plan.measured_peak_bytes <= found.plan.budget_bytes


@pytest.mark.usefixtures("interpreted")
def test_statistics_are_written_once_a_step():
    model = built(Normalised)
    other = copy.deepcopy(model)
    batches = [torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    planned = Rockmate(other, batches[0], 0.8, options=COMPILED)
    assert compiled_parts(planned).chosen
    train(model, batches), train(planned, batches)
    for (name, one), (_, theirs) in zip(other.named_buffers(), model.named_buffers(), strict=True):
        torch.testing.assert_close(one, theirs, rtol=1e-4, atol=1e-5, msg=name)
    counts = [int(one) for name, one in other.named_buffers() if name.endswith("num_batches_tracked")]
    assert set(counts) == {3}


@pytest.mark.usefixtures("interpreted")
def test_statistics_are_computed_once_and_what_is_normalised_again():
    planned = Rockmate(built(Normalised), torch.randn(4, 3, 16, 16), 0.75, options=COMPILED)
    batch_norms = sum(isinstance(one, nn.BatchNorm2d) for one in planned.original.modules())
    assert planned.code.count("_statistics(") == batch_norms
    assert planned.code.count("_rest(") > batch_norms


@pytest.mark.usefixtures("interpreted")
def test_random_stream_is_eager_s():
    model, batch = built(Layers), rows()
    planned = Rockmate(copy.deepcopy(model), batch, 0.8, options=COMPILED)
    states = []
    for one in (model, planned):
        torch.manual_seed(5)
        squares(one(batch)).backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.usefixtures("interpreted")
def test_a_plan_file_has_its_parts_and_compiles_them_again(tmp_path):
    model, batch = built(Layers), rows()
    planned = Rockmate(copy.deepcopy(model), batch, 0.8, options=COMPILED)
    plan_files.save(planned.plan_file(), tmp_path / "plan.json")
    code.CALLS.clear(), choose._TRIED.clear()
    again = Rockmate(copy.deepcopy(model), batch, plan=tmp_path / "plan.json", loss=squares)
    assert again.plan.compiled == planned.plan.compiled
    gradients = gradients_of(batch, planned, again)
    assert all(bitwise_equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.usefixtures("interpreted")
def test_a_plan_file_whose_parts_cannot_be_compiled_says_so(tmp_path, monkeypatch):
    model, batch = built(Layers), rows()
    plan_files.save(Rockmate(copy.deepcopy(model), batch, 0.8, options=COMPILED).plan_file(), tmp_path / "plan.json")
    code.CALLS.clear(), choose._TRIED.clear()
    monkeypatch.setattr(build, "compiled", without_compiler)
    with pytest.raises(CompileError, match=r"cannot be compiled here: RuntimeError: no C\+\+ compiler"):
        Rockmate(copy.deepcopy(model), batch, plan=tmp_path / "plan.json", loss=squares)


@pytest.mark.usefixtures("interpreted")
def test_a_plan_file_of_parts_that_save_otherwise_is_another_graph_s(tmp_path, monkeypatch):
    model, batch = built(SmoothLayers), rows()
    plan_files.save(Rockmate(copy.deepcopy(model), batch, 0.9, options=COMPILED).plan_file(), tmp_path / "plan.json")
    code.CALLS.clear(), choose._TRIED.clear()
    monkeypatch.setattr(build, "_PRICE", 0.0)  # as another release might divide
    with pytest.raises(PlanFileMismatch, match="compiled"):
        Rockmate(copy.deepcopy(model), batch, plan=tmp_path / "plan.json", loss=squares)


@pytest.mark.usefixtures("interpreted")
def test_the_cache_keeps_what_was_tried(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCKMATE_CACHE", "1")
    monkeypatch.setenv("ROCKMATE_CACHE_DIR", str(tmp_path))
    model, batch = built(Layers), rows()
    tried = []
    monkeypatch.setattr(choose, "tried", lambda *given, _tried=choose.tried: tried.append(given) or _tried(*given))
    for _ in range(2):
        planned = Rockmate(copy.deepcopy(model), batch, 0.8, options=COMPILED)
        assert compiled_parts(planned).chosen
        code.CALLS.clear(), choose._TRIED.clear()
    assert len(tried) == 2  # classes


def without_compiler(graph, is_backward):
    raise RuntimeError("no C++ compiler was found.\nInstall one.")


@pytest.mark.usefixtures("interpreted")
def test_what_cannot_be_compiled_stays_as_it_is_and_is_told(monkeypatch):
    monkeypatch.setattr(build, "compiled", without_compiler)
    model, batch = built(Layers), rows()
    with pytest.warns(CompileWarning, match=r"stay as they are, and cannot be compiled: RuntimeError"):
        planned = Rockmate(copy.deepcopy(model), batch, 0.8, options=COMPILED)
    assert not compiled_parts(planned).chosen
    assert "no C++ compiler was found" in str(planned.plan.compiled)
    assert verify(planned, batch, loss=squares).from_eager is None


@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore::rockmate.CompileWarning")
@pytest.mark.parametrize("wrong", ["values", "gradients", "strides", "shared"])
def test_what_is_compiled_wrongly_is_not_used(wrong, monkeypatch):
    def compiled(graph, is_backward):
        run = interpreted_graph(graph, is_backward)

        def changed(given):
            made = list(run(given))
            if wrong == ("gradients" if is_backward else "values"):
                made[0] = made[0] * 1.01
            if wrong == "strides" and not is_backward:
                made[0] = made[0].t().contiguous().t()
            if wrong == "shared" and not is_backward:
                made[0] = torch.cat([made[0], made[0]])[: made[0].shape[0]]
            return made

        return changed

    monkeypatch.setattr(build, "compiled", compiled)
    planned = Rockmate(built(Layers), rows(), 0.6, options=COMPILED)
    assert not compiled_parts(planned).chosen
    told = {"values": "numbers are others", "gradients": "numbers are others", "strides": "lies otherwise"}
    assert told.get(wrong, "shares its memory") in str(planned.plan.compiled)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore::rockmate.CompileWarning")
@pytest.mark.parametrize(("wrong", "told"), [("strides", "lie otherwise"), ("shared", "share their memory")])
def test_statistics_that_are_compiled_wrongly_are_not_used(wrong, told, monkeypatch):
    def compiled(graph, is_backward):
        run = interpreted_graph(graph, is_backward)

        def changed(given):
            made = list(run(given))
            if all(one.numel() == 8 for one in made) and len(given) == 1:  # statistics of eight channels
                made[0] = (
                    made[0].as_strided((1, 8, 1, 1), (8, 1, 8, 8)) if wrong == "strides" else made[2].view(1, 8, 1, 1)
                )
            return made

        return changed

    monkeypatch.setattr(build, "compiled", compiled)
    planned = Rockmate(built(Normalised), torch.randn(4, 3, 16, 16), 0.8, options=COMPILED)
    assert not compiled_parts(planned).chosen
    assert told in str(planned.plan.compiled)


@pytest.mark.usefixtures("interpreted")
def test_ctrl_c_while_compiling_leaves_all_usable(monkeypatch):
    def interrupted(graph, is_backward):
        raise KeyboardInterrupt

    model, batch = built(Normalised), torch.randn(4, 3, 16, 16)
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    with monkeypatch.context() as patched:
        patched.setattr(build, "compiled", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Rockmate(model, batch, 0.8, options=COMPILED)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert compiled_parts(Rockmate(model, batch, 0.8, options=COMPILED)).chosen


@pytest.mark.usefixtures("interpreted")
def test_what_is_pinned_is_in_no_part():
    model, batch = built(Layers), rows()
    every = compiled_parts(Rockmate(copy.deepcopy(model), batch, 0.8, options=COMPILED))
    name = every.trials[0].operations[0]
    options = PlanOptions(loss=squares, compile=True, limits=BRIEFLY, plan_in_background=False, pin=(name,))
    found = Rockmate(copy.deepcopy(model), batch, 0.8, options=options).plan.compiled
    assert all(name not in trial.operations for trial in found.trials)


@pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")
class TestCallsOfOtherSizes:
    COUNTS = (100, 200, 300, 400, 500, 50, 412, 512, 333)

    def trained(self, counts, *budgets):
        """Modules of these budgets, whose steps all give the same to the bit, and what is eager's but for rounding."""
        model = built(Layers)
        planned = [Rockmate(copy.deepcopy(model), rows(), budget, options=COMPILED) for budget in budgets]
        for count in counts:
            gradients = gradients_of(rows(count)[:count], model, *planned)
            for mine in gradients[1:]:
                torch.testing.assert_close(mine, gradients[0], rtol=1e-4, atol=1e-6)
                assert all(bitwise_equal(*pair) for pair in zip(mine, gradients[1], strict=True))
            for one in (model, *planned):
                one.zero_grad()
        return planned

    @pytest.mark.usefixtures("interpreted")
    def test_they_train_as_the_parts_without_a_plan(self):
        (tight, _) = self.trained(self.COUNTS, 0.8, "1GiB")
        assert len(tight.plans) == len({*self.COUNTS, 512})
        assert all(plan.compiled.chosen for plan in tight.plans)
        assert all(plan.peak_bytes <= plan.budget_bytes for plan in tight.plans)

    @pytest.mark.usefixtures("interpreted")
    def test_each_form_is_compiled_for_all_sizes_at_once(self, monkeypatch):
        compiled = []

        def counted(graph, is_backward):
            compiled.append(graph)
            return interpreted_graph(graph, is_backward)

        monkeypatch.setattr(build, "compiled", counted)
        self.trained((), 0.8)
        first = len(compiled)
        self.trained(self.COUNTS, 0.8)
        assert 0 < first < len(compiled) <= 2 * first

    @pytest.mark.ci  # a minute
    @pytest.mark.usefixtures("said_to_pay")
    def test_they_train_so_where_they_are_compiled(self):
        (tight, _) = self.trained(self.COUNTS, 0.8, "1GiB")
        assert len(tight.plans) == len({*self.COUNTS, 512})

    @pytest.mark.ci
    @pytest.mark.usefixtures("interpreted")
    def test_images_of_any_size_are_normalised_by_statistics_of_theirs(self):
        self.trained_on_images()

    @pytest.mark.ci  # a minute
    @pytest.mark.usefixtures("said_to_pay")
    def test_images_of_any_size_train_so_where_they_are_compiled(self):
        self.trained_on_images()

    def trained_on_images(self):
        model = built(Normalised)
        first, *others = (torch.randn(count, 3, 4 * count, 48) for count in (10, 6, 8, 4, 5, 7, 9))
        planned = [Rockmate(copy.deepcopy(model), first, budget, options=COMPILED) for budget in (0.75, "1GiB")]
        for batch in (first, *others):
            eager, *ours = gradients_of(batch, model, *planned)
            torch.testing.assert_close(ours[0], eager, rtol=1e-3, atol=1e-5)
            assert all(bitwise_equal(*pair) for pair in zip(*ours, strict=True))
            for one in (model, *planned):
                one.zero_grad()
        buffers = [dict(one.original.named_buffers()) for one in planned]
        assert all(bitwise_equal(one, buffers[1][name]) for name, one in buffers[0].items())
        torch.testing.assert_close(buffers[0], dict(model.named_buffers()), rtol=1e-4, atol=1e-5)
        for one in planned:
            assert len(one.plans) == 7
            assert all(plan.compiled.chosen for plan in one.plans)
            assert all(plan.peak_bytes <= plan.budget_bytes for plan in one.plans)

    @pytest.mark.usefixtures("interpreted")
    def test_what_the_compiler_has_for_no_other_sizes_stays_as_it_is(self, monkeypatch):
        def refused(*given):
            raise RuntimeError("no symbols")

        monkeypatch.setattr(build, "kernels_for", refused)
        (planned,) = self.trained(self.COUNTS, 0.8)
        assert len(planned.plans) == len({*self.COUNTS, 512})

    @pytest.mark.usefixtures("interpreted")
    def test_what_gives_other_numbers_at_other_sizes_is_not_used(self, monkeypatch):
        def off(kernels):
            return replace(kernels, forward=lambda inputs: [1.01 * one for one in kernels.forward(inputs)])

        def wrong(*given):
            return [off(kernels) for kernels in build_kernels(*given)]

        build_kernels = build.kernels_for
        monkeypatch.setattr(build, "kernels_for", wrong)
        self.trained(self.COUNTS, 0.8)

    @pytest.mark.usefixtures("interpreted")
    def test_a_plan_file_of_theirs_tells_of_its_own_call(self, tmp_path):
        (planned,) = self.trained(self.COUNTS, 0.8)
        plan_files.save(planned.plan_file(), tmp_path / "plan.json")
        again = Rockmate(copy.deepcopy(planned.original), rows(), plan=tmp_path / "plan.json", loss=squares)
        assert again.plan.compiled.chosen


@pytest.mark.usefixtures("interpreted")
def test_a_threshold_says_what_pays(monkeypatch):
    monkeypatch.undo()
    trial = RegionTrial(("a", "b"), 1.0, 0.99, 100, 100)
    assert not trial.pays
    assert RegionTrial(("a", "b"), 1.0, 0.97, 100, 100).pays
    assert RegionTrial(("a", "b"), 1.0, 0.99, 100, 80).pays
    assert not RegionTrial(("a", "b"), 1.0, 1.01, 100, 80).pays
    assert not RegionTrial(("a", "b"), 1.0, 0.5, 100, 100, "it has other gradients").pays
    assert str(CompiledRegions()) == "nothing to compile"
    assert str(CompiledRegions((trial,))) == "no part of it is faster compiled"


@pytest.mark.usefixtures("interpreted")
def test_nothing_is_compiled_unless_it_is_asked_for():
    assert Rockmate(built(Layers), rows(), 0.8, loss=squares, limits=BRIEFLY).plan.compiled is None
    assert code.CALLS == {}


@pytest.mark.usefixtures("interpreted")
class TestQuestions:
    def test_the_largest_batch_is_one_of_plans_with_compiled_parts(self):
        def make(count):
            return model, rows(count)[:count], squares

        model = built(Layers)
        found = max_batch(make, budget="400KiB", most=256, compile=True, limits=BRIEFLY)
        assert found.batch == 256
        assert found.plan_file.plan.compiled.chosen
        assert found.plan_file.plan.measured_peak_bytes <= 400 << 10
        options = PlanOptions(loss=squares, limits=BRIEFLY, plan_in_background=False)
        planned = Rockmate(copy.deepcopy(model), make(found.batch)[1], plan=found.plan_file, options=options)
        other = Rockmate(copy.deepcopy(model), make(found.batch)[1], "1GiB", options=COMPILED)
        gradients = gradients_of(make(found.batch)[1], planned, other)
        assert all(bitwise_equal(*pair) for pair in zip(*gradients, strict=True))

    def test_where_no_compiled_batch_fits_the_answer_has_none(self, monkeypatch):
        model = built(Layers)

        def make(count):
            return model, rows(count)[:count], squares

        def run(search, start, found, run=BatchSearch.run):
            if search._request.compile:
                raise BudgetTooSmall("with parts", 1 << 30, "", 0)
            return run(search, start, found)

        monkeypatch.setattr(BatchSearch, "run", run)
        found = max_batch(make, budget="400KiB", measurements=2, compile=True, limits=BRIEFLY)
        assert found.plan_file.plan.compiled is None

    @pytest.mark.usefixtures("a_millisecond_each")  # each answer measures again: on a busy machine, other times
    @pytest.mark.parametrize(("slowdown", "is_compiled"), [(1.05, True), (1.3, False)])
    @pytest.mark.parametrize("parts", ["save less", "save more"])
    def test_the_smallest_budget_is_the_smaller_of_both(self, parts, slowdown, is_compiled, monkeypatch):
        if parts == "save more":
            monkeypatch.setattr(build, "_PRICE", 0.0)
        model = built(Layers)
        given = {"loss": squares, "limits": BRIEFLY}
        found = smallest_budget(model, rows(), slowdown, compile=True, **given)
        without = smallest_budget(model, rows(), slowdown, **given)
        assert found.budget_bytes <= without.budget_bytes * 1.01
        assert (found.plan_file.plan.compiled is not None) == is_compiled
        assert found.plan_file.plan.measured_peak_bytes <= found.budget_bytes
        assert found.slowdown <= slowdown + 1e-6

    @pytest.mark.ci
    def test_a_sweep_has_the_faster_plan_of_each_budget(self):
        given = {"budgets": [0.9, 0.7, 0.1], "solvers": ["auto", "greedy"], "loss": squares}
        found = sweep(built(Layers), rows(), compile=True, **given)
        without = sweep(built(Layers), rows(), **given)
        ours, theirs = ([row for row in one.rows if row.solver == "auto"] for one in (found, without))
        assert [row.fits for row in ours] == [row.fits for row in theirs]
        assert len(found.rows) == len(without.rows)
        assert all(row.measured_peak_bytes <= row.budget_bytes for row in ours if row.fits)


def test_plans_of_blocks_refuse_it():
    model = built(Layers)
    with pytest.raises(ArgumentError, match="compile is an option of whole models"):
        distributed.plan_blocks(nn.Sequential(model), [rows()], "1GiB", blocks=Layers, options=COMPILED)


@pytest.mark.usefixtures("interpreted")
def test_the_report_tells_of_it(tmp_path):
    planned = Rockmate(built(Layers), rows(), 0.6, options=COMPILED)
    assert "Compiled" in str(planned.report())
    assert "compiled_" in planned.code


@pytest.mark.usefixtures("interpreted")
def test_it_moves_data_too(tmp_path):
    moving = replace(COMPILED, offload=Offload("disk", path=str(tmp_path)))
    assert verify(built(Layers), rows(), 0.8, options=moving).exact


def test_each_turn_of_budgets_is_exact_and_lower(interpreted):
    peaks = []
    for budget in (1.0, 0.85, 0.75, 0.7):
        found = verify(built(Layers), rows(), budget, options=COMPILED, steps=1)
        assert found.exact
        assert found.plan.measured_peak_bytes <= found.plan.budget_bytes
        peaks.append(found.plan.measured_peak_bytes)
    assert peaks[-1] == min(peaks) < peaks[0]  # between them each plan is of times of its own, which vary


@pytest.mark.usefixtures("interpreted")
def test_where_no_plan_has_room_for_compiled_parts_there_is_one_without(monkeypatch):
    def never(measured, request, module):
        if measured.regions is not None:
            raise BudgetTooSmall("too small. Sorry", 10**9, "", 0)
        return make_plan(measured, request, module)

    make_plan = reuse.make_plan
    monkeypatch.setattr(reuse, "make_plan", never)
    planned = Rockmate(built(Layers), rows(), 0.6, options=COMPILED)
    assert str(planned.plan.compiled) == "no plan with compiled parts is within the budget"
    assert verify(planned, rows(), loss=squares).from_eager is None


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("is_faster", [True, False])
def test_the_plan_whose_steps_are_faster_is_taken(monkeypatch, is_faster):
    took = (9.0, 10.0) if is_faster else (9.95, 10.0)  # what is hardly faster would be rounded otherwise for nothing
    monkeypatch.setattr(parts, "steps_by_turns_ms", lambda *_: took)
    planned = Rockmate(built(Layers), rows(), 0.8, options=COMPILED)
    assert bool(compiled_parts(planned).chosen) == is_faster
    assert is_faster or str(planned.plan.compiled) == "steps with compiled parts took 9.95 ms, and 10 ms without"
    assert verify(planned, rows(), loss=squares).exact


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("is_faster", [True, False])
def test_where_no_step_can_be_run_predictions_decide(monkeypatch, is_faster):
    def slowed(measured, request, module):
        planned = make_plan(measured, request, module)
        if (measured.regions is not None) is not is_faster:
            planned.plan = replace(planned.plan, time_ms=1e6 * planned.plan.time_ms)
        return planned

    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    make_plan = reuse.make_plan
    monkeypatch.setattr(reuse, "make_plan", slowed)
    monkeypatch.setattr(parts, "steps_by_turns_ms", no_memory)
    planned = Rockmate(built(Layers), rows(), 0.8, options=COMPILED)
    assert bool(compiled_parts(planned).chosen) == is_faster
    assert is_faster or str(planned.plan.compiled) == "plans without compiled parts take less time by prediction"


@pytest.mark.usefixtures("interpreted")
def test_steps_that_decide_leave_the_model_and_the_random_stream_alone(monkeypatch):
    """Its parameters, statistics, gradients, and what is drawn afterwards."""
    took = []

    def steps(*given):
        took.append(turns.steps_by_turns_ms(*given))
        return 1.0, 2.0

    monkeypatch.setattr(parts, "steps_by_turns_ms", steps)
    model, batch = built(Normalised), torch.randn(4, 3, 16, 16)
    squares(model(batch)).backward()
    before = copy.deepcopy(model.state_dict())
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    drawn = torch.get_rng_state()
    planned = Rockmate(model, batch, 0.8, options=COMPILED)
    assert len(took) == 1
    assert all(ms > 0 for ms in took[0])
    assert compiled_parts(planned).chosen
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(bitwise_equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(bitwise_equal(p.grad, other) for p, other in zip(model.parameters(), gradients, strict=True))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("is_lower", [True, False])
def test_where_no_plan_is_within_the_budget_the_one_of_lower_peak_is_taken(monkeypatch, is_lower):
    """As in training that goes on: no step is timed, both take more than there may be."""
    model, batch = built(Layers), rows()

    def make(request):
        measured, planned = find(model, batch, request, {}, False)
        is_low = (measured.regions is not None) is is_lower
        planned.plan = replace(planned.plan, measured_peak_bytes=planned.plan.budget_bytes + (1 if is_low else 2))
        return measured, planned

    find = parts.plan_or_reuse
    request = PlanRequest(1.0, squares, compile=True, limits=BRIEFLY)
    measured, planned = parts.chosen(make, request, lambda *_: pytest.fail("nobody runs them"))
    assert planned.plan.exceeds
    assert bool(planned.plan.compiled.chosen) == bool(measured.regions.chosen) == is_lower
    assert is_lower or str(planned.plan.compiled) == "plans without compiled parts take less memory"


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("is_faster", [True, False])
def test_what_steps_took_is_kept_for_the_next_start(monkeypatch, tmp_path, is_faster):
    measured = []
    monkeypatch.setenv("ROCKMATE_CACHE", "1")
    monkeypatch.setenv("ROCKMATE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        parts, "steps_by_turns_ms", lambda *_: measured.append(1) or ((1.0, 2.0) if is_faster else (2.0, 1.0))
    )
    for _ in range(2):
        planned = Rockmate(built(Layers), rows(), 0.8, options=replace(COMPILED, cache=True))
        assert bool(compiled_parts(planned).chosen) == is_faster
    assert len(measured) == 1


@pytest.mark.ci
@pytest.mark.usefixtures("fresh")
@pytest.mark.filterwarnings("ignore::rockmate.CompileWarning")
def test_without_a_c_compiler_the_model_is_planned_as_it_is(monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with inductor_config.patch({"cpp.cxx": ("/nowhere/g++",), "force_disable_caches": True}):
        planned = Rockmate(built(Layers), rows(), 0.8, options=COMPILED)
    assert not compiled_parts(planned).chosen
    assert all(trial.refused for trial in compiled_parts(planned).trials)
    assert verify(planned, rows(), loss=squares).exact


class SmoothLayers(nn.Module):
    """A transformer's kinds of operations without kinks."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        for first, then in itertools.pairwise(self.parts):
            normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
            x = x + torch.softmax(first(normed) * 2, -1) * torch.nn.functional.silu(then(normed)) * 3
        return x


@pytest.mark.ci
@pytest.mark.usefixtures("fresh")
def test_compiled_gradients_are_as_near_to_those_of_float64_as_eager_ones(monkeypatch):
    monkeypatch.setattr(RegionTrial, "pays", property(lambda trial: not trial.refused))
    monkeypatch.setattr(parts, "chosen", lambda make, request, *_: make(request))
    model, batch = built(SmoothLayers), rows()
    exact = copy.deepcopy(model).double()
    planned = Rockmate(copy.deepcopy(model), batch, 0.9, options=COMPILED)
    assert compiled_parts(planned).chosen
    away = []
    for one, given in ((exact, batch.double()), (model, batch), (planned, batch)):
        squares(one(given)).backward()
        gradients = torch.cat([parameter.grad.double().flatten() for parameter in one.parameters()])
        away.append(gradients)
    truth, eager, ours = away
    assert (ours - truth).norm() <= 2 * (eager - truth).norm()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny", "bert-tiny"])
def test_ten_budgets_are_exact_kept_and_monotone(name):
    peaks = []
    for budget in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55):
        entry = zoo.get(name)
        options = PlanOptions(loss=entry.loss, compile=True, plan_in_background=False)
        found = verify(entry.model, entry.sample, budget, options=options, steps=2)
        assert found.exact, found
        assert found.plan.measured_peak_bytes <= found.plan.budget_bytes
        peaks.append(found.plan.measured_peak_bytes)
    assert all(later <= earlier for earlier, later in itertools.pairwise(peaks))


@pytest.mark.usefixtures("interpreted")
def test_a_copy_trains_as_the_module_does():
    model, batch = built(Layers), rows()
    planned = Rockmate(model, batch, 0.8, options=COMPILED)
    assert compiled_parts(planned).chosen
    other = copy.deepcopy(planned)
    gradients = gradients_of(batch, planned, other)
    assert all(bitwise_equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore::rockmate.PickleWarning")
def test_a_pickled_module_trains_as_the_module_does():
    model, batch = built(Layers), rows()
    planned = Rockmate(model, batch, 0.8, loss=squares, compile=True)
    assert compiled_parts(planned).chosen
    other = pickle.loads(pickle.dumps(planned))
    gradients = gradients_of(batch, planned, other)
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)  # its own plan is made anew, if need be
