"""Where memory runs out in a planned step, the error says who holds it, and which budget would fit."""

import re

import pytest
import torch

from rockmate import Rockmate, zoo
from tests.accelerator.test_out_of_memory import allocations, error_of, failing
from tests.module.models import Layers, built, rows
from tests.module.steps import FEW_ROUNDS, recomputing, squares

pytestmark = [
    pytest.mark.ci,
    pytest.mark.filterwarnings("ignore::rockmate.FragmentationWarning"),
    pytest.mark.filterwarnings("ignore::rockmate.PoorPlanWarning"),
]


def test_whichever_allocation_of_the_plan_s_own_code_fails_is_told_with_its_place(extension):
    model, data = recomputing(built(Layers), rows()), rows(1)
    count = allocations(lambda: squares(model(data)).backward())
    told, phases = 0, set()
    for nth in range(1, count + 1):
        model.zero_grad()
        with failing(extension, nth):
            error = error_of(lambda: squares(model(data)).backward())
        assert isinstance(error, torch.OutOfMemoryError)
        notes = [note for note in getattr(error, "__notes__", []) if "ran by its plan" in note]
        assert len(notes) <= 1  # none where an operation of PyTorch's own backward is what fails
        told += len(notes)
        for note in notes:
            phases.add(re.search(r"Memory ran out at (\w+) \((.*?)\), where the plan holds", note)[1])
    assert told > count / 3
    assert len(phases) > 3


@pytest.mark.parametrize("name", ["bert-tiny", "gpt2-tiny"])
def test_the_budget_that_is_told_fits(device, extension, name):
    memory = torch.accelerator.memory
    entry = zoo.get(name, device=device, batch=400)
    model = Rockmate(entry.model, entry.sample, 1.0, loss=entry.loss, limits=FEW_ROUNDS)
    there_bytes = int(0.8 * model.plan.measured_peak_bytes)
    memory.empty_cache()
    extension.limit(0, memory.memory_reserved() + there_bytes)
    error = error_of(lambda: entry.loss(model(*entry.sample)).backward())
    (note,) = error.__notes__
    budget = re.search(r'plan for them \(budget="(.*?)"\)', note)[1]
    del error
    model.zero_grad()
    memory.empty_cache()
    again = Rockmate(entry.model, entry.sample, budget, loss=entry.loss, limits=FEW_ROUNDS)
    assert again.plan.budget_bytes <= there_bytes
    entry.loss(again(*entry.sample)).backward()
