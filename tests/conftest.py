"""What every test shares: fixed threads, a fixed seed, visible skips, golden files."""

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

# On a busy machine OpenMP's threads, spinning while they wait, make small operations a hundred times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# What is tested is planned here and now, and nothing of it is left behind: tests of the cache have one of their own.
os.environ["ROCKMATE_CACHE"] = "0"
os.environ["ROCKMATE_BACKGROUND"] = "0"  # plans that are the same each time; tests of what goes on there turn it on

import torch

import rk_solvers.anytime.min_budget
from rkgb.kernels import bernoulli
from tests.tiers import assign_tiers

# Workers share the cores: of several threads each, they would wait for one another.
THREADS = 1
SEED = 20_240
GOLDEN_FOLDER = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite the files of tests/golden/ from what the code does now, instead of comparing with them",
    )


def pytest_configure() -> None:
    # Sums are split among threads, so results are equal from run to run only when their number is fixed.
    torch.set_num_threads(THREADS)
    # A job in the background of a script ignores Ctrl-C, and so does what it starts: tests that send one would wait.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The test accelerator has processes of its own: autograd knows those devices that were there at its first use."""
    is_asked_for = any("tests/accelerator" in argument for argument in config.args)
    return True if collection_path.name == "accelerator" and not is_asked_for else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before `-m` chooses: the marks of the tiers."""
    assign_tiers(items)


def required_features() -> frozenset[str]:
    """The features that ROCKMATE_REQUIRE lists: a test that needs one of them may not be skipped."""
    listed = os.environ.get("ROCKMATE_REQUIRE", "")
    return frozenset(name.strip() for name in listed.split(",") if name.strip())


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is None or torch.cuda.is_available():
        return
    if "cuda" in required_features():
        pytest.fail("ROCKMATE_REQUIRE lists cuda, but torch.cuda.is_available() is False", pytrace=False)
    pytest.skip("needs an NVIDIA GPU (ROCKMATE_REQUIRE=cuda makes this a failure)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """A test marked with a required feature that skips itself fails: a skip must never look like a pass."""
    report = yield
    required = sorted(name for name in required_features() if item.get_closest_marker(name) is not None)
    if report.skipped and required and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, though ROCKMATE_REQUIRE lists {', '.join(required)}: {report.longrepr}"
    return report


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds every generator before each test, so that no test depends on those run before it."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    return SEED


@pytest.fixture(autouse=True)
def walks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are measured in one walk: a second one only makes times steadier, and would take minutes of all tests."""
    if request.node.get_closest_marker("both_walks") is None:
        monkeypatch.setattr("rkgb.profile.measure._WALKS", ("measure",))


@pytest.fixture(autouse=True)
def proofs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals prove what they can in two seconds: nearer bounds on the least peak would take minutes of all tests."""
    if request.node.get_closest_marker("long_proofs") is None:
        short = tuple((operations, near, 0.08) for operations, near, _ in rk_solvers.anytime.min_budget.EXACT)
        monkeypatch.setattr("rk_solvers.anytime.min_budget.EXACT", short)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` asserts that tests/golden/<name> holds this text; --update-golden rewrites it."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN_FOLDER / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), f"{path} is missing: run `make golden`, read it, and commit it"
        expected = path.read_text(encoding="utf-8")
        assert text == expected, f"{path} differs: if the change is meant, run `make golden` and read the diff"

    return compare


@pytest.fixture
def pytorchs_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers take as long as in eager training."""
    monkeypatch.setattr(bernoulli, "quicker", lambda: None)


@pytest.fixture
def our_draws(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each draw by our loops from here on, the number of elements."""
    drawn: list[int] = []
    real = bernoulli.draw_into

    def draw_into(places, *given):
        drawn.append(places.size)
        real(places, *given)

    bernoulli.quicker()
    monkeypatch.setattr(bernoulli, "draw_into", draw_into)
    return drawn


@pytest.fixture
def quick_disk(monkeypatch):
    """Links that move all at once, and steps that show so: what moves then does not depend on the machine's disk."""
    from rk_solvers import Link, SecondMemory
    from rockmate.offload import tiers
    from rockmate.offload.file_tier import FileTier
    from rockmate.offload.host_tier import HostTier
    from rockmate.offload.tier import Traffic
    from rockmate.planning.trying import moving

    def links(tier, device, *_):
        tier.send(torch.ones(1, device=device).untyped_storage()).wait_sent()  # there is one
        return SecondMemory(Link(1e9), Link(1e9), tier.limit_bytes, unit_bytes=tier.unit_bytes)

    monkeypatch.setattr(tiers, "measured_links", links)
    for tier in (FileTier, HostTier):  # what transfers within steps show is the machine's
        monkeypatch.setattr(tier, "traffic", lambda _: (Traffic(), Traffic()))
    monkeypatch.setattr(moving, "steps_by_turns_ms", lambda *_: [1.0, 2.0])  # of the plan that moves, and of the other
