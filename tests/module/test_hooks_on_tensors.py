"""Hooks on tensors and kept gradients within a submodule: its call is one operation, and they happen as in eager."""

import copy

import pytest
import torch
from torch import nn

from tests.module.steps import FEW_ROUNDS, planned_if_it_may
from tests.where import placed

WIDTH, ROWS, DEPTH = 24, 64, 6
HOOKED = (1, 4)
pytestmark = pytest.mark.filterwarnings("ignore::rkgb.errors.TraceWarning")


class Block(nn.Module):
    """What is done to a tensor of its forward is said by `act`, and to which one by `where`."""

    def __init__(self, act=None, where=""):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.act, self.where, self.seen = act, where, []

    def forward(self, x):
        inner = torch.tanh(self.first(x))
        output = x + torch.sigmoid(self.second(inner))
        if self.act is not None and torch.is_grad_enabled():
            self.act(self, {"input": x, "inner": inner, "output": output}[self.where])
        return output


def scale(block, tensor):
    tensor.register_hook(lambda grad: grad * 0.5)


def clip(block, tensor):
    tensor.register_hook(lambda grad: grad.clamp(-1e-4, 1e-4))


def log(block, tensor):
    tensor.register_hook(lambda grad: block.seen.append(float(grad.abs().sum())))


def keep(block, tensor):
    tensor.retain_grad()
    block.kept = tensor


def at_node(block, tensor):
    tensor.grad_fn.register_prehook(lambda grads: tuple(grad * 0.5 for grad in grads))


def removed_at_once(block, tensor):
    tensor.register_hook(lambda grad: grad * 3).remove()


class Around(nn.Module):
    """Uses what it hands to its block for itself, too, and calls it twice."""

    def __init__(self, block):
        super().__init__()
        self.layer, self.block = nn.Linear(WIDTH, WIDTH), block

    def forward(self, x):
        h = torch.tanh(self.layer(x))
        return h * self.block(self.block(h))


def network(act, where):
    torch.manual_seed(0)
    blocks = (Around(Block(act, where)) if place in HOOKED else Block() for place in range(DEPTH))
    return placed(nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks))


def traces(model):
    """What the hooks left behind, of all steps so far."""
    blocks = [model[place + 1].block for place in HOOKED]
    return [(block.seen, getattr(block, "kept", None) is not None and block.kept.grad) for block in blocks]


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


ACTS = {"scale": scale, "clip": clip, "log": log, "keep": keep, "at_node": at_node, "removed_at_once": removed_at_once}


@pytest.mark.parametrize("budget", [1.0, 0.5])
@pytest.mark.parametrize("where", ["input", "inner", "output"])
@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_they_happen_as_in_eager(act, where, budget):
    x = placed(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)))
    model = network(act, where)
    mine = copy.deepcopy(model)
    planned = planned_if_it_may(mine, x, budget, limits=FEW_ROUNDS)
    for step in range(2):
        for trained, forward in ((model, model), (mine, planned)):
            trained.zero_grad()
            forward(x + step).square().mean().backward()
        for (name, eager), ours in zip(model.named_parameters(), mine.parameters(), strict=True):
            assert torch.equal(eager.grad, ours.grad), name
        assert same(traces(model), traces(mine))
    assert model[HOOKED[0] + 1].block.seen or act is not log


class Packing(Block):
    """Packs what its backward needs, in its own way."""

    def __init__(self, pack, unpack):
        super().__init__()
        self.hooks = (pack, unpack)

    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(*self.hooks):
            return super().forward(x)


PACKED = {
    "shorter": (torch.Tensor.half, torch.Tensor.float),
    "elsewhere": (lambda tensor: tensor.detach().cpu().numpy().copy(), lambda held: placed(torch.from_numpy(held))),
}


@pytest.mark.parametrize("budget", [1.0, 0.6])
@pytest.mark.parametrize("hooks", PACKED.values(), ids=PACKED)
def test_so_do_hooks_that_pack_what_is_saved(hooks, budget):
    x = placed(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)))
    torch.manual_seed(0)
    model = placed(nn.Sequential(nn.Linear(WIDTH, WIDTH), Packing(*hooks), Block(), Packing(*hooks), Block()))
    eager = copy.deepcopy(model)
    planned = planned_if_it_may(model, x, budget, limits=FEW_ROUNDS)
    for step in range(2):
        for forward in (eager, planned):
            forward.zero_grad()
            forward(x + step).square().mean().backward()
        assert all(map(torch.equal, (p.grad for p in eager.parameters()), (p.grad for p in model.parameters())))


def test_others_of_the_model_are_recomputed():
    """Only a submodule whose forward does it runs once."""
    planned = planned_if_it_may(network(scale, "inner"), placed(torch.randn(ROWS, WIDTH)), 0.5, limits=FEW_ROUNDS)
    names = {name for names in planned.plan.schedule.recomputed.values() for name in names}
    assert names
    hooked = tuple(f"{place + 1}.block" for place in HOOKED)
    nodes = planned._member.measured.graphs.S_graph
    assert not names & {node.name for node in nodes if node.ops[0].source.module_path.startswith(hooked)}
