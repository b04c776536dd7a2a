"""What a module has told its user: each thing once, however often the warning filters would have it."""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Iterator

from rkgb.process.turns import warnings_collected
from rockmate.calls.by_itself import first_clause
from rockmate.calls.specialization import Specialization
from rockmate.errors import CheckpointingWarning, ExportWarning, FallbackWarning, ReplanWarning
from rockmate.guards.checkpointing import OwnCheckpointing
from rockmate.runtime.double_backward import frames_to_the_user
from rockmate.units import format_bytes

_MOST_TOLD = 256


class Told:
    """The texts that were told."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, None] = OrderedDict()
        self._of_numbers = False

    @contextlib.contextmanager
    def once(self) -> Iterator[None]:
        """What is warned of within this context comes once for all such contexts."""
        with warnings_collected() as caught:
            yield
        for told in caught:
            self.tell(str(told.message), told.category)

    def tell(self, text: str, category: type[Warning] = ReplanWarning) -> None:
        """Warn of it, if it is new."""
        if text not in self._texts:
            self._texts[text] = None
            if len(self._texts) > _MOST_TOLD:
                self._texts.popitem(last=False)
            self.warn(category(text))

    def of_plan(self, name: str, member: Specialization, count: int, refusal: Exception | None) -> None:
        """That the module of this class has one more plan, and `count` of them now; why the others do not hold."""
        plan = member.plan
        if not member.planned.is_taken_over:
            text = (
                f"{name} was planned once more, in {plan.planning_s:.1f} s, and has {count} plans now under "
                f"{format_bytes(plan.budget_bytes)}: {first_clause(refusal)}. Each is kept for calls like its own; "
                'shapes="nearest", "eager" or "error" does otherwise.'
            )
            self.warn(ReplanWarning(text))
        elif not self._of_numbers:  # once for all: later values are many, and none of them is measured
            self._of_numbers = True
            self.tell(
                f"{name} was traced once more, in {plan.planning_s:.1f} s: {first_clause(refusal)}. The graph is the "
                "same, and so is the plan."
            )

    def of_loss(self, name: str, budget_bytes: int, why: str) -> None:
        """That steps exceed the budget by what the loss takes, and no plan was found; nothing if `why` is empty."""
        if why:
            self.tell(
                f"steps of {name} take more than their budget of {format_bytes(budget_bytes)}: {why}, and no plan was "
                "found for that. Training goes on as it is. Raise the budget, or give the loss (loss=), which is then "
                "measured by itself."
            )

    def of_checkpointing(self, own: OwnCheckpointing) -> None:
        """What is new of the module's own checkpointing."""
        if (news := own.news()) is not None:
            self.tell(news, CheckpointingWarning)

    def of_plan_above(self, name: str, member: Specialization) -> None:
        """That calls of the module of this class run above the budget, by the plan of lowest peak."""
        plan = member.plan
        self.warn(
            FallbackWarning(
                f"calls of {name} such as {plan.calls} run above the budget: {member.why_above}. The module itself "
                f"takes {format_bytes(plan.baseline_peak_bytes)}. Such calls are counted in `fallbacks`. Raise the "
                "budget, or make such batches smaller."
            )
        )

    def of_tracer(self, tracer: str, name: str) -> None:
        """That what `tracer` makes of the module of this class has no plan."""
        self.tell(
            f"{tracer} records {name}, which is planned, as the module itself: what it makes of it trains without "
            f"the plan, and without a budget. Record it in eval mode if it is for inference ({name}.eval()), or "
            "train the planned module itself.",
            ExportWarning,
        )

    def warn(self, warning: Warning) -> None:
        """Warn, at the line of the user's that called."""
        warnings.warn(warning, stacklevel=frames_to_the_user())
