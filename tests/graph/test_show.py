"""Graphs as tables and as networkx graphs say what the graphs say."""

import itertools
import subprocess
import sys

import networkx as nx
import pytest

from rkgb.export.networkx_form import to_networkx
from rkgb.export.render.structure import structure_of
from rkgb.show import describe
from tests.graph.programs import TINY, zoo_graphs

KINDS = ("B", "D", "S", "K")


def graph(name, kind):
    return getattr(zoo_graphs(name), f"{kind}_graph")


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("kind", KINDS)
def test_table_has_a_line_for_each_element_with_columns_aligned(name, kind):
    of = graph(name, kind)
    headline, headings, *lines = describe(of).splitlines()
    assert headline.startswith(f"{kind} graph: ")
    assert len(lines) == len(structure_of(of).elements)
    first_column = headings.index("kind")
    for line, element in zip(lines, structure_of(of).elements.values(), strict=True):
        assert line[first_column:].split()[0] == element.kind
        assert line[first_column - 1] == " "


def test_table_of_a_chain_is_readable():
    lines = describe(graph("unet-tiny", "S")).splitlines()
    line = next(line for line in lines if line.startswith("batch_norm_0 "))
    fields = line.split()
    assert fields[1:3] == ["forward", "batch_norm"]
    assert "convolution_0," in fields
    assert "64.0 KiB" in line
    assert line.split("  ")[-1].startswith("down.0.1 ")


def test_summary_has_a_line_for_each_block():
    graphs = zoo_graphs("gpt2-tiny")
    lines = describe(graphs).splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("block "))
    assert lines[start - 1] == f"{len(graphs.blocks)} blocks, {len(graphs.equivalent_classes)} distinct"
    blocks = [line.split() for line in lines[start + 1 :]]
    assert [int(fields[0]) for fields in blocks] == list(range(len(graphs.blocks)))
    assert [int(fields[2]) for fields in blocks] == [len(block.nodes) for block in graphs.blocks]
    for first, second in itertools.combinations(range(len(blocks)), 2):
        together = any({first, second} <= set(members) for members in graphs.equivalent_classes)
        assert (blocks[first][1] == blocks[second][1]) == together


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("kind", KINDS)
def test_networkx_form_has_the_elements_and_links(name, kind):
    of = graph(name, kind)
    structure = structure_of(of)
    found = to_networkx(of)
    assert list(found) == list(structure.elements)
    assert {(a, b): values for a, b, values in found.edges(data="values")} == {
        (link.source, link.target): link.values for link in structure.links
    }
    assert nx.is_directed_acyclic_graph(found)


def test_networkx_form_of_k_answers_questions_about_memory_and_time():
    of = graph("gpt2-tiny", "K")
    found = to_networkx(of)
    sizes = {name: size for name, size in found.nodes(data="size_bytes") if found.nodes[name]["kind"] == "data"}
    assert sizes == {data.name: data.size_bytes for data in of.data.values() if data.kind == "data"}
    for comp in of.forward:
        vertex = found.nodes[f"{comp.name}.forward"]
        assert vertex["time_ms"] == comp.time_ms
        assert vertex["module_path"] == comp.node.ops[0].source.module_path
        assert set(found.predecessors(f"{comp.name}.forward")) == {data.name for data in comp.deps}


def test_block_takes_facts_from_the_d_graph():
    graphs = zoo_graphs("gpt2-tiny")
    block = graphs.blocks[3]
    bare, told = to_networkx(block), to_networkx(block, graphs.D_graph.values)
    assert list(bare) == list(told)
    for node in block.nodes:
        assert bare.nodes[node.name]["size_bytes"] is None
        values = graphs.D_graph.values
        assert told.nodes[node.name]["size_bytes"] == sum(values[owner].storage_bytes for owner in node.data)


@pytest.mark.slow
def test_importing_does_not_load_what_only_pictures_need():
    code = "import sys, rkgb.show; print([name for name in ('matplotlib', 'fast_sugiyama') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "[]"
