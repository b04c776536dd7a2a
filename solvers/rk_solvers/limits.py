"""Every second, and every count of rounds, that a search, a bound or a proof may take."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the solvers may take; ``Limits(search_s=60)`` is the usual record but for that.

    A limit in seconds is the most that its part may take: parts end earlier when they are done. Raises `ValueError` for
    a negative one, and for a gap that is no share.
    """

    search_s: float = 15.0  # one search for a plan; planning one call may take a few of them
    extra_s: float = 45.0  # beyond that, for as long as the best plan may be far from the best there is
    gap: float = 0.01  # a search ends where no plan is faster by more than this share of the step's time
    seed: int = 0  # of the draws of a search
    # None: a search ends by its gap or its seconds. A number: the default solver makes so many rounds of greedy tries
    # and local improvement, solves no program and starts no process, so that no clock decides what is found.
    rounds: int | None = None
    bound_s: float = 6.0  # the lower bound on the time of a plan whose search gave none
    proof_s: float = 2.0  # a proof of which budgets no plan fits
    least_peak_s: float = 25.0  # the exact program of how little a refused step could take; half where small
    combination_s: float = 5.0  # the program of the best of several plans, in the extra time
    window_s: float = 3.0  # the program of a few stages of a plan, in the extra time
    guess_s: float = 2.0  # a guess whether a batch fits that was not measured

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value >= 0:
                raise ValueError(f"the limit {field.name} is {value!r}: give a number that is not negative")
        if not self.gap < 1:
            raise ValueError(f"gap is {self.gap!r}: give a share of the step's time, such as 0.01 for 1 %")

    @property
    def longest_s(self) -> float:
        """Seconds that one search may take in all."""
        return self.search_s + self.extra_s

    def within(self, time_limit_s: float | None) -> Limits:
        """These limits, where one search takes at most `time_limit_s` seconds in all; as they are for None."""
        return self if time_limit_s is None else replace(self, search_s=time_limit_s, extra_s=0.0)

    def without_proofs(self, search_s: float) -> Limits:
        """These limits for one search of at most so many seconds, after which nothing is proven."""
        return replace(self.within(search_s), least_peak_s=0.0, proof_s=0.0, bound_s=0.0)


USUAL_LIMITS = Limits()
