"""Every way to ask autograd for gradients, of a module with all that is delicate: state, noise, ties, writes."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.module.models import WIDTH, built, rows
from tests.module.steps import assert_same, keep_every_other, keep_nothing, recomputing, squares

Scenario = Callable[[nn.Module], list[Tensor | None]]


class Delicate(nn.Module):
    """Batch statistics, dropout, a tied weight, a write in place, and views as outputs of which two share a storage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.dropout(torch.tanh(self.norm(self.first(hidden))), 0.2, self.training)
        hidden = (hidden * 2).mul_(torch.sigmoid(hidden))
        last = torch.tanh(self.last(hidden).exp())
        return last[:, ::2], last.t(), F.softplus(hidden)


def only_gradients(module: nn.Module) -> list[Tensor | None]:
    wanted = [rows(1, requires_grad=True), module.norm.weight, module.first.weight]
    return [*torch.autograd.grad(squares(module(wanted[0])), wanted)]


def some_inputs(module: nn.Module) -> list[Tensor | None]:
    data = rows(1, requires_grad=True)
    squares(module(data)).backward(inputs=[data, module.last.bias])
    return [data.grad]


def output_after_output(module: nn.Module) -> list[Tensor | None]:
    for output in reversed(outputs := module(rows(1, requires_grad=True))):
        output.square().mean().backward(retain_graph=True)
    return list(outputs)


def one_output_only(module: nn.Module) -> list[Tensor | None]:
    module(rows(1, requires_grad=True))[2].square().mean().backward()
    return []


def retained(module: nn.Module) -> list[Tensor | None]:
    loss = squares(module(rows(1, requires_grad=True)))
    loss.backward(retain_graph=True)
    torch.rand(5)
    loss.backward()
    return [loss]


def accumulated(module: nn.Module) -> list[Tensor | None]:
    for seed in range(3):
        (squares(module(rows(seed, requires_grad=True))) / 3).backward()
    return []


def interleaved(module: nn.Module) -> list[Tensor | None]:
    losses = [squares(module(rows(seed, requires_grad=True))) for seed in range(3)]
    for place in (1, 2, 0):
        losses[place].backward()
    return losses


def of_second_order(module: nn.Module) -> list[Tensor | None]:
    data = rows(1, requires_grad=True)
    (gradient,) = torch.autograd.grad(squares(module(data)), data, create_graph=True)
    gradient.square().sum().backward()
    return [gradient, data.grad]


def hooked(module: nn.Module) -> list[Tensor | None]:
    told: list[Tensor | None] = []
    data = rows(1, requires_grad=True)
    data.register_hook(lambda gradient: gradient.clamp(max=1e-6))
    handles = [
        module.first.weight.register_hook(lambda gradient: gradient.neg()),
        module.norm.weight.register_post_accumulate_grad_hook(lambda weight: told.append(weight.grad.clone())),
    ]
    outputs = module(data)
    outputs[0].register_hook(lambda gradient: gradient * 3)
    outputs[2].retain_grad()
    squares(outputs).backward()
    for handle in handles:
        handle.remove()
    return [*told, outputs[2].grad, data.grad]


def with_anomalies_detected(module: nn.Module) -> list[Tensor | None]:
    with torch.autograd.set_detect_anomaly(True):
        loss = squares(module(rows(1, requires_grad=True)))
        loss.backward()
    return [loss]


SCENARIOS: list[Scenario] = [
    only_gradients,
    some_inputs,
    output_after_output,
    one_output_only,
    retained,
    accumulated,
    interleaved,
    of_second_order,
    hooked,
    with_anomalies_detected,
]


@pytest.mark.filterwarnings("ignore::rockmate.errors.DoubleBackwardWarning")
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("recompute", [keep_nothing, keep_every_other])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=[scenario.__name__ for scenario in SCENARIOS])
def test_all_that_autograd_gives_is_eager_s(scenario, recompute):
    model = recomputing(built(Delicate), rows(requires_grad=True), recompute)
    assert model.plan.recomputations > 0
    records = []
    for module in (copy.deepcopy(model.original), model):
        torch.manual_seed(3)
        found = {f"result {i}": None if t is None else t.detach() for i, t in enumerate(scenario(module))}
        found |= {f"gradient of {name}": parameter.grad for name, parameter in module.named_parameters()}
        found |= {f"buffer {name}": buffer.clone() for name, buffer in module.named_buffers()}
        found["random stream"] = torch.get_rng_state()
        records.append(found)
    assert_same(records[1], records[0])
