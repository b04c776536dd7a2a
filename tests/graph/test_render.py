"""Pictures show the graph: every element and dependency once, by kind, size and block, on pages that can be read."""

import contextlib
import itertools

import pytest

from rkgb import GraphError
from rkgb.export.render.layout import edge_ends
from rkgb.export.render.pages import pages_of
from rkgb.export.render.parts import MOST_COMPUTATIONS, parts_of
from rkgb.export.render.picture import Scale
from rkgb.export.render.structure import structure_of
from rkgb.export.render.style import LOOKS
from rkgb.passes.d_to_s import STEPS, one_node_per_operation
from tests.graph.pictured import KINDS, VARIED, colourful, graph, pictured
from tests.graph.programs import TINY, zoo_graphs

# ---- structure and picture against the graph -------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("kind", ["B", "D"])
def test_structure_of_operations_has_each_node_leaf_and_dependency_once(name, kind):
    of = graph(zoo_graphs(name), kind)
    structure = structure_of(of)
    assert sorted(structure.elements) == sorted([*of.leaves, *(node.name for node in of), "output"])
    definer = {value: node.name for node in of for value in node.output_names} | {leaf: leaf for leaf in of.leaves}
    wanted = {(definer[value], node.name) for node in of for value in node.call.inputs}
    wanted |= {(definer[value], "output") for value in of.output_names}
    found = [(link.source, link.target) for link in structure.links]
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.ci
def test_structure_of_s_has_the_nodes_deps_and_sizes(name):
    of = zoo_graphs(name).S_graph
    structure = structure_of(of)
    beside = [op.name for op in (*of.leaf_views, *of.effects)]
    nodes = [node.name for node in of]
    assert sorted(structure.elements) == sorted([*of.dgraph.leaves, *beside, *nodes, "output"])
    found = sorted((link.source, link.target) for link in structure.links if {link.source, link.target} <= set(nodes))
    assert found == sorted((dep.name, node.name) for node in of for dep in node.deps)
    for node in of:
        assert structure.elements[node.name].size_bytes == sum(of.dgraph.values[d].storage_bytes for d in node.data)


@pytest.mark.parametrize("name", TINY)
def test_structure_of_k_has_each_computation_and_data_with_bytes_and_time(name):
    of = zoo_graphs(name).K_graph
    structure = structure_of(of)
    assert len(structure.elements) == len(list(of)) + len(of.data)
    assert len(structure.links) == sum(len(comp.deps) + len(comp.outputs) for comp in of)
    assert {data.name: data.size_bytes for data in of.data.values()} == {
        element.name: element.size_bytes for element in structure.elements.values() if not element.is_computation
    }
    times_ms = [element.time_ms for element in structure.computations]
    assert sum(times_ms) == pytest.approx(sum(comp.time_ms for comp in of))


@pytest.mark.parametrize("name", VARIED)
@pytest.mark.parametrize("kind", [*KINDS, "block"])
def test_picture_shows_each_element_and_link_once(name, kind):
    structure, picture = pictured(graph(zoo_graphs(name), kind))
    members = [member for node in picture.nodes for member in node.members]
    assert sorted(members) == sorted(structure.elements)
    node_of = {member: node.name for node in picture.nodes for member in node.members}
    edges = [(edge.source, edge.target) for edge in picture.edges]
    assert len(edges) == len(set(edges))
    assert set(edges) == {(node_of[link.source], node_of[link.target]) for link in structure.links}
    for link in structure.links:
        edge = picture.edges[edges.index((node_of[link.source], node_of[link.target]))]
        assert set(link.values) <= set(edge.tooltip.split("\n"))


@pytest.mark.parametrize("name", VARIED)
@pytest.mark.parametrize("kind", KINDS)
def test_edges_written_from_upper_to_lower_end_have_no_cycle(name, kind):
    _, picture = pictured(graph(zoo_graphs(name), kind))
    order = {edge_ends(edge) for edge in picture.edges}
    waiting = {node.name for node in picture.nodes}
    while waiting:
        ready = waiting - {lower for upper, lower in order if upper in waiting}
        assert ready, "a cycle"
        waiting -= ready


def test_every_kind_has_a_look_of_its_own_and_the_picture_uses_it():
    graphs = colourful()
    kinds = set()
    for kind in KINDS:
        structure, picture = pictured(graph(graphs, kind))
        for node in picture.nodes:
            assert {structure.elements[member].kind for member in node.members} == {
                next(kind for kind, look in LOOKS.items() if look is node.look)
            }
        assert set(picture.legend) == {node.look for node in picture.nodes}
        kinds |= {element.kind for element in structure.elements.values()}
    assert kinds == set(LOOKS) - {"elsewhere", "leaf"}
    looks = [(look.fill, look.border, look.shape) for look in LOOKS.values()]
    assert len(set(looks)) == len(looks)


def test_kinds_are_those_of_the_operations():
    graphs = colourful()
    for kind in ("B", "D"):
        elements = structure_of(graph(graphs, kind)).elements.values()
        by_op = {element.op: element.kind for element in elements if element.op}
        assert by_op["exp_"] == "in-place"
        assert by_op["t"] == by_op["view"] == "view"
        assert by_op["tanh"] == by_op["matmul" if "matmul" in by_op else "mm"] == "forward"
        assert "random" in by_op.values()


def test_bars_are_longer_for_more_bytes():
    _, picture = pictured(zoo_graphs("unet-tiny").K_graph)
    data = zoo_graphs("unet-tiny").K_graph.data
    bars = sorted((data[node.name].size_bytes, node.bars[0].fraction) for node in picture.nodes if node.name in data)
    assert [fraction for _, fraction in bars] == sorted(fraction for _, fraction in bars)
    assert bars[-1][1] == 1.0
    assert 0 < bars[0][1] < 0.1


@pytest.mark.parametrize("quantities", [[], [None, 0], [5], [1, 10, 100, None, 0]])
def test_scale_is_logarithmic_between_the_ends(quantities):
    found = Scale.of(quantities)
    positive = [quantity for quantity in quantities if quantity]
    if not positive:
        assert found is None
        return
    assert found.fraction(max(positive)) == 1.0
    assert found.fraction(0) == 0.0
    if len(positive) == 3:
        assert found.fraction(10) == pytest.approx((found.fraction(1) + found.fraction(100)) / 2)


# ---- pages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("kind", KINDS)
def test_parts_cover_the_graph_and_only_views_of_leaves_stand_in_two(name, kind):
    graphs = zoo_graphs(name)
    structure = structure_of(graph(graphs, kind))
    parts = parts_of(structure, graphs.blocks, graphs.equivalent_classes)
    names = [each for part in parts for each in part.names]
    assert set(names) == {element.name for element in structure.computations}
    in_nodes = {op.name for node in graphs.S_graph for op in node.ops}
    twice = {each for each in names if names.count(each) > 1}
    assert all(in_nodes.isdisjoint(structure.elements[each].ops) for each in twice)
    assert sorted(part.index for part in parts if part.is_representative) == [c[0] for c in graphs.equivalent_classes]


@pytest.mark.parametrize("name", VARIED)
@pytest.mark.parametrize("kind", KINDS)
def test_large_graph_has_an_overview_and_its_distinct_blocks_in_full(name, kind):
    graphs = zoo_graphs(name)
    of = graph(graphs, kind)
    structure = structure_of(of)
    pages = pages_of(of, None) if kind != "B" else pages_of(of)
    if len(structure.computations) <= MOST_COMPUTATIONS:
        assert len(pages) == 1
        return
    blocks = () if kind == "B" else graphs.blocks
    parts = parts_of(structure, blocks, graphs.equivalent_classes if blocks else ())
    assert [node.name for node in pages[0].nodes] == [part.label for part in parts]
    drawn = [
        member
        for page in pages[1:]
        for node in page.nodes
        if not node.outside
        for member in node.members
        if structure.elements[member].is_computation
    ]
    assert sorted(drawn) == sorted(each for part in parts if part.is_representative for each in part.names)
    assert max(len(page.nodes) for page in pages[1:]) < 8 * MOST_COMPUTATIONS


def test_what_a_page_leaves_out_is_named_on_it():
    graphs = zoo_graphs("gpt2-tiny")
    page = next(page for page in pages_of(graphs.S_graph) if page.title.startswith("block 3 (and 5)"))
    outside = {(node.title, *node.lines) for node in page.nodes if node.outside}
    assert any(lines[-1] == "from block 2" for lines in outside)
    assert ("to block 4",) in outside


def test_equivalent_blocks_share_a_colour_and_others_do_not():
    graphs = zoo_graphs("gpt2-tiny")
    overview = pages_of(graphs.K_graph)[0]
    fills = [node.look.fill for node in overview.nodes]
    for first, second in itertools.combinations(range(len(fills)), 2):
        together = any({first, second} <= set(members) for members in graphs.equivalent_classes)
        assert (fills[first] == fills[second]) == together


def test_s_graph_is_drawn_in_full_between_the_steps_of_its_making():
    of = one_node_per_operation(zoo_graphs("gpt2-tiny").D_graph)
    unfinished = 0
    for step in STEPS:
        with contextlib.suppress(GraphError):
            of.verify()
            break  # from here on, it can be cut into blocks
        unfinished += 1
        pages = pages_of(of)[1:]
        drawn = [member for page in pages for node in page.nodes if not node.outside for member in node.members]
        for element in structure_of(of).computations:
            assert drawn.count(element.name) == 1
        of = step(of)
    assert unfinished


@pytest.mark.parametrize("name", VARIED)
def test_k_graph_of_a_block_is_drawn_with_what_it_is_given(name):
    graphs = zoo_graphs(name)
    for of in graphs.K_graph_list:
        structure, picture = pictured(of)
        assert len(structure.elements) == len(list(of)) + len(of.data)
        members = [member for node in picture.nodes for member in node.members]
        assert sorted(members) == sorted(structure.elements)
        assert not any(node.outside for node in picture.nodes)
