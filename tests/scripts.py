"""Scripts of the repository, run by tests."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

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


def written_between_marks(begin: str, end: str, write: Callable[[str], str]) -> str:
    """What `write` makes of a page with an old part between marks: it is seen to replace that part, and no other."""
    page = write(f"before\n{begin}\nold\n{end}\nafter\n")
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
    return page


def load_script(path: str) -> ModuleType:
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
