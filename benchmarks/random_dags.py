"""Random layered graphs, as problems of `rk_solvers`: graphs of the kind on which the literature compares solvers.

    python benchmarks/random_dags.py --output folder             # g1.json … g4.json
    python benchmarks/random_dags.py --nodes 400 --edges 1200 --seed 3 --output folder

The random layered graphs of B. Bartan et al., "Moccasin: efficient tensor rematerialization for neural networks",
ICML 2023 (arXiv:2304.14463, section 4), come from M. Gagrani et al., "Neural topological ordering for computation
graphs", NeurIPS 2022 (arXiv:2207.05899, appendix A): nodes lie in layers, most edges lead from one layer to the next,
some skip layers. These here are drawn in that manner with about as many nodes and edges, but they are not those very
graphs: no result on one of them can be compared with a figure of these papers.

A training step is made of such a graph as autograd does: one backward operation for each forward one, in reverse
order, which needs what the forward one has read. README.md says how sizes and times are drawn.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

from rk_solvers import BackwardOp, Data, ForwardOp, Problem

MIB = 1 << 20
BYTES_PER_MS = 500e6  # of a device: what a node takes at least, for what it reads and writes


@dataclass(frozen=True)
class Size:
    """What a graph is made of."""

    nodes: int
    edges: int


SIZES = {"g1": Size(100, 236), "g2": Size(250, 944), "g3": Size(500, 2461), "g4": Size(1000, 5857)}


def layered_dag(size: Size, seed: int) -> list[list[int]]:
    """For each node the nodes that it reads, in a topological order.

    Each node but the first reads one of the layer before its own at least, and each but the last is read. Raises
    `ValueError` where these alone are more edges than asked for, or where so many cannot be drawn.
    """
    rng = random.Random(seed)
    layer_of = layers(size.nodes, rng)
    members: dict[int, list[int]] = {}
    for node, layer in enumerate(layer_of):
        members.setdefault(layer, []).append(node)
    reads: list[set[int]] = [{rng.choice(members[layer - 1])} if layer else set() for layer in layer_of]
    for node in set(range(size.nodes - 1)).difference(*reads):
        reads[rng.choice(members[layer_of[node] + 1])].add(node)
    missing = size.edges - sum(map(len, reads))
    most = sum(len(members[layer]) * len(members[other]) for other in members for layer in members if layer < other)
    if missing < 0 or size.edges > most:
        raise ValueError(f"{size.edges} edges do not fit {size.nodes} nodes in {len(members)} layers; at most {most}")
    while missing:
        node = rng.randrange(len(members[0]), size.nodes)
        back = min(layer_of[node], 1 + int(rng.expovariate(1.0)))  # mostly from the layer before, some skip layers
        source = rng.choice(members[layer_of[node] - back])
        if source not in reads[node]:
            reads[node].add(source)
            missing -= 1
    return [sorted(found) for found in reads]


def layers(nodes: int, rng: random.Random) -> list[int]:
    """The layer of each node: about as many layers as nodes in a layer; one node in the last."""
    width = max(1.0, nodes**0.5)
    found: list[int] = []
    layer = 0
    while len(found) < nodes - 1:
        count = max(1, round(rng.gauss(width, width / 2)))
        found += [layer] * min(count, nodes - 1 - len(found))
        layer += 1
    return [*found, layer]


def random_problem(size: Size, seed: int) -> Problem:
    """The training step of a graph, with random sizes and times. Raises `ValueError` as `layered_dag`."""
    rng = random.Random(seed)
    reads = layered_dag(size, seed)
    out_bytes = [rng.choice((1, 4, 16)) * rng.randint(MIB // 2, MIB) for _ in reads]
    forward: list[ForwardOp] = []
    for node, inputs in enumerate(reads):
        moved = out_bytes[node] + sum(out_bytes[source] for source in inputs)
        time_ms = moved / BYTES_PER_MS * rng.choice((1, 1, 1, 10))  # some compute more than they read and write
        forward.append(ForwardOp(f"f{node}", time_ms, tuple(inputs), (node,)))
    data = tuple(Data(f"y{node}", number, node) for node, number in enumerate(out_bytes))
    last = len(reads) - 1
    return Problem(data, tuple(forward), backward_of(forward, out_bytes), frozenset({last}))


def backward_of(forward: list[ForwardOp], out_bytes: list[int]) -> tuple[BackwardOp, ...]:
    """Loss, then one backward operation for each forward one, which needs what was read.

    A gradient is alive from the first backward operation that adds to it to the one that uses it.
    """
    last = len(forward) - 1
    found = [BackwardOp("loss", 0.0, (last,), 0, out_bytes[last])]
    alive = {last}
    for index in range(last, -1, -1):
        op = forward[index]
        resident = sum(out_bytes[node] for node in alive)
        alive.update(op.inputs)
        peak = sum(out_bytes[node] for node in alive)
        found.append(BackwardOp(f"b{index}", 2 * op.time_ms, op.inputs, resident, peak))
        alive.discard(index)
    return tuple(found)


def main() -> None:
    """Writes the problems as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, help="with --edges: one graph of this size instead of g1 to g4")
    parser.add_argument("--edges", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True, help="folder")
    options = parser.parse_args()
    if (options.nodes is None) != (options.edges is None):
        parser.error("give both --nodes and --edges, or neither")
    sizes = SIZES if options.nodes is None else {f"g{options.nodes}": Size(options.nodes, options.edges)}
    options.output.mkdir(parents=True, exist_ok=True)
    for name, size in sizes.items():
        path = options.output / f"{name}.json"
        path.write_text(random_problem(size, options.seed).to_json() + "\n", encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
