"""Progress of planning, for a person to watch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

ProgressCallback = Callable[[str, int, int], None]
"""Told the stage's name, how many of its parts are done, and how many there are. A name may have news in brackets."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Nobody asked to be told."""


@contextlib.contextmanager
def progress_display(wanted: bool | ProgressCallback) -> Iterator[ProgressCallback]:
    """A callable to report to: the user's own, a display on standard error, or one that ignores what it is told."""
    if callable(wanted):
        yield wanted
    elif not wanted:
        yield no_progress
    else:
        # Here, so that who wants no display does not load it.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description:<12}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as display:
            tasks: dict[str, TaskID] = {}

            def tell(stage_and_news: str, done: int, total: int) -> None:
                stage = stage_and_news.split(" (")[0]
                for other, task in tasks.items():
                    if other != stage:
                        display.stop_task(task)
                if stage not in tasks:
                    tasks[stage] = display.add_task(stage, total=total)
                display.update(tasks[stage], completed=done, total=total, description=stage_and_news)

            yield tell
