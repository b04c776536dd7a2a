"""Which tests run when: `make test` runs the quick ones, `make test-ci` all but long sweeps, `make test-all` every one.

A test is quick unless it is marked `ci` or `slow`. Of a test with many sets of parameters, the quick tier and the tier
of CI run as many as `SETS` says for its file, evenly spread from the first to the last: neighbours are alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import pytest

EVERY = 1_000_000


class Sets(NamedTuple):
    """How many sets of parameters of one test a tier runs at most."""

    quick: int
    ci: int


# By file or folder; the longest that matches counts, and all sets are quick where none does.
SETS = {
    "tests/accelerator/test_distributed.py": Sets(1, 2),
    "tests/accelerator/test_host_tier.py": Sets(1, 2),
    "tests/accelerator/test_families.py": Sets(1, 3),
    "tests/accelerator/test_faults.py": Sets(1, 1),
    "tests/accelerator/test_front_doors.py": Sets(1, 1),
    "tests/accelerator/test_layout.py": Sets(1, 1),
    "tests/accelerator/test_modules.py": Sets(1, 4),
    "tests/accelerator/test_offload.py": Sets(1, 1),
    "tests/accelerator/test_out_of_memory.py": Sets(1, 1),
    "tests/accelerator/test_planned.py": Sets(1, 2),
    "tests/accelerator/test_promises.py": Sets(1, 1),
    "tests/accelerator/test_reserved.py": Sets(1, 1),
    "tests/accelerator/test_threads.py": Sets(1, 1),
    "tests/accelerator/test_trainers.py": Sets(1, 2),
    "tests/accelerator/test_verify.py": Sets(1, 1),
    "tests/cli/": Sets(2, 6),
    "tests/compile/test_partitioner.py": Sets(1, 3),
    "tests/distributed/": Sets(2, 2),
    "tests/families/test_kept.py": Sets(1, 2),
    "tests/families/test_transformers.py": Sets(1, 1),
    "tests/families/test_random_lengths.py": Sets(1, 1),
    "tests/families/test_recorded.py": Sets(1, 1),
    "tests/front_doors/": Sets(2, 5),
    "tests/graph/": Sets(3, 8),
    "tests/graph/test_json_refusals.py": Sets(EVERY, EVERY),
    "tests/graph/test_render.py": Sets(2, 12),
    "tests/graph/test_render_files.py": Sets(2, 12),
    "tests/graph/test_show.py": Sets(2, 12),
    "tests/graph/test_torch_private.py": Sets(EVERY, EVERY),
    "tests/graph/test_undetected.py": Sets(EVERY, EVERY),
    "tests/loops/": Sets(1, 3),
    "tests/module/": Sets(1, 2),
    "tests/module/test_exactness.py": Sets(4, 4),
    "tests/module/test_layout.py": Sets(1, 1),
    "tests/module/test_moves.py": Sets(2, 3),
    "tests/module/test_offload.py": Sets(1, 2),
    "tests/offload/": Sets(1, 2),
    "tests/plan_files/": Sets(1, 2),
    "tests/regions/": Sets(4, 8),
    "tests/solver/": Sets(3, 8),
    "tests/test_docs.py": Sets(2, 4),
    "tests/test_hf_families.py": Sets(1, 4),
    "tests/test_notebooks.py": Sets(1, 1),
    "tests/test_peers.py": Sets(2, 4),
    "tests/trainers/": Sets(1, 1),
}


def assign_tiers(items: Iterable[pytest.Item]) -> None:
    """Mark those `ci` and `slow` that are neither by themselves and that `SETS` leaves to these tiers."""
    tests = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    for name, sets in tests.items():
        quick, ci = sets_of(name)
        for tier, most in (("ci", quick), ("slow", ci)):
            taken = spread(len(sets), most)
            for place, item in enumerate(sets):
                if place not in taken:
                    item.add_marker(tier)


def sets_of(name: str) -> Sets:
    """What `SETS` says for the test of that name."""
    found = [folder for folder in SETS if name.startswith(folder)]
    return SETS[max(found, key=len)] if found else Sets(EVERY, EVERY)


def spread(number: int, most: int) -> set[int]:
    """At most `most` places of `number`, evenly spread from the first to the last."""
    if number <= most:
        return set(range(number))
    return {round(index * (number - 1) / max(most - 1, 1)) for index in range(most)}
