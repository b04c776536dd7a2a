"""What stands in a graph for objects of other classes once it came out of a file."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

from rkgb.export.json_form.errors import FunctionNotGiven
from rkgb.process.autocast import OFF, Autocast


class NamedDict(dict[Any, Any]):
    """A dictionary that was of a class of its own, such as a library's output class."""

    def __init__(self, class_name: str) -> None:
        super().__init__()
        self.class_name = class_name

    def __repr__(self) -> str:
        return f"<{self.class_name} {super().__repr__()}>"


class NamedNamespace(types.SimpleNamespace):
    """The attributes of an object of another class: a dataclass, a named tuple, a cache."""

    __slots__ = ("class_name",)

    def __init__(self, class_name: str, /, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.class_name = class_name

    def __copy__(self) -> NamedNamespace:
        # A namespace's own way to copy knows nothing of the class's name.
        return NamedNamespace(self.class_name, **vars(self))

    def __repr__(self) -> str:
        held = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"<{self.class_name} {held}>"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """In the place of an object in the module's output that holds no tensor, and that no file can hold."""

    class_name: str


@dataclass(frozen=True, slots=True)
class MissingFunction:
    """In the place of a function of the user's: its name, to be told what it is when a graph is loaded."""

    name: str
    autocast: Autocast = OFF  # it was called under this

    @property
    def __name__(self) -> str:
        return self.name.rsplit(".", maxsplit=1)[-1].lower()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Say that it cannot be run."""
        raise FunctionNotGiven(
            f"the graph calls {self.name}, of which its file holds the name alone. Load the graph with "
            f'functions={{"{self.name}": …}}: what the model called, such as the apply of its autograd function.'
        )
