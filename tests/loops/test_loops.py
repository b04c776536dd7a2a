"""Training loops in the manner of public ones: planned modules train to the same bits, within their budgets."""

import pytest

from tests.loops import language, optimising, representations, vision
from tests.loops.harness import Loop, run_both

LOOPS = [*vision.LOOPS, *optimising.LOOPS, *language.LOOPS, *representations.LOOPS]

pytestmark = pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")


def _marks(loop: Loop) -> list[pytest.MarkDecorator]:
    marks = [] if loop.quick else [pytest.mark.slow]
    return [*marks, pytest.mark.xfail(strict=True, reason=loop.fails)] if loop.fails else marks


@pytest.mark.parametrize("loop", [pytest.param(one, id=one.name, marks=_marks(one)) for one in LOOPS])
def test_a_planned_module_trains_as_the_module_itself_in(loop: Loop) -> None:
    planned = run_both(loop)
    plans = [plan for model in planned.models for plan in model.plans]
    assert plans
    assert not loop.recomputes or any(any(stage) for plan in plans for stage in plan.recompute), "nothing is recomputed"
    assert not loop.judged or planned.judged, "no step was measured"
    fallbacks = [str(one) for model in planned.models for one in model.fallbacks]
    assert loop.falls_back or not fallbacks, fallbacks
