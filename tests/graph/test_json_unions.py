"""Fields that hold one of several classes, or sets, survive a file."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from rkgb import make_all_graphs, make_sample
from rkgb.export.json_form import GraphFormatError, dumps, from_json, loads, to_json
from rkgb.restore.packed_mask import PackedMask
from rkgb.restore.pool_indices import WindowIndices
from tests.models.tracing import step_difference


def again(graph):
    text = dumps(graph)
    found = loads(text)
    assert dumps(found) == text
    return found


def test_smaller_forms_and_sets_of_names_are_written():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.MaxPool2d(2), nn.Dropout(0.1), nn.Conv2d(8, 2, 1))
    sample = torch.randn(4, 3, 80, 80)
    graphs = make_all_graphs(model, sample)
    assert {type(way) for ways in graphs.K_graph.restorations.values() for way in ways} == {PackedMask, WindowIndices}
    found = again(graphs)
    assert {node.name: ways for node, ways in found.K_graph.restorations.items()} == {
        node.name: ways for node, ways in graphs.K_graph.restorations.items()
    }
    assert found.D_graph.handed == graphs.D_graph.handed != frozenset()
    assert step_difference(found.D_graph, model, make_sample(model, sample), seed=1) is None

    marked = replace(graphs.D_graph, varying=frozenset({"a", "b"}), trained=frozenset(graphs.D_graph.output_names))
    assert (again(marked).varying, again(marked).trained) == (marked.varying, marked.trained)


@pytest.mark.parametrize("form", [None, {}, ["PackedMask"], ["Threes", {}], [["PackedMask"], {}], ["PackedMask", None]])
def test_a_smaller_form_that_is_none_is_refused(form):
    model = nn.Sequential(nn.Linear(512, 512), nn.Dropout(0.1))
    written = to_json(make_all_graphs(model, torch.randn(64, 512)).K_graph)
    ((_, (told,)),) = written["graph"]["restorations"]
    assert told[0] == "PackedMask"
    written["graph"]["restorations"][0][1][0] = form
    with pytest.raises(GraphFormatError, match=r"graph\.restorations"):
        from_json(written)
