"""The scripts that people run first do run."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.link_speeds import crossing_gb_per_s
from benchmarks.reporting import code_version, processor
from tests.scripts import load_script, run_script

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_demo_trains_and_draws(tmp_path):
    text = run_script("examples/demo.py", "--quick", "--output", str(tmp_path))
    assert "after 3 steps equal to eager's" in text
    assert "off by up to" not in text
    figures = {path.name for path in tmp_path.iterdir()}
    assert figures == {f"{name}-tiny.{suffix}" for name in ("gpt2", "resnet50") for suffix in ("png", "pdf")}


@pytest.mark.slow
def test_step_benchmark_writes_its_results(tmp_path):
    run_script("benchmarks/step.py", "--quick", "--models", "gpt2", "--repeats", "2", "--output", str(tmp_path))
    (path,) = tmp_path.iterdir()
    result = json.loads(path.read_text(encoding="utf-8"))
    contenders = {contender["label"]: contender for contender in result["contenders"]}
    assert {"eager", "checkpoint", "rockmate 1.00", "rockmate 0.50"} <= contenders.keys()
    for contender in contenders.values():
        assert contender["largest_gradient_difference"] == 0
        if contender["budget_bytes"] is not None:
            assert contender["measured_peak_bytes"] <= contender["budget_bytes"]
    assert [bar["limit"] for bar in result["bars"]] == [1.01, 1.15, 1.25]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiled_budgets_are_measured_and_drawn(tmp_path):
    run_script(
        "benchmarks/compiled_budgets.py", "--quick", "--shares", "1.2", "--repeats", "2", "--output", str(tmp_path)
    )
    report = json.loads((tmp_path / "compiled-budgets-cpu.json").read_text(encoding="utf-8"))
    assert [row["way"] for row in report["rows"]] == [
        "torch.compile, its own budget",
        "torch.compile, our partitioner",
        "Rockmate",
    ]
    for row in report["rows"][1:]:
        assert row["is_right"]
        assert row["peak_share"] <= row["share"]
    lines = list(load_script("docs/make_tables.py").compiled_budget_sections(report))
    assert sum(line.startswith("| 1.2 |") for line in lines) == 1


@pytest.mark.ci
def test_logits_of_a_few_rows_are_measured_and_drawn(tmp_path):
    run_script("benchmarks/chunked_loss.py", "--quick", "--repeats", "2", "--output", str(tmp_path))
    report = json.loads((tmp_path / "chunked-loss-cpu.json").read_text(encoding="utf-8"))
    ways = ["whole", "ChunkedCrossEntropy", "transformers, whole", "transformers, chunk_logits"]
    assert [row["way"] for row in report["rows"]] == ways
    assert max(row["gradient_difference"] for row in report["rows"]) < 1e-5
    lines = list(load_script("docs/make_tables.py").chunked_loss_sections(report))
    assert sum(line.startswith("| transformers, chunk_logits |") for line in lines) == 1


@pytest.mark.ci
def test_scripts_that_are_watched_are_compared_and_drawn(tmp_path):
    run_script("benchmarks/observing.py", "--quick", "--output", str(tmp_path))
    report = json.loads((tmp_path / "observing-cpu.json").read_text(encoding="utf-8"))
    (row,) = report["rows"]
    assert row["same"]
    assert row["peak_bytes"] == row["told_bytes"] == row["held_bytes"]
    lines = list(load_script("docs/make_tables.py").observing_sections(report))
    assert sum(line.startswith("| sequences |") for line in lines) == 1


@pytest.mark.ci
def test_largest_batches_are_compared_with_the_true_ones_and_drawn(tmp_path):
    run_script("benchmarks/largest_batches.py", "--quick", "--output", str(tmp_path))
    report = json.loads((tmp_path / "largest-batches-cpu.json").read_text(encoding="utf-8"))
    (row,) = report["rows"]
    assert 0.98 * row["true_batch"] <= row["batch"] <= row["true_batch"]
    assert row["measurements"] <= 5
    lines = list(load_script("docs/make_tables.py").largest_batch_sections(report))
    assert sum(line.startswith("| mixer-tiny |") for line in lines) == 1


@pytest.mark.ci
def test_estimates_are_compared_and_drawn(tmp_path):
    pytest.importorskip("transformers")
    run_script("benchmarks/estimates.py", "--models", "gpt2-tiny", "Bert", "mixer-tiny", "--output", str(tmp_path))
    report = json.loads((tmp_path / "estimates.json").read_text(encoding="utf-8"))
    assert all(one["met"] for one in report["bars"])
    assert [row["reason"] for row in report["rows"][:2]] == [None, None]
    lines = list(load_script("docs/make_tables.py").estimate_sections(report))
    assert lines[0].startswith("3 models, 3 with an estimate")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize(("script", "model", "ways"), [("compiled_parts", "hf-llama", 3), ("layouts", "resnet50", 4)])
def test_models_are_measured_by_turns_and_drawn(tmp_path, script, model, ways):
    options = ["--quick", "--models", model, "--shares", "0.9", "--repeats", "2", "--no-inductor"]
    run_script(f"benchmarks/{script}.py", *options, "--output", str(tmp_path))
    (path,) = tmp_path.iterdir()
    report = json.loads(path.read_text(encoding="utf-8"))
    (rows,) = (one["rows"] for one in report["models"])
    assert rows[0]["label"] == "eager"
    for row in rows[1:]:
        assert row["budget_bytes"] is None or row["peak_bytes"] <= row["budget_bytes"]
    lines = list(load_script("docs/make_tables.py").model_sections(report))
    assert sum(line.startswith("| rockmate 0.90") for line in lines) == ways


@pytest.mark.slow
def test_graph_benchmark_writes_its_results(tmp_path):
    run_script("benchmarks/graphs.py", "--quick", "--repeats", "1", "--output", str(tmp_path))
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.ci
def test_calls_benchmark_writes_its_results(tmp_path):
    run_script("benchmarks/calls.py", "--quick", "--output", str(tmp_path))
    report = json.loads((tmp_path / "calls-cpu.json").read_text(encoding="utf-8"))
    calls = {result["call"]: result for result in report["calls"]}
    assert {"mul.Tensor, schema", "mul.Tensor, binding", "product", "product, forgetting"} <= calls.keys()
    assert all(result["cold_us"] > 0 and result["hot_us"] > 0 for result in calls.values())


@pytest.mark.slow
def test_bytes_benchmark_writes_results_that_the_page_can_show(tmp_path):
    run_script("benchmarks/bytes.py", "--quick", "--models", "unet-tiny", "--output", str(tmp_path))
    report = json.loads((tmp_path / "bytes-cpu.json").read_text(encoding="utf-8"))
    assert all(bar["met"] for bar in report["bars"])
    page = "\n".join(load_script("docs/make_tables.py").bytes_sections(report))
    assert page.count("| unet-tiny |") == 8
    assert "refused: " in page


@pytest.mark.slow
def test_solver_benchmark_writes_results_that_the_page_can_show(tmp_path):
    results = tmp_path / "results"
    run_script("benchmarks/solvers.py", "--quick", "--cache", str(tmp_path / "cache"), "--output", str(results))
    report = json.loads((results / "solvers.json").read_text(encoding="utf-8"))
    assert {result["problem"] for result in report["results"]} == {"gpt2-tiny", "unet-tiny", "g1"}
    for result in report["results"]:
        assert not result["fits"] or result["peak_bytes"] <= result["budget_bytes"]
    page = "\n".join(load_script("docs/make_tables.py").solver_sections(report))
    assert page.count("| auto |") == 3


@pytest.mark.slow
def test_relu_benchmark_writes_its_results(tmp_path):
    run_script(
        "benchmarks/relu_signs.py", "--quick", "--seconds", "2", "--models", "transformer", "--output", str(tmp_path)
    )
    result = json.loads((tmp_path / "relu-signs-cpu.json").read_text(encoding="utf-8"))
    assert [row["share"] for row in result["rows"]] == [0.7, 0.5, 0.4, 0.3]
    assert all(row["outputs"] > 0 for row in result["rows"])


@pytest.mark.slow
def test_planning_benchmark_writes_its_results(tmp_path):
    run_script("benchmarks/planning.py", "--quick", "--models", "gpt2-12", "--output", str(tmp_path))
    result = json.loads((tmp_path / "planning-cpu.json").read_text(encoding="utf-8"))
    (row,) = result["rows"]
    assert all(row[name] > 0 for name in ("eager_s", "first_s", "first_cpu_s", "second_s", "cached_s"))
    assert len(result["bars"]) == 3


@pytest.mark.slow
def test_lengths_benchmark_writes_its_results(tmp_path):
    run_script("benchmarks/lengths.py", "--quick", "--models", "hf-bert", "--batches", "8", "--output", str(tmp_path))
    result = json.loads((tmp_path / "lengths-cpu.json").read_text(encoding="utf-8"))
    (run,) = result["runs"]
    assert run["exact"]
    assert run["peak_bytes"]["rockmate"] <= run["budget_bytes"]
    assert len(run["planned"]) < 8 == len(run["lengths"])


@pytest.mark.slow
def test_new_sizes_benchmark_writes_its_results(tmp_path):
    run_script("benchmarks/new_sizes.py", "--quick", "--models", "bert", "--output", str(tmp_path))
    result = json.loads((tmp_path / "new-sizes-cpu.json").read_text(encoding="utf-8"))
    (row,) = result["rows"]
    assert row["exact"]
    assert max(row["peak_bytes"]) <= row["budget_bytes"]
    assert len(row["sizes"]) == len(row["beyond_ms"]) == 2


@pytest.mark.ci
@pytest.mark.slow
def test_replanning_benchmark_writes_its_results(tmp_path):
    run_script("benchmarks/replanning.py", "--quick", "--seconds", "1", "--output", str(tmp_path))
    result = json.loads((tmp_path / "replanning-cpu.json").read_text(encoding="utf-8"))
    assert [list(found["plans"]) for found in result["rounds"]] == [["0.70", "0.50"]]
    for plan in result["rounds"][0]["plans"].values():
        assert 0.99 <= plan["bound_ratio"] <= plan["predicted_ratio"]


def test_a_result_is_no_change_of_the_code(tmp_path):
    code, result = tmp_path / "code.py", tmp_path / "benchmarks" / "results" / "found.json"
    result.parent.mkdir(parents=True)
    for path in (code, result):
        path.write_text("1")
    assert code_version(tmp_path) == "unknown"
    person = ("-c", "user.name=someone", "-c", "user.email=someone@example.org", "-c", "commit.gpgsign=false")
    for command in (["init", "-q"], ["add", "."], [*person, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    commit = code_version(tmp_path)
    result.write_text("2")
    assert code_version(tmp_path) == commit
    code.write_text("2")
    assert code_version(tmp_path) == f"{commit}-dirty"


def test_a_processor_is_told_with_its_largest_cache(tmp_path: Path):
    assert processor(tmp_path)
    caches = tmp_path / "sys/devices/system/cpu/cpu0/cache"
    for index, size in enumerate(("48K", "2048K", "33792K")):
        (caches / f"index{index}").mkdir(parents=True)
        (caches / f"index{index}" / "size").write_text(f"{size}\n", encoding="utf-8")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("model\t\t: 7\nmodel name\t: A Chip\n\nflags\t\t: fast\n", encoding="utf-8")
    assert processor(tmp_path) == "A Chip, model 7, 33 MiB of cache"


@pytest.mark.slow
def test_offload_benchmark_writes_its_results(tmp_path):
    run_script("benchmarks/offload.py", "--quick", "--shares", "0.7", "--output", str(tmp_path))
    report = json.loads((tmp_path / "offload-cpu.json").read_text("utf-8"))
    ways = [row["way"] for row in report["rows"]]
    assert ways == ["eager", "save_on_cpu", "moved", "recomputed", "both"]
    page = "\n".join(load_script("docs/make_tables.py").offload_sections(report))
    assert "everything moved" in page


def test_the_speed_at_which_a_plan_is_as_slow_as_another_lies_between_two_that_were_measured():
    assert crossing_gb_per_s([(0.25, 0.8), (0.125, 1.2)]) == pytest.approx(1 / 6)  # halfway between 4 and 8 ms for a MB
    assert crossing_gb_per_s([(0.5, 0.9), (0.25, 0.95)]) is None
    assert crossing_gb_per_s([(0.5, 1.2), (0.25, 1.4)]) is None


@pytest.mark.ci
def test_implementations_of_operations_are_compared(tmp_path):
    run_script("benchmarks/implementations.py", "--quick", "--models", "resnet50", "--output", str(tmp_path))
    rows = json.loads((tmp_path / "implementations-cpu.json").read_text("utf-8"))["rows"]
    assert sum(row["count"] for row in rows) == 53  # convolutions of a ResNet-50
    for row in rows:
        usual, other = row["found"]
        assert other["name"] == "without oneDNN"
        assert other["refused"] or other["away"] < 1e-3
        assert row["gain"] == 0 or other["ms"] < usual["ms"]


@pytest.mark.ci
def test_divisions_of_parts_are_compared(tmp_path):
    run_script("benchmarks/part_divisions.py", "--quick", "--models", "hf-llama", "--output", str(tmp_path))
    rows = json.loads((tmp_path / "part-divisions-cpu.json").read_text("utf-8"))["rows"]
    saved = [row["compiled_bytes"] for row in rows]
    assert saved == sorted(saved, reverse=True)
    assert saved[0] > saved[-1]


@pytest.mark.ci
def test_seconds_of_compiling_are_told(tmp_path):
    run_script("benchmarks/compile_seconds.py", "--quick", "--output", str(tmp_path))
    report = json.loads((tmp_path / "compile-seconds-cpu.json").read_text("utf-8"))
    assert [(row["way"], row["layers"]) for row in report["rows"]] == [
        ("parts", 2), ("whole", 2), ("parts", 4), ("whole", 4),
    ]  # fmt: skip
    assert report["rows"][0]["parts"] > 0
    assert len(report["bars"]) == 3


@pytest.mark.ci
def test_operations_are_compared_with_their_forms_in_place(tmp_path):
    run_script("benchmarks/in_place.py", "--quick", "--models", "hf-bert", "--output", str(tmp_path))
    rows = json.loads((tmp_path / "in-place-cpu.json").read_text("utf-8"))["rows"]
    assert {row["operation"].split()[0] for row in rows} >= {"add"}  # of residual branches
    for row in rows:
        assert row["count"] > 0
        assert row["gain"] == 0 or row["in_place_ms"] < row["ms"]


@pytest.mark.ci
def test_draws_are_compared(tmp_path):
    pytest.importorskip("numba")
    run_script("benchmarks/draws.py", "--quick", "--numbers-of-threads", "1", "--output", str(tmp_path))
    rows = json.loads((tmp_path / "draws-cpu.json").read_text("utf-8"))["rows"]
    assert [row["way"] for row in rows] == [
        "eager", "rockmate 1", "rockmate 1, PyTorch's draws", "rockmate 0.7", "rockmate 0.7, PyTorch's draws",
    ]  # fmt: skip
    assert all(0 < row["drawn_share"] < 1 for row in rows)


@pytest.mark.slow
def test_small_budgets_are_searched_and_bounded(tmp_path):
    command = ("--quick", "--cache", str(tmp_path / "problems"), "--output", str(tmp_path))
    run_script("benchmarks/small_budgets.py", *command)
    cases = json.loads((tmp_path / "small-budgets.json").read_text("utf-8"))["cases"]
    assert [case["case"] for case in cases] == ["transformer@0.3", "hf-bert@least", "hf-bert@least*1.5"]
    lines = list(load_script("docs/make_tables.py").small_budget_sections({"cases": cases}))
    assert sum(line.startswith("| ") for line in lines) == 2 + len(cases)
    assert all(case["bracket"]["bound"] <= case["bracket"]["plan"] for case in cases)


@pytest.mark.slow
def test_link_speeds_are_simulated_and_drawn(tmp_path):
    run_script("benchmarks/link_speeds.py", "--quick", "--shares", "0.7", "--output", str(tmp_path))
    report = json.loads((tmp_path / "link-speeds.json").read_text("utf-8"))
    overheads = [row["overhead"] for row in report["rows"]]
    assert overheads == sorted(overheads, reverse=True)  # none for a faster link is slower
    assert len(report["throttled"]) == 7
    assert report["crossing"].keys() == {"predicted_gb_per_s", "measured_gb_per_s"}
    picture = tmp_path / "links.svg"
    run_script("docs/make_link_figure.py", str(tmp_path / "link-speeds.json"), str(picture))
    assert picture.stat().st_size > 5_000
