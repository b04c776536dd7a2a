"""Every notebook runs from top to bottom in a minute or so, and is stored as it ran, with small outputs."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("nbclient", "nbformat", "ipykernel"):
    pytest.importorskip(package)

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TIMEOUT_S = 180  # of a machine that is busy with other things; calm, none takes a minute
SLOW = {"solvers_compared"}
MAX_STORED_BYTES = 100_000


def stem(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=[pytest.mark.slow] if path.stem in SLOW else []) for path in NOTEBOOKS], ids=stem
)
@pytest.mark.ci
def test_notebook_runs(path, tmp_path):
    """In a process of its own: Jupyter's event loops and sockets outlive a test."""
    command = [sys.executable, str(ROOT / "notebooks" / "execute.py"), str(path), "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    ran = json.loads((tmp_path / path.name).read_text(encoding="utf-8"))
    assert kinds_of_output(ran) == kinds_of_output(json.loads(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=stem)
def test_notebook_is_stored_as_it_ran(path):
    text = path.read_text(encoding="utf-8")
    cells = code_cells(json.loads(text))
    counts = [cell["execution_count"] for cell in cells]
    assert counts == list(range(1, len(cells) + 1)), "store it: python notebooks/execute.py"
    assert len(text.encode()) <= MAX_STORED_BYTES
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert not re.search(r"(?<![\w.)/])/\w+/\w+/", json.dumps([o.get("text", "") for o in outputs])), "a path"


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def kinds_of_output(notebook: dict) -> list[list[tuple[str, str | None]]]:
    """For each code cell, what kinds of output it has; the outputs themselves hold times.

    On a busy machine, what a cell prints comes in several pieces.
    """
    return [
        [
            kind
            for kind, _ in itertools.groupby((output["output_type"], output.get("name")) for output in cell["outputs"])
        ]
        for cell in code_cells(notebook)
    ]
