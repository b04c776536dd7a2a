"""`verify`, the command line, the demo and README's own code, on the device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rockmate import Rockmate, plan_files
from rockmate.cli import main
from rockmate.cli.output import DIFFERENT, GOOD, WRONG_INPUT
from rockmate.runtime.step import Step
from tests import test_docs
from tests.accelerator.shared import shared_from
from tests.cli import conftest as cli
from tests.cli.command_line import run, run_json
from tests.module import test_verify
from tests.scripts import ROOT, TIMEOUT_S

pytestmark = [
    pytest.mark.ci,
    pytest.mark.filterwarnings("ignore::rockmate.FragmentationWarning"),
    pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning"),
]
ON_DEVICE = ("--device", "testacc", "--threads", "1")
QUIETLY = (*ON_DEVICE, "--quiet")

globals().update(shared_from(cli))
globals().update(shared_from(test_verify))


# ---- the command line ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory, there) -> Path:
    """A plan for the device, as `rockmate plan` writes it."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    assert main(["plan", "gpt2-tiny", "--budget", "0.7", "--solver", "greedy", "-o", str(path), *QUIETLY]) == GOOD
    return path


def test_check_and_profile_run_the_plan_there(plan_path, capsys):
    plan_file = plan_files.load(plan_path)
    assert plan_file.made.device.startswith("testacc")
    status, found = run_json(capsys, "check", plan_path, "gpt2-tiny", *ON_DEVICE)
    assert status == GOOD
    assert found["matches"]
    assert found["exact"]
    status, found = run_json(capsys, "profile", plan_path, "gpt2-tiny", *QUIETLY)
    assert status == GOOD
    assert found["plan"]["peak_bytes"] == plan_file.plan.measured_peak_bytes
    assert found["eager"]["peak_bytes"] == plan_file.plan.baseline_peak_bytes


def test_check_finds_recomputations_that_give_other_bits(plan_path, capsys, monkeypatch):
    right = Step.fill

    def wrong(step, op, index, value):
        right(step, op, index, value * 1.5 if value.is_floating_point() else value)

    monkeypatch.setattr(Step, "fill", wrong)
    assert run(capsys, "check", plan_path, "gpt2-tiny", *ON_DEVICE)[0] == DIFFERENT


def test_verify_says_exact(capsys):
    status, out, err = run(capsys, "verify", "mixer-tiny", "--budget", "0.9", *ON_DEVICE)
    assert status == GOOD, err
    assert out.startswith("exact under ")


def test_a_plan_for_the_device_is_none_for_the_cpu(plan_path, capsys):
    status, found = run_json(capsys, "check", plan_path, "gpt2-tiny", "--device", "cpu", "--threads", "1")
    assert status == DIFFERENT
    assert "testacc" in found["difference"]


def test_explain_and_report_tell_of_the_plan(plan_path, capsys, tmp_path):
    assert run(capsys, "explain", plan_path)[0] == GOOD
    page = tmp_path / "report.html"
    status, _, err = run(capsys, "report", plan_path, "-o", page, "--quiet")
    assert status == GOOD, err
    assert "testacc" in page.read_text()


@pytest.mark.slow
def test_sweep_and_max_batch_search_there(capsys, tmp_path):
    options = ("--solver", "greedy", "--time-limit", "1", *QUIETLY)
    status, found = run_json(capsys, "max-batch", "gpt2-tiny", "--budget", "4MiB", *options)
    assert status == GOOD
    assert found["plan"]["measured_peak_bytes"] <= found["budget_bytes"]
    status, found = run_json(
        capsys, "sweep", "mixer-tiny", "--budgets", "0.7,1.0", "--solvers", "greedy,keep-all", *QUIETLY
    )
    assert status == GOOD
    assert {row["solver"] for row in found["rows"]} == {"greedy", "keep-all"}


def test_a_device_that_there_is_not_is_wrong_input(capsys):
    status, _, err = run(capsys, "verify", "mixer-tiny", "--device", "testacc:7")
    assert status == WRONG_INPUT
    assert "there is no device 'testacc:7' here" in err


# ---- scripts and pages -----------------------------------------------------------------------------------


def run_there(*arguments: str) -> str:
    """Standard output of a script, or `-m` of a module, in a process that has the device."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.accelerator.run", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "solvers")])},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_demo_trains_and_draws(tmp_path):
    text = run_there("examples/demo.py", "--quick", "--device", "testacc", "--output", str(tmp_path))
    assert "on testacc" in text
    assert "after 3 steps equal to eager's" in text
    assert "off by up to" not in text
    figures = {path.name for path in tmp_path.iterdir()}
    assert figures == {f"{name}-tiny.{suffix}" for name in ("gpt2", "resnet50") for suffix in ("png", "pdf")}


@pytest.mark.slow
def test_the_module_verifies_in_a_process_of_its_own():
    text = run_there("-m", "rockmate", "verify", "mixer-tiny", "--budget", "0.9", *ON_DEVICE)
    assert text.startswith("exact under ")


@pytest.mark.parametrize("page", ["README.md", pytest.param("docs/tutorial.md", marks=pytest.mark.slow)])
def test_a_page_s_code_runs_where_the_device_is_the_default(device, page, tmp_path, monkeypatch):
    """The same code as on the CPU: all that it makes is on the device."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "example"}
    torch.set_default_device(device)
    try:
        for block, _ in test_docs.runs_of((ROOT / page).read_text("utf-8")):
            test_docs.run(block, namespace)
    finally:
        torch.set_default_device(None)
    planned = [thing for thing in namespace.values() if isinstance(thing, Rockmate)]
    assert planned
    for model in planned:
        assert {parameter.device for parameter in model.parameters()} == {device}
        assert model.plan.measured_peak_bytes <= model.plan.budget_bytes
