"""Errors of the graph builder. Every message says what happened, where, and what to do."""

from __future__ import annotations


class RockmateError(Exception):
    """Root of every error that this project raises on purpose."""


class SampleError(RockmateError):
    """The sample does not fit the signature of the module's ``forward``."""


class ModelError(RockmateError, TypeError):
    """What was given as the model is no ``torch.nn.Module``."""


class TraceError(RockmateError):
    """The module cannot be traced faithfully, so no graph of it would be right."""


class ReplayMismatch(TraceError):
    """The traced operations ran, but gave other results than the module itself.

    `path` is that of the submodule, called as one operation, whose call is the first to differ; "" where it is none.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class GraphError(RockmateError):
    """A graph breaks one of its own rules: a defect of a stage, never of the user's model."""


class RecordMismatch(RockmateError):
    """What was recorded of a graph is not what it does now."""


class GuardError(RockmateError):
    """A run read something else out of its data than the trace did, and would take another way than the graph.

    `path` is that of the submodule that reads, "" for the whole module.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class TraceWarning(UserWarning):
    """Something of the module does not happen when its graph runs, though all results are the same."""


class RenderError(RockmateError, ValueError):
    """A graph cannot be drawn as asked: an unknown format, or something that is no graph."""
