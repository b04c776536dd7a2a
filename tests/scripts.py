"""Scripts of the repository, run by tests."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 500


def run_script(*arguments: str) -> str:
    """Standard output of a script of the repository, run as from its root."""
    search_path = os.pathsep.join([str(ROOT), str(ROOT / "solvers")])
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": search_path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
