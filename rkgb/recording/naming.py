"""Fresh names for the values and operations of a trace."""

from __future__ import annotations

from collections import Counter


class Namer:
    """Gives out names, each once: parameters and operations of a user's module may be called alike."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._taken: set[str] = set()

    def numbered(self, stem: str) -> str:
        """``stem_0``, ``stem_1``, …"""
        name = stem
        while name == stem or name in self._taken:
            name = f"{stem}_{self._counts[stem]}"
            self._counts[stem] += 1
        self._taken.add(name)
        return name

    def plain(self, name: str) -> str:
        """`name` itself where it is free, else numbered."""
        if name in self._taken:
            return self.numbered(name)
        self._taken.add(name)
        return name
