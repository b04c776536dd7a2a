"""What is relied on of the compiler's private names, as `test_torch_private.py` asks for all others."""

import inspect

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from functorch.compile import aot_function, nop

from rkgb.torch_private.compiler import partitioners


def saved_names(forward, options):
    inputs = {node.name for node in forward.graph.nodes if node.op == "placeholder"}
    (returned,) = next(node for node in forward.graph.nodes if node.op == "output").args
    return [node.name for node in returned[options["num_fwd_outputs"] :] if node.name not in inputs]


def divided(saved, repeated):
    """What a chain of products hands to its backward where these of its nodes are to be saved, and these repeated."""
    found = []

    def partition(joint, inputs, **options):
        nodes = {node.name: node for node in joint.graph.nodes}
        forward, backward = partitioners.partitioned(
            joint, inputs, [nodes[name] for name in saved], [nodes[name] for name in repeated], **options
        )
        found.append(saved_names(forward, options))
        return forward, backward

    def chain(x):
        for _ in range(4):
            x = torch.tanh(x @ x)
        return x

    x = torch.rand(8, 8, requires_grad=True)
    y = aot_function(chain, fw_compiler=nop, bw_compiler=nop, partition_fn=partition)(x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(chain(x).sum(), x)[0])
    return found[0]


def test_the_partitioner_does_what_nodes_are_marked_for():
    products = ["mm", "mm_1", "mm_2", "mm_3"]
    tanhs = ["tanh", "tanh_1", "tanh_2"]
    assert divided(tanhs, products)[:-1] == tanhs  # the last value is the output, too
    assert divided(["tanh_1"], ["tanh", "tanh_2", *products])[:-1] == ["tanh_1"]


def test_its_own_budget_does_not_change_that():
    with torch._functorch.config.patch(activation_memory_budget=0.1):
        assert divided(["tanh", "tanh_1", "tanh_2"], ["mm", "mm_1", "mm_2", "mm_3"])[:-1] == [
            "tanh",
            "tanh_1",
            "tanh_2",
        ]


def test_the_compiler_takes_a_partitioner():
    assert "custom_partitioner_fn" in torch._inductor.config.get_config_copy()
    assert {"__call__", "uuid"} <= partitioners.CustomPartitionerFn.__abstractmethods__
    given = inspect.signature(partitioners.CustomPartitionerFn.__call__).parameters
    assert [*given][:3] == ["self", "gm", "joint_inputs"]


def test_its_names_are_those_that_are_told():
    assert set(partitioners.__all__) == {"CustomPartitionerFn", "partitioned", "partitioner_of"}


class OfTheCompiler(partitioners.CustomPartitionerFn):
    def __call__(self, gm, joint_inputs, **kwargs):
        raise AssertionError("nothing is compiled")

    def uuid(self):
        return None


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_module_tells_its_partitioner(fullgraph):
    partitioner = OfTheCompiler()
    options = {"custom_partitioner_fn": partitioner}
    compiled = torch.compile(torch.nn.Linear(2, 2), options=options, fullgraph=fullgraph)
    assert partitioners.partitioner_of(compiled) is partitioner
    other = torch.compile(torch.nn.Linear(2, 2), backend="eager", fullgraph=fullgraph)
    assert partitioners.partitioner_of(other) is None


def test_a_module_that_is_compiled_in_place_tells_a_copy():
    module = torch.nn.Linear(2, 2)
    assert partitioners.partitioner_of(module) is None
    module.compile(options={"custom_partitioner_fn": OfTheCompiler()})
    assert isinstance(partitioners.partitioner_of(module), OfTheCompiler)
