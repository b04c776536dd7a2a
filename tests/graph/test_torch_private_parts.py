"""What is relied on of private names of the compiler for parts of a model, as `test_torch_private.py` asks for."""

import shutil

import pytest
import torch

from rkgb.torch_private.compiler import parts


def function(x, y):
    return torch.tanh(x) * y, x > 0


def made():
    return [torch.empty(3, 4, requires_grad=True), torch.empty(3, 4)]


def test_a_function_and_its_gradients_are_one_graph():
    graph = parts.forward_and_backward_of(function, made)
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    assert [node.name for node in inputs] == ["primals_1", "primals_2", "tangents_1"]
    (returned,) = next(node for node in graph.graph.nodes if node.op == "output").args
    assert [node is None for node in returned] == [False, False, False, True]
    assert {node.target.overloadpacket for node in graph.graph.nodes if node.op == "call_function"} >= {
        torch.ops.aten.tanh,
        torch.ops.aten.gt,
    }


def test_symbols_stand_for_sizes_and_what_is_asked_of_them_is_told():
    sizes = parts.SymbolicSizes()

    def make():
        rows, columns, both = map(sizes.symbol, (3, 5, 15))
        return [rows, columns, both, torch.empty_strided((both, 4), (4, 1), requires_grad=True)]

    def folded(rows, columns, both, x):
        return (torch.tanh(x).view(rows, columns, 4) * 2,)

    graph = parts.forward_and_backward_of(folded, make, sizes)
    inputs = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    assert inputs == ["primals_1", "primals_2", "primals_3", "primals_4", "tangents_1"]
    hold = sizes.conditions()
    assert hold((3, 5, 15))
    assert hold((7, 2, 14))
    assert not hold((7, 2, 15))
    assert not hold((1, 2, 2))
    *symbols, _, tangent = (node.meta["val"] for node in graph.graph.find_nodes(op="placeholder"))
    lies = parts.numbers_in((tangent.shape, tangent.stride()), symbols)
    assert lies((3, 5, 15)) == ((3, 5, 4), (20, 4, 1))
    assert lies((7, 2, 14)) == ((7, 2, 4), (8, 4, 1))
    assert parts.numbers_in(((3, 2), (2, 1)), [])(()) == ((3, 2), (2, 1))


@pytest.mark.ci  # seconds
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_graph_is_compiled_and_takes_a_list():
    joint = parts.forward_and_backward_of(function, made)
    likes = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
    plain = torch.fx.Graph()
    given = [plain.placeholder(name) for name in ("x", "y")]
    for node, like in zip(given, likes, strict=False):
        node.meta["val"] = like
    total = plain.call_function(torch.ops.aten.add.Tensor, tuple(given))
    total.meta["val"] = likes[0]
    plain.output((total,))
    run = parts.compiled(torch.fx.GraphModule({}, plain), is_backward=False)
    x, y = torch.rand(3, 4), torch.rand(3, 4)
    (found,) = run([x, y])
    assert torch.equal(found, x + y)
