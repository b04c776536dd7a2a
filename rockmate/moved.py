"""Names that users know by an older place: importing them there tells the new one."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

# For one release.
MOVED = {
    "rockmate.explain": "rockmate.reports.explain",
    "rockmate.inverse": "rockmate.queries",
    "rockmate.plan": "rockmate.planning.plan",
    "rockmate.profiling": "rockmate.queries.profiling",
    "rockmate.rotor": "rockmate.compat.rotor",
    "rockmate.running": "rockmate.runtime",
    "rockmate.staged": "rockmate.queries.measured_rockmate",
    "rockmate.sweep": "rockmate.queries.sweep",
    "rockmate.verification": "rockmate.queries.verification",
}


class _Moved:
    """A finder of modules that finds none: it says where those are that have moved."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """None for all other modules; `ModuleNotFoundError` for one that has moved."""
        if name in MOVED:
            raise ModuleNotFoundError(f"{name} is now {MOVED[name]}: import it from there.", name=name)
        return None


def tell_of_moved_modules() -> None:
    """Have imports of modules that have moved say where they are."""
    if _Moved not in sys.meta_path:
        sys.meta_path.insert(0, _Moved)
