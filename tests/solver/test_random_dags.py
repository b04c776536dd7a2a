"""The random layered graphs of the benchmarks are what their module says."""

import re

import pytest

from benchmarks.random_dags import BYTES_PER_MS, MIB, SIZES, Size, layered_dag, random_problem
from rk_solvers import Problem, check, schedule_of

SMALL = [Size(2, 1), Size(3, 2), Size(10, 12), Size(40, 60), Size(60, 600)]
DRAWN = [(size, seed) for size in (*SMALL, SIZES["g1"], SIZES["g2"]) for seed in range(5)]


def longest_paths(reads):
    """For each node the edges of the longest path that ends there."""
    lengths: list[int] = []
    for inputs in reads:
        lengths.append(max((lengths[source] + 1 for source in inputs), default=0))
    return lengths


@pytest.mark.parametrize("name", SIZES)
def test_the_named_graphs_have_the_size_asked_for(name):
    size = SIZES[name]
    reads = layered_dag(size, seed=0)
    assert len(reads) == size.nodes
    assert sum(map(len, reads)) == size.edges


@pytest.mark.parametrize(("size", "seed"), DRAWN)
def test_graphs_are_acyclic_of_the_size_asked_for_and_every_node_is_read(size, seed):
    reads = layered_dag(size, seed)
    assert len(reads) == size.nodes
    assert sum(map(len, reads)) == size.edges
    for node, inputs in enumerate(reads):
        assert all(0 <= source < node for source in inputs)  # what is read comes before: there is no cycle
        assert inputs == sorted(set(inputs))
    assert {source for inputs in reads for source in inputs} == set(range(size.nodes - 1))
    first = sum(not inputs for inputs in reads)
    assert not any(reads[:first])  # those that read nothing are the first layer
    assert all(reads[first:])


def test_graphs_are_layered_with_some_edges_that_skip():
    reads = layered_dag(SIZES["g2"], seed=0)
    layer_of = longest_paths(reads)  # each node reads one of the layer before its own, so this is its layer
    assert layer_of == sorted(layer_of)
    spans = [layer_of[node] - layer_of[source] for node, inputs in enumerate(reads) for source in inputs]
    assert min(spans) == 1
    assert 0.5 < spans.count(1) / len(spans) < 1
    assert spans.count(2) > spans.count(3) > 0


def test_a_seed_fixes_the_graph():
    assert layered_dag(SIZES["g1"], 3) == layered_dag(SIZES["g1"], 3) != layered_dag(SIZES["g1"], 4)
    assert random_problem(SIZES["g1"], 3) == random_problem(SIZES["g1"], 3) != random_problem(SIZES["g1"], 4)


@pytest.mark.parametrize("size", [Size(10, 3), Size(10, 46), Size(100, 4951), Size(1000, 990)])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(ValueError, match=re.escape(f"{size.edges} edges do not fit {size.nodes} nodes")):
        layered_dag(size, seed=0)
    with pytest.raises(ValueError, match="at most"):
        random_problem(size, seed=0)


@pytest.mark.parametrize("seed", range(10))
def test_any_number_of_edges_from_the_fewest_to_the_most_told_is_drawn(seed):
    counts = range(1, 46)  # of ten nodes; no graph of them has more edges
    drawn = [edges for edges in counts if edge_count(Size(10, edges), seed) is not None]
    assert all(edge_count(Size(10, edges), seed) == edges for edges in drawn)
    assert drawn == list(range(drawn[0], drawn[-1] + 1))
    with pytest.raises(ValueError, match=f"at most {drawn[-1]}$"):
        layered_dag(Size(10, 46), seed)


def edge_count(size, seed):
    """The edges of the graph, None where it is refused."""
    try:
        return sum(map(len, layered_dag(size, seed)))
    except ValueError:
        return None


@pytest.mark.parametrize(("name", "seed"), [("g1", 0), ("g1", 1), ("g2", 0)])
def test_the_problem_is_a_training_step_of_the_graph(name, seed):
    problem = random_problem(SIZES[name], seed)
    reads = layered_dag(SIZES[name], seed)
    last = len(reads) - 1
    assert [list(op.inputs) for op in problem.forward] == reads
    assert problem.held == {last}
    loss, *backward = problem.backward
    assert loss.needs == (last,)
    assert [op.needs for op in backward] == [op.inputs for op in reversed(problem.forward)]
    # A step begins and ends without gradients of activations, but for those of nodes that read nothing.
    assert loss.resident_bytes == 0
    assert backward[-1].peak_bytes == problem.data[0].size_bytes


@pytest.mark.parametrize("name", ["g1", "g3"])
def test_sizes_and_times_are_within_the_bounds_of_the_readme(name):
    problem = random_problem(SIZES[name], seed=0)
    slow = 0
    for op, data in zip(problem.forward, problem.data, strict=True):
        assert MIB // 2 <= data.size_bytes <= 16 * MIB
        moved_ms = (data.size_bytes + sum(problem.data[source].size_bytes for source in op.inputs)) / BYTES_PER_MS
        assert op.time_ms == pytest.approx(moved_ms) or op.time_ms == pytest.approx(10 * moved_ms)
        slow += op.time_ms > 5 * moved_ms
    assert 0.15 < slow / len(problem.forward) < 0.35


@pytest.mark.parametrize("name", ["g1", "g2"])
def test_the_checker_accepts_the_step_that_keeps_everything(name):
    problem = random_problem(SIZES[name], seed=0)
    replayed = check(problem, schedule_of(problem, problem.no_recompute))
    assert replayed.time_ms == pytest.approx(problem.keep_all_time_ms)
    assert replayed.peak_bytes >= sum(item.size_bytes for item in problem.data)


def test_the_problem_survives_its_file():
    problem = random_problem(SIZES["g1"], seed=0)
    assert Problem.from_json(problem.to_json()) == problem
