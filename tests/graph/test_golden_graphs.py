"""The operations of three tiny models as text: a reviewer reads in a diff what a change of tracing does."""

import dataclasses

import pytest
import torch

from rkgb import DGraph, DNode
from rockmate import zoo
from tests.graph.programs import traced

MODELS = {
    "gpt2": lambda: (
        zoo.GPT2(dataclasses.replace(zoo.GPT2Config.tiny(), layers=1)),
        torch.zeros(2, 8, dtype=torch.int64),
    ),
    "mixer": lambda: (zoo.Mixer(dataclasses.replace(zoo.MixerConfig.tiny(), layers=1)), torch.zeros(2, 3, 16, 16)),
    "unet": lambda: (zoo.UNet(dataclasses.replace(zoo.UNetConfig.tiny(), depth=1)), torch.zeros(2, 3, 8, 8)),
}


def described(graph: DGraph) -> str:
    """Leaves, then one line for each operation: what it makes of what, whose storage that is if another's."""
    leaves = [
        f"{leaf.kind.value} {fact(graph, name)} {leaf.path}".rstrip() for name, leaf in sorted(graph.leaves.items())
    ]
    return "\n".join(
        [*leaves, "", *(line(graph, op) for op in graph), "", f"returns {', '.join(graph.output_names)}", ""]
    )


def line(graph: DGraph, op: DNode) -> str:
    made = ", ".join(fact(graph, name) for name in op.output_names)
    owners = dict.fromkeys(graph.owner(name) for name in op.output_names if graph.owner(name) != name)
    marks = [f"in {name}" for name in owners] + [f"writes {name}" for name in op.written]
    marks += ["random"] * op.is_random + ["no gradient"] * (not op.grad_enabled)
    return "; ".join([f"{made} = {op.call.op_name}({', '.join(op.call.inputs)})", *marks])


def fact(graph: DGraph, name: str) -> str:
    return f"{name}: {graph.values[name].describe()}"


@pytest.mark.parametrize("name", MODELS)
def test_the_operations_of_a_model_are_those_on_file(name, golden):
    module, sample = MODELS[name]()
    golden(f"dgraph_{name}.txt", described(traced(module, sample)))
