"""Attention by another kernel of the device than the one that PyTorch picks, where that is faster."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rkgb import DGraph
from rkgb.devices.cpu import Cpu
from rkgb.devices.cuda import Cuda
from rkgb.ir.values import ValueInfo
from rkgb.kernels.attention import IS_ON
from rkgb.torch_private.operations import (
    attention_of_accelerators,
    attention_of_cudnn,
    attention_of_the_cpu,
    flash_attention,
)
from rockmate import KernelsError, PlanOptions, Rockmate, plan_files, verify
from rockmate.kernels import choose, trial
from rockmate.kernels.alternative import Alternative
from rockmate.kernels.alternatives import alternatives_of
from rockmate.kernels.choose import _with_one_each
from rockmate.kernels.option import KernelTrial
from rockmate.planning.measured import trace_model
from rockmate.planning.request import PlanRequest
from tests.module.models import built
from tests.module.steps import BRIEFLY, squares
from tests.where import placed

AUTO = PlanOptions(loss=squares, kernels="auto", limits=BRIEFLY, plan_in_background=False)
LENGTH, WIDTH, HEADS = 24, 32, 4


class Attending(nn.Module):
    """Blocks of attention, whose heads may share keys; by PyTorch's choice, or by a `fused` call as a trace has it."""

    def __init__(self, keys=HEADS, masked=False, dropout=0.0, learned=False, fused=False):
        super().__init__()
        self.fused = fused
        self.size, self.keys, self.dropout = WIDTH // HEADS, keys, dropout
        self.layers = nn.ModuleList(
            nn.ModuleDict({"in": nn.Linear(WIDTH, (HEADS + 2 * keys) * self.size), "out": nn.Linear(WIDTH, WIDTH)})
            for _ in range(3)
        )
        mask = torch.zeros(LENGTH, LENGTH).masked_fill(torch.ones(LENGTH, LENGTH).tril() == 0, -2.0)
        self.mask = nn.Parameter(mask, requires_grad=learned) if masked or learned else None

    def forward(self, x):
        for layer in self.layers:
            parts = layer["in"](x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            query, key, value = parts.split([HEADS, self.keys, self.keys], 1)
            if self.fused:
                mixed = attention_of_the_cpu(query, key, value, 0.0, True)[0]
            else:
                mixed = scaled_dot_product_attention(
                    query, key, value, self.mask, self.dropout, self.mask is None, enable_gqa=self.keys != HEADS
                )
            x = x + layer["out"](mixed.transpose(1, 2).flatten(2)).tanh()
        return x


def attending(**options):
    return built(partial(Attending, **options))


def rows(batch=4):
    return placed(torch.randn(batch, LENGTH, WIDTH, generator=torch.Generator().manual_seed(batch)))


def graph_of(model: nn.Module) -> DGraph:
    return trace_model(model, rows(), PlanRequest(None, loss=squares)).graph.dgraph


def attentions_in(graph: DGraph) -> list[list[Alternative]]:
    """Of each attention the other kernels."""
    found = [
        [other for other in alternatives_of(graph, op) if other.kernel.startswith("attentions")]
        for op in graph
        if "attention" in op.name and "flash" in op.call.op_name
    ]
    assert all(len({other.kernel for other in others}) == len(others) for others in found)
    return found


@pytest.fixture
def all_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels of attention are on, whatever was built."""
    for kernel in IS_ON:
        monkeypatch.setitem(IS_ON, kernel, lambda: True)


# ---- exactness -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("attends")
@pytest.mark.parametrize("options", [{}, {"keys": 2}, {"masked": True}], ids=["plain", "shared keys", "masked"])
@pytest.mark.parametrize("budget", ["2MiB", "256KiB"])
def test_training_is_that_of_these_kernels_without_a_plan(options, budget):
    found = verify(attending(**options), rows(), budget, options=AUTO)
    assert found.exact, found
    chosen = {one.kernel: len(one.operations) for one in found.plan.kernels.chosen}
    assert sum(count for kernel, count in chosen.items() if kernel == "attentions by products and a softmax") > 0
    assert found.from_eager is not None
    assert 0 < found.from_eager < 1e-5  # rounding alone


@pytest.mark.usefixtures("attends")
def test_what_a_kernel_notes_for_its_backward_goes_with_it():
    model = Rockmate(attending(), rows(), "2MiB", options=AUTO)
    names = {name for name in model.plan.kernels.operations if "attention" in name}
    assert len(names) == 3
    request = PlanRequest(None, loss=squares, chosen_kernels=model.plan.kernels)
    ops = [op for op in trace_model(attending(), rows(), request).graph.dgraph if op.name in names]
    assert [op.call.op_name for op in ops] == 3 * ["attention"]
    assert all(len(op.output_names) == 1 for op in ops)


@pytest.mark.usefixtures("quicker")
def test_one_that_saves_more_stands_for_nothing():
    model = Rockmate(attending(), rows(), 1.0, options=AUTO)
    refused = {one.refused for one in model.plan.kernels.trials if "softmax" in one.kernel}
    assert refused == {"it saves more for the backward"}


@pytest.mark.usefixtures("attends")
def test_a_plan_of_a_file_says_so_where_the_user_has_switched_it_off(tmp_path):
    model, path = Rockmate(attending(), rows(), "2MiB", options=replace(AUTO, cache=False)), tmp_path / "plan.json"
    plan_files.save(model.plan_file(), path)
    again = Rockmate(attending(), rows(), plan=path, loss=squares)
    assert again.plan.kernels == model.plan.kernels
    assert verify(again, rows(), loss=squares).exact
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        pytest.raises(
            KernelsError, match="one of attentions by products and a softmax in the plan, .*enable_flash_sdp"
        ),
    ):
        Rockmate(attending(), rows(), plan=path, loss=squares)


# ---- which there are -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("all_on")
def test_the_kernels_of_a_device_are_offered_but_the_one_that_runs(monkeypatch):
    graph = graph_of(attending())
    assert [[one.kernel for one in others] for others in attentions_in(graph)] == 3 * [
        ["attentions by products and a softmax"]
    ]
    monkeypatch.setattr(Cpu, "attentions", ("flash of the CPU", *Cuda.attentions))
    kernels = {other.call.args[-1] for other in attentions_in(graph)[0]}
    assert kernels == set(Cuda.attentions)
    assert {other.call.args[-1] for other in attentions_in(graph_of(attending(masked=True)))[0]} == {
        "memory-efficient",
        "cuDNN",
        "written out",
    }
    assert {other.call.args[-1] for other in attentions_in(graph_of(attending(keys=2)))[0]} == {
        "flash",
        "cuDNN",
        "written out",
    }


@pytest.mark.usefixtures("all_on")
@pytest.mark.parametrize("kernel", [flash_attention, attention_of_accelerators, attention_of_cudnn])
def test_calls_of_accelerators_are_read_by_their_names(monkeypatch, kernel):
    """As a trace on a GPU has them: the names of arguments and their places are others for each kernel."""
    monkeypatch.setattr(Cpu, "attentions", Cuda.attentions)
    graph = graph_of(attending())
    op = next(op for op in graph if "flash" in op.call.op_name)
    query, key, value = op.call.args[:3]
    middle = () if kernel is flash_attention else (None, True)
    call = replace(
        op.call, function=kernel.default, args=(query, key, value, *middle, 0.0, True), kwargs={"scale": 0.3}
    )
    others = alternatives_of(graph, replace(op, call=call))
    assert len(others) == 3
    for other in others:
        assert other.call.args[:7] == (query, key, value, None, True, 0.3, False)
    drawing = replace(call, args=(query, key, value, *middle, 0.1, True))
    assert not alternatives_of(graph, replace(op, call=drawing))


@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"learned": True}])
def test_what_draws_or_learns_its_mask_stays(options):
    graph = graph_of(attending(**options))
    kernels = [other.kernel for op in graph for other in alternatives_of(graph, op)]
    assert not any(kernel.startswith("attentions") for kernel in kernels)


def test_what_is_noted_for_others_stays():
    class Logarithms(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            heads = self.layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            made, logarithm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(heads, heads, heads)
            return made.sum((1, 3)) + logarithm.detach().sum(1)

    graph = graph_of(built(Logarithms))
    assert attentions_in(graph) == [[]]


@pytest.mark.parametrize(
    ("shape", "stride"), [((24, 24), (24, 1)), ((4, 1, 24, 24), (24, 24, 0, 1)), ((4, 4, 24, 24), (0, 0, 24, 1))]
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_a_mask_of_a_trial_hides_a_whole_row(shape, stride, dtype):
    info = ValueInfo(shape, stride, 0, dtype, torch.device("cpu"), False, "mask", 0)
    made = trial._mask(info, 0)
    assert (made.shape, made.stride(), made.dtype) == (shape, stride, dtype)
    shown = made if dtype is torch.bool else made != -torch.inf
    assert 0.3 < float(shown.double().mean()) < 0.8
    assert not bool(shown.any(-1).all())
    assert bool(shown.any(-1).any())


class Sensitive(nn.Module):
    """An attention whose first row sees nothing."""

    def __init__(self):
        super().__init__()
        self.layer, self.mask = nn.Linear(WIDTH, WIDTH), nn.Buffer(torch.ones(LENGTH, LENGTH).tril(-1) > 0)

    def forward(self, x):
        heads = self.layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return scaled_dot_product_attention(heads, heads.sin(), heads.cos(), self.mask)


@pytest.mark.usefixtures("attends")
def test_a_kernel_that_gives_other_numbers_for_rows_of_nothing_stands_for_nothing(monkeypatch):
    plain = choose.alternatives_of

    def unsafe(graph, op):
        """A softmax that makes no numbers of such rows, as some kernels have it."""
        if "attention" not in op.name or "flash" not in op.call.op_name:
            return plain(graph, op)
        (other,) = plain(graph, op)

        def made(query, key, value, mask):
            scores = query @ key.transpose(2, 3) / key.shape[3] ** 0.5
            output = scores.masked_fill(mask == -torch.inf, -torch.inf).softmax(-1) @ value
            return output.transpose(1, 2).contiguous().transpose(1, 2)

        return (replace(other, call=replace(other.call, function=made, args=other.call.args[:4])),)

    monkeypatch.setattr(choose, "alternatives_of", unsafe)
    model = Rockmate(attending(masked=True), rows(), "2MiB", options=AUTO)
    refused = {one.refused for one in model.plan.kernels.trials if one.kernel.startswith("attentions")}
    assert refused == {"its numbers are others: nan away"}
    monkeypatch.setattr(choose, "alternatives_of", plain)
    assert verify(built(Sensitive), rows(), "2MiB", options=AUTO).exact


def test_of_several_that_pay_the_quickest_is_taken():
    slow, quick, slower = (KernelTrial(("a", "b"), name, 1.0, ms) for name, ms in (("x", 0.8), ("y", 0.5), ("z", 1.2)))
    found = _with_one_each([slow, quick, slower, KernelTrial(("c",), "x", 1.0, 0.7)])
    assert [one.pays for one in found] == [False, True, False, True]
    assert found[0].refused == "y are faster"
    assert found[2] is slower
