"""Which things a window holds: as simulated, so in truth; and what a link's speed comes to."""

import random

import pytest
import torch

from rk_solvers.links import Link
from rockmate.offload.file_tier import FileTier
from rockmate.resting.tensor import rested_of
from rockmate.resting.tensors import RestingTensors
from rockmate.resting.window import SimulatedWindow, UseOrder

FAST = Link(1e9, 0.0)


def random_uses(generator, count):
    """Uses of one or two things at once, each thing once at least."""
    uses = [[index] for index in range(count)] + [
        generator.sample(range(count), generator.choice([1, 1, 2])) for _ in range(count)
    ]
    generator.shuffle(uses)
    return uses


@pytest.mark.parametrize("seed", range(6))
def test_tensors_do_what_is_simulated(tmp_path, seed):
    generator = random.Random(seed)
    tensors = [torch.full((generator.randrange(20_000, 60_000),), float(index)) for index in range(10)]
    sizes, uses = [tensor.nbytes for tensor in tensors], random_uses(generator, 10)
    window_bytes = int(sum(sizes) * generator.uniform(0.3, 0.9))
    simulated = SimulatedWindow(window_bytes, sizes, FAST)
    tier = FileTier(tmp_path)
    owner = RestingTensors(tier, window_bytes)
    owner.take(tensors)
    rested = [rested_of(tensor) for tensor in tensors]
    order = UseOrder([rested[index] for used in uses for index in used])
    for _ in range(3):
        before_bytes, owner.most_held_bytes = owner.read_bytes, owner.held_bytes
        owner.follow(order)
        cursor = 0
        for used in uses:
            with owner.used_at([rested[index] for index in used], cursor):
                assert all(tensors[index][0] == index for index in used)
            cursor += len(used)
        simulated.step((0.0, used) for used in uses)
        assert simulated.held_bytes == owner.held_bytes
        assert simulated.most_held_bytes == owner.most_held_bytes <= window_bytes
        assert simulated.read_bytes == owner.read_bytes - before_bytes
    tier.close()


def test_what_comes_ahead_is_not_waited_for():
    uses = [(10.0, [index]) for index in [*range(8), *reversed(range(8))]]
    for link, waited in ((Link(100.0, 0.0), False), (Link(5.0, 0.0), True)):
        window = SimulatedWindow(300, [100] * 8, link)
        for _ in range(2):
            window.step(uses)
        assert (window.wait_ms > 0) is waited
        assert window.read_bytes == 2 * (8 - 3) * 100  # of each way, what is not here already


def test_more_room_never_reads_more():
    uses = [(1.0, [index]) for index in [*range(12), *reversed(range(12))]]
    read = []
    for places in range(1, 13):
        window = SimulatedWindow(places * 100, [100] * 12, FAST)
        for _ in range(3):
            window.step(uses)
        read.append(window.read_bytes)
    assert read == sorted(read, reverse=True)
    assert read[-1] == 0
