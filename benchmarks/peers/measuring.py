"""What is measured of each way to train a model: exactness, peak, and time, all in one process."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.case import SEED, Built, Case, NotForThisModel, Peer, peak_of
from benchmarks.peers.families import Family
from benchmarks.peers.slope import SLOPE_TOLERANCE, slope_by_norm
from rockmate.compile.checking import refusal_in

# Where a gradient is not eager's to the bit, how far it may be off: the norm of the difference by that of the gradient,
# or by a hundredth of that of all gradients where this is larger. Wrong masks or counts are off by a tenth and more.
TOLERANCES = {torch.float32: 1e-2, torch.float64: 1e-6, torch.bfloat16: 1e-1, torch.float16: 1e-1}
FLOOR = 1e-2

LIMIT_S = 900.0  # to get ready in

EXACT, CLOSE, WRONG = "exact", "close", "wrong"  # runs: to the bit, within the tolerance, or beyond it
UNKNOWN = "unknown"  # runs, and nothing can be said of its gradients
REFUSED, ABSENT, FAILED = "refused", "does not apply", "failed"  # does not run, and the reason says why


@dataclass(frozen=True)
class Trace:
    """What one step leaves behind."""

    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    random: list[Tensor]  # state of each generator


@dataclass
class Contender:
    """A way to train one model, and what was measured of it."""

    label: str
    family: Family
    status: str = FAILED
    reason: str = ""
    note: str = ""
    share: float | None = None  # of the eager peak, asked for
    budget_bytes: int | None = None
    ready_s: float | None = None  # from the model to the end of the first step: planning, compiling
    peak_bytes: int | None = None  # measured
    gradients_equal: bool | None = None
    largest_difference: float | None = None  # of a gradient's element
    relative_difference: float | None = None  # as the tolerance has it
    slope: float | None = None  # of the loss along the gradient, by its norm, where random numbers are not eager's
    buffers_equal: bool | None = None
    random_equal: bool | None = None
    predicted_peak_bytes: int | None = None
    predicted_ratio: float | None = None  # time of the plan by that of keeping everything
    bound_ratio: float | None = None  # proven for every plan of that budget
    solver: str | None = None
    planning_s: float | None = None
    smallest_budget_bytes: int | None = None  # of a refusal
    proven_bytes: int | None = None
    step_ms: list[float] = field(default_factory=list)
    sitting_ms: list[float] = field(default_factory=list)  # medians of processes of their own
    built: Built | None = None

    @property
    def runs(self) -> bool:
        """Whether its steps can be timed; it competes unless it is wrong."""
        return self.built is not None

    @property
    def median_ms(self) -> float | None:
        """Median time of a step."""
        return statistics.median(self.step_ms) if self.step_ms else None


# ---- a step and its traces ------------------------------------------------------------------------------------


def synchronise(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def take_step(case: Case, built: Built) -> None:
    """A step, to an idle device; the gradients are dropped."""
    case.step(built.call)
    synchronise(case.device)
    built.weights.zero_grad(set_to_none=True)


def first_trace(case: Case, built: Built) -> Trace:
    """What the first step leaves behind; the gradients are taken away."""
    with built.first_step():
        case.step(built.call)
    synchronise(case.device)
    random = [torch.get_rng_state()]
    if case.device.type == "cuda":
        random.append(torch.cuda.get_rng_state(case.device))
    gradients = {name: value.grad for name, value in built.weights.named_parameters() if value.grad is not None}
    buffers = {name: value.clone() for name, value in built.weights.named_buffers()}
    built.weights.zero_grad(set_to_none=True)
    return Trace(gradients, buffers, random)


# ---- exactness -------------------------------------------------------------------------------------------------


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, float]:
    """The largest difference of an element, and the largest relative difference of a tensor, as in `TOLERANCES`."""
    norms = {name: value.double().norm() for name, value in expected.items()}
    whole = torch.stack(list(norms.values())).norm() if norms else torch.zeros(())
    largest = relative = 0.0
    for name, value in expected.items():
        difference = found[name].double() - value.double()
        if not difference.isfinite().all():
            return float("inf"), float("inf")
        if difference.numel() and difference.any():
            largest = max(largest, difference.abs().max().item())
            relative = max(relative, (difference.norm() / (norms[name] + FLOOR * whole)).item())
    return largest, relative


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Whether these are the same to the bit."""
    return all(torch.equal(found[name], value) for name, value in expected.items())


def judge(contender: Contender, found: Trace, expected: Trace, tolerance: float) -> None:
    """Fill in how far this trace is from eager's, and whether it is right."""
    contender.random_equal = all(map(torch.equal, found.random, expected.random))
    if found.gradients.keys() != expected.gradients.keys() or found.buffers.keys() != expected.buffers.keys():
        contender.status, contender.reason = WRONG, "other parameters have gradients, or other buffers exist"
        return
    contender.gradients_equal = equal(found.gradients, expected.gradients)
    contender.buffers_equal = equal(found.buffers, expected.buffers)
    contender.largest_difference, contender.relative_difference = furthest(found.gradients, expected.gradients)
    wrongs = []
    if not contender.gradients_equal and not contender.relative_difference <= tolerance:
        wrongs.append(f"gradients off by {contender.relative_difference:.1g} of their norm")
    if not contender.buffers_equal and not buffers_close(found.buffers, expected.buffers, tolerance):
        wrongs.append("buffers differ after one step, as where BatchNorm counts a batch twice")
    contender.reason = "; ".join(wrongs)
    is_exact = contender.gradients_equal and contender.buffers_equal
    contender.status = WRONG if wrongs else EXACT if is_exact else CLOSE


def draws(trace: Trace, device: torch.device) -> bool:
    """Whether the step drew random numbers on this device."""
    return not torch.equal(trace.random[-1], torch.Generator(device).manual_seed(SEED).get_state())


def judge_by_loss(contender: Contender, case: Case, built: Built, found: Trace, expected: Trace) -> None:
    """Judge gradients that are not eager's by the loss: its slope along a right gradient is the gradient's norm.

    Buffers that random numbers or the order of sums do not explain stay wrong.
    """
    if found.gradients.keys() != expected.gradients.keys() or found.buffers.keys() != expected.buffers.keys():
        return
    random = draws(expected, case.device)  # then statistics are others, too
    if not buffers_close(found.buffers, expected.buffers, None if random else TOLERANCES[case.dtype]):
        return
    why = "draws other random numbers" if random else f"{contender.reason}, as sums in another order may be"
    if case.dtype not in (torch.float32, torch.float64):
        contender.status, contender.reason = UNKNOWN, f"{why}; {case.dtype} is too coarse to judge by the loss"
        return
    again = first_trace(case, replace(built, first_step=contextlib.nullcontext))  # nothing is compiled in it
    slope = slope_by_norm(case, built, again.gradients)
    contender.slope = round(slope, 4)
    told = f"the loss's slope along its gradient is {slope:.3f} of the gradient's norm"
    if abs(slope - 1) <= SLOPE_TOLERANCE:
        contender.status, contender.reason = CLOSE, f"{why}; {told}"
    else:
        contender.reason = f"gradients are none of the loss: {told}"


def buffers_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float | None) -> bool:
    """Whether counts are equal, and statistics within the tolerance, if there is one."""
    return all(
        tolerance is None or bool((found[name] - value).double().norm() <= tolerance * value.double().norm())
        if value.is_floating_point()
        else torch.equal(found[name], value)
        for name, value in expected.items()
    )


# ---- one contender after the other, then all in turn ---------------------------------------------------------------


def one_line(error: BaseException) -> str:
    """The first line of what an error says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}"[:300] if lines else type(error).__name__


@contextlib.contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Raise `TimeoutError` in what takes longer, where the system has alarms."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError(f"not ready within {limit_s:.0f} s")

    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measure(
    peer: Peer, case: Case, eager_peak_bytes: int, expected: Trace | None, limit_s: float = LIMIT_S
) -> tuple[Contender, Trace | None]:
    """Build, run twice, compare with `expected`, which is None for eager; nothing that this raises gets out."""
    contender = Contender(peer.label, peer.family, share=peer.share)
    if peer.share is not None:
        contender.budget_bytes = int(peer.share * eager_peak_bytes)
    trace = None
    try:
        started = time.perf_counter()
        with within(limit_s):
            built = peer.build(case, eager_peak_bytes)
            trace = first_trace(case, built)
        contender.ready_s = round(time.perf_counter() - started, 2)
        judge(contender, trace, expected or trace, TOLERANCES[case.dtype])
        if expected is not None and contender.status == WRONG and built.own_numbers:
            judge_by_loss(contender, case, built, trace, expected)
        contender.peak_bytes = peak_of(case, built)
        contender.built, contender.note = built, built.note
        fill_in_plan(contender, built)
    except NotForThisModel as error:
        contender.status, contender.reason = ABSENT, str(error)
    except Exception as error:  # noqa: BLE001  whatever stops a peer is the reason in its row
        if (refused := refusal_in(error)) is None:
            contender.status, contender.reason = FAILED, one_line(error)
        else:
            contender.status, contender.reason = REFUSED, "no plan fits the budget"
            contender.smallest_budget_bytes = refused.smallest_budget_bytes
            contender.proven_bytes = refused.proven_bytes or None  # a partitioner proves nothing
    return contender, trace


def fill_in_plan(contender: Contender, built: Built) -> None:
    """What a plan of ours promised; a peak above its budget is no result."""
    plan = built.plan
    if plan is None:
        return
    contender.predicted_peak_bytes, contender.solver = plan.peak_bytes, plan.solver
    contender.planning_s = round(plan.planning_s, 2)
    if plan.baseline_time_ms > 0:
        contender.predicted_ratio = plan.time_ms / plan.baseline_time_ms
        if plan.lower_bound_ms is not None:
            contender.bound_ratio = plan.lower_bound_ms / plan.baseline_time_ms
    assert contender.peak_bytes is not None
    if contender.budget_bytes is not None and contender.peak_bytes > contender.budget_bytes:
        contender.status, contender.reason = WRONG, "its measured peak is above its budget"


def line_up(
    case: Case, peers: Sequence[Peer], tell: Callable[[Contender], None], limit_s: float = LIMIT_S
) -> list[Contender]:
    """All contenders, measured but not yet timed. The first of the peers is eager: others are compared with it."""
    eager, expected = measure(peers[0], case, 0, None)
    if eager.peak_bytes is None or expected is None:
        raise RuntimeError(f"{case.name} does not train eagerly: {eager.reason}")
    tell(eager)
    contenders = [eager]
    for peer in peers[1:]:
        contender, _ = measure(peer, case, eager.peak_bytes, expected, limit_s)
        contenders.append(contender)
        tell(contender)
        gc.collect()
    return contenders


def time_all(
    case: Case, contenders: Sequence[Contender], rounds: int, tell: Callable[[str], None], seed: int = SEED
) -> None:
    """Times a step of each in each round, in an order that is drawn anew, from `seed`. What fails in a round is out.

    Another step goes before it, as in training, where a step of the same model does: what ran before has left caches,
    the heap and the kernels that libraries keep as it needs them.
    """
    order = random.Random(seed)
    for turn in range(rounds):
        running = [contender for contender in contenders if contender.runs]
        order.shuffle(running)
        for contender in running:
            tell(f"round {turn + 1} of {rounds}: {contender.label}")
            assert contender.built is not None
            try:
                take_step(case, contender.built)
                started = time.perf_counter()
                case.step(contender.built.call)
                synchronise(case.device)
                contender.step_ms.append(round(1000 * (time.perf_counter() - started), 3))
                contender.built.weights.zero_grad(set_to_none=True)
            except Exception as error:  # noqa: BLE001  as in `measure`
                contender.built, contender.step_ms = None, []
                contender.status, contender.reason = FAILED, f"in a later step: {one_line(error)}"


def median_error(times: Sequence[float]) -> float | None:
    """Standard error of the median, as a share of it: that of a normal distribution with these quartiles."""
    if len(times) < 2:
        return None
    first, median, third = statistics.quantiles(times, n=4, method="inclusive")
    return math.sqrt(math.pi / 2 / len(times)) * (third - first) / 1.349 / median


def ratio_of(contender: Contender, eagers: Sequence[Contender]) -> tuple[float | None, float | None]:
    """The time of a contender by eager's, and the standard error of that.

    Eager ran as several contenders, whose times are taken together. Where there were sittings, it is the mean of their
    ratios: where things come to lie in memory makes equal steps differ from one process to the next, however many of
    them are timed in each.
    """
    if contender.sitting_ms:
        eager_ms = [statistics.mean(medians) for medians in zip(*(one.sitting_ms for one in eagers), strict=True)]
        ratios = [median / eager for median, eager in zip(contender.sitting_ms, eager_ms, strict=True)]
        error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else None
        return statistics.mean(ratios), error
    eager_times = [time_ms for one in eagers for time_ms in one.step_ms]
    if contender.median_ms is None or not eager_times:
        return None, None
    errors = median_error(contender.step_ms), median_error(eager_times)
    known = [error for error in errors if error is not None]
    return contender.median_ms / statistics.median(eager_times), math.hypot(*known) if len(known) == 2 else None


def result_of(contender: Contender, eagers: Sequence[Contender]) -> dict[str, Any]:
    """What the result file says of a contender, beside eager training."""
    numbers = {key: value for key, value in vars(contender).items() if key != "built"}
    eager_peak_bytes = eagers[0].peak_bytes
    assert eager_peak_bytes is not None
    numbers["median_ms"] = statistics.median(contender.sitting_ms) if contender.sitting_ms else contender.median_ms
    numbers["time_ratio"], numbers["time_error"] = ratio_of(contender, eagers)
    numbers["peak_share"] = None if contender.peak_bytes is None else contender.peak_bytes / eager_peak_bytes
    ratio, bound = contender.predicted_ratio, contender.bound_ratio
    numbers["gap"] = None if ratio is None or bound is None else max(0.0, 1 - bound / ratio)
    return numbers
