"""Graphs survive a file: what comes back is the same graph, and computes the same."""

import json
import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rkgb import AllGraphs, BGraph, BNode, DGraph, GuardError, Leaf, LeafKind, b_to_d, d_to_s, make_sample, trace
from rkgb.export.json_form import (
    FunctionNotGiven,
    GraphFormatError,
    NamedNamespace,
    dumps,
    from_json,
    load,
    loads,
    save,
    to_json,
)
from rkgb.export.json_form.reader import Reader
from rkgb.export.json_form.writer import Writer
from rkgb.ir.call import Call, Ref
from rkgb.process.autocast import Autocast
from rkgb.recording.record import UnderAutocast
from rkgb.replay.replay import run_graph
from rkgb.tree import leaves
from rockmate import zoo
from tests.graph.programs import TINY, Program, bytes_of, graphs_of, linear, rows, simplified, traced, zoo_graphs
from tests.graph.random_graphs import random_graph
from tests.models.mechanisms import Halves, ScaledSquare
from tests.models.tracing import exact_graph, sample_of, step_difference
from tests.models.zoo import MODELS, build

FUNCTIONS = {
    "tests.models.mechanisms.ScaledSquare": ScaledSquare.apply,
    "tests.models.mechanisms.Halves": Halves.apply,
}
# One of each kind: constants, writes, custom functions and operators, classes of a library in the output.
SOON = (
    "regions_without_gradient in_place_and_views einsum_and_indexing custom_functions custom_operator structures "
    "spatial_transformer hf_llama_cache"
).split()


def again(graph: Any) -> Any:
    """What comes out of the text of `graph`, which gives the same text again."""
    text = dumps(graph)
    found = loads(text, FUNCTIONS)
    assert type(found) is type(graph)
    assert dumps(found) == text
    return found


def parts_of(graphs: AllGraphs) -> list[Any]:
    return [graphs.B_graph, graphs.D_graph, graphs.S_graph, graphs.K_graph, graphs]


def same_outputs(graph: DGraph, module: nn.Module, sample: Any) -> None:
    torch.manual_seed(3)
    expected = leaves(sample.copy().call(module))
    torch.manual_seed(3)
    found = leaves(run_graph(graph, module, sample.copy()))
    facts = [[(x.dtype, x.shape, x.stride(), bytes_of(x)) for x in tensors] for tensors in (expected, found)]
    assert facts[0] == facts[1]


@pytest.mark.parametrize("name", TINY)
def test_every_graph_gives_the_same_text_and_the_same_training_step(name):
    entry, graphs = zoo.get(name), zoo_graphs(name)
    for part in parts_of(graphs):
        again(part)
    sample = make_sample(entry.model, entry.sample)
    found = again(graphs)
    for graph in (found.D_graph, found.S_graph.dgraph, again(graphs.D_graph)):
        same_outputs(graph, entry.model, sample)
        assert step_difference(graph, entry.model, sample, seed=1) is None


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SOON else pytest.mark.slow) for n in MODELS])
@pytest.mark.filterwarnings("ignore::rkgb.TraceWarning")
def test_models_of_the_test_zoo_compute_the_same_after_a_file(name):
    module, args, kwargs = build(name)
    sample = sample_of(module, args, kwargs)
    found = again(exact_graph(module, sample))
    assert step_difference(found, module, sample, seed=1) is None


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 60))])
def test_random_modules_give_the_same_text_and_the_same_step(seed):
    module, sample = random_graph(3000 + seed)
    graphs = graphs_of(module, sample)
    for part in parts_of(graphs):
        again(part)
    assert step_difference(again(graphs.S_graph).dgraph, module, make_sample(module, sample), seed) is None


def test_what_is_not_written_is_filled_in_again():
    graphs = zoo_graphs("unet-tiny")
    found = again(graphs)
    for old, new in zip(graphs.S_graph, found.S_graph, strict=True):
        assert [[n.name for n in ends] for ends in (old.deps, old.users)] == [
            [n.name for n in ends] for ends in (new.deps, new.users)
        ]
    assert list(found.K_graph.data) == list(graphs.K_graph.data)
    for name, old in graphs.K_graph.data.items():
        new = found.K_graph.data[name]
        assert [c.name for c in old.users] == [c.name for c in new.users]
        assert [c.name for c in old.producers] == [c.name for c in new.producers]
    assert found.S_graph.dgraph is found.D_graph
    assert found.K_graph.sgraph is found.S_graph
    assert {op for node in found.S_graph for op in node.ops} <= set(found.D_graph)
    assert [op.inputs for op in found.D_graph] == [op.inputs for op in graphs.D_graph]


def test_two_traces_of_one_model_give_one_text():
    module, sample = random_graph(5)
    assert dumps(simplified(module, sample)) == dumps(simplified(module, sample))


def test_operations_are_written_once_for_each_graph_that_they_are_in():
    graphs = zoo_graphs("gpt2-tiny")
    text = dumps(graphs)
    assert text.count('"function":') == len(graphs.B_graph.nodes) + len(graphs.D_graph.nodes)
    assert len(dumps(graphs.S_graph)) < 1.3 * len(dumps(graphs.D_graph))


def test_files_hold_what_texts_hold(tmp_path):
    graph = zoo_graphs("mixer-tiny").S_graph
    save(graph, tmp_path / "graph.json")
    assert (tmp_path / "graph.json").read_text("utf-8") == dumps(graph)
    assert dumps(load(tmp_path / "graph.json")) == dumps(graph)
    assert from_json(to_json(graph)).nodes[0].name == graph.nodes[0].name


# ---- values in calls ---------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.sampled_from([Ref("x"), torch.bfloat16, torch.strided, torch.channels_last, torch.device("cuda:1")]),
    st.sampled_from([torch.Size([2, 0]), slice(None, 3, -1), torch.complex64, torch.device("meta"), math.inf]),
)
KEYS = st.one_of(st.text(max_size=3), st.integers(-5, 5))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


def around(*args: Any, function: Any = torch.ops.aten.clone.default, **kwargs: Any) -> BGraph:
    """A graph of one call with these arguments."""
    node = BNode("a", Call(function, args, kwargs), Ref("a"))
    return BGraph([node], {"x": Leaf("x", LeafKind.INPUT, index=0)}, Ref("a"))


def alike(mine: Any, theirs: Any) -> bool:
    """Equality of values and types, to the bit, a NaN being equal to a NaN."""
    if type(mine) is not type(theirs):
        return False
    if isinstance(mine, dict):
        return list(mine) == list(theirs) and alike(list(mine.values()), list(theirs.values()))
    if isinstance(mine, list | tuple):
        return len(mine) == len(theirs) and all(map(alike, mine, theirs))
    if isinstance(mine, float):
        return (mine != mine and theirs != theirs) or (mine == theirs and repr(mine) == repr(theirs))
    if isinstance(mine, complex):
        return alike([mine.real, mine.imag], [theirs.real, theirs.imag])
    return mine == theirs


@given(st.lists(VALUES, max_size=3), st.dictionaries(st.text(max_size=3), VALUES, max_size=2))
@settings(max_examples=200, deadline=None)
@pytest.mark.ci
def test_arguments_of_calls_come_back_with_their_types(args, kwargs):
    call = again(around(*args)).nodes[0].call
    assert alike(list(call.args), args)
    named = BGraph([BNode("a", Call(torch.ops.aten.clone.default, (), kwargs), Ref("a"))], around().leaves, Ref("a"))
    assert alike(again(named).nodes[0].call.kwargs, kwargs)


Shape = namedtuple("Shape", "height width")


@pytest.mark.parametrize(
    "value", [Shape(1, 2), OrderedDict(a=1), object(), {1, 2}, torch.Generator(), nn.ReLU(), 2**64, lambda: 0]
)
def test_what_has_no_form_is_refused_with_its_place(value):
    with pytest.raises(GraphFormatError, match=r"\$\.graph\.nodes\[0\]\.call\.args\[1\]\[0\]"):
        to_json(around(1, [value]))


@dataclass
class Pair:
    left: Any
    right: Any


class Cache:
    def __init__(self, held: Any) -> None:
        self.held, self.owner, self.settings = held, self, object()


def test_classes_of_the_output_come_back_as_what_they_hold():
    graph = around(Ref("x"))
    cache = Cache([Ref("x"), Ref("a")])
    first = OrderedDict({"first": Ref("a"), 2: (torch.float16, cache)})
    graph.output = Pair(first, Shape(cache, 2))
    output = again(graph).output
    assert isinstance(output, NamedNamespace)
    assert output.class_name.endswith("Pair")
    assert output.left[2][1] is output.right.height
    assert output.right.height.owner is output.right.height
    module, sample = nn.Identity(), make_sample(nn.Identity(), rows())
    result = run_graph(again(graph), module, sample)
    assert torch.equal(result.right.height.held[0], sample.tensors[0])
    assert torch.equal(result.left["first"], sample.tensors[0])
    assert result.class_name == output.class_name
    assert (result.left.class_name, list(result.left)) == ("collections.OrderedDict", ["first", 2])
    assert result.right.width == 2
    assert result.right.height.settings.class_name == "builtins.object"


# ---- constants ---------------------------------------------------------------------------------------------


def holding(*constants: torch.Tensor) -> BGraph:
    found = [Leaf(f"c{index}", LeafKind.CONSTANT, constant=tensor) for index, tensor in enumerate(constants)]
    return BGraph([], {leaf.name: leaf for leaf in found}, [Ref(leaf.name) for leaf in found])


LAYOUTS = {
    "scalar": lambda x: x[0, 0],
    "plain": lambda x: x,
    "transposed": lambda x: x.t(),
    "column": lambda x: x[1:, 2],
    "every second": lambda x: x[::2, 1::3],
    "expanded": lambda x: x[:, :1].expand(-1, 1000),
    "windows": lambda x: x.reshape(-1).unfold(0, 3, 1),
    "empty": lambda x: x[:0],
    "empty at the end": lambda x: x[4:, 5:],
}
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.complex32, torch.uint8]
DTYPES += [torch.float8_e4m3fn, torch.uint16]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constants_come_back_to_the_bit(dtype, layout):
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (20 * 16,), dtype=torch.uint8)
    size = dtype.itemsize
    tensor = LAYOUTS[layout](data[: 20 * size].view(dtype).view(4, 5))
    (found,) = [leaf.constant for leaf in again(holding(tensor)).leaves.values()]
    assert (found.dtype, found.shape, found.stride()) == (dtype, tensor.shape, tensor.stride())
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    assert torch.equal(found.view(whole), tensor.view(whole))


def test_constants_that_share_memory_still_do_and_the_rest_of_it_is_not_written():
    memory = torch.arange(1000.0)
    one, two, other = memory[100:110], memory[104:108].view(torch.int32), torch.zeros(2)
    graph = holding(one, other, two)
    found = [leaf.constant for leaf in again(graph).leaves.values()]
    found[0][4] = 7.5
    assert found[2][0] == torch.tensor(7.5).view(torch.int32)
    assert found[0].untyped_storage().data_ptr() != found[1].untyped_storage().data_ptr()
    assert memory[104] == 104
    assert len(dumps(graph)) < 1000


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")], ids=["sparse", "meta"])
def test_constants_without_plain_bytes_are_refused(tensor):
    with pytest.raises(GraphFormatError, match=r"\$\.graph\.leaves\.c0\.constant: a tensor of"):
        to_json(holding(tensor))


def test_a_constant_in_the_memory_of_a_parameter_is_refused():
    module = linear()
    graph = traced(module, rows())
    weight = next(leaf for leaf in graph.leaves.values() if leaf.path == "weight")
    graph.leaves["c"] = Leaf("c", LeafKind.CONSTANT, constant=module.weight.data)
    graph.values["c"] = graph.values[weight.name]
    with pytest.raises(GraphFormatError, match=r"c is in the memory of %weight"):
        to_json(graph)


# ---- guards and functions ------------------------------------------------------------------------------------


def numbers_read(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Reads out of its data in every way that guards know."""
    y = module.layer(x)
    y = y * len(torch.nonzero(x > 0).tolist())
    y = y * float(x.detach().numpy()[0, 0] > 0) + np.asarray(x.detach()).size
    return y if x.sum() > 0 and "tensor" in repr(x) else -y


def test_guards_are_kept_and_still_refuse_other_data():
    module, x = Program(numbers_read, layer=linear()), rows().abs()
    sample = make_sample(module, x)
    graph = b_to_d(trace(module, sample, "record"), module, sample)
    found = again(graph)
    guards = [[node.call.function for node in one.nodes if node.is_guard] for one in (graph, found)]
    assert len(guards[0]) >= 4
    for old, new in zip(*guards, strict=True):
        assert (old.read, old.place, old.may_vary) == (new.read, new.place, new.may_vary)
        assert repr(old.expected) == repr(new.expected)
        assert type(old.expected) is type(new.expected)
    same_outputs(found, module, sample)
    with pytest.raises(GuardError):
        run_graph(found, module, make_sample(module, x + 1))


def custom(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = ScaledSquare.apply(module.layer(x), 0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return ScaledSquare.apply(hidden @ hidden.t(), 2.0)


def test_custom_functions_are_names_until_they_are_given():
    module = Program(custom, layer=linear())
    sample = make_sample(module, rows())
    graph = b_to_d(trace(module, sample, "record"), module, sample)
    text = dumps(graph)
    found = loads(text)
    assert dumps(found) == text
    d_to_s(found)
    with pytest.raises(FunctionNotGiven, match="tests.models.mechanisms.ScaledSquare"):
        run_graph(found, module, sample)
    same_outputs(loads(text, FUNCTIONS), module, sample)
    assert step_difference(loads(text, FUNCTIONS), module, sample, seed=1) is None


def two_kinds(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("xpu", torch.bfloat16, cache_enabled=False):
        x = ScaledSquare.apply(module.layer(x), 2.0)
        with torch.autocast("xpu", enabled=False):
            return ScaledSquare.apply(x, 0.5)


def autocasts_of(graph: Any) -> list[Autocast]:
    functions = [node.call.function for node in graph.nodes]
    return [one.autocast for one in functions if isinstance(one, UnderAutocast)]


def test_custom_functions_under_autocast_of_several_kinds_are_read_as_they_were_and_from_older_files():
    module = Program(two_kinds, layer=linear())
    text = dumps(b_to_d(trace(module, make_sample(module, rows()), "record"), module, make_sample(module, rows())))
    cpu, xpu = ("cpu", torch.bfloat16), ("xpu", torch.bfloat16)
    assert autocasts_of(loads(text, FUNCTIONS)) == [Autocast((cpu, xpu), (), False), Autocast((cpu,), (xpu,), False)]
    new = '"autocast":[["cpu","bfloat16"],["xpu","bfloat16"]],"autocast_caches":false'
    assert text.count(new) == 1
    old = text.replace(new, '"autocast":["cpu","bfloat16"]')
    assert autocasts_of(loads(old, FUNCTIONS))[0] == Autocast((cpu,))
    for wrong in ('"autocast":[["tpu","bfloat16"]]', '"autocast":[["cpu"]]', '"autocast":"cpu"'):
        with pytest.raises(GraphFormatError, match="autocast"):
            loads(text.replace(new, wrong), FUNCTIONS)


# ---- new versions of classes -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Later:
    """A class as a later version may have it: the fields with defaults are new."""

    name: str
    place: tuple[str, int] = ("", 0)
    friends: list["Later"] = field(default_factory=list)
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    time_ms: float | None = None


def test_new_fields_with_defaults_are_written_and_may_be_missing():
    first = Later("a", ("b", 3), sizes={"x": (1, 2)}, time_ms=math.inf)
    writer = Writer()
    form = json.loads(json.dumps(writer.write([first, Later("c", friends=[first])], list[Later])))
    one, two = Reader([], {}).read(form, list[Later])
    assert (one.place, one.sizes, one.time_ms, two.friends, two.time_ms) == (
        ("b", 3),
        {"x": (1, 2)},
        math.inf,
        [one],
        None,
    )
    assert Reader([], {}).read({"name": "old"}, Later).place == ("", 0)
