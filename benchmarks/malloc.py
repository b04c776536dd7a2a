"""Settings of glibc's malloc under which every contender is timed: what is freed stays with the process.

Otherwise large blocks go back to the system and are taken anew, page by page, as it happens: in eager's steps as in
everybody's, at times that no plan decides.
"""

from __future__ import annotations

import os
import sys

KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def restart_keeping() -> None:
    """Run this program anew with these settings, which malloc reads once, at the start; not where they already hold."""
    if sys.platform == "linux" and not is_keeping():
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **KEEPING})


def is_keeping() -> bool:
    """Whether these are the settings of this process, and of those that it starts."""
    return all(os.environ.get(name) == value for name, value in KEEPING.items())
