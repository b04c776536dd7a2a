"""Indices of max pooling: data of their own, whose smaller form tells them bit by bit."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from rkgb import chain, cut, make_all_graphs, make_sample
from rkgb.devices.allocation_log import AllocationLog
from rkgb.export.json_form import from_json, to_json
from rkgb.passes.d_to_s import d_to_s
from rkgb.pipeline import exact_trace
from rkgb.restore.pool_indices import WindowIndices

PADDED = {"kernel_size": 3, "stride": 2, "padding": 1}


class Pooled(nn.Module):
    """A layer with a gradient, and pooling of what it gives."""

    def __init__(self, **settings):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.pool = (nn.MaxPool3d if settings.pop("depth", False) else nn.MaxPool2d)(**settings)

    def forward(self, x):
        return self.pool(x * self.weight)


def forms_of(graph, simple):
    """The form of each node that fills indices."""
    found = {node: WindowIndices.of(graph, node) for node in simple.nodes}
    return {node: form for node, form in found.items() if form is not None}


def traced(model, x, **options):
    """The D and the S graph, and the forms of nodes."""
    graph = exact_trace(model, make_sample(model, x), **options)[1]
    simple = d_to_s(graph)
    return graph, simple, forms_of(graph, simple)


def awkward(shape, generator):
    """Ties, infinities and what is no number among ordinary numbers."""
    x = torch.randint(-3, 4, shape, generator=generator).float()
    chosen = torch.rand(shape, generator=generator)
    x[chosen < 0.3] = -float("inf")
    x[chosen > 0.9] = float("nan")
    x[..., : shape[-1] // 2, :] = -float("inf")  # whole windows
    return x


@pytest.mark.parametrize(
    ("settings", "shape", "itemsize"),
    [
        ({"kernel_size": 2}, (2, 8, 64, 64), 1),
        (PADDED, (2, 8, 100, 100), 1),
        (PADDED, (2, 8, 127, 300), 2),
        (PADDED | {"ceil_mode": True}, (2, 8, 100, 81), 1),
        ({"kernel_size": (3, 2), "stride": (1, 2), "padding": (1, 0)}, (2, 4, 61, 80), 1),
        ({"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2}, (2, 4, 60, 60), 1),
        ({"kernel_size": (1, 5), "stride": 1, "dilation": (1, 3)}, (2, 4, 60, 60), 1),
        ({"kernel_size": 2}, (16, 80, 80), 1),
        ({"kernel_size": 3, "stride": 1, "padding": 1, "depth": True}, (2, 2, 9, 31, 40), 2),
        ({"kernel_size": (1, 2, 2), "stride": 1, "ceil_mode": True, "depth": True}, (2, 3, 8, 31, 40), 1),
    ],
    ids=str,
)
def test_indices_come_back_bit_by_bit(settings, shape, itemsize):
    generator = torch.Generator().manual_seed(0)
    model = Pooled(**settings)
    graph, _, forms = traced(model, torch.randn(shape, generator=generator))
    (form,) = forms.values()
    assert form.dtype.itemsize == itemsize
    (name,) = graph.handed
    pooling = next(node for node in graph if name in node.output_names)
    for x in (torch.randn(shape, generator=generator), awkward(shape, generator)):
        indices = pooling.call.function(x, *pooling.call.args[1:], **pooling.call.kwargs)[1]
        packed = form.pack(indices)
        assert packed.nbytes == form.packed_bytes == indices.numel() * itemsize
        assert torch.equal(form.unpack(packed), indices)


@pytest.mark.parametrize("shape", [(2, 8, 100, 100), (2, 8, 127, 300)], ids=["bytes", "int16"])
def test_no_other_tensor_is_made_on_the_way(shape):
    _, _, forms = traced(Pooled(**PADDED), torch.randn(shape))
    (form,) = forms.values()
    indices = functional.max_pool2d_with_indices(torch.randn(shape), **PADDED)[1]
    with AllocationLog(indices.device) as packing:
        packed = form.pack(indices)
    with AllocationLog(indices.device) as unpacking:
        form.unpack(packed)
    assert (packing.peak_bytes, unpacking.peak_bytes) == (packed.nbytes, indices.nbytes)


def test_a_layout_is_kept():
    x = torch.randn(2, 8, 100, 100).contiguous(memory_format=torch.channels_last)
    _, _, forms = traced(Pooled(**PADDED), x)
    (form,) = forms.values()
    indices = functional.max_pool2d_with_indices(x, **PADDED)[1]
    assert indices.stride() == form.stride != torch.empty(indices.shape).stride()
    back = form.unpack(form.pack(indices))
    assert back.stride() == indices.stride()
    assert torch.equal(back, indices)


@pytest.mark.parametrize("tracer", ["jit", "record"])
def test_they_are_a_node_of_their_own_that_reads_nothing(tracer):
    model = Pooled(**PADDED)
    x = torch.randn(2, 8, 100, 100)
    graphs = make_all_graphs(model, x, tracer=tracer)
    forms = forms_of(graphs.D_graph, graphs.S_graph)
    ((node, form),) = forms.items()
    assert graphs.K_graph.restorations == {node: (form,)}
    (own,) = (comp for comp in graphs.K_graph.forward if comp.node is node)
    (pooling,) = (comp for comp in graphs.K_graph.forward if own.node.deps == {comp.node: None})
    (indices,) = own.outputs
    assert not own.deps
    assert own.repeat_ms > 0
    assert indices.size_bytes == 8 * form.packed_bytes
    assert indices not in pooling.outputs
    assert pooling.workspace_bytes >= indices.size_bytes  # whoever repeats the maxima makes them too
    assert [comp.name for comp in indices.users] == [f"{pooling.name}.backward"]


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.MaxPool2d(2)).requires_grad_(False),
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.MaxPool2d(16)),
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.AdaptiveMaxPool2d(50)),
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.AvgPool2d(2)),
    ],
    ids=["no gradient", "few", "windows of several sizes", "mean"],
)
def test_other_pooling_is_left_as_it_is(model):
    graph, _, forms = traced(model, torch.randn(2, 3, 100, 100))
    assert not forms
    assert not graph.handed


def test_a_window_that_reaches_too_far_has_no_form():
    _, _, forms = traced(Pooled(kernel_size=(2, 1), stride=1, dilation=(50, 1)), torch.randn(1, 1, 60, 700))
    assert not forms


def pooling_between():
    """Pooling, of whose maxima alone what follows is made: a block might end there."""
    ends = (nn.Conv2d(3, 4, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*ends, nn.Conv2d(4, 4, 1))


class Skipped(nn.Module):
    """Pooling whose maxima are read at once and far on: worth a pin."""

    def __init__(self):
        super().__init__()
        self.first, self.pool, self.last = nn.Conv2d(3, 4, 1), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1)
        self.between = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Conv2d(4, 4, 1), nn.Tanh())))

    def forward(self, x):
        y = self.pool(self.first(x))
        return self.last(self.between(y) * y)


@pytest.mark.parametrize(
    ("model", "cut_up"),
    [
        (pooling_between, cut),
        (pooling_between, lambda graph: chain(graph, 2)),
        (Skipped, lambda graph: chain(graph, 3)),
    ],
    ids=["cut", "chain", "pinned"],
)
def test_a_block_holds_both_the_maxima_and_their_indices(model, cut_up):
    _, simple, forms = traced(model(), torch.randn(4, 3, 160, 160))
    assert forms
    found = cut_up(simple)
    assert len(list(found)) > 2
    if model is Skipped:
        assert found.skip_values
    for block in found:
        for node in block.nodes:
            if node in forms:
                assert set(node.deps) <= set(block.nodes)


def test_who_reads_indices_reads_those_that_were_taken_over():
    class Back(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(3, 8, 1)

        def forward(self, x):
            maxima, indices = functional.max_pool2d_with_indices(self.layer(x), 2)
            return functional.max_unpool2d(maxima, indices, 2), indices

    graph, simple, forms = traced(Back(), torch.randn(2, 3, 100, 100))
    ((node, _),) = forms.items()
    assert node.data[0] in graph.output_names
    assert all(node.data[0] in op.inputs for op in graph if op.call.op_name == "max_unpool2d")
    assert len(node.users) >= 1
    simple.verify()


def test_the_graphs_are_written_and_read():
    graph, _, _ = traced(pooling_between(), torch.randn(4, 3, 160, 160))
    assert from_json(to_json(graph)).handed == graph.handed != frozenset()
