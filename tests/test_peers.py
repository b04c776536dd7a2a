"""Ways to train beside ours: each is told right from wrong, and the page shows what was measured."""

import argparse
import functools
import json
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.peers import auto_sac, checkpointing, compiled, library, ours, page, pareto
from benchmarks.peers.bars import ANY, ANY_THAT_EXISTS, THIRD, bars_of, time_bar
from benchmarks.peers.case import Built, Case, Peer
from benchmarks.peers.families import Family
from benchmarks.peers.measuring import Contender, draws, first_trace, line_up, result_of, time_all
from benchmarks.peers.models import RECIPES, case_named
from benchmarks.peers.monet import PUBLISHED
from benchmarks.peers.registry import peers_for
from benchmarks.peers.sittings import sit
from benchmarks.peers.slope import slope_by_norm
from rockmate.errors import BudgetTooSmall
from tests.scripts import load_script, run_script, written_between_marks

EAGER = checkpointing.PEERS[0]


def chain_case(*, norm: bool = False, dropout: float = 0.1, blocks: int = 4) -> Case:
    """A chain of small blocks."""
    torch.manual_seed(0)

    def block() -> nn.Module:
        layers = [nn.Linear(16, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 16)]
        return nn.Sequential(*layers, nn.BatchNorm1d(16)) if norm else nn.Sequential(*layers)

    model = nn.Sequential(*(block() for _ in range(blocks)), nn.Linear(16, 4))
    sample, target = torch.randn(256, 16), torch.randint(4, (256,))
    chains = (tuple((str(place),) for place in range(blocks)),)
    return Case("chain", model, (sample,), lambda output: nn.functional.cross_entropy(output, target), chains)


def contenders_of(case, *peers):
    return line_up(case, [EAGER, *peers], lambda contender: None)


def named(peers, text):
    return next(peer for peer in peers if text in peer.label)


@pytest.mark.ci
@pytest.mark.slow
def test_all_kinds_of_checkpoint_train_exactly_and_save_memory():
    eager, *others = contenders_of(chain_case(), *checkpointing.PEERS[1:])
    assert eager.status == "exact"
    running = [contender for contender in others if contender.runs]
    assert len(running) == 8
    assert {contender.status for contender in running} == {"exact"}
    assert all(contender.random_equal for contender in running)
    by_label = {contender.label: contender for contender in others}
    assert by_label["checkpoint, per block"].peak_bytes < eager.peak_bytes
    assert by_label["checkpoint, per block, BatchNorm mended"].reason == "it has no BatchNorm"


@pytest.mark.ci
@pytest.mark.slow
def test_a_batch_counted_twice_is_wrong_unless_it_is_mended():
    case = chain_case(norm=True)
    peers = [named(checkpointing.PEERS, text) for text in ("per block", "per block, BatchNorm", "matmuls, BatchNorm")]
    _, plain, mended, selective = contenders_of(case, *peers)
    assert (plain.status, plain.gradients_equal, plain.buffers_equal) == ("wrong", True, False)
    assert (mended.status, selective.status) == ("exact", "exact")


@pytest.mark.ci
def test_wrong_gradients_are_wrong_and_failures_have_a_reason():
    def half(case: Case, eager_peak_bytes: int) -> Built:
        model = case.fresh_model()
        first = next(iter(model.parameters()))
        first.register_hook(lambda gradient: gradient / 2)
        return Built(model, model)

    def broken(case: Case, eager_peak_bytes: int) -> Built:
        raise RuntimeError("no such thing\nat all")

    _, wrong, failed = contenders_of(
        chain_case(), Peer("half", Family.CHECKPOINT, half), Peer("broken", Family.CHECKPOINT, broken)
    )
    assert (wrong.status, wrong.gradients_equal) == ("wrong", False)
    assert "gradients off by" in wrong.reason
    assert (failed.status, failed.reason, failed.runs) == ("failed", "RuntimeError: no such thing", False)


def test_who_is_not_ready_in_time_is_out():
    def slow(case: Case, eager_peak_bytes: int) -> Built:
        while True:
            time.sleep(0.01)

    _, late = line_up(chain_case(), [EAGER, Peer("slow", Family.CHECKPOINT, slow)], lambda contender: None, limit_s=0.3)
    assert (late.status, late.reason) == ("failed", "TimeoutError: not ready within 0 s")


def test_contenders_share_weights_and_nothing_else():
    case = chain_case(norm=True)
    first, second = case.fresh_model(), case.fresh_model()
    assert {value.data_ptr() for value in first.parameters()} == {value.data_ptr() for value in second.parameters()}
    case.step(first)
    assert all(value.grad is None for value in [*second.parameters(), *case.model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(second.buffers(), case.model.buffers(), strict=True))
    assert not torch.equal(first.get_buffer("0.4.running_mean"), second.get_buffer("0.4.running_mean"))


@pytest.mark.ci
def test_other_random_numbers_are_judged_by_the_slope_of_the_loss():
    def of_seed(case: Case, eager_peak_bytes: int, *, seed: int, late: int | None = None) -> Built:
        """Draws its masks from another seed; with `late`, its gradients are those of a third one."""
        model = case.fresh_model()

        def call(batch: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(seed)
            output = model(batch)
            if late is None:
                return output
            torch.manual_seed(late)
            other = model(batch)
            return other + (output - other).detach()

        return Built(model, call, own_numbers=True)

    right = Peer("right", Family.CHECKPOINT, functools.partial(of_seed, seed=5))
    wrong = Peer("wrong", Family.CHECKPOINT, functools.partial(of_seed, seed=5, late=6))
    _, right, wrong = contenders_of(chain_case(dropout=0.3), right, wrong)
    assert right.status == "close"
    assert right.slope == pytest.approx(1, abs=0.005)
    assert wrong.status == "wrong"
    assert "slope" in wrong.reason


@pytest.mark.ci
@pytest.mark.slow
def test_sums_in_another_order_are_judged_by_the_loss_and_statistics_by_eagers():
    def built(
        case: Case, eager_peak_bytes: int, *, factor: float = 1.0, noise: float = 0.0, twice: bool = False
    ) -> Built:
        """Gradients are those of a loss `factor` times as large, with `noise`; with `twice`, batches count twice."""
        model = case.fresh_model()
        generator = torch.Generator().manual_seed(0)

        def noisy(gradient: torch.Tensor) -> torch.Tensor:
            other = torch.randn(gradient.shape, generator=generator)
            return gradient + noise * gradient.norm() / other.norm() * other

        for parameter in model.parameters() if noise else ():
            parameter.register_hook(noisy)

        def call(batch: torch.Tensor) -> torch.Tensor:
            output = model(batch)
            if twice:
                model(batch)
            return output + (factor - 1) * (output - output.detach())

        return Built(model, call, own_numbers=True)

    rounded, near, far, counted = (
        Peer("other", Family.CHECKPOINT, functools.partial(built, **options))
        for options in ({"noise": 0.03}, {"factor": 1.02}, {"factor": 1.2}, {"factor": 1.2, "twice": True})
    )
    _, rounded, near, far, counted = contenders_of(chain_case(norm=True, dropout=0.0), rounded, near, far, counted)
    assert (rounded.status, near.status, far.status, counted.status) == ("close", "wrong", "wrong", "wrong")
    assert "another order" in rounded.reason
    assert "off by" in rounded.reason
    assert far.slope == pytest.approx(1 / 1.2, abs=0.01)
    assert "slope" in near.reason
    assert counted.slope is None
    assert "BatchNorm" in counted.reason


def test_the_slope_leaves_the_weights_as_they_were():
    case = chain_case()
    built = EAGER.build(case, 0)
    before = [value.detach().clone() for value in built.weights.parameters()]
    trace = first_trace(case, built)
    assert draws(trace, torch.device("cpu"))
    slope_by_norm(case, built, trace.gradients)
    assert all(torch.equal(*pair) for pair in zip(before, built.weights.parameters(), strict=True))
    still = chain_case(dropout=0.0)
    assert not draws(first_trace(still, EAGER.build(still, 0)), torch.device("cpu"))


@pytest.mark.ci
def test_ours_keeps_its_budget_and_a_refusal_tells_bytes():
    shares = (0.7, 0.001)
    peers = [peer for peer in ours.peers(shares) if peer.family is Family.OURS]
    eager, good, refused = contenders_of(chain_case(blocks=8), *peers)
    assert good.status == "exact"
    assert good.peak_bytes <= good.budget_bytes == int(0.7 * eager.peak_bytes)
    assert good.predicted_ratio >= 1
    assert (refused.status, refused.runs) == ("refused", False)
    assert refused.budget_bytes < refused.proven_bytes <= refused.smallest_budget_bytes


def test_a_refusal_within_the_compiler_s_error_is_one():
    def refuse(case, eager_peak_bytes):
        try:
            raise BudgetTooSmall("no division", smallest_budget_bytes=4096, binding_op="", proven_bytes=0)
        except BudgetTooSmall as error:
            raise RuntimeError("backend='inductor' raised") from error

    eager, refused = contenders_of(chain_case(), Peer("partitioned", Family.COMPILE, refuse, 0.5))
    assert (refused.status, refused.smallest_budget_bytes, refused.proven_bytes) == ("refused", 4096, None)
    assert page.remarks(result_of(refused, [eager])) == "no plan fits the budget; smallest budget 4.00 KiB"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_code_is_compared_within_a_tolerance():
    peers = [named(compiled.PEERS, f"aot_eager, budget {budget}") for budget in ("1.0", "0.3")]
    case = chain_case(dropout=0.0)
    contenders = contenders_of(case, *peers)
    assert {contender.status for contender in contenders} <= {"exact", "close"}
    time_all(case, contenders, 2, lambda text: None)
    assert all(len(contender.step_ms) == 2 for contender in contenders)


@pytest.mark.ci
@pytest.mark.slow
def test_every_round_times_all_that_run():
    contenders = contenders_of(chain_case(), *checkpointing.PEERS[1:4])
    time_all(chain_case(), contenders, 2, lambda text: None)
    assert [len(contender.step_ms) for contender in contenders] == [2, 2, 2, 2]
    found = result_of(contenders[2], contenders[:1])
    assert found["time_ratio"] > 0
    assert found["time_error"] > 0


def test_ratios_of_sittings_are_taken_in_each_and_then_together():
    eagers = [
        Contender("eager", Family.EAGER, sitting_ms=times, peak_bytes=10) for times in ([90.0, 190.0], [110.0, 210.0])
    ]
    plan = Contender("rockmate 0.50", Family.OURS, step_ms=[1.0], sitting_ms=[110.0, 240.0], peak_bytes=5)
    found = result_of(plan, eagers)
    assert found["time_ratio"] == pytest.approx((1.1 + 1.2) / 2)
    assert found["time_error"] == pytest.approx(0.05)
    assert found["median_ms"] == 175.0


@pytest.mark.slow
def test_a_sitting_is_a_fresh_process_that_follows_the_plans():
    options = argparse.Namespace(threads=1, device="cpu", dtype="float32", rounds=2, batch_factor=None, quick=True)
    options.sittings = 2
    case = case_named("mixer", quick=True)
    peers = [peer for peer in peers_for((0.7,)) if peer.family in (Family.EAGER, Family.OURS)]
    contenders = line_up(case, peers, lambda contender: None)
    assert sit("mixer", contenders, options, lambda text: None) == 2
    assert [len(contender.sitting_ms) for contender in contenders] == [2, 2, 2]
    assert all(time_ms > 0 for contender in contenders for time_ms in contender.sitting_ms)
    options.device = "no such device"
    assert sit("mixer", contenders, options, lambda text: None) == 0
    assert [len(contender.sitting_ms) for contender in contenders] == [2, 2, 2]


def test_eager_alone_needs_no_sitting():
    """A model none of whose plans fits, as VGG-16, is not run again in five processes."""
    contenders = contenders_of(chain_case())
    assert [contender.family for contender in contenders] == [Family.EAGER]
    assert sit("vgg16", contenders, argparse.Namespace(sittings=5), lambda text: None) == 0


@pytest.mark.ci
def test_what_a_library_does_not_offer_is_told():
    _, hugging_face, offloaded, automatic = contenders_of(chain_case(), *library.PEERS, auto_sac.PEERS[0])
    assert (hugging_face.status, hugging_face.reason) == ("does not apply", "no model of the transformers library")
    assert offloaded.status == "exact"
    assert "saves nothing" in offloaded.note
    assert automatic.status == "exact" or automatic.reason


def test_decisions_of_a_policy_are_followed_in_order():
    contexts = auto_sac.following([0, 1, 0], frozenset())
    peer = Peer("x", Family.AUTO_SAC, functools.partial(checkpointing.per_block, contexts_of=lambda model: contexts))
    _, contender = contenders_of(chain_case(), peer)
    assert contender.status == "exact"


def test_registry_and_recipes_are_whole():
    peers = peers_for((0.5,))
    assert peers[0] is EAGER
    assert {peer.family for peer in peers} == set(Family)
    assert len({peer.label for peer in peers}) == len(peers)
    assert not [peer for peer in peers_for((0.5,), ("compile",)) if peer.family == "compile"]


@pytest.mark.parametrize("name", [name for name in RECIPES if not name.startswith("hf-")])
def test_blocks_of_a_case_are_its_submodules(name):
    case = case_named(name, quick=True)
    paths = [path for block in case.blocks for path in block]
    assert len(set(paths)) == len(paths) > 1
    assert all(case.model.get_submodule(path) is not None for path in paths)


def result(share, ratio, **others):
    plain = {"family": "rockmate", "status": "exact", "share": share, "time_ratio": ratio, "predicted_ratio": 1.1}
    return plain | {"gap": 0.01, "reason": "", "proven_bytes": None, "budget_bytes": 100, "random_equal": True} | others


def test_bars_say_what_was_reached():
    bars = {bar["label"]: bar for bar in bars_of("gpt2", [result(0.7, 1.02), result(0.5, 1.2)])}
    assert bars["time at 0.70"]["met"]
    assert not bars["time at 0.50"]["met"]
    assert bars["time at 0.40"]["reason"] == "was not run"
    assert bars["gap at 0.70"]["met"]
    assert not bars["measured from predicted time at 0.70"]["met"]
    refused = result(0.5, None, status="refused", reason="no plan fits the budget", proven_bytes=120)
    assert time_bar(0.5, ANY_THAT_EXISTS, refused)["met"]
    assert not time_bar(0.5, ANY, refused)["met"]
    assert time_bar(0.5, ANY, result(0.5, 9.0))["met"]
    assert not time_bar(0.5, ANY, result(0.5, 9.0, status="wrong", reason="buffers"))["met"]
    assert not time_bar(0.5, ANY, result(0.5, 9.0, random_equal=False))["met"]


def test_what_monet_published_is_whole():
    assert PUBLISHED.keys() == {name for name, recipe in RECIPES.items() if recipe.as_published is not None}
    for found in PUBLISHED.values():
        memory_gb, percents = zip(*found.points, strict=True)
        assert found.eager_gb > memory_gb[0]
        assert list(memory_gb) == sorted(memory_gb, reverse=True)
        assert list(percents) == sorted(percents)
    assert PUBLISHED["resnet50"].ratios[-1] == pytest.approx((0.331, 1.1195), abs=5e-4)


def test_on_a_gpu_the_time_at_a_third_is_held_against_what_monet_published():
    results = [result(THIRD, 1.13)]
    assert [bar["label"] for bar in bars_of("googlenet", results) if bar["label"].startswith("time")] == []
    for name, is_met in (("googlenet", True), ("resnet50", False)):
        (bar,) = [bar for bar in bars_of(name, results, on_gpu=True) if bar["label"] == "time at 0.33"]
        assert (bar["reached"], bar["limit"], bar["met"]) == (1.13, PUBLISHED[name].ratios[-1][1], is_met)


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_of_monet_s_table_have_its_batches_and_images(name):
    model, (images,), _ = RECIPES[name].as_published(torch.device("cpu"))
    sides = (416, 608) if name == "unet" else (224, 224)
    assert images.shape == (PUBLISHED[name].batch, 3, *sides)
    paths = [path for chain in RECIPES[name].find(model) for block in chain for path in block]
    assert all(model.get_submodule(path) is not None for path in paths)


def report_of(case: Case) -> dict:
    greedy = named(ours.peers((0.7,)), "greedy")
    contenders = contenders_of(case, *checkpointing.PEERS[1:], greedy)
    time_all(case, contenders, 2, lambda text: None)
    where = {
        "torch": "2.13.0",
        "threads": 2,
        "dtype": "float32",
        "repeats": 2,
        "sittings": 0,
        "code": "abc",
        "skipped": [],
    }
    results = [result_of(contender, contenders[:1]) for contender in contenders]
    for found in results:
        if found["family"] == Family.OTHER_SOLVERS:
            found["family"] = Family.OURS
    circumstances = where | {"gpu": None, "device": "cpu"}
    return {
        "model": "gpt2",
        "circumstances": circumstances,
        "contenders": results,
        "bars": bars_of("gpt2", results),
    }


@pytest.mark.ci
@pytest.mark.slow
def test_page_and_picture_show_what_the_result_file_holds(tmp_path):
    report = report_of(chain_case(norm=True, blocks=6))
    path = tmp_path / "peers-gpt2-cpu.json"
    path.write_text(json.dumps(report), encoding="utf-8")
    tables = load_script("docs/make_tables.py")
    text = written_between_marks(tables.BEGIN, tables.END, lambda page: tables.peers_page(page, [path]))
    for part in (
        "images/peers-gpt2-cpu.svg",
        "| checkpoint, per block | **wrong** |",
        "rockmate 0.50, greedy",
        "code at abc",
    ):
        assert part in text
    pictures = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for picture in pictures:
        pareto.draw(report, picture)
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert "MONeT" not in "".join(page.sections([report], "images"))
    as_published = "| MONeT, as published | – | – | 1.119 × | – | – | – | 0.331 | – | – | on its authors' GPU,"
    assert as_published in "".join(page.sections([report | {"model": "resnet50"}], "images"))
    there = {"tag": "a-server", "processor": "a chip", "wait_policy": "ACTIVE"}
    elsewhere = report | {"circumstances": report["circumstances"] | there}
    assert page.file_name(elsewhere) == "peers-gpt2-cpu-a-server"
    told = "\n".join(page.sections([elsewhere], "images"))
    assert "### gpt2 on cpu, a-server" in told
    assert "Processor: a chip. Threads spin while they wait." in told
    assert page.NO_RESULTS in tables.peers_page(f"{tables.BEGIN}{tables.END}", [])


@pytest.mark.slow
def test_script_writes_its_results(tmp_path):
    options = "--quick --models gpt2 --repeats 2 --sittings 1 --rounds 2 --skip-families compile --only".split()
    run_script("benchmarks/against_peers.py", *options, "per block", "rockmate 0.50", "--output", str(tmp_path))
    (path,) = Path(tmp_path).iterdir()
    assert path.name == "peers-gpt2-cpu.json"
    report = json.loads(path.read_text(encoding="utf-8"))
    contenders = {contender["label"]: contender for contender in report["contenders"]}
    assert {"eager", "checkpoint, per block", "rockmate 0.50", "rockmate 0.50, greedy"} <= contenders.keys()
    plan = contenders["rockmate 0.50"]
    assert plan["status"] == "exact"
    assert plan["peak_bytes"] <= plan["budget_bytes"]
    assert plan["bound_ratio"] <= plan["predicted_ratio"]
    assert [bar["limit"] for bar in report["bars"][:5]] == [1.03, 1.08, 1.12, 1.18, 1.30]
    assert report["circumstances"]["code"]
    assert report["circumstances"]["keeps_freed_memory"] == (sys.platform == "linux")
    text = "\n".join(page.sections([report], "images"))
    assert "| rockmate 0.50 | exact |" in text
