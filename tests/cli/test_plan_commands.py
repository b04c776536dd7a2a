"""Commands on plans: what they print is what the library says, and their exit statuses tell how it went."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from rockmate import Rockmate, plan_files
from rockmate.cli import main
from rockmate.cli.commands.max_batch import _budget_text
from rockmate.cli.output import DIFFERENT, GOOD, WRONG_INPUT
from rockmate.plan_files import cache
from rockmate.queries.min_budget import Attempt, CheapestBudget
from rockmate.reports.explain import explain
from rockmate.runtime.step import Step
from tests.cli.command_line import MODEL, run, run_json

TARGET = f"{MODEL}:make"
GREEDY = ("--solver", "greedy", "--time-limit", "1")


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    assert main(["plan", TARGET, "--budget", "0.8", *GREEDY, "-o", str(path)]) == GOOD
    return path


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCKMATE_CACHE", "1")
    monkeypatch.setenv("ROCKMATE_CACHE_DIR", str(tmp_path / "cache"))


# ---- plan ------------------------------------------------------------------------------------------------


def test_plan_prints_what_the_plan_in_its_file_says(capsys, tmp_path):
    path = tmp_path / "plan.json.gz"
    status, content = run_json(capsys, "plan", TARGET, "--budget", "0.75", *GREEDY, "-o", path)
    assert status == GOOD
    assert path.read_bytes().startswith(b"\x1f\x8b")
    plan = plan_files.load(path).plan
    assert content["file"] == str(path)
    assert content["model"] == TARGET
    assert content["budget_bytes"] == plan.budget_bytes == round(0.75 * plan.baseline_peak_bytes)
    for name in ("peak_bytes", "measured_peak_bytes", "time_ms", "overhead", "gap", "recomputations", "solver"):
        assert content[name] == getattr(plan, name)
    assert content["eager_time_ms"] == plan.baseline_time_ms
    assert content["measured_peak_bytes"] <= content["budget_bytes"]


def test_plan_shows_a_table_and_where_the_file_is(capsys, tmp_path):
    path = tmp_path / "plan.json"
    status, out, _ = run(capsys, "plan", TARGET, "--budget", "1GiB", *GREEDY, "-o", path)
    assert status == GOOD
    rows = dict(line.split("  ", 1) for line in out.splitlines())
    assert rows["budget"].strip().startswith("1.00 GiB")
    assert rows["solver"].strip() == "keep-all"
    assert rows["written to"].strip() == str(path)


def test_a_budget_that_nothing_fits_ends_with_status_1_and_writes_nothing(capsys, tmp_path):
    path = tmp_path / "plan.json"
    status, out, err = run(capsys, "plan", TARGET, "--budget", "1KiB", *GREEDY, "-o", path)
    assert (status, out) == (DIFFERENT, "")
    assert "the smallest for which a schedule was found" in err
    assert not path.exists()


@pytest.mark.usefixtures("without_ortools")
def test_a_solver_that_is_not_installed_is_wrong_input_and_says_what_to_install(capsys, tmp_path):
    path = tmp_path / "plan.json"
    status, out, err = run(capsys, "plan", TARGET, "--budget", "0.8", "--solver", "intervals", "-o", path)
    assert (status, out) == (WRONG_INPUT, "")
    assert "error: the solver Intervals needs OR-tools; install it: pip install ortools" in err
    assert not path.exists()


def test_what_is_asked_for_reaches_the_plan(capsys, tmp_path):
    path = tmp_path / "plan.json"
    options = ("--scope", "total", "--optimizer", "adamw", "--pin", "layers.1", "--opaque", "layers.0")
    status, content = run_json(capsys, "plan", TARGET, "--budget", "1MiB", *options, *GREEDY, "-o", path)
    assert status == GOOD
    file = plan_files.load(path)
    assert file.asked.scope == "total"
    assert file.asked.opaque == ("layers.0",)
    assert file.asked.pinned
    split = file.promise.memory_split
    assert content["total_budget_bytes"] == split.total_bytes == 1 << 20
    assert split.residents.optimizer_bytes > 2 * 4 * sum(p.numel() for p in _net().parameters()) * 0.99


def _net() -> nn.Module:
    from rockmate.cli.targets import find_source

    return find_source(TARGET).target().model


def test_a_submodule_that_there_is_not_is_wrong_input(capsys):
    status, _, err = run(capsys, "plan", TARGET, "--opaque", "layers.9")
    assert status == WRONG_INPUT
    assert "Net has no such submodule" in err


def test_the_cache_is_used_unless_it_is_told_not_to_be(own_cache, capsys):
    command = ("plan", TARGET, "--budget", "0.8", *GREEDY)
    assert run(capsys, *command, "--no-cache")[0] == GOOD
    assert cache.entries() == []
    assert run(capsys, *command)[0] == GOOD
    (entry,) = cache.entries()
    status, content = run_json(capsys, "cache", "list")
    assert status == GOOD
    (plan,) = content["plans"]
    assert plan["key"] == entry.key
    assert plan["model"] == "Net"
    assert plan["calls"] == "float32[256, 32] on cpu"
    assert plan["budget_bytes"] == entry.load().promise.budget_bytes
    assert entry.key[:12] in run(capsys, "cache", "list")[1]
    entry.path.write_bytes(b"damaged")
    assert "cannot be read" in run(capsys, "cache", "list")[1]
    assert run(capsys, "cache", "clear")[:2] == (GOOD, f"1 plan cleared from {cache.folder()}\n")
    assert cache.entries() == []


# ---- check -----------------------------------------------------------------------------------------------


def test_check_of_the_model_that_was_planned_is_exact(plan_path, capsys):
    status, content = run_json(capsys, "check", plan_path, TARGET, "--optimizer", "momentum")
    assert status == GOOD
    assert content["matches"]
    assert content["exact"]
    assert content["largest_gradient_difference"] == 0
    assert (
        run(capsys, "check", plan_path, TARGET, "--steps", "1")[1].splitlines()[0].startswith("the graph is the plan's")
    )


def test_check_of_another_model_or_batch_tells_the_differences_with_status_1(plan_path, capsys):
    status, out, err = run(capsys, "check", plan_path, TARGET, "--batch", "7")
    assert (status, err) == (DIFFERENT, "")
    assert "input 0 is float32[7, 32], but was float32[256, 32]" in out
    status, content = run_json(capsys, "check", plan_path, "mixer-tiny")
    assert status == DIFFERENT
    assert not content["matches"]
    assert not content["exact"]
    assert "Mixer" in content["difference"]


def test_check_finds_recomputations_that_give_other_bits(plan_path, capsys, monkeypatch):
    right = Step.fill
    monkeypatch.setattr(Step, "fill", lambda step, op, index, value: right(step, op, index, value * 1.5))
    status, content = run_json(capsys, "check", plan_path, TARGET)
    assert status == DIFFERENT
    assert content["matches"]
    assert content["largest_gradient_difference"] > 0
    assert content["where"]


def test_a_damaged_plan_is_wrong_input_of_every_command_that_reads_one(plan_path, capsys, tmp_path):
    path = tmp_path / "damaged.json"
    path.write_bytes(plan_path.read_bytes()[:-100])
    for command in (("check", path, TARGET), ("profile", path, TARGET), ("explain", path)):
        status, out, err = run(capsys, *command)
        assert (status, out) == (WRONG_INPUT, "")
        assert err.startswith("error: this is no plan that can be used")
        assert f"in the file {path}" in err
    status, _, err = run(capsys, "explain", tmp_path / "absent.json")
    assert status == WRONG_INPUT
    assert "does not exist" in err


# ---- profile ---------------------------------------------------------------------------------------------


def test_profile_measures_plan_and_eager_to_the_byte(plan_path, capsys):
    status, content = run_json(capsys, "profile", plan_path, TARGET, "--steps", "3", "--per-op")
    assert status == GOOD
    plan = plan_files.load(plan_path).plan
    assert content["plan"]["peak_bytes"] == plan.measured_peak_bytes  # of the same step, on the CPU
    assert content["plan"]["predicted_peak_bytes"] == plan.peak_bytes
    assert content["eager"]["peak_bytes"] == plan.baseline_peak_bytes
    assert len(content["plan"]["times_ms"]) == len(content["eager"]["times_ms"]) == 3
    assert sorted(content["plan"]["times_ms"])[1] == content["plan"]["median_ms"]
    problem = plan_files.load(plan_path).problem
    operations = content["operations"]
    assert [op["name"] for op in operations] == [op.name for op in (*problem.forward, *problem.backward)]
    assert sum(op["runs"] for op in operations) == len(operations) + plan.recomputations
    for op in operations:
        assert op["measured_bytes"] == op["planned_bytes"], op["name"]  # bytes do not depend on the day
        assert op["measured_ms"] > 0
        assert op["source"].startswith("example_model.py:") or op["name"] == "loss"


def test_profile_leaves_the_module_as_it_was(plan_path, capsys):
    from rockmate.cli.targets import find_source
    from rockmate.queries.profiling import profile

    target = find_source(TARGET).target()
    planned = Rockmate(target.model, target.sample, plan=plan_path, loss=target.loss).eval()
    target.model.head.weight.grad = torch.ones_like(target.model.head.weight)
    state = torch.get_rng_state()
    found = profile(planned, target.sample, loss=target.loss, steps=1)
    assert found.operations == ()
    assert found.plan.spread == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert not target.model.training
    assert torch.equal(target.model.head.weight.grad, torch.ones_like(target.model.head.weight))
    assert all(p.grad is None for name, p in target.model.named_parameters() if name != "head.weight")
    with pytest.raises(ValueError, match="at least 1 step"):
        profile(planned, target.sample, steps=0)


def test_profile_prints_tables(plan_path, capsys):
    status, out, _ = run(capsys, "profile", plan_path, TARGET, "--steps", "1", "--per-op", "--top", "2")
    assert status == GOOD
    assert "Its peak is within the budget" in out
    assert "more, faster ones (--top)" in out


# ---- explain ---------------------------------------------------------------------------------------------


def test_explain_prints_what_the_library_says(plan_path, capsys):
    found = explain(plan_files.load(plan_path))
    status, content = run_json(capsys, "explain", plan_path)
    assert status == GOOD
    assert [tensor["name"] for tensor in content["tensors"]] == [entry.name for entry in found.entries]
    assert [tensor["why"] for tensor in content["tensors"]] == [entry.why for entry in found.entries]
    assert content["peak"]["peak_bytes"] == found.peak.peak_bytes
    assert content["binding_bytes"] == found.binding_bytes
    _, out, _ = run(capsys, "explain", plan_path, "--top", "4")
    for entry in found.heaviest(4):
        assert f"\n{entry.name} " in out
    assert f"and {len(found.entries) - 4} more" in out
    assert found.peak.op in out


def test_explain_of_one_operation_tells_all_of_it(plan_path, capsys):
    entry = next(entry for entry in explain(plan_files.load(plan_path)).entries if entry.decision == "recomputed")
    for name in (entry.name, entry.producer):
        status, out, _ = run(capsys, "explain", plan_path, "--op", name)
        assert status == GOOD
        assert entry.why in out
        assert "if kept" in out
    status, _, err = run(capsys, "explain", plan_path, "--op", "linear_99")
    assert status == WRONG_INPUT
    assert "no tensor, operation or submodule 'linear_99'" in err


# ---- max-batch -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_max_batch_tells_every_batch_that_was_tried(capsys, tmp_path):
    path = tmp_path / "plan.json"
    command = ("max-batch", TARGET, "--budget", "100KiB", "--batch", "32", "--measurements", "20", *GREEDY)
    status, content = run_json(capsys, *command, "-o", path)
    assert status == GOOD
    fits = {trial["batch"]: trial["fits"] for trial in content["trials"]}
    assert content["trials"][0]["batch"] == 32
    assert content["is_largest"]
    assert fits[content["batch"]]
    assert not fits[content["batch"] + 1]
    assert content["plan"]["measured_peak_bytes"] <= content["budget_bytes"] == 100 << 10
    assert f"[{content['batch']}, 32]" in plan_files.load(path).graph.calls


@pytest.mark.slow
def test_max_batch_of_a_slowdown_tells_the_smallest_budget(capsys, tmp_path):
    status, content = run_json(capsys, "max-batch", TARGET, "--slowdown", "1.2", *GREEDY, "-o", tmp_path / "plan.json")
    assert status == GOOD
    assert content["slowdown"] <= 1.2
    assert content["budget_bytes"] == content["plan"]["budget_bytes"] < content["eager_peak_bytes"]
    assert plan_files.load(tmp_path / "plan.json").promise.budget_bytes == content["budget_bytes"]


def test_max_batch_tells_what_fits_apart_from_what_is_fast_enough():
    slow = Attempt(budget_bytes=1000, peak_bytes=900, slowdown=1.137, fits=True, is_fast_enough=False)
    found = CheapestBudget(2000, 1.1, 1.05, plan_file=None, attempts=(slow,), eager_peak_bytes=3000)
    tried, _ = _budget_text(found)
    heading, _, row = tried.splitlines()
    assert heading.split()[-3:] == ["fits", "within", "1.1×"]
    assert row.split()[-3:] == ["1.137×", "yes", "no"]


@pytest.mark.parametrize(
    "command",
    [
        ("plan", TARGET, "--budget", "0.8"),
        ("max-batch", TARGET, "--budget", "200KiB"),
        ("sweep", TARGET),
    ],
    ids=lambda command: command[0],
)
def test_an_output_in_a_missing_folder_fails_before_the_model_is_looked_for(command, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("rockmate.cli.options.find_source", lambda *_: pytest.fail("the work began"))
    status, out, err = run(capsys, *command, "-o", tmp_path / "nowhere" / "plan.json")
    assert status == WRONG_INPUT
    assert f"there is no folder '{tmp_path / 'nowhere'}'" in err
    assert not (tmp_path / "nowhere").exists()
    assert out == ""


def test_max_batch_takes_one_question_at_a_time(capsys):
    for options in ((), ("--budget", "1MiB", "--slowdown", "1.1")):
        status, _, err = run(capsys, "max-batch", TARGET, *options)
        assert status == WRONG_INPUT
        assert "give --budget for the largest batch, or --slowdown" in err
    status, _, err = run(capsys, "max-batch", TARGET, "--budget", "0.5")
    assert status == WRONG_INPUT
    assert "grows with the batch" in err


# ---- zoo -------------------------------------------------------------------------------------------------


def test_the_zoo_shows_its_models(capsys):
    status, content = run_json(capsys, "zoo", "list")
    assert status == GOOD
    assert "gpt2-tiny" in content["models"]
    status, content = run_json(capsys, "zoo", "show", "mixer-tiny")
    assert status == GOOD
    assert content["kind"] == "model"
    assert content["sample"] == ["float32[8, 3, 16, 16]"]
    assert content["parameter_bytes"] == 4 * content["parameters"]
    for command in (("zoo", "show", "nothing"), ("zoo", "get", "nothing", "-o", "plan.json")):
        status, _, err = run(capsys, *command)
        assert status == WRONG_INPUT
        assert "the zoo has no 'nothing'; it has " in err
    assert "is a model of the zoo, not a plan" in run(capsys, "zoo", "get", "mixer-tiny", "-o", "plan.json")[2]


def test_plans_of_the_zoo_are_listed_shown_and_written(capsys, tmp_path, monkeypatch, plan_path):
    """With a folder of plans as the package's."""
    promise = plan_files.load(plan_path).promise
    facts = {
        "name": "net-0.8",
        "model": "net",
        "share": 0.8,
        "budget_bytes": promise.budget_bytes,
        "peak_bytes": promise.measured_peak_bytes,
        "eager_peak_bytes": promise.baseline_peak_bytes,
        "overhead": 0.125,
        "gap": None,
        "recomputations": 3,
        "solver": "greedy",
        "seconds": 1.5,
        "smallest_budget_bytes": None,
        "device": "cpu",
        "torch": "2.13.0",
    }
    (tmp_path / "index.json").write_text(json.dumps({"plans": [facts]}))
    (tmp_path / "net-0.8.json.gz").write_bytes(gzip.compress(plan_path.read_bytes()))
    monkeypatch.setattr(plan_files.zoo, "folder", lambda: tmp_path)
    assert run_json(capsys, "zoo", "list")[1]["plans"] == [facts]
    assert "net-0.8" in run(capsys, "zoo", "list")[1]
    assert "recomputations" in run(capsys, "zoo", "show", "net-0.8")[1]
    for name in (("net-0.8",), ("net", "--budget", "0.9")):
        status, _, err = run(capsys, "zoo", "get", *name, "-o", tmp_path / "mine.json")
        assert status == GOOD, err
        assert plan_files.load(tmp_path / "mine.json") == plan_files.load(plan_path)
    status, _, err = run(capsys, "zoo", "get", "net", "--budget", "0.5", "-o", tmp_path / "mine.json")
    assert status == WRONG_INPUT
    assert "no plan for 'net' within 0.50 of its eager peak is stored" in err


# ---- graph -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_graphs_are_drawn_in_the_format_that_the_file_s_name_tells(capsys, tmp_path):
    status, content = run_json(capsys, "graph", TARGET, "--level", "S", "-o", tmp_path / "S.png")
    assert (status, content["files"]) == (GOOD, [str(tmp_path / "S.png")])
    assert (tmp_path / "S.png").read_bytes().startswith(b"\x89PNG")
    status, content = run_json(capsys, "graph", TARGET, "-o", tmp_path / "new" / "all.html")
    page = (tmp_path / "new" / "all.html").read_text()
    assert page.count("<svg") == page.count("</svg>") >= 4
    assert not any(word in page for word in ('src="', 'href="http', "<script", "@import"))
    status, content = run_json(capsys, "graph", TARGET, "-o", tmp_path / "all.dot")
    assert [path.removeprefix(str(tmp_path)) for path in content["files"]] == [f"/all_{kind}.dot" for kind in "BDSK"]
    for path in content["files"]:
        assert Path(path).read_text().startswith("digraph")
    status, _, err = run(capsys, "graph", TARGET, "-o", tmp_path / "picture")
    assert status == WRONG_INPUT
    assert "end it in .pdf, or say --format pdf" in err


# ---- report ----------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_reports_are_text_pages_or_figures(plan_path, capsys, tmp_path):
    status, out, _ = run(capsys, "report", plan_path)
    assert status == GOOD
    assert "Net" in out.splitlines()[0]
    page = tmp_path / "report.html"
    assert run(capsys, "report", plan_path, "--measured", TARGET, "-o", page)[:2] == (GOOD, f"written to {page}\n")
    assert page.read_text().startswith("<!")
    status, _, err = run(capsys, "report", plan_path, "-o", tmp_path / "report.doc")
    assert status == WRONG_INPUT
    assert "whose name ends in .html" in err
    assert run(capsys, "report", plan_path, "--measured", "mixer-tiny")[0] == WRONG_INPUT
