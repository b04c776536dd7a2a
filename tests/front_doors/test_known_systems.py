"""The page on the known systems answers every row of the checklist, with names that are there."""

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rockmate.cli.app import COMMANDS
from rockmate.compat.rotor import models

PAGE = Path(__file__).resolve().parents[2] / "docs" / "known_systems.md"
# What the systems name: rotor, Rockmate 1, MONeT, Checkmate.
ROWS = [
    f"{letter}{number}"
    for letter, count in (("R", 23), ("K", 24), ("M", 16), ("C", 7))
    for number in range(1, count + 1)
]
STRATEGIES = (
    "CHEN_SQRTN CHEN_GREEDY CHEN_SQRTN_NOAP CHEN_GREEDY_NOAP OPTIMAL_ILP_GC CHECKPOINT_LAST_NODE CHECKPOINT_ALL "
    "CHECKPOINT_ALL_AP GRIEWANK_LOGN APPROX_DET_ROUND_LP_SWEEP APPROX_RANDOMIZED_ROUND LB_LP"
).split()
# How an answer without a name begins: there is nothing to call.
SAID_IN_WORDS = (
    "the same",
    "as there",
    "any module",
    "accepted: ",
    "nothing to carry over",
    "shared, ",
    "neither",
    "modules are left",
    "both exact: ",
    "checkpointing alone",
    "the table above",
    "HiGHS, ",
    "PyTorch 2",
    "asked of the driver",
)


@cache
def text() -> str:
    return PAGE.read_text("utf-8")


@cache
def rows() -> dict[str, str]:
    """The last cell of each row by its name."""
    found = re.findall(r"^\| ([RKMC]\d+) \| .+ \| (.+) \|$", text(), re.MULTILINE)
    assert len(found) == len(dict(found)), "a row is there twice"
    return dict(found)


def test_no_row_of_the_checklist_is_missing():
    assert list(rows()) == ROWS


@pytest.mark.parametrize("row", ROWS)
def test_each_row_says_where_it_lives_or_why_not(row):
    answer = rows()[row]
    where = re.search(r"`(rockmate|rkgb|rk_solvers)[. ]|\]\(", answer)
    refused = "refused" in answer
    assert where or refused or answer.startswith(SAID_IN_WORDS), answer
    if refused and not where:
        assert re.search(r"\(M1\)|refused[^.]*(:|, as) .{20,}", answer), "a refusal has a reason"


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"`((?:rockmate|rkgb|rk_solvers)(?:\.\w+)+)", PAGE.read_text("utf-8"))))
)
def test_names_of_the_page_are_there(name):
    found(name)


def found(name: str) -> Any:
    """What a dotted name is the name of."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            thing = getattr(thing, part)
        return thing
    raise AssertionError(f"there is no {name}")


def test_commands_of_the_page_are_there():
    named = set(re.findall(r"`rockmate ([a-z-]+)", text()))
    assert named
    assert named <= COMMANDS.keys()


def test_every_strategy_of_checkmate_has_an_answer():
    first_cells = " ".join(re.findall(r"^\| ([^|]*)\|", text(), re.MULTILINE))
    assert not [strategy for strategy in STRATEGIES if not re.search(rf"\b{strategy}\b", first_cells)]


def test_the_models_that_are_named_are_there():
    told = rows()["R8"].lower().replace("-", "_")
    for name in ("vgg_16", "mobilenet_v2", "googlenet", "densenet_121"):
        assert name in told
        assert hasattr(models, name.replace("_1", "1"))
