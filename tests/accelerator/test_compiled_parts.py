"""Parts that no compiler compiles for the device: the model is planned as it is, and that is told."""

import pytest

from rockmate import CompileWarning, Rockmate, verify
from tests.module.models import Smooth, built, rows
from tests.module.steps import BRIEFLY, squares

pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore::rockmate.FragmentationWarning")]


def test_what_cannot_be_compiled_there_stays_as_it_is():
    with pytest.warns(CompileWarning, match="cannot be compiled"):
        planned = Rockmate(built(Smooth), rows(), 0.8, loss=squares, compile=True, limits=BRIEFLY)
    assert not planned.plan.compiled.chosen
    assert verify(planned, rows(), loss=squares).exact
