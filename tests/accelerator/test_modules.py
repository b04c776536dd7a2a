"""Small modules, random operations, demanding modules and random networks: on the device as eagerly there, to the bit.

A module that makes tensors on the CPU in its forward, or draws from the CPU's stream, cannot run elsewhere, planned or
not: eager training tells, and the test is skipped with what it says.
"""

import copy
import random

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from rockmate import BudgetTooSmall, NothingToTrain, PeakMemory, Rockmate
from rockmate.memory.allocators import allocated_now_bytes
from tests.graph.cases import CASES
from tests.module.models import built, images, rows
from tests.module.random_networks import of_classes, random_case
from tests.module.steps import (
    FEW_ROUNDS,
    assert_same,
    assert_trains_exactly,
    following,
    keep_every_other,
    measured_for,
    recomputing,
    seen,
    squares,
)
from tests.module.test_exactness import NORMS, RANDOM, around, normalising
from tests.module.test_hard_modules import MODULES
from tests.where import on_the_cpu

pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore::rockmate.FragmentationWarning")]


def on(device: torch.device, sample: object) -> object:
    """The sample there, its tensors leaves as before."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to(device).requires_grad_(tensor.requires_grad), sample)


def call(module: nn.Module, sample: object) -> object:
    if isinstance(sample, dict):
        return module(**sample)
    return module(*sample) if isinstance(sample, tuple) else module(sample)


def stepped(module: nn.Module, sample: object, parts: nn.Module) -> dict[str, Tensor | None]:
    """Outputs, gradients, buffers and both random streams after a step from seed 0."""
    parts.zero_grad()
    torch.manual_seed(0)
    output = call(module, sample)
    magnitudes = tree_map_only(Tensor, lambda tensor: tensor.abs() if tensor.is_complex() else tensor, output)
    squares(magnitudes).backward()
    arguments = (
        sample if isinstance(sample, tuple) else tuple(sample.values()) if isinstance(sample, dict) else (sample,)
    )
    record = seen(parts, arguments, output)
    record["the device's stream"] = torch.get_device_module("testacc").get_rng_state()
    return record


def eager_or_skip(module: nn.Module, sample: object) -> dict[str, Tensor | None]:
    try:
        return stepped(module, sample, module)
    except RuntimeError as error:
        pytest.skip(f"eager training says: {str(error).splitlines()[0][:120]}")


@pytest.mark.parametrize("name", CASES)
def test_small_modules(device, name):
    torch.manual_seed(1)
    module, sample = CASES[name]()
    module, sample = module.to(device), on(device, sample)
    state = copy.deepcopy(module.state_dict())
    expected = eager_or_skip(module, sample)
    module.load_state_dict(state)
    module.zero_grad()
    try:
        model = recomputing(module, sample, loss=None)
    except NothingToTrain:
        pytest.skip("it has views alone, and no operation of a backward")
    module.load_state_dict(state)
    assert_same(stepped(model, sample, module), expected)


@pytest.mark.parametrize("name", RANDOM)
def test_random_operations(device, name):
    network, batches = around(RANDOM[name]).to(device), [rows().to(device), rows(1).to(device)]
    eager_or_skip(copy.deepcopy(network), batches[0])
    model = recomputing(network, batches[0])
    assert model.plan.recomputations > 0
    assert_trains_exactly(model, [*batches, batches[0]])


@pytest.mark.parametrize("training", [True, False], ids=["training", "norm-in-eval-mode"])
@pytest.mark.parametrize("name", NORMS)
def test_normalisation(device, name, training):
    network = normalising(NORMS[name]).to(device)
    network[1].train(training)
    eager_or_skip(copy.deepcopy(network), images().to(device))
    assert_trains_exactly(recomputing(network, images().to(device)), [images(1).to(device), images().to(device)])


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("recompute", [None, keep_every_other], ids=["nothing-kept", "every-other-kept"])
def test_demanding_modules(device, name, recompute):
    make, sample = MODULES[name]
    network, sample = built(make).to(device), on(device, sample)
    eager_or_skip(copy.deepcopy(network), sample)
    measured = measured_for(network, sample)
    model = recomputing(network, sample) if recompute is None else following(measured, network, recompute(measured))
    assert_trains_exactly(model, [sample] * 2)


@pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")
@pytest.mark.parametrize("seed", range(120))
def test_random_networks_are_exact_and_within_their_budgets(device, seed):
    with on_the_cpu():
        case, rng = random_case(seed), random.Random(seed)
    network, loss = case.network.to(device), squares if case.loss is of_classes else case.loss
    batches = [on(device, case.batch(number)) for number in range(2)]
    eager = copy.deepcopy(network)
    eager_or_skip(copy.deepcopy(network), batches[0])
    torch.accelerator.memory.empty_cache()
    try:
        model = Rockmate(network, batches[0], rng.uniform(0.5, 1.0), loss=loss, limits=FEW_ROUNDS)
    except BudgetTooSmall as error:
        model = Rockmate(network, batches[0], error.smallest_budget_bytes, loss=loss, limits=FEW_ROUNDS)
    except NothingToTrain:
        pytest.skip("every parameter that this seed draws is frozen")
    plan = model.plan
    assert plan.measured_peak_bytes <= plan.budget_bytes
    records = []
    for one in (eager, model):
        torch.manual_seed(seed)
        for batch in batches:
            one.zero_grad()
            output = one(*batch)
            loss(output).backward()
            records.append(seen(network if one is model else eager, batch, output))
    for mine, theirs in zip(records[len(batches) :], records[: len(batches)], strict=True):
        assert_same(mine, theirs)
    model.zero_grad()
    del output, records
    with PeakMemory(device) as memory:
        loss(model(*batches[0])).backward()
    assert memory.peak_bytes <= plan.budget_bytes
    assert allocated_now_bytes(device) > 0
