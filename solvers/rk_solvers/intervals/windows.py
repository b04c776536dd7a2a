"""Which operations a large neighbourhood search frees next, and for how long it may think about them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from rk_solvers.intervals.model import Window, stages_of
from rk_solvers.problem import Chain, Problem, Recompute

FEWEST, FIRST = 8, 24  # operations in a window: at least, and to begin with


@dataclass(slots=True)
class Windows:
    """A source of windows that learns how large they may be."""

    problem: Problem
    seed: int
    chain: Chain | None = None
    size: dict[int, int] = field(default_factory=dict)  # by number of ranges
    random: random.Random = field(init=False)
    parts: int = 1  # of the last window

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def next(self, plan: Recompute) -> Window:
        """Ranges of operations, or of blocks of the chain; the more ranges, the shorter."""
        count = len(self.problem.forward)
        self.parts = self.random.choice([1, 2, 4, 8])
        length = max(1, self.size.setdefault(self.parts, FIRST) // self.parts)
        planned = [op for op, stages in enumerate(stages_of(self.problem, plan)) if stages]
        ops: set[int] = set()
        for _ in range(self.parts):
            middle = self.random.choice(planned) if planned and self.random.random() < 0.5 else self._any()
            first = max(0, middle - length // 2)
            ops.update(range(first, min(count, first + length)))
        return Window(frozenset(ops), range(len(self.problem.backward)), near=self.random.random() < 0.8)

    def learn(self, proven: bool, effort: float) -> None:
        """Make windows larger where the last was solved with little `effort` (part of what it was given)."""
        size = self.size[self.parts]
        if not proven:
            self.size[self.parts] = max(FEWEST, size * 3 // 4)
        elif effort < 0.3:
            self.size[self.parts] = min(len(self.problem.forward), size + max(2, size // 10))

    def _any(self) -> int:
        """An operation at random; with a chain, in the middle of a block at random."""
        if self.chain is None or self.random.random() < 0.5:
            return self.random.randrange(len(self.problem.forward))
        block = self.random.choice(self.chain.blocks)
        return (block.start + block.stop) // 2
