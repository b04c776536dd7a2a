"""Sweeps: every solver on one measured problem, the plans of "auto" run, and what is told of all of them."""

import json
import math
import xml.etree.ElementTree as ElementTree

import pytest

from rockmate.cli.commands.sweep import BudgetRange, spread, sweep_text
from rockmate.cli.output import DIFFERENT, GOOD, WRONG_INPUT
from rockmate.cli.sweep_figure import draw_sweep
from rockmate.cli.targets import find_source
from rockmate.queries.sweep import OURS, sweep
from tests.cli.command_line import MODEL, run, run_json

TARGET = f"{MODEL}:make"
FRACTIONS = (0.2, 0.6, 1.0)
SOME = ("auto", "greedy", "chen", "rotor", "keep-all", "keep-none")


@pytest.fixture(scope="module")
def found():
    target = find_source(TARGET).target(96)
    return sweep(target.model, target.sample, FRACTIONS, loss=target.loss, solvers=SOME, time_limit=0.5)


@pytest.mark.ci
@pytest.mark.slow
def test_every_solver_has_a_row_for_every_budget(found):
    assert found.solvers == SOME
    assert len(found.rows) == len(SOME) * len(FRACTIONS)
    assert found.budgets == tuple(round(part * found.eager_peak_bytes) for part in FRACTIONS)
    for row in found.rows:
        assert row.fits == (row.peak_bytes <= row.budget_bytes)
        assert row.slowdown >= 1 - 1e-9
        assert (row.measured_peak_bytes is not None) >= (row.fits and row.solver == OURS)
        if row.fits and row.solver == OURS:
            assert row.measured_peak_bytes <= row.budget_bytes
        assert row.took_s >= 0


def test_more_memory_costs_no_baseline_time(found):
    for solver in SOME[1:]:
        rows = [found.row(solver, budget) for budget in found.budgets]
        times = [row.time_ms for row in rows if row.fits]
        assert times == sorted(times, reverse=True)
        assert [row.fits for row in rows] == sorted(row.fits for row in rows)
    whole = found.budgets[-1]
    assert all(found.row(solver, whole).slowdown == pytest.approx(1) for solver in SOME[:-1])
    assert not found.row("keep-all", found.budgets[1]).fits


def test_the_smallest_budget_is_between_what_is_proven_and_what_fits(found):
    assert found.proven_bytes <= found.smallest_bytes
    fitting = [row.measured_peak_bytes or row.peak_bytes for row in found.rows if row.fits]
    assert found.smallest_bytes <= min(fitting)
    with pytest.raises(KeyError, match="hiremate was not run"):
        found.row("hiremate", found.budgets[0])


def test_the_table_and_the_figures_tell_what_was_found(found, tmp_path):
    text = sweep_text(found)
    for solver in found.solvers:
        assert solver in text
    whole = next(line for line in text.splitlines() if "100%" in line)
    assert whole.count("1.000×") == len(SOME) - 1
    for name in ("sweep.png", "sweep.pdf", "sweep.html"):
        draw_sweep(found, tmp_path / name, "<model> & $x$")
        assert (tmp_path / name).stat().st_size > 1000
    page = (tmp_path / "sweep.html").read_text()
    assert "&lt;model&gt; &amp; $x$: memory against time" in page
    assert page.count("<tr>") == 1 + len(FRACTIONS)
    assert "http://www.w3.org" in page  # the name of SVG's own format, which is nowhere loaded from
    assert not any(word in page for word in ("<script", "@import", "src="))
    ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])


@pytest.mark.usefixtures("without_ortools")
def test_solvers_that_cannot_run_here_are_left_out_with_the_reason():
    target = find_source(TARGET).target(8)
    found = sweep(target.model, target.sample, [1.0], solvers=["intervals", "keep-all"])
    reason = "the solver Intervals needs OR-tools; install it: pip install ortools"
    assert found.left_out == (("intervals", reason),)
    assert found.solvers == ("keep-all",)
    assert f"intervals was left out: {reason}" in sweep_text(found)


@pytest.mark.parametrize(
    ("text", "steps", "budgets"),
    [
        ("0.25..1.0", 4, [0.25, 0.5, 0.75, 1.0]),
        (".5..1", 2, [0.5, 1.0]),
        ("0.4..0.8", 1, [0.8]),
        ("1KiB..3KiB", 3, [1024, 2048, 3072]),
        ("0.5,2GiB,1000", 8, [0.5, 2 << 30, 1000]),
    ],
)
def test_budgets_are_ranges_or_lists(text, steps, budgets):
    assert spread(BudgetRange().convert(text, None, None), steps) == pytest.approx(budgets)


def test_wrong_options_are_told_before_anything_is_measured(capsys):
    for options, message in (
        (("--budgets", "0.9..0.3"), "no range"),
        (("--budgets", "0.5..2GiB"), "no range"),
        (("--budgets", "some"), "no size in bytes"),
        (("--solvers", "greedy,best"), "there is no solver 'best'"),
        (("--figure", "sweep.doc"), "end it in .png"),
    ):
        status, out, err = run(capsys, "sweep", TARGET, *options)
        assert (status, out) == (WRONG_INPUT, "")
        assert message in err
    with pytest.raises(ValueError, match="there is no solver 'best'"):
        sweep(find_source(TARGET).target().model, None, [0.5], solvers=["best"])


@pytest.mark.ci
def test_the_command_writes_what_it_prints(capsys, tmp_path):
    path = tmp_path / "sweep.json"
    command = ("sweep", TARGET, "--batch", "16", "--budgets", "0.1,1.0", "--solvers", "keep-none,keep-all")
    status, content = run_json(capsys, *command, "-o", path)
    assert status == GOOD
    assert json.loads(path.read_text()) == content
    assert {row["solver"] for row in content["rows"]} == {"keep-none", "keep-all"}
    status, content = run_json(
        capsys, *command[:3], "16", "--budgets", "0.01", "--solvers", "auto", "--time-limit", "0.5"
    )
    assert status == DIFFERENT
    assert content["rows"][0]["slowdown"] is None  # JSON has no infinity
    assert math.isfinite(content["smallest_bytes"])
