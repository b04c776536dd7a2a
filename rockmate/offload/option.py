"""What users say of a second memory: whether data may be moved, where to, and how many bytes at most."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

from rockmate.errors import OffloadError
from rockmate.units import parse_bytes

Where = Literal["auto", "disk", "host"]
"""Host memory for an accelerator and a file for the CPU, whichever it is; a file; host memory."""

_WHERES: tuple[str, ...] = get_args(Where)


@dataclass(frozen=True, slots=True)
class Offload:
    """A second memory for data of a step while nothing reads them, with a budget of its own.

    Args:
        where: "disk" for a scratch file without a name, past the page cache, for modules on the CPU; "host" for pinned
            memory of the host, for modules on an accelerator; "auto" for the one that the module's device can have.
        path: the folder of the file, on a disk: that of temporary files by default, or /var/tmp where that is in
            memory.
        limit: most bytes that are there at once for one module: an int, or a size such as "40GiB". What is free
            there bounds it, too.

    Raises:
        OffloadError: one of them is not what it should be.
    """

    where: Where = "auto"
    path: str | None = None
    limit: int | str | None = None

    def __post_init__(self) -> None:
        if self.where not in _WHERES:
            raise OffloadError(f'data are to be moved to {self.where!r}; say "auto", "disk" or "host".')
        if self.path is not None:
            if self.where == "host":
                raise OffloadError(f"data are to be moved to host memory, which has no path such as {self.path!r}.")
            if not isinstance(self.path, str | os.PathLike):
                raise OffloadError(f"path is {self.path!r}; give the path of a folder on a disk.")
            object.__setattr__(self, "path", os.fspath(self.path))
        self.limit_bytes  # noqa: B018  read now, to refuse it now

    @property
    def limit_bytes(self) -> int | None:
        """The limit as a number; None where there is none."""
        if self.limit is None:
            return None
        try:
            found = parse_bytes(self.limit) if isinstance(self.limit, str) else self.limit
        except ValueError as error:
            raise OffloadError(f"limit cannot be read: {error}") from None
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise OffloadError(f'limit is {self.limit!r}; give bytes as an int, or a size such as "40GiB".')
        return found

    def place_for(self, device: object, *, is_host: bool) -> Literal["disk", "host"]:
        """Where data of a module on `device` go. Raises `OffloadError` where they cannot go where it was said."""
        place: Literal["disk", "host"] = "disk" if is_host else "host"
        if self.where in ("auto", place):
            return place
        if is_host:
            raise OffloadError(
                'data of a module on the CPU are in host memory already: say "disk", or "auto", to have them in a file.'
            )
        raise OffloadError(
            f'data of a module on {device} are not written to a disk: say "host", or "auto", to have them in host '
            "memory."
        )


def as_offload(said: Offload | str | None) -> Offload | None:
    """What was said, as a record: a word is that of `Offload.where`. Raises `OffloadError`."""
    if said is None or isinstance(said, Offload):
        return said
    if isinstance(said, str):
        return Offload(said)  # type: ignore[arg-type]  # which it refuses
    raise OffloadError(
        f'offload is {said!r}; give "auto", "disk", "host", or a record such as Offload("disk", path=...).'
    )
