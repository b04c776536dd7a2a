"""The page in a real browser: it asks for nothing, shows what the plan file holds, and can be used by anyone."""

import dataclasses
import re

import msgspec
import pytest

from rk_solvers import Compute, simulate
from rockmate import Rockmate, zoo
from rockmate.reports import MeasuredStep, MeasuredSteps, pareto_points, text_report, write_figure, write_html
from rockmate.units import format_bytes, format_ms
from tests.module.steps import FEW_ROUNDS
from tests.reports.conftest import HOSTILE
from tests.reports.synthetic import plan_file_of_layers
from tests.scripts import run_script

LEFT, RIGHT = 78, 14  # of the plot in its chart, in pixels


@pytest.fixture(scope="module")
def path(plan_file, tmp_path_factory):
    return write_html(plan_file, tmp_path_factory.mktemp("page") / "report.html", sweep=())


def hover(page, share: float) -> str:
    """What is told of the place at that share of the axis."""
    box = page.locator("#chart svg").bounding_box()
    page.mouse.move(box["x"] + LEFT + share * (box["width"] - LEFT - RIGHT), box["y"] + 80)
    return page.locator("#tip").inner_text()


def rows_of(page, section: str) -> list[list[str]]:
    rows = page.locator(f"#{section} tbody tr").all()
    return [row.locator("th, td").all_inner_texts() for row in rows]


@pytest.mark.ci
def test_hovering_tells_the_operation_and_its_bytes(page_of, path, plan_file):
    moments = simulate(plan_file.problem, plan_file.parsed_schedule).moments
    page = page_of(path)
    page.locator("#step").scroll_into_view_if_needed()
    page.get_by_role("radio", name="by operation").check()
    seen = set()
    for index, moment in enumerate(moments):
        kind, name = str(moment.op).split()
        word = "recompute" if kind == "compute" and name in seen else kind
        seen.add(name)
        if index % 7 and index + 1 < len(moments):
            continue
        told = hover(page, (index + 0.5) / len(moments))
        assert name.removesuffix(".backward") in told.splitlines()[0]
        assert word in told.splitlines()[0]
        assert f"step {index + 1} of {len(moments)}" in told
        assert told.rstrip().endswith(format_bytes(moment.peak_bytes))
    assert any(isinstance(op, Compute) for op in plan_file.parsed_schedule.ops)


def test_hovering_by_time_finds_the_operation_that_runs_then(page_of, path, plan_file):
    moments = simulate(plan_file.problem, plan_file.parsed_schedule).moments
    page = page_of(path)
    page.locator("#step").scroll_into_view_if_needed()
    longest = max(moments, key=lambda moment: moment.end_ms - moment.start_ms)
    told = hover(page, (longest.start_ms + longest.end_ms) / 2 / moments[-1].end_ms)
    assert f"step {moments.index(longest) + 1} of" in told


def test_dragging_zooms_and_a_double_click_shows_all_again(page_of, path):
    page = page_of(path)
    page.locator("#step").scroll_into_view_if_needed()
    box = page.locator("#chart svg").bounding_box()
    whole = page.locator("#chart svg").inner_html()
    page.mouse.move(box["x"] + 300, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 60, steps=4)
    page.mouse.up()
    zoomed = page.locator("#chart path.kept").get_attribute("d")
    assert zoomed not in whole
    page.mouse.dblclick(box["x"] + 400, box["y"] + 60)
    assert page.locator("#chart path.kept").get_attribute("d") in whole


def test_keys_lead_through_the_step(page_of, path, plan_file):
    moments = simulate(plan_file.problem, plan_file.parsed_schedule).moments
    page = page_of(path)
    page.locator("#chart").focus()
    readout = page.locator("#readout")
    page.keyboard.press("Home")
    assert moments[0].op.name in readout.inner_text()
    page.keyboard.press("ArrowRight")
    assert moments[1].op.name in readout.inner_text()
    page.keyboard.press("p")
    peak = max(moments, key=lambda moment: moment.peak_bytes)
    assert format_bytes(peak.peak_bytes) in readout.inner_text()
    for key in ("+", "+", "ArrowLeft", "-", "0", "End"):
        page.keyboard.press(key)
    assert f"step {len(moments)} of {len(moments)}" in readout.inner_text()
    page.keyboard.press("Enter")
    assert "chosen moment" in page.locator("#moment-title").inner_text()
    page.get_by_text("back to the peak").click()
    assert "at the peak" in page.locator("#moment-title").inner_text()


def test_tables_are_sorted_searched_and_turned(page_of, path, plan_file):
    page = page_of(path)
    tensors = page.locator("#tensors")
    sizes = sorted((data.size_bytes for data in plan_file.problem.data), reverse=True)
    assert [row[1] for row in rows_of(page, "tensors")] == [format_bytes(size) for size in sizes[:15]]
    assert tensors.locator("th[aria-sort=descending]").inner_text().startswith("bytes")
    tensors.get_by_role("button", name="bytes").click()
    assert [row[1] for row in rows_of(page, "tensors")] == [format_bytes(size) for size in sizes[:-16:-1]]
    tensors.get_by_role("button", name="next").click()
    assert rows_of(page, "tensors")[0][1] == format_bytes(sizes[-16])

    operations = page.locator("#operations")
    operations.get_by_role("searchbox").fill("softmax")
    main = {op.node: op for op in plan_file.graph.operations if op.name == op.node}
    texts = {name: f"{name} {op.function} {op.module} {op.source} {op.arguments}" for name, op in main.items()}
    expected = [op.name for op in plan_file.problem.forward if "softmax" in texts[op.name]]
    assert [row[0] for row in rows_of(page, "operations")] == expected
    operations.get_by_role("searchbox").fill("no such thing")
    assert "Nothing is found" in operations.inner_text()
    operations.get_by_role("searchbox").fill("")
    operations.get_by_role("combobox").select_option("recomputed")
    again = {name for names in plan_file.parsed_schedule.recomputed.values() for name in names}
    assert operations.locator(".pager").inner_text().startswith(f"1–{min(15, len(again))} of {len(again)} of")


def test_a_tensor_shows_when_it_is_in_memory(page_of, path, plan_file):
    page = page_of(path)
    page.locator("#tensors").get_by_role("combobox").select_option("recomputed")
    page.locator("#tensors tbody th button").first.click()
    assert page.locator("#chart .stay").count() >= 2
    assert "in memory 2 times" in page.locator("#readout").inner_text()


def test_sizes_and_times_are_written_as_everywhere_else(page_of, path):
    page = page_of(path)
    sizes = [0, 1, 1023, 1024, 338_432, 2**20 + 2**17, *(3**power for power in range(2, 28)), 2**40 * 5 // 2]
    sizes += [1024 * whole + 512 for whole in range(95, 110)]  # just between two
    assert page.evaluate("sizes => sizes.map(formatBytes)", sizes) == list(map(format_bytes, sizes))
    times = [0.0, 0.0005, 0.4996, 1.005, 1.125, 12.25, 99.96, 999.5, 1_000.0, 12_345.0, 130_000.0]
    assert page.evaluate("times => times.map(formatMs)", times) == list(map(format_ms, times))


def luminance(colour: str) -> float:
    """Relative, as the Web Content Accessibility Guidelines define it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible_in_light_and_dark(page_of, path, scheme):
    page = page_of(path, color_scheme=scheme)
    colour = "([selector, name]) => getComputedStyle(document.querySelector(selector))[name]"
    paper = luminance(page.evaluate(colour, ["body", "backgroundColor"]))
    assert (paper > 0.5) == (scheme == "light")
    for selector, name in (("h1", "color"), (".story", "color"), (".link", "color"), ("#chart text", "fill")):
        light, dark = sorted([paper, luminance(page.evaluate(colour, [selector, name]))], reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, selector


@pytest.mark.parametrize("width", [320, 390, 768])
def test_narrow_screens_do_not_scroll_sideways(page_of, path, width):
    page = page_of(path, viewport={"width": width, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    box = page.locator("#chart svg").bounding_box()
    assert box["width"] <= width


def test_names_that_look_like_markup_are_only_names(page_of, hostile_file, tmp_path):
    page = page_of(write_html(hostile_file, tmp_path / "hostile.html"))
    assert page.locator("h1").inner_text() == HOSTILE
    assert page.title().startswith(HOSTILE)
    assert page.evaluate("window.harmed") is None
    assert page.locator("img").count() == 0
    page.locator("#operations").get_by_role("searchbox").fill("harmed")
    assert HOSTILE in page.locator("#operations").inner_text()
    assert page.evaluate("window.harmed") is None


def test_a_budget_far_beyond_does_not_flatten_the_chart(page_of, path, plan_file, tmp_path):
    vast = msgspec.structs.replace(plan_file.promise, budget_bytes=2**40)
    page = page_of(write_html(msgspec.structs.replace(plan_file, promise=vast), tmp_path / "vast.html", sweep=()))
    assert page.locator("#chart .budget").count() == 0
    assert page.locator("#chart .budget-label").text_content() == "budget 1.00 TiB ↑"
    area = page.locator("#chart path.kept").bounding_box()
    assert area["height"] > 100


def test_a_step_without_time_or_bytes_is_a_page_all_the_same(page_of, plan_file, tmp_path):
    problem = plan_file.problem
    nothing = dataclasses.replace(
        problem,
        data=tuple(dataclasses.replace(data, size_bytes=0) for data in problem.data),
        forward=tuple(
            dataclasses.replace(op, time_ms=0.0, workspace_bytes=0, replay_bytes=0) for op in problem.forward
        ),
        backward=tuple(dataclasses.replace(op, time_ms=0.0, resident_bytes=0, peak_bytes=0) for op in problem.backward),
    )
    zeros = dict.fromkeys(("budget_bytes", "peak_bytes", "baseline_peak_bytes", "measured_peak_bytes"), 0)
    zeros |= dict.fromkeys(("time_ms", "baseline_time_ms", "lower_bound_ms", "gap"), 0.0)
    promise = msgspec.structs.replace(plan_file.promise, **zeros)
    empty = msgspec.structs.replace(plan_file, problem=nothing, promise=promise)
    page = page_of(write_html(empty, tmp_path / "empty.html", sweep=pareto_points(plan_file, budgets=2)))
    page.locator("#chart").focus()
    page.keyboard.press("p")
    page.get_by_role("radio", name="by operation").check()
    for key in ("+", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    assert "0 B" in page.locator("#readout").inner_text()
    assert "0 B" in text_report(empty)
    write_figure(empty, tmp_path / "empty.png", sweep=())


def test_measured_steps_are_drawn_beside_the_prediction(page_of, plan_file, tmp_path):
    plan, eager = (
        MeasuredStep(peak, 20.0, ((0.0, 0), (10.0, peak), (20.0, 5)))
        for peak in (plan_file.promise.budget_bytes + 1, 900_000)
    )
    page = page_of(write_html(plan_file, tmp_path / "measured.html", MeasuredSteps(plan, eager), sweep=()))
    assert page.locator("#chart .measured-line").count() == 1
    assert page.locator("#chart .measured-eager-line").count() == 1
    assert "above the budget" in page.locator(".fact.bad").inner_text()
    page.get_by_label("eager measured").uncheck()
    assert page.locator("#chart .measured-eager-line").count() == 0


def test_charts_and_tables_are_told_to_those_who_do_not_see_them(page_of, path, plan_file):
    page = page_of(path)
    assert format_bytes(plan_file.promise.peak_bytes) in page.locator("#story").inner_text()
    tree = page.locator("body").aria_snapshot()
    assert 'group "Memory over the step' in tree
    assert 'table "operations"' in tree
    assert 'columnheader "bytes' in tree
    assert page.locator("th:not([scope])").count() == 0
    unnamed = "[...document.querySelectorAll('input, select, button')].filter(e => !e.labels?.length && "
    unnamed += "!e.ariaLabel && !e.textContent.trim()).length"
    assert page.evaluate(unnamed) == 0


def test_times_measured_anew_stand_beside_those_of_the_plan(page_of, planned, tmp_path):
    entry = zoo.get("gpt2-tiny")
    page = page_of(planned.report(tmp_path / "operations.html", sample=entry.sample, operations=True))
    heads = page.locator("#operations thead th").all_inner_texts()
    assert sum(head.startswith("measured") for head in heads) == 2
    column = next(index for index, head in enumerate(heads) if head.startswith("measured"))
    assert all(row[column].endswith((" µs", " ms")) for row in rows_of(page, "operations"))


@pytest.mark.slow
def test_three_thousand_operations_stay_small_and_quick(page_of, tmp_path):
    path = write_html(plan_file_of_layers(3_000), tmp_path / "large.html")
    assert path.stat().st_size < 2_000_000
    page = page_of(path)
    drawn = "(() => { const start = performance.now(); document.getElementById('zoom-in').click(); "
    drawn += "document.getElementById('zoom-all').click(); return performance.now() - start; })()"
    assert page.evaluate(drawn) < 1_000  # two drawings of the whole chart, on a busy machine
    page.locator("#tensors").get_by_role("searchbox").fill("layer_2999")
    assert len(rows_of(page, "tensors")) == 2


@pytest.mark.slow
def test_the_picture_of_the_documentation_is_taken(browser, tmp_path):
    options = ("--entry", "gpt2-tiny", "--time-limit", "1", "--output", str(tmp_path))
    run_script("docs/make_report_picture.py", *options)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_residual_network_is_shown(page_of, tmp_path):
    entry = zoo.get("resnet50-tiny")
    model = Rockmate(entry.model, entry.sample, 0.6, loss=entry.loss, solver="greedy", limits=FEW_ROUNDS)
    page = page_of(model.report(tmp_path / "resnet.html", sample=entry.sample))
    assert page.locator("h1").inner_text() == "ResNet"
    assert page.locator("#pareto .own").count() == 1
    assert page.locator(".fact.bad").count() == 0
