"""Random modules by other kernels, on random lengths: near eager's steps, and those of any budget to the bit."""

import warnings

import pytest

from tests.regions.test_random_lengths import train


def others_of(module, x):
    """Operations of the plan of such a call that run by other kernels; None where it has none."""
    sizes = str(list(x.shape))
    plan = next((one for one in module.plans if sizes in one.calls), None)
    return None if plan is None or plan.kernels is None else plan.kernels.operations


@pytest.mark.usefixtures("quicker")
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[] if seed < 2 else pytest.mark.ci) for seed in range(12)])
def test_steps_of_any_length_are_near_eager_s_and_those_of_any_budget(seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps, others = train(seed, others_of, kernels="auto")
    assert others in (0, steps) or others > steps // 3
