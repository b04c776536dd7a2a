"""The least cut is the least of all choices, found by trying every one."""

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rockmate.division.cut import SavingProblem
from rockmate.division.joint import JointGraph, bytes_of, draws, has_effects, is_tuple, is_view
from tests.compile.joint_graphs import joint_of

UNARY = (torch.sin, torch.exp, torch.tanh, torch.sigmoid, lambda x: x * 2, lambda x: x.t())
BINARY = (torch.mul, torch.add, torch.matmul)


def random_function(seed: int) -> Callable[[Tensor], Tensor]:
    chance = random.Random(seed)
    steps = [(chance.random(), chance.random(), chance.random(), chance.random()) for _ in range(chance.randint(3, 6))]

    def function(x: Tensor) -> Tensor:
        values = [x]
        for kind, which, first, second in steps:
            one, other = values[int(first * len(values))], values[int(second * len(values))]
            if kind < 0.5:
                values.append(UNARY[int(which * len(UNARY))](one))
            else:
                values.append(BINARY[int(which * len(BINARY))](one, other))
        return values[-1] + values[-2]

    return function


def least_cost(graph: JointGraph, problem: SavingProblem, time_ms: dict, price: float) -> float:
    savable = [node for node in problem.nodes if node not in graph.given and not (is_view(node) or is_tuple(node))]
    best = float("inf")
    for count in range(len(savable) + 1):
        for saved in itertools.combinations(savable, count):
            best = min(best, cost_of(graph, time_ms, price, set(saved)))
    return best


def cost_of(graph: JointGraph, time_ms: dict, price: float, saved: set) -> float:
    repeated, waiting = set(), list(graph.needed)
    while waiting:
        node = waiting.pop()
        if node in saved or node in graph.given or node in repeated:
            continue
        if draws(node) or has_effects(node):
            return float("inf")
        repeated.add(node)
        waiting += node.all_input_nodes
    paid = [node for node in saved if node not in graph.outputs]
    return sum(time_ms[node] for node in repeated) + price * sum(map(bytes_of, paid))


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_costs_less(seed):
    graph = joint_of(random_function(seed), torch.rand(4, 4, requires_grad=True))
    chance = random.Random(seed)
    time_ms = {node: chance.random() for node in graph.nodes}
    problem = SavingProblem(graph, time_ms)
    for price in (1e-4, 1e-3, 1e-2, 1e-1):
        found = problem.cheapest(price)
        cost = cost_of(graph, time_ms, price, set(found.saved))
        # Costs are rounded to whole numbers, 5e8 in all.
        assert cost <= least_cost(graph, problem, time_ms, price) + 1e-6
        assert found.repeated.isdisjoint(found.saved)
        assert not any(is_view(node) for node in found.saved)


def test_what_is_kept_is_saved_where_it_is_needed_and_then_nothing_before_it_is():
    def function(x: Tensor) -> Tensor:
        for _ in range(6):
            x = torch.tanh(x @ x)
        return x

    graph = joint_of(function, torch.rand(8, 8, requires_grad=True))
    time_ms = dict.fromkeys(graph.nodes, 1e-9)
    problem = SavingProblem(graph, time_ms)
    assert problem.cheapest(1.0).saved == frozenset()
    middle = [node for node in problem.nodes if "tanh" in node.name][2]
    assert problem.cheapest(1.0, [middle]).saved == {middle}


def test_what_is_drawn_is_saved_at_any_price():
    def function(x: Tensor) -> Tensor:
        return torch.sin(torch.bernoulli(torch.sigmoid(x.detach()), 0.5) * x) @ x

    graph = joint_of(function, torch.rand(8, 8, requires_grad=True))
    problem = SavingProblem(graph, dict.fromkeys(graph.nodes, 1e-9))
    drawn = [node for node in graph.nodes if draws(node)]
    assert drawn
    assert set(drawn) <= set(problem.cheapest(1e6).saved)
    assert set(drawn).isdisjoint(problem.cheapest(1e6).repeated)


def test_a_graph_without_anything_to_save():
    graph = joint_of(lambda x: x + 1, torch.rand(8, requires_grad=True))
    assert SavingProblem(graph, dict.fromkeys(graph.nodes, 1.0)).cheapest(1.0).saved == frozenset()
