"""What is never compiled runs as Python wherever it is called from, and so does all that it calls."""

import pytest
import torch

from rkgb.process.uncompiled import never_compiled

SEEN: list[bool] = []


def note(tensor: torch.Tensor) -> torch.Tensor:
    SEEN.append(torch.compiler.is_compiling())
    return tensor


@never_compiled
def pack(tensor: torch.Tensor) -> torch.Tensor:
    return note(tensor.detach())


@never_compiled
def unpack(tensor: torch.Tensor) -> torch.Tensor:
    return note(tensor)


@pytest.fixture
def graphs():
    """What the compiler was given since, by the names of its operations."""
    found: list[list[str]] = []

    def backend(module, inputs):
        found.append([node.name for node in module.graph.nodes if node.op == "call_function"])
        return module.forward

    torch._dynamo.reset()
    SEEN.clear()
    yield found, lambda function: torch.compile(function, backend=backend)
    torch._dynamo.reset()


@pytest.mark.parametrize("use", ["alone", "inside", "around"])
def test_hooks_run_as_python(graphs, use):
    found, compiled = graphs
    layer = torch.nn.Linear(4, 4)

    def forward(x):
        return torch.tanh(layer(x)).sum()

    def step(x):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = (compiled(forward) if use == "inside" else forward)(x)
        loss.backward()
        return loss

    x = torch.ones(2, 4, requires_grad=True)
    (compiled(step) if use == "around" else step)(x)
    assert len(SEEN) >= 4
    assert not any(SEEN)
    assert not any("detach" in name for names in found for name in names)
    assert x.grad is not None
