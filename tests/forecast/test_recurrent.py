"""Recurrent layers, whose steps the CPU takes one by one: told by shapes alone, and measured."""

import functools

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rkgb.shapes.cpu.stepwise import recurrent_of_the_cpu
from rkgb.tree import leaves
from rockmate import estimate
from tests.forecast.test_eager_step import measured_bytes

ROWS, STEPS, WIDTH, SIZE = 64, 12, 16, 24
KINDS = {
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": functools.partial(nn.RNN, nonlinearity="relu"),
    "lstm of doubles": functools.partial(nn.LSTM, dtype=torch.float64),  # for which oneDNN has no kernel
    "lstm with projections": functools.partial(nn.LSTM, proj_size=8),
    "lstm": nn.LSTM,
}
OPTIONS = {
    "one layer": {},
    "both ways": {"bidirectional": True},
    "two layers": {"num_layers": 2},
    "two with dropout": {"num_layers": 2, "dropout": 0.1},
    "two layers both ways": {"num_layers": 2, "bidirectional": True},
    "without biases": {"bias": False},
}
pytestmark = pytest.mark.filterwarnings("ignore:(TF32 acc|LSTM with proj).*:UserWarning")
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


class Net(nn.Module):
    def __init__(self, layer, is_packed):
        super().__init__()
        self.layer, self.is_packed = layer, is_packed

    def forward(self, x, lengths):
        if not self.is_packed:
            return self.layer(x)[0]
        rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.layer(rows)[0], batch_first=True)[0]


def squares(output):
    return output.square().mean()


@every_option
@pytest.mark.parametrize("is_packed", [False, True], ids=["of one length", "packed"])
@every_kind
def test_a_step_takes_what_shapes_tell(kind, is_packed, options):
    model = Net(kind(WIDTH, SIZE, batch_first=True, **options), is_packed)
    if kind is nn.LSTM and not is_packed:
        pytest.skip("oneDNN runs all its steps at once: see tests/forecast/test_layers.py")
    x = torch.randn(ROWS, STEPS, WIDTH, dtype=next(model.parameters()).dtype)
    lengths = torch.randint(1, STEPS + 1, (ROWS,), generator=torch.Generator().manual_seed(0))
    lengths[0] = STEPS
    found = estimate(model, (x, lengths), loss=squares, batches=False, time_limit=0.1)
    assert not found.unplanned
    assert found.eager.step_peak_bytes == pytest.approx(
        measured_bytes(model, (x, lengths), squares), rel=2e-4
    )  # few bytes are not told


class Ours(TorchFunctionMode):
    """Recurrent layers are computed by what stands for them where there are no data."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = recurrent_of_the_cpu(func, args)
        return func(*args, **(kwargs or {})) if made is None else made


@every_option
@every_kind
def test_steps_are_those_of_pytorch(kind, options):
    """On data: outputs, last states and gradients, to the bit."""
    torch.manual_seed(0)
    layer = kind(WIDTH, SIZE, batch_first=True, **{**options, "dropout": 0.0})
    x = torch.randn(8, 5, WIDTH, dtype=next(layer.parameters()).dtype)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 5, 4, 4, 3, 2, 2, 1]), batch_first=True)
    for given in (x, packed):
        found = []
        for mode in (torch.backends.mkldnn.flags(enabled=False), Ours()):
            layer.zero_grad()
            with mode:
                output, last = layer(given)
            output = output.data if given is packed else output
            squares(output).backward()
            found.append([output, *leaves(last), *(parameter.grad.clone() for parameter in layer.parameters())])
        assert all(map(torch.equal, *found))
