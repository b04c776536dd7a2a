"""Run a script, or `-m` a module, with the test accelerator there: for benchmarks and examples that take --device.

python -m tests.accelerator.run benchmarks/bytes.py --device testacc --quick --output folder
"""

from __future__ import annotations

import runpy
import sys

from tests.accelerator.device import device


def main() -> None:
    """Run what the command line names, as Python would."""
    device()
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
