"""What was measured of real steps, for reports to show beside what was predicted."""

from __future__ import annotations

from dataclasses import dataclass

from rockmate.reports.comparison import Timeline


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One real step: forward, loss, backward."""

    peak_bytes: int  # most at once above what was there before
    time_ms: float  # the least of several steps that nobody observed
    timeline: Timeline  # bytes after each allocation and release, over the observed step stretched to `time_ms`


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """The same step twice: under the plan, and as the module runs by itself."""

    plan: MeasuredStep
    eager: MeasuredStep | None  # None where it does not fit the device
    operation_ms: tuple[tuple[str, float], ...] = ()  # by operation of the problem; none where nobody asked


def thinned(timeline: Timeline, most: int = 2_000) -> Timeline:
    """At most about `most` points of `timeline`: of each stretch, the lowest and the highest, so that peaks stay.

    Raises:
        ValueError: `most` below 4.
    """
    if most < 4:
        raise ValueError(f"no timeline has its shape with {most} points; give at least 4")
    if len(timeline) <= most:
        return timeline
    width = -(-2 * len(timeline) // (most - 2))
    found = [timeline[0]]
    for start in range(1, len(timeline) - 1, width):
        stretch = range(start, min(start + width, len(timeline) - 1))
        low = min(stretch, key=lambda index: timeline[index][1])
        high = max(stretch, key=lambda index: timeline[index][1])
        found += [timeline[index] for index in sorted({low, high})]
    return (*found, timeline[-1])
