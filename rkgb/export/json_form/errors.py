"""What can be wrong with graphs as JSON."""

from __future__ import annotations

from typing import NoReturn

from rkgb.errors import RockmateError


class GraphFormatError(RockmateError):
    """A file is no graph that this version can read, or a graph holds what the format has no form for."""


class FunctionNotGiven(RockmateError):
    """An operation was run that the file only names: no file brings code along."""


class Place:
    """Where in the JSON value reading or writing is, and how deep."""

    DEEPEST = 120  # levels: far more than any real graph has, and far less than Python's stack takes

    def __init__(self) -> None:
        self._steps: list[str | int] = []

    def at(self, step: str | int) -> Place:
        """Go one level down, to a key or an index; the end of a `with` block comes back."""
        self._steps.append(step)
        if len(self._steps) > self.DEEPEST:
            raise self.error(f"more than {self.DEEPEST} levels are nested here")
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._steps.pop()

    def error(self, wrong: str) -> GraphFormatError:
        """The error that says what is wrong at this place."""
        return GraphFormatError(f"at {self}: {wrong}")

    def __str__(self) -> str:
        shown = self._steps if len(self._steps) <= 16 else [*self._steps[:16], "…"]
        return "$" + "".join(_step(step) for step in shown)


def refuse_generator(place: Place) -> NoReturn:
    """Raise the error for a random generator of the user's own."""
    raise place.error(
        "a random generator of the module's own has no form in JSON: a graph that draws from it runs in this process "
        "only. Draw from PyTorch's default generator to store the graph"
    )


def _step(step: str | int) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    return f".{step}" if len(step) <= 60 and (step.isidentifier() or step == "…") else f"[{shortly(step)}]"


def shortly(value: object) -> str:
    """`value` for messages: what is in a file may be of any length."""
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'dict'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 62 else text[:61] + "…"
