"""The command line: `rockmate`, or `python -m rockmate`."""

from rockmate.cli.app import main

__all__ = ["main"]
