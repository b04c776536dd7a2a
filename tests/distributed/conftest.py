"""Groups of ranks, shared by all tests: starting a process takes longer than most of them."""

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.stop()
