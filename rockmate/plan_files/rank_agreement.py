"""One plan for all ranks: the first that needs it makes it, the others follow.

Nothing here is collective: a rank may plan what no other ever plans, such as a short last batch. Ranks meet in the
key-value store of their process group, under a digest of what decides a plan. The first to come claims it, plans, and
publishes what it decided, with the times that it measured; later ones wait for that, and follow it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
import torch

from rk_solvers import Problem, Solver
from rkgb.devices.registry import device_of
from rkgb.errors import RockmateError
from rkgb.process.turns import TURNS
from rkgb.torch_private.ranks import default_store
from rockmate import errors
from rockmate.errors import BudgetTooSmall, PlanExchangeError, PlanExchangeWarning, PlanMismatch
from rockmate.memory.budget import RESERVE, Budget, is_what_is_free, read_budget, resolve_budget
from rockmate.planning.costs import LOSS
from rockmate.planning.fixed_plan import FixedPlan, PortablePlan
from rockmate.planning.measured import Measured
from rockmate.planning.plan import Plan
from rockmate.planning.request import PlanRequest

_FORMAT = "rockmate plan 2"  # keys of another form of the content are others'
_LONGEST_POLL_S = 0.25
_ATTEMPTS = 6  # searches that one plan may take
_MARGIN_S = 180.0  # for real steps, the smallest budget of a refusal, and a machine that others use


class HasPlan(Protocol):
    """What planning returns."""

    plan: Plan


P = TypeVar("P", bound=HasPlan)
MakePlan = Callable[[Measured, PlanRequest, torch.nn.Module], P]
_alone: ContextVar[bool] = ContextVar("rockmate_plans_alone", default=False)


@contextlib.contextmanager
def plan_alone() -> Iterator[None]:
    """Within this context, this rank plans for itself alone: nothing is published, nobody is followed."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


class RankAgreement:
    """What ranks agree upon through a key-value store of `torch.distributed`, without a collective.

    Args:
        store: any store that all ranks share, such as that of their process group.
        rank: this one's number, to name who made what.
        timeout_s: how long to wait for another rank's text before giving up.
    """

    def __init__(self, store: Any, rank: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s

    def agree(self, key: str, make: Callable[[], str]) -> tuple[str, bool]:
        """The text under `key`, and whether this rank made it: by `make`, unless another one was first.

        Raises what `make` raises; on the ranks that wait for it, the same error if it is one of `rockmate.errors`, else
        `PlanExchangeError`, as where nothing comes in time. The next rank to come after an error tries again.
        """
        attempt = 0
        while True:
            place = f"{key}/{attempt}"
            if self._store.add(f"{place}/claims", 1) == 1:
                return self._make(place, make), True
            stale = self._store.check([f"{place}/text"])
            content = json.loads(self._wait(place))
            if "text" in content:
                return content["text"], False
            if not stale:
                raise _raised(content)
            attempt += 1  # it failed before this rank came: what was wrong may be over

    def agree_on(self, content: Any, kind: Any, find: Callable[[], Any]) -> Any:
        """What `find` gives, of that kind, on the first rank to come for `content`. Raises as `agree`."""
        text, _ = self.agree(key_of(content), lambda: msgspec.json.encode(find()).decode())
        return msgspec.json.decode(text.encode(), type=kind)

    def _make(self, place: str, make: Callable[[], str]) -> str:
        try:
            text = make()
        except BaseException as error:
            self._publish(place, _told(error, self._rank))
            raise
        self._publish(place, {"text": text})
        return text

    def _publish(self, place: str, content: dict[str, Any]) -> None:
        self._store.set(f"{place}/text", json.dumps(content))

    def _wait(self, place: str) -> str:
        """By looking again and again: a wait in the store could not be interrupted from the keyboard."""
        deadline, pause_s = time.monotonic() + self._timeout_s, 0.005
        while not self._store.check([f"{place}/text"]):
            if time.monotonic() > deadline:
                raise PlanExchangeError(
                    f"the rank that began to plan has published nothing for {self._timeout_s:.0f} s: it may have "
                    "ended, or be slower than its time_limit lets expect."
                )
            with TURNS.others_plan():  # perhaps that rank is a thread of this process
                time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        return str(self._store.get(f"{place}/text").decode())


def default_exchange(search_s: float) -> RankAgreement | None:
    """That of the default process group; None where there is none, or nobody else in it, or `plan_alone`.

    It waits for a plan as long as all its searches, which take `search_s`, and what goes with them may take.
    """
    distributed = torch.distributed
    if _alone.get() or not distributed.is_available() or not distributed.is_initialized():
        return None
    if distributed.get_world_size() < 2:
        return None
    store = default_store()
    return RankAgreement(store, distributed.get_rank(), search_s + _MARGIN_S)


def plan_with_others(
    measured: Measured, request: PlanRequest, module: torch.nn.Module, make_plan: MakePlan[P]
) -> tuple[Measured, P]:
    """What ``make_plan(measured, request, module)`` returns, or a plan that follows the one of another rank.

    The measured times are then that rank's, so that every rank tells the same of the same plan. Without other ranks,
    and where this one cannot do as another did, it plans by itself; in the second case it warns
    (`PlanExchangeWarning`). Raises what `make_plan` raises here or there.
    """
    exchange = default_exchange(_ATTEMPTS * request.limits.longest_s)
    if exchange is None or isinstance(request.solver, FixedPlan):
        return measured, make_plan(measured, request, module)
    made: list[P] = []

    def publish() -> str:
        made.append(make_plan(measured, request, module))
        return _Published.of(measured, made[0].plan).to_json()

    try:
        text, own = exchange.agree(plan_key(measured, request), publish)
        if own:
            return measured, made[0]
        return _followed(measured, request, module, _Published.from_json(text), make_plan)
    except _CannotFollow as reason:
        told = str(reason)
    except PlanExchangeError as error:
        if error.rank is not None:
            raise
        told = str(error)
    warn_alone(module, told)
    return measured, make_plan(measured, request, module)


def warn_alone(module: torch.nn.Module, reason: str) -> None:
    """Tell that this rank plans `module` by itself."""
    warnings.warn(
        f"this rank plans {type(module).__name__} by itself, and may recompute other operations than the others do "
        f"(gradients are the same): {reason}",
        PlanExchangeWarning,
        stacklevel=6,  # who calls Rockmate(...)
    )


def _followed(
    measured: Measured, request: PlanRequest, module: torch.nn.Module, published: _Published, make_plan: MakePlan[P]
) -> tuple[Measured, P]:
    try:
        problem = published.with_times(measured.problem)
        same = dataclasses.replace(measured, problem=problem, drawn_sooner_ms=published.drawn_sooner_ms)
        same_request = dataclasses.replace(
            request,
            solver=FixedPlan(published.decisions, published.lower_bound_ms),
            budget=_budget(measured, request, published.budget_bytes),
            follow=None,  # by who planned, if at all
        )
        planned = make_plan(same, same_request, module)
    except PlanMismatch as error:
        raise _CannotFollow(str(error)) from None
    except BudgetTooSmall as error:
        raise _CannotFollow(f"what another rank planned does not fit here. {error}") from None
    planned.plan = dataclasses.replace(planned.plan, lower_bound_ms=published.lower_bound_ms)
    return same, planned


def _budget(measured: Measured, request: PlanRequest, published_bytes: int) -> Budget:
    """The publisher's, where each rank would take what is free and has about as much: later plans are for it, too."""
    if not is_what_is_free(request.budget):
        return request.budget
    present_bytes = 0 if measured.residents is None else measured.residents.present_bytes
    own_bytes = resolve_budget(None, measured.eager_peak_bytes, measured.device, present_bytes)
    return published_bytes if published_bytes <= own_bytes * (1 + RESERVE / 2) else request.budget


def plan_key(measured: Measured, request: PlanRequest) -> str:
    """A digest of what decides a plan: operations and their bytes, the budget, the search, the kind of device.

    Times are left out, as no two ranks measure the same; so are workspaces, which libraries choose by what is free.
    """
    problem = measured.problem
    solver = request.solver
    if not isinstance(solver, str):
        solver = solver_text(solver) or _kind_of(solver)
    content = [
        [(item.name, item.size_bytes, item.producer) for item in problem.data],
        [(op.name, op.inputs, op.outputs, op.recomputable) for op in problem.forward],
        [(op.name, op.needs, op.resident_bytes, op.peak_bytes * (op.name == LOSS)) for op in problem.backward],
        sorted(problem.held),
        ["auto" if is_what_is_free(request.budget) else read_budget(request.budget), request.scope],
        [solver, dataclasses.asdict(request.limits), None if request.follow is None else request.follow.to_json()],
        device_of(measured.device).name,
    ]
    return key_of(content)


def key_of(content: Any) -> str:
    """A key for what is made of `content`, which is any that JSON can hold: equal where that is."""
    text = json.dumps([_FORMAT, content], default=str)
    return f"rockmate/{hashlib.sha256(text.encode()).hexdigest()}"


def solver_text(solver: Solver) -> str | None:
    """Equal for solvers that search alike, in every process; None where that cannot be told."""
    return f"{_kind_of(solver)} {solver!r}" if dataclasses.is_dataclass(solver) else None


def _kind_of(solver: Solver) -> str:
    return f"{type(solver).__module__}.{type(solver).__qualname__}"


class _CannotFollow(Exception):
    """This rank's module or memory is unlike that of the rank that planned."""


@dataclass(frozen=True, slots=True)
class _Published:
    """What other ranks are told of a plan."""

    decisions: PortablePlan
    forward_ms: tuple[tuple[float, float | None], ...]  # the first time, and again
    backward_ms: tuple[float, ...]
    drawn_sooner_ms: float
    lower_bound_ms: float | None
    budget_bytes: int  # of the step, or of all of training

    @staticmethod
    def of(measured: Measured, plan: Plan) -> _Published:
        problem = measured.problem
        return _Published(
            PortablePlan.of(plan.schedule, plan.solver),
            tuple((op.time_ms, op.repeat_ms) for op in problem.forward),
            tuple(op.time_ms for op in problem.backward),
            measured.drawn_sooner_ms,
            plan.lower_bound_ms,
            plan.whole_budget_bytes,
        )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self) | {"decisions": self.decisions.to_json()})

    @staticmethod
    def from_json(text: str) -> _Published:
        content = json.loads(text)
        return _Published(
            PortablePlan.from_json(content["decisions"]),
            tuple((time_ms, repeat_ms) for time_ms, repeat_ms in content["forward_ms"]),
            tuple(content["backward_ms"]),
            content["drawn_sooner_ms"],
            content["lower_bound_ms"],
            content["budget_bytes"],
        )

    def with_times(self, problem: Problem) -> Problem:
        """`problem`, whose operations take as long as on the rank that planned."""
        forward = zip(problem.forward, self.forward_ms, strict=True)
        backward = zip(problem.backward, self.backward_ms, strict=True)
        return dataclasses.replace(
            problem,
            forward=tuple(dataclasses.replace(op, time_ms=ms, repeat_ms=again) for op, (ms, again) in forward),
            backward=tuple(dataclasses.replace(op, time_ms=time_ms) for op, time_ms in backward),
        )


# ---- errors, as text ---------------------------------------------------------------------------------


def _told(error: BaseException, rank: int) -> dict[str, Any]:
    content = {"error": type(error).__name__, "message": str(error), "rank": rank}
    if isinstance(error, BudgetTooSmall):
        content["numbers"] = [error.smallest_budget_bytes, error.binding_op, error.proven_bytes]
    return content


def _raised(content: dict[str, Any]) -> RockmateError:
    """The error of another rank: of the same class where it is one of ours."""
    rank, name = content["rank"], content["error"]
    message = f"{content['message']} (Said by rank {rank}, which planned for all.)"
    if "numbers" in content:
        return BudgetTooSmall(message, *content["numbers"])
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, RockmateError) and kind not in (BudgetTooSmall, PlanExchangeError):
        return kind(message)
    return PlanExchangeError(
        f"rank {rank}, which planned for all ranks, failed with {name}: {content['message']}. Rockmate(...) within "
        "rockmate.distributed.plan_alone() plans on each rank by itself.",
        rank,
    )
