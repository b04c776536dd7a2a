"""Every model of the test zoo is traced exactly, to the bit, with its dropout on."""

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from rkgb import DGraph, Sample
from rkgb.errors import TraceWarning
from rkgb.pipeline import exact_trace
from rkgb.replay.fresh import fresh_sample
from rkgb.state.module_state import module_state_kept
from rkgb.tree import leaves
from tests.graph.programs import bytes_of, state_of, with_gradients
from tests.models.tracing import exact_graph, output_differences, sample_of, step_difference, tried
from tests.models.zoo import MODELS, build

PLAIN = (bool, int, float, str, tuple, type(None))
# The library adds hooks to the first two when they are first called, and one to the embedding of the third to have it
# checkpointed; old-style norms set the weight that they make.
DO_MORE = ("hf_mixtral", "hf_segformer", "hf_gpt2_checkpointed", "norm_hooks")
FRESH_SEEDS = (11, 12)  # the replay check itself looks at other data
ALL_MODELS = pytest.mark.parametrize("name", MODELS)


@dataclass
class Traced:
    """A model of the zoo with its graph, and what tracing changed."""

    module: nn.Module
    sample: Sample
    graph: DGraph
    before: Any
    after: Any
    told: list[str]


@functools.cache
def traced(name: str) -> Traced:
    module, args, kwargs = build(name)
    sample = sample_of(module, args, kwargs)
    with_gradients(module)
    before = everything(module, sample)
    with warnings.catch_warnings(record=True) as told:  # all others stay errors
        warnings.filterwarnings("always", category=TraceWarning)
        graph = exact_graph(module, sample)
    return Traced(module, sample, graph, before, everything(module, sample), [str(warning.message) for warning in told])


def everything(module: nn.Module, sample: Sample) -> Any:
    attributes = {
        f"{path}.{name}": value if isinstance(value, PLAIN) else type(value)
        for path, submodule in module.named_modules()
        for name, value in vars(submodule).items()
    }
    return state_of(module), attributes, [(bytes_of(tensor), tensor.grad) for tensor in sample.tensors]


@ALL_MODELS
def test_a_training_step_of_the_graph_is_that_of_the_model(name):
    model = traced(name)
    for seed in FRESH_SEEDS:
        sample = fresh_sample(model.sample, seed)
        assert step_difference(model.graph, model.module, sample, seed) is None


@pytest.mark.parametrize("name", ["mixer", "gpt2_eager", "hf_bert_padded"])
def test_a_graph_without_one_gradient_is_not_that_of_the_model(name):
    """The comparison above would see it."""
    module, args, kwargs = build(name)
    sample = sample_of(module, args, kwargs)
    graph = exact_graph(module, sample)
    trained = [node for node in graph if any(graph.values[output].requires_grad for output in node.output_names)]
    trained[len(trained) // 2].grad_enabled = False
    assert step_difference(graph, module, sample, FRESH_SEEDS[0]) is not None


@ALL_MODELS
def test_the_output_of_the_graph_is_that_of_the_model(name):
    """Also what no gradient reaches: the classes of the output, and tensors in objects such as a cache."""
    model = traced(name)
    sample = fresh_sample(model.sample, FRESH_SEEDS[0])
    assert output_differences(model.graph, model.module, sample, FRESH_SEEDS[0]) == []


@pytest.mark.slow
@ALL_MODELS
@pytest.mark.parametrize("tracer", ["jit", "record"])
def test_either_front_end_alone_is_exact_or_refuses(name, tracer):
    """What one of them gets wrong must not depend on the other one to be seen; recording must follow every model."""
    model = traced(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TraceWarning)
        trace, refusal = tried(exact_trace, model.module, model.sample, tracer)
    if trace is None:
        assert tracer == "jit", refusal
        return
    sample = fresh_sample(model.sample, FRESH_SEEDS[0])
    assert step_difference(trace[1], model.module, sample, FRESH_SEEDS[0]) is None


@ALL_MODELS
def test_tracing_leaves_the_model_as_it_was(name):
    model = traced(name)
    assert model.after == model.before


@ALL_MODELS
def test_only_models_that_do_more_than_compute_are_told_so(name):
    assert name in DO_MORE or traced(name).told == []


@ALL_MODELS
def test_the_same_seed_gives_the_same_model_and_no_other_generator_moves(name):
    stream = torch.get_rng_state()
    (first, *one), (second, *two) = build(name), build(name)
    assert torch.equal(stream, torch.get_rng_state())
    assert first.state_dict().keys() == second.state_dict().keys()
    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))
    assert all(map(torch.equal, leaves(one), leaves(two)))
    assert first.training


def test_models_with_dropout_draw_numbers():
    """A zoo in which dropout were off by a wrong setting would prove little."""
    silent = [name for name in MODELS if has_dropout(build(name)[0]) and not draws(name)]
    assert silent == []


def has_dropout(module: nn.Module) -> bool:
    return any(isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 for part in module.modules())


def draws(name: str) -> bool:
    module, args, kwargs = build(name)
    with module_state_kept(module):
        before = torch.get_rng_state()
        module(*args, **kwargs)
        return not torch.equal(before, torch.get_rng_state())
