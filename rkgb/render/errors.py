"""What can go wrong while a graph is drawn."""

from __future__ import annotations

from rkgb.errors import RockmateError


class RenderError(RockmateError, ValueError):
    """A graph cannot be drawn as asked: an unknown format, or something that is no graph."""
