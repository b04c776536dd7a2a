"""Blocks are equal when nothing that decides what they compute and cost differs; renaming then is exact.

A wrong renaming gives a block the saved tensors of another one: gradients would be wrong.
"""

import dataclasses
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rkgb import DNode, cut, equivalent_classes, make_sample
from rkgb.passes.equivalence import canonical_form
from rockmate import zoo
from tests.graph.cases import Square, program
from tests.graph.oracles import untimed
from tests.graph.programs import (
    TINY,
    Program,
    graphs_of,
    linear,
    measured_alone,
    measured_together,
    rows,
    scale,
    simplified,
    zoo_graphs,
)


def classes_of(module, sample):
    graph = simplified(module, sample)
    return equivalent_classes(graph.dgraph, cut(graph))


# ---- what is equal ---------------------------------------------------------------------------------------


def test_equal_layers_are_one_class():
    assert classes_of(nn.Sequential(linear(), linear(), linear()), rows(3, 4, requires_grad=True)) == [[0], [1, 2]]


def test_classes_are_listed_by_first_appearance():
    module = nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh(), linear())
    assert classes_of(module, rows()) == [[0], [1, 3], [2, 4]]


def test_equal_blocks_have_equal_digests_and_as_many_names():
    graph = simplified(nn.Sequential(*(nn.Sequential(linear(), nn.LayerNorm(4)) for _ in range(3))), rows())
    forms = [canonical_form(graph.dgraph, block) for block in cut(graph)]
    assert forms[2].digest == forms[4].digest
    assert len(forms[2].names) == len(forms[4].names)
    assert set(forms[2].names).isdisjoint(forms[4].names)


def branches(first, second, x=None):
    """A module of two residual blocks, one after another; whether they are one class."""
    module = Program(lambda m, x: m.second(m.first(x * m.w)), first=first, second=second, w=scale())
    classes = classes_of(module, rows() if x is None else x)
    return classes[-1] == [len(classes) - 1, len(classes)]


def residual(function, **parts):
    return Program(lambda m, x: x + function(m, x.tanh()), **parts)


def test_residual_blocks_of_one_kind_are_equal():
    assert branches(residual(lambda m, x: x.exp()), residual(lambda m, x: x.exp()))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (residual(lambda m, x: x.exp()), residual(lambda m, x: x.sin())),
        (residual(lambda m, x: x * 2), residual(lambda m, x: x * 3)),
        (residual(lambda m, x: x * 2), residual(lambda m, x: x * 2.0)),
        (residual(lambda m, x: F.dropout(x, 0.1)), residual(lambda m, x: F.dropout(x, 0.2))),
        (residual(lambda m, x: F.dropout(x, 0.1)), residual(lambda m, x: F.dropout(x, 0.0))),
        (residual(lambda m, x: m.l(x), l=linear()), residual(lambda m, x: m.l(x), l=linear().requires_grad_(False))),
        (residual(lambda m, x: m.l(x), l=linear()), residual(lambda m, x: m.l(x), l=nn.Linear(4, 4, bias=False))),
        (residual(lambda m, x: x * m.w, w=scale()), residual(lambda m, x: x * m.w, w=rows(4))),
        (residual(lambda m, x: x * m.w, w=scale()), residual(lambda m, x: x * m.w, w=scale((1, 4)))),
        (residual(lambda m, x: x * m.w, w=scale()), residual(lambda m, x: x * m.w, w=nn.Parameter(rows(8)[::2]))),
        (residual(lambda m, x: x * m.w, w=scale()), residual(lambda m, x: x * m.w, w=nn.Parameter(scale().double()))),
        (residual(lambda m, x: x.exp() * x), residual(lambda m, x: x.exp() * x.exp())),
        (residual(lambda m, x: x.exp() * x), residual(lambda m, x: (e := x.exp()) * e)),
        (residual(lambda m, x: x.exp()), residual(lambda m, x: x.exp().detach())),
        (residual(lambda m, x: torch.relu(x * 1)), residual(lambda m, x: torch.relu_(x * 1))),
        (residual(lambda m, x: x.clone()), residual(lambda m, x: x.contiguous())),
        (residual(lambda m, x: x * torch.tensor([1.0])), residual(lambda m, x: x * torch.tensor([2.0]))),
        (residual(lambda m, x: m.l(x), l=linear()), residual(lambda m, x: m.l(x.detach()), l=linear())),
    ],
)  # fmt: skip
def test_blocks_are_different_when_anything_differs_that_matters(first, second):
    assert not branches(first, second)


def constant(last, dtype=torch.float32, device="cpu"):
    """A thousand elements of which the last one is given."""
    return torch.cat([torch.zeros(999), torch.tensor([last])]).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_constants_are_compared_to_their_last_element(device, dtype):
    def digest(last):
        kept = constant(last, dtype, device)
        module = Program(lambda m, x: (x * m.w * kept).abs(), w=nn.Parameter(torch.randn(1000, device=device)))
        graph = simplified(module, torch.randn(1000, device=device))
        return [canonical_form(graph.dgraph, block).digest for block in cut(graph)]

    assert digest(1.0) == digest(1.0)
    assert digest(1.0) != digest(0.0)


def test_a_constant_counts_by_its_elements_not_by_its_layout_in_memory():
    def digest(kept):
        graph = simplified(Program(lambda m, x: x * m.w + kept.sum(), w=scale()), rows())
        return [canonical_form(graph.dgraph, block).digest for block in cut(graph)]

    matrix = rows(3, 5)
    assert digest(matrix) == digest(matrix.clone())
    assert digest(matrix) != digest(matrix.t())
    assert digest(matrix[0].expand(2, 5)) != digest(matrix[1].expand(2, 5))


def other(value):
    """Another value of the same type, for facts of operations."""
    return [*value, "linear_0"] if isinstance(value, list) else not value


FACTS = [fact.name for fact in dataclasses.fields(DNode) if fact.init]


@pytest.mark.parametrize("fact", [fact for fact in FACTS if fact not in ("name", "source", "call", "outputs")])
def test_every_fact_of_an_operation_counts_whatever_modes_there_will_be(fact):
    """Grad mode and autocast decide what is saved; a mode that comes later will, too."""
    graph = simplified(program(lambda m, x: m.layer(x)), rows())
    (block,) = cut(graph)
    changed = [dataclasses.replace(op, **{fact: other(getattr(op, fact))}) for op in block.ops]
    different = dataclasses.replace(block, ops=changed)
    assert canonical_form(graph.dgraph, block).digest != canonical_form(graph.dgraph, different).digest


def test_regions_without_gradient_differ_from_those_with():
    def without(m, x):
        with torch.no_grad():
            return m.l(x)

    assert not branches(residual(lambda m, x: m.l(x), l=linear()), residual(without, l=linear()))
    assert branches(residual(without, l=linear()), residual(without, l=linear()))


def test_a_block_whose_input_others_read_too_differs_from_one_that_has_it_alone():
    """The backward of the first adds to a gradient that is there; that of the other makes it."""
    graph = simplified(program(lambda m, x: ((h := m.layer(x)).exp().sum(), h.exp().sum())), rows())
    first = cut(graph)[1]
    assert first.shared_inputs == ["linear_0"]
    alone = dataclasses.replace(first, shared_inputs=[])
    assert canonical_form(graph.dgraph, first).digest != canonical_form(graph.dgraph, alone).digest


def test_a_block_that_reads_a_view_of_its_input_differs_from_one_that_reads_a_fresh_value():
    """In the first the view's owner is alive, with more bytes; both inputs look alike."""
    fresh = Program(lambda m, x: (x * 1).exp().sin() * 1)
    view = Program(lambda m, x: (x * m.w).view(-1)[:12].view(3, 4).exp().sin() * 1, w=nn.Parameter(rows(2, 3, 4)))
    module = Program(lambda m, x: m.fresh(m.view(x * m.w)), view=view, fresh=fresh, w=scale())
    graph = simplified(module, rows())
    blocks = cut(graph)
    exps = [block for block in blocks if any(op.call.op_name == "exp" for op in block.ops)]
    digests = {canonical_form(graph.dgraph, block).digest for block in exps}
    assert len(exps) == len(digests) == 2


def test_values_of_an_owner_outside_the_block_are_renamed_too():
    """The block reads a view, and never names its owner; saved tensors are told by owner."""
    layers = [layer for _ in range(3) for layer in (residual(lambda m, x: m.l(x), l=linear()), turned(), nn.Softmax(1))]
    module, sample = nn.Sequential(linear(), *layers), rows(4, 4)
    graphs = graphs_of(module, sample)
    assert any(len(members) > 1 for members in graphs.equivalent_classes)
    assert any(block.inputs and graphs.D_graph.owner(block.inputs[0]) != block.inputs[0] for block in graphs.blocks)
    together, alone = measured_together(graphs, module, sample), measured_alone(graphs, module, sample)
    assert [untimed(profile) for profile in together] == [untimed(profile) for profile in alone]


def turned():
    return Program(lambda m, x: x.t())


# ---- the profile of an equal block is its own --------------------------------------------------------------


def repeated(function, depth=3, **make_parts):
    """A stem, then `depth` equal residual blocks with parts of their own."""
    blocks = (
        Program(lambda m, x: x + function(m, x), **{name: make() for name, make in make_parts.items()})
        for _ in range(depth)
    )
    return nn.Sequential(linear(), *blocks)


def attention(m, x):
    query, key, value = (part.view(3, 2, 2).transpose(0, 1) for part in m.p(x).chunk(3, -1))
    return m.d((query @ key.transpose(-2, -1)).softmax(-1)).matmul(value).transpose(0, 1).reshape(3, 4)


REPEATED = {
    "linear": lambda: repeated(lambda m, x: m.a(x).exp(), a=linear),
    "dropout": lambda: repeated(lambda m, x: F.dropout(m.a(x).relu_(), 0.4), a=linear),
    "batch_norm": lambda: repeated(lambda m, x: m.n(m.a(x)).relu_(), a=linear, n=lambda: nn.BatchNorm1d(4)),
    "in_place": lambda: repeated(lambda m, x: (h := m.a(x)).add_(h.sigmoid()).mul_(x), a=linear),
    "views": lambda: repeated(lambda m, x: torch.cat([p.exp() for p in m.a(x).chunk(2, 1)], 1).t().t(), a=linear),
    "attention": lambda: repeated(attention, p=lambda: linear(4, 12), d=lambda: nn.Dropout(0.3)),
    "two_results": lambda: repeated(lambda m, x: (b := m.a(x).max(1, True)).values * b.indices, a=linear),
    "custom_function": lambda: repeated(lambda m, x: Square.apply(m.a(x)), a=linear),
    "same_operand_twice": lambda: repeated(lambda m, x: (h := m.a(x)) * h + h.exp() * x, a=linear),
    "swapped_operands": lambda: repeated(lambda m, x: (m.a(x) - m.b(x)) * (m.b(x) - m.a(x)), a=linear, b=linear),
    "gru_cell": lambda: repeated(lambda m, x: m.g(x, x.tanh()), g=lambda: nn.GRUCell(4, 4)),
    "encoder_layer": lambda: repeated(lambda m, x: m.e(x), e=lambda: nn.TransformerEncoderLayer(4, 2, 8)),
}


@pytest.mark.parametrize("name", REPEATED)
def test_the_renamed_profile_of_a_repeated_block_is_the_one_that_it_measures(name):
    module, sample = REPEATED[name](), rows()
    graphs = graphs_of(module, sample)
    assert any(len(members) > 1 for members in graphs.equivalent_classes)
    together, alone = measured_together(graphs, module, sample), measured_alone(graphs, module, sample)
    assert [untimed(profile) for profile in together] == [untimed(profile) for profile in alone]


@pytest.mark.parametrize("name", TINY)
def test_the_renamed_profile_of_a_block_of_the_zoo_is_the_one_that_it_measures(name):
    entry, graphs = zoo.get(name), zoo_graphs(name)
    together = measured_together(graphs, entry.model, entry.sample)
    alone = measured_alone(graphs, entry.model, entry.sample)
    assert [untimed(profile) for profile in together] == [untimed(profile) for profile in alone]


@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
def test_the_renamed_profile_of_a_layer_of_a_deep_gpt2_is_the_one_that_it_measures(attention):
    model = zoo.GPT2(dataclasses.replace(zoo.GPT2Config.tiny(attention), layers=5))
    sample = torch.randint(64, (2, 8))
    graphs = graphs_of(model, sample)
    assert any(len(members) >= 4 for members in graphs.equivalent_classes)
    together, alone = measured_together(graphs, model, sample), measured_alone(graphs, model, sample)
    assert [untimed(profile) for profile in together] == [untimed(profile) for profile in alone]


@pytest.mark.parametrize("name", TINY)
def test_every_name_in_a_profile_belongs_to_its_block(name):
    graphs = zoo_graphs(name)
    for block in graphs.blocks:
        known = {*block.leaves, *block.inputs, *(output for op in block.ops for output in op.output_names)}
        known |= {graphs.D_graph.owner(value) for value in known}
        phantoms = {p.name for op in block.ops for p in graphs.K_graph.op_profiles[op.name].phantoms}
        for op in block.ops:
            for saved in graphs.K_graph.op_profiles[op.name].saved:
                assert saved.source in known | phantoms


# ---- how many ------------------------------------------------------------------------------------------------


def gpt2_classes(layers, attention="explicit"):
    config = dataclasses.replace(zoo.GPT2Config.tiny(attention), layers=layers)
    return classes_of(zoo.GPT2(config), torch.randint(config.vocabulary, (2, 8)))


@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
@pytest.mark.parametrize("layers", [2, 4, 8, 12])
def test_gpt2_has_at_most_nine_distinct_blocks_however_many_layers(layers, attention):
    assert len(gpt2_classes(layers, attention)) <= 9


def test_more_layers_add_members_not_classes():
    assert len(gpt2_classes(4)) == len(gpt2_classes(12))


def test_resnet50_has_fewer_distinct_blocks_than_blocks():
    graph = simplified(zoo.resnet50(classes=10, width=8), torch.randn(2, 3, 64, 64))
    blocks = cut(graph)
    assert len(equivalent_classes(graph.dgraph, blocks)) <= len(blocks) - 6


def test_equivalent_classes_are_a_partition():
    graphs = zoo_graphs("gpt2-tiny")
    members = [index for indices in graphs.equivalent_classes for index in indices]
    assert sorted(members) == list(range(len(graphs.blocks)))


def test_the_form_depends_on_neither_names_nor_the_run():
    module, sample = program(lambda m, x: m.layer(x).exp()), rows()
    one, two = simplified(module, sample), simplified(module, make_sample(module, sample).copy())
    forms = [[canonical_form(graph.dgraph, block).digest for block in cut(graph)] for graph in (one, two)]
    assert forms[0] == forms[1]
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in forms[0])
