"""Training loops in the manner of public ones: planned modules train to the same bits, within their budgets."""

import pytest

from tests.loops import generative, language, optimising, practice, representations, vision
from tests.loops.harness import Loop, run_both

LOOPS = [
    *vision.LOOPS,
    *optimising.LOOPS,
    *language.LOOPS,
    *representations.LOOPS,
    *generative.LOOPS,
    *practice.LOOPS,
]

pytestmark = pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")


def _marks(loop: Loop) -> list[pytest.MarkDecorator]:
    marks = [] if loop.quick else [pytest.mark.slow]
    if loop.tells:
        marks.append(pytest.mark.filterwarnings(f"ignore::{loop.tells.__module__}.{loop.tells.__qualname__}"))
    return [*marks, pytest.mark.xfail(strict=True, reason=loop.fails)] if loop.fails else marks


@pytest.mark.parametrize("loop", [pytest.param(one, id=one.name, marks=_marks(one)) for one in LOOPS])
@pytest.mark.ci
def test_a_planned_module_trains_as_the_module_itself_in(loop: Loop) -> None:
    planned = run_both(loop)
    plans = [plan for model in planned.models for plan in model.plans]
    assert plans
    assert not loop.recomputes or any(plan.recomputations for plan in plans), "nothing is recomputed"
    assert not loop.judged or planned.judged, "no step was measured"
    fallbacks = [str(one) for model in planned.models for one in model.fallbacks]
    assert loop.falls_back or not fallbacks, fallbacks


def test_there_are_forty_loops_of_different_names():
    assert len({loop.name for loop in LOOPS}) == len(LOOPS) >= 40
