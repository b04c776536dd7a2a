"""One plan for all ranks: made once, followed by the others, and nobody waits in vain."""

import threading
import time

import pytest
from torch.distributed import HashStore

from rockmate.errors import BudgetError, BudgetTooSmall, PlanExchangeError
from rockmate.plan_files.rank_agreement import RankAgreement
from tests.distributed import agreement
from tests.distributed.ranks import Ranks


def test_one_rank_plans_and_all_have_its_plan(two: Ranks):
    results = two.run(agreement.plan_once, 300)
    assert sum(solved for solved, _, _ in results) == 1
    plans = [plan for _, *both in results for plan in both]
    assert plans[0]["recomputations"] > 0
    assert plans[0]["fits"]
    assert all(plan == plans[0] for plan in plans)  # of the second time, too


@pytest.mark.slow
def test_four_ranks_have_one_plan(four: Ranks):
    results = four.run(agreement.plan_once, 310)
    assert sum(solved for solved, _, _ in results) == 1
    assert all(first == second == results[0][1] for _, first, second in results)


def test_ranks_with_other_models_plan_their_own(two: Ranks):
    (first, first_s), (second, second_s) = two.run(agreement.plan_different, 320)
    assert first["schedule"] != second["schedule"]
    assert max(first_s, second_s) < 60


def test_any_order_of_plans_ends(two: Ranks):
    first, second = two.run(agreement.plan_crosswise, 330)
    assert first == second


def test_a_rank_may_plan_what_no_other_does(two: Ranks):
    assert two.run(agreement.plan_on_one_rank, 171)[1] > 0


def test_all_ranks_are_told_that_the_budget_is_too_small(two: Ranks):
    first, second = two.run(agreement.too_small, 340)
    assert first[1:] == second[1:]
    assert first[0].partition(" (Said by")[0] == second[0].partition(" (Said by")[0]


def test_an_error_of_the_planning_rank_reaches_all_and_is_not_for_ever(two: Ranks):
    results = two.run(agreement.fails_then_works, 350)
    told = sorted(message.partition(":")[0] for message, _ in results)
    assert told == ["PlanExchangeError", "ZeroDivisionError"]
    assert all("a defect of a solver" in message for message, _ in results)
    assert results[0][1] == results[1][1]
    assert results[0][1]["recomputations"] > 0


def test_ranks_can_plan_alone(two: Ranks):
    assert [solved for solved, _ in two.run(agreement.plan_by_itself, 360)] == [1, 1]


def test_a_rank_with_less_memory_plans_for_it(two: Ranks):
    (untold, first), (told, second) = two.run(agreement.cannot_follow, 370)
    assert not untold
    assert len(told) == 1
    assert "does not fit here" in told[0]
    assert first["fits"]
    assert second["fits"]
    assert second["recomputations"] > first["recomputations"]


# ---- the exchange itself ---------------------------------------------------------------------------


def exchanges(count: int, timeout_s: float = 20.0) -> list[RankAgreement]:
    store = HashStore()
    return [RankAgreement(store, rank, timeout_s) for rank in range(count)]


def test_of_many_at_once_exactly_one_makes():
    made: list[int] = []
    found: list[tuple[str, bool]] = []

    def rank(exchange: RankAgreement, number: int) -> None:
        def make() -> str:
            made.append(number)
            time.sleep(0.1)
            return f"by {number}"

        found.append(exchange.agree("key", make))

    threads = [threading.Thread(target=rank, args=(e, n)) for n, e in enumerate(exchanges(8))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert {text for text, _ in found} == {f"by {made[0]}"}
    assert [own for _, own in found].count(True) == 1


def test_who_waits_in_vain_is_told():
    first, second = exchanges(2, timeout_s=0.3)
    begun, ended = threading.Event(), threading.Event()

    def never() -> str:
        begun.set()
        ended.wait()
        return ""

    thread = threading.Thread(target=first.agree, args=("key", never))
    thread.start()
    begun.wait()
    with pytest.raises(PlanExchangeError, match="published nothing for 0 s"):
        second.agree("key", lambda: "never made")
    ended.set()
    thread.join()
    assert second.agree("key", lambda: "never made") == ("", False)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (BudgetTooSmall("none fits", 7, "compute x", 5), BudgetTooSmall),
        (BudgetError("more than there is"), BudgetError),
        (MemoryError("no memory left"), PlanExchangeError),
        (KeyboardInterrupt("stopped"), PlanExchangeError),
    ],
)
def test_who_waits_gets_the_error_and_who_comes_later_tries_again(error, expected):
    first, second, third = exchanges(3)
    waiting = threading.Event()
    raised: list[BaseException] = []

    def fail() -> str:
        waiting.wait()
        time.sleep(0.1)
        raise error

    def make() -> None:
        try:
            first.agree("key", fail)
        except BaseException as own:  # noqa: BLE001, whatever it is
            raised.append(own)

    thread = threading.Thread(target=make)
    thread.start()
    time.sleep(0.1)
    waiting.set()
    with pytest.raises(expected, match=str(error)) as told:
        second.agree("key", lambda: "not needed")
    thread.join()
    assert raised == [error]
    assert "rank 0" in str(told.value)
    if isinstance(error, BudgetTooSmall):
        assert (told.value.smallest_budget_bytes, told.value.proven_bytes) == (7, 5)
    assert third.agree("key", lambda: "made anew") == ("made anew", True)
    assert second.agree("key", lambda: "not needed") == ("made anew", False)
