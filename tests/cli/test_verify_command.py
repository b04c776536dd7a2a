"""`rockmate verify`: one line that says whether training is exact, and an exit status to match."""

import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from rockmate.cli import main
from rockmate.cli.output import DIFFERENT, GOOD, WRONG_INPUT
from rockmate.cli.targets import load_target
from rockmate.runtime.step import Step
from tests.module.models import Layers, built, rows
from tests.module.steps import squares
from tests.scripts import ROOT

HERE = "tests.cli.test_verify_command"


def pair():
    return built(Layers), rows()


def triple():
    return built(Layers), (rows(),), squares


def broken():
    raise ZeroDivisionError("the user's own")


def single():
    return built(Layers)


def quadruple():
    return 1, 2, 3, 4


def no_model():
    return 5, rows()


def strange_sample():
    return built(Layers), "text"


def failing_loss():
    return built(Layers), rows(), lambda output: output["no such key"]


def frozen():
    return built(Layers).requires_grad_(False), rows()


@pytest.mark.parametrize("name", ["pair", "triple"])
def test_a_factory_is_verified(name, capsys):
    assert main(["verify", f"{HERE}:{name}", "--budget", "0.8", "--steps", "2", "--optimizer", "adamw"]) == GOOD
    verdict, plan = capsys.readouterr().out.splitlines()
    assert verdict.startswith("exact under ")
    assert plan.startswith("Plan(budget ")
    assert " 0 recomputations" not in plan


@pytest.mark.ci
def test_a_zoo_name_is_verified_in_a_process_of_its_own():
    command = [sys.executable, "-m", "rockmate", "verify", "mixer-tiny", "--budget", "0.9", "--threads", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == GOOD, done.stderr
    assert done.stdout.startswith("exact under ")
    # Builds of PyTorch for CUDA tell of the driver that is missing.
    assert [line for line in done.stderr.splitlines() if "gpuGetDeviceCount" not in line] == []


def test_what_is_not_exact_ends_with_status_1_and_the_place(capsys, monkeypatch):
    right = Step.fill
    monkeypatch.setattr(Step, "fill", lambda step, op, index, value: right(step, op, index, value * 1.5))
    assert main(["verify", f"{HERE}:triple", "--budget", "0.8"]) == DIFFERENT
    verdict = capsys.readouterr().out.splitlines()[0]
    assert verdict.startswith("not exact under ")
    assert "recomputed with other bits than the forward's for the backward of %" in verdict


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("gpt9", r"the zoo has no 'gpt9'; it has .*gpt2-tiny.* give package.module:factory"),
        ("no.such.module:factory", "gives no model: ModuleNotFoundError: No module named 'no'"),
        (f"{HERE}:absent", "gives no model: AttributeError: .*absent"),
        (f"{HERE}:broken", "broken gives no model: ZeroDivisionError: the user's own"),
        (f"{HERE}:HERE", "gives no model: TypeError: 'str' object is not callable"),
        (f"{HERE}:single", r"must return \(model, sample\) or \(model, sample, loss\), not a Layers"),
        (f"{HERE}:quadruple", "not a tuple of 4"),
        (f"{HERE}:no_model", "the model must be a torch.nn.Module, but is a int"),
        (f"{HERE}:strange_sample", "the sample of Layers holds no tensor"),
        (f"{HERE}:frozen", "there is no training step to plan"),
    ],
)
def test_wrong_targets_are_told_with_status_2(target, message, capsys):
    assert main(["verify", target]) == WRONG_INPUT
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: ")
    assert told.err.count("\n") == 1
    assert re.search(message, told.err)


def test_an_error_of_the_user_s_code_is_no_difference_but_status_2_with_its_traceback(capsys):
    assert main(["verify", f"{HERE}:failing_loss", "--budget", "0.8"]) == WRONG_INPUT
    told = capsys.readouterr()
    assert told.out == ""
    assert 'output["no such key"]' in told.err
    assert told.err.splitlines()[-1].startswith("error: verify ended by ")


@pytest.mark.parametrize(
    ("budget", "message"),
    [("0.001", "the smallest for which a schedule was found"), ("2 apples", "the budget cannot be read"), ("-1", "-1")],
)
def test_budgets_that_nothing_fits_or_that_are_none_end_with_status_2(budget, message, capsys):
    assert main(["verify", f"{HERE}:pair", f"--budget={budget}"]) == WRONG_INPUT
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["chek"],
        ["verify"],
        ["verify", "gpt2-tiny", "--steps", "0"],
        ["verify", "gpt2-tiny", "--threads", "two"],
        ["verify", "gpt2-tiny", "--optimizer", "adamm"],
    ],
)
def test_unknown_options_end_with_status_2(arguments, capsys):
    assert main(arguments) == WRONG_INPUT
    told = capsys.readouterr()
    assert told.out == ""
    assert "Usage: rockmate" in told.err


def test_sizes_are_budgets(capsys):
    assert main(["verify", f"{HERE}:pair", "--budget", "1GiB", "--steps", "1"]) == GOOD
    assert capsys.readouterr().out.startswith("exact under 1.00 GiB")


def test_threads_are_set():
    before = torch.get_num_threads()
    try:
        assert main(["verify", f"{HERE}:single", "--threads", "1"]) == WRONG_INPUT
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_the_loss_may_be_left_out():
    model, _, loss = load_target(f"{HERE}:pair")
    assert isinstance(model, nn.Module)
    assert loss is None
    assert load_target(f"{HERE}:triple")[2] is squares
