"""Files are not trusted: whatever is damaged, or made to do harm, is refused with its place and what is wrong."""

import copy
import json
import random
import sys
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from rkgb import AllGraphs, DGraph, b_to_d, make_sample, trace
from rkgb.export.json_form import GraphFormatError, dumps, from_json, loads, to_json
from tests.graph.programs import Program, graphs_of, linear, rows
from tests.graph.test_json_form import holding, numbers_read


@cache
def small() -> AllGraphs:
    """All graphs of a small module with a constant and a dictionary for output."""

    def forward(module: nn.Module, x: torch.Tensor) -> dict[str, Any]:
        hidden = module.layer(x).relu() + torch.tensor([1.0, 2.0, -1.0, 0.5])
        return {"y": module.layer(hidden).transpose(0, 1), "all": [hidden.sum(), (hidden > 0)[:, 1:3]]}

    return graphs_of(Program(forward, layer=linear()), rows())


@cache
def guarded() -> DGraph:
    module = Program(numbers_read, layer=linear())
    sample = make_sample(module, rows().abs())
    return b_to_d(trace(module, sample, "record"), module, sample)


def edited(graph: Any, *steps: Any, value: Any) -> dict[str, Any]:
    form = json.loads(dumps(graph))
    place = form
    for step in steps[:-1]:
        place = place[step]
    place[steps[-1]] = value
    return form


NODE = ("graph", "nodes", 0)
DAMAGES = [
    (("format",), "other-graph", "no graph of rkgb"),
    (("version",), 2, "version 2, this rkgb reads up to 1"),
    (("version",), 10**300, "Update rkgb"),
    (("version",), "1", "$.version"),
    (("kind",), "Z", "$.kind"),
    (("extra",), 1, "'extra'"),
    (("graph",), [], "$.graph: a DGraph is expected"),
    (("storages",), ["?"], "$.graph.leaves.constant_0.constant: these are no bytes"),
    (("storages",), [""], "ends at byte"),
    ((*NODE, "call", "function"), "aten::no_such.default", "$.graph.nodes[0].call.function: 'aten::no_such.default'"),
    ((*NODE, "call", "function"), "os.system", "no name of an operation"),
    ((*NODE, "call", "function"), "load_library::x.y", "knows no such operation"),
    ((*NODE, "call", "function"), "aten::from_file.default", "files"),
    ((*NODE, "call", "function"), {"read": "eval", "expected": 0, "place": ""}, "no name of an operation"),
    ((*NODE, "call", "args"), [{"%": "nowhere"}], "reads %nowhere"),
    ((*NODE, "call", "args"), [{"class": "os.system"}], "$.graph.nodes[0].call.args[0]: an object with the keys"),
    ((*NODE, "name"), 5, "$.graph.nodes[0].name: a text is expected, not 5"),
    ((*NODE, "grad_enabled"), 1, "true or false"),
    ((*NODE, "outputs"), "text", "outputs of"),
    ((*NODE, "__class__"), "x", "has no '__class__'"),
    (("graph", "nodes", 1), None, "$.graph.nodes[1]: a DNode is expected, not None"),
    (("graph", "values"), {}, "of which the file says nothing"),
    (("graph", "values", "input_0", "shape"), [2**70, 2], "$.graph.values.input_0.shape[0]"),
    (("graph", "values", "input_0", "dtype"), "float31", "$.graph.values.input_0.dtype"),
    (("graph", "values", "input_0", "device"), "the moon", "no name of a device"),
    (("graph", "leaves", "constant_0", "constant", "shape"), [2**40], "ends at byte"),
    (("graph", "leaves", "constant_0", "constant", "stride"), [-1], "less than zero"),
    (("graph", "leaves", "constant_0", "constant", "dtype"), "quint8", "do not fit"),
    (("graph", "leaves", "constant_0", "kind"), "input", "constants, and no others"),
]


@pytest.mark.parametrize(("place", "value", "words"), DAMAGES, ids=str)
def test_damaged_files_are_refused_with_the_place_and_what_is_wrong(place, value, words):
    form = edited(small().D_graph, *place, value=value)
    modules = set(sys.modules)
    with pytest.raises(GraphFormatError) as refused:
        loads(json.dumps(form))
    assert words in str(refused.value)
    assert set(sys.modules) == modules


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "\x00", "[" * 200_000, '{"a":' * 200_000, "1" * 10_000, '{"format":"rkgb-graph"}', "NaN"]
)
def test_other_texts_are_refused(text):
    with pytest.raises(GraphFormatError):
        loads(text)


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


STRANGE = {
    "nested": nested(5_000),
    "nested tuple": {"tuple": nested(900)},
    "huge": 10**5000,
    "infinite": 1e400,
    "object": object(),
    "numbered": {1: 2},
    "bytes": b"",
}


@pytest.mark.parametrize("value", STRANGE.values(), ids=STRANGE)
@pytest.mark.parametrize("place", [(*NODE, "call", "args"), ("graph", "output"), (*NODE, "name"), ("graph",)], ids=str)
def test_hostile_values_are_refused(place, value):
    with pytest.raises(GraphFormatError):
        from_json(edited(small().D_graph, *place, value=value))


def test_a_boolean_is_zero_or_one():
    form = to_json(holding(torch.tensor([True, False])))
    with pytest.raises(GraphFormatError, match="0 or 1"):
        from_json({**form, "storages": ["AgA="]})


def fuzzed_text(text: str, rng: random.Random) -> str:
    place = rng.randrange(len(text))
    way = rng.randrange(4)
    if way == 0:
        return text[:place]
    if way == 1:
        return text[:place] + rng.choice('{}[]",:0-1e9tn\\ ') + text[place + 1 :]
    if way == 2:
        return text[:place] + text[place + rng.randrange(1, 40) :]
    start = rng.randrange(len(text))
    return text[:place] + text[start : start + rng.randrange(1, 200)] + text[place:]


HOSTILE = [None, True, -1, 0, 10**18, 10**400, 1e308, "", "input_0", [], {}, [[]], {"%": "x"}, {"same": 0}, [1, 2]]
HOSTILE += ["float32", {"dict": [[[], 1]]}, {"object": "x", "attributes": []}, {"size": [-1]}, {"tuple": nested(90)}]


def fuzzed_form(form: Any, rng: random.Random) -> None:
    """Puts one strange value, or another part of the file, somewhere into `form`."""
    places: list[tuple[Any, Any]] = []
    waiting = [form]
    while waiting:
        thing = waiting.pop()
        for key in list(thing) if isinstance(thing, dict) else range(len(thing)):
            places.append((thing, key))
            if isinstance(thing[key], dict | list):
                waiting.append(thing[key])
    (target, key), (other, source) = rng.choice(places), rng.choice(places)
    if rng.random() < 0.3 and isinstance(target, dict):
        del target[key]
    else:
        target[key] = copy.deepcopy(other[source] if rng.random() < 0.4 else rng.choice(HOSTILE))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
@pytest.mark.parametrize("which", ["all", "guarded"])
def test_whatever_happens_to_a_file_it_is_refused_or_is_a_graph(which, seed):
    """A graph that was let in can be written and read again."""
    rng = random.Random(seed)
    text = dumps(small() if which == "all" else guarded())
    refused = 0
    for _ in range(150):
        form = json.loads(text)
        fuzzed_form(form, rng)
        for read, damaged in ((loads, fuzzed_text(text, rng)), (from_json, form)):
            try:
                graph = read(damaged)
            except GraphFormatError:
                refused += 1
                continue
            written = dumps(graph)
            assert dumps(loads(written)) == written
    assert 100 < refused
