"""Smaller forms: which operations have one, and that it tells its tensor bit by bit."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from rkgb import TraceWarning, make_all_graphs
from rkgb.devices.allocation_log import AllocationLog
from rkgb.restore.packed_form import LEAST_ELEMENTS, PackedForm
from rkgb.restore.packed_mask import PackedMask

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def as_integers(tensor):
    return tensor.view(INTEGERS[tensor.dtype.itemsize])


def form_of(shape, stride, dtype, low, high):
    mask = (1 << 8 * dtype.itemsize) - 1
    low, high = (as_integers(torch.tensor(value, dtype=dtype)).item() & mask for value in (low, high))
    return PackedMask(shape, stride, dtype, low, high)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("elements", [1, 7, 8, 9, 4095, 65536, 65537, 262_152, 524_291, 3_200_003])
def test_what_is_packed_comes_back_bit_by_bit(dtype, elements):
    form = form_of((elements,), (1,), dtype, -0.0, 1 / 0.9)
    drawn = torch.rand(elements) < 0.7
    tensor = torch.where(drawn, torch.tensor(1 / 0.9, dtype=dtype), torch.tensor(-0.0, dtype=dtype))
    packed = form.pack(tensor)
    assert packed.nbytes == form.packed_bytes == -(-elements // 8)
    assert torch.equal(as_integers(form.unpack(packed)), as_integers(tensor))


@pytest.mark.parametrize("elements", [65536, 524_291])
def test_no_other_tensor_is_made_on_the_way(elements):
    form = form_of((elements,), (1,), torch.float32, 0.0, 1.0)
    tensor = torch.empty(elements).bernoulli_(0.5)
    with AllocationLog(tensor.device) as packing:
        packed = form.pack(tensor)
    with AllocationLog(tensor.device) as unpacking:
        form.unpack(packed)
    assert packing.peak_bytes == packed.nbytes
    assert unpacking.peak_bytes - tensor.nbytes <= 64  # a row of the table, where some elements are less than a byte


def test_a_tensor_keeps_its_layout():
    tensor = torch.empty_strided((3, 5, 7), (1, 21, 3)).bernoulli_(0.5)
    form = form_of((3, 5, 7), (1, 21, 3), torch.float32, 0.0, 1.0)
    back = form.unpack(form.pack(tensor))
    assert back.stride() == tensor.stride()
    assert torch.equal(back, tensor)


class Noise(nn.Module):
    """Multiplies by what `make` draws for the output of a layer, [64, 512]."""

    def __init__(self, make):
        super().__init__()
        self.layer = nn.Linear(512, 512)
        self.make = make

    def forward(self, x):
        y = self.layer(x)
        return y * self.make(y)


def bernoulli(y):
    return torch.empty_like(y).bernoulli_(0.9)


def forms_of(graph):
    """The form of each node that has one."""
    return {node: way for node, ways in graph.restorations.items() for way in ways if isinstance(way, PackedForm)}


def forms_in(model, sample, **options):
    graphs = make_all_graphs(model, sample, **options)
    return graphs, forms_of(graphs.K_graph)


@pytest.mark.parametrize("tracer", ["jit", "record"])
def test_the_mask_of_a_dropout_is_a_bit_an_element(tracer):
    graphs, forms = forms_in(nn.Sequential(nn.Linear(512, 512), nn.Dropout(0.1)), torch.randn(64, 512), tracer=tracer)
    ((node, form),) = forms.items()
    assert not node.deps  # the shape alone is read of what it multiplies
    assert (form.shape, form.packed_bytes) == ((64, 512), 64 * 512 // 8)
    (comp,) = (comp for comp in graphs.K_graph.forward if comp.node is node)
    assert 0 < comp.repeat_ms


@pytest.mark.parametrize(
    "make",
    [bernoulli, lambda y: bernoulli(y).div_(0.9), lambda y: bernoulli(y).mul_(-3).div_(7.0)],
    ids=["plain", "scaled", "negative"],
)
def test_what_draws_and_multiplies_has_a_form(make):
    _, forms = forms_in(Noise(make), torch.randn(64, 512))
    (form,) = forms.values()
    torch.manual_seed(1)
    tensor = make(torch.empty(form.shape))
    assert torch.equal(as_integers(form.unpack(form.pack(tensor))), as_integers(tensor))


@pytest.mark.parametrize(
    "make",
    [
        lambda y: torch.empty_like(y).uniform_(),
        lambda y: bernoulli(y).add_(1.0),
        lambda y: bernoulli(y).mul_(bernoulli(y)),
        lambda y: bernoulli(y)[:, :256].repeat(1, 2),
        lambda y: torch.empty_like(y).bernoulli_(torch.full_like(y, 0.5)),
        lambda y: torch.zeros_like(y).index_fill_(1, torch.arange(7), 1.0),
        lambda y: y.new_empty(64, 1).bernoulli_(0.5),
    ],
    ids=["uniform", "added", "product", "part", "by a tensor", "nothing drawn", "few"],
)
def test_what_may_have_other_values_or_few_has_no_form(make):
    _, forms = forms_in(Noise(make), torch.randn(64, 512))
    allowed = {"empty_like", "empty_strided", "bernoulli_"}  # such as the second operand of the product
    assert {op.call.op_name for node in forms for op in node.ops} <= allowed
    assert len(forms) <= 1


def test_a_small_mask_is_drawn_again():
    few = LEAST_ELEMENTS - 512
    assert not forms_in(nn.Sequential(nn.Linear(512, 512), nn.Dropout(0.1)), torch.randn(few // 512, 512))[1]


def test_a_shape_that_depends_on_data_is_read_each_time():
    class Selected(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(512, 512)

        def forward(self, x):
            rows = self.layer(x)[x[:, 0] > 0]
            return functional.dropout(rows, 0.2, training=True).sum(0)

    with pytest.warns(TraceWarning, match="shape that depends on data"):
        graphs, forms = forms_in(Selected(), torch.randn(128, 512), tracer="record")
    assert not forms
    assert any(op.call.op_name == "empty_like" for op in graphs.D_graph)


def test_equal_blocks_share_what_was_measured():
    block = [nn.Linear(512, 512), nn.Dropout(0.1)]
    graphs, forms = forms_in(nn.Sequential(*block, *block), torch.randn(64, 512))
    assert len(forms) == 2
    assert all(comp.repeat_ms is not None for comp in graphs.K_graph.forward if comp.node in forms)
    for part in graphs.K_graph_list:
        assert forms_of(part) == {node: forms[node] for node in part.blocks[0].nodes if node in forms}


def test_a_node_has_the_form_of_its_own_values():
    graphs, forms = forms_in(nn.Sequential(nn.Linear(512, 512), nn.Dropout(0.25)), torch.randn(64, 512))
    ((node, form),) = forms.items()
    assert PackedMask.of(graphs.D_graph, node) == form
    packed = torch.full((form.packed_bytes,), 255, dtype=torch.uint8)
    assert torch.equal(form.unpack(packed), torch.full((64, 512), 1.0) / 0.75)
