"""Run the notebooks from top to bottom, each in a fresh kernel, and store them as they ran.

python notebooks/execute.py                   # stores the outputs in the notebooks themselves
python notebooks/execute.py --output folder   # leaves the notebooks alone
"""
# a script, not a package

from __future__ import annotations

import argparse
import base64
import io
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class ThisPython(KernelSpecManager):
    """Knows one kernel, whatever is registered on the machine: the interpreter that runs this script."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        """The kernel, under any name."""
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=40"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


def execute(path: Path, scratch: Path, timeout_s: int) -> Any:
    """The notebook as it ran; what it writes goes to `scratch`. Raises `CellExecutionError` for a cell that fails."""
    notebook = nbformat.read(path, as_version=4)
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=ThisPython())
    folder = {"metadata": {"path": str(scratch)}}
    client = NotebookClient(notebook, km=manager, timeout=timeout_s, record_timing=False, resources=folder)
    search_path = os.pathsep.join([str(ROOT), str(ROOT / "solvers")])
    # On a busy machine OpenMP's threads, spinning while they wait, make small operations a hundred times slower.
    settings = {"PYTHONPATH": search_path, "OMP_WAIT_POLICY": "PASSIVE", "IPYTHONDIR": str(scratch / "ipython")}
    settings["ROCKMATE_CACHE"] = "0"  # a plan found there would have been made by another run
    return without_circumstances(client.execute(env=os.environ | settings))


def without_circumstances(notebook: Any) -> Any:
    """The notebook without what would differ from machine to machine, and without messages to the error stream."""
    notebook.metadata = METADATA
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index}"
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if "image/png" in output.get("data", {}):
                    output.data["image/png"] = with_few_colours(output.data["image/png"])
    return notebook


def with_few_colours(encoded: str) -> str:
    """The same picture with a palette of 64 colours, a third as large; in base64, as notebooks hold it."""
    smaller = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(encoded))) as image:
        image.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(smaller, "PNG", optimize=True)
    return base64.b64encode(smaller.getvalue()).decode()


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all that are beside this script")
    parser.add_argument("--output", type=Path, help="folder; default: each notebook's own")
    parser.add_argument("--timeout", type=int, default=60, help="seconds for one cell (default 60)")
    options = parser.parse_args()
    for path in options.notebooks or sorted(Path(__file__).parent.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as scratch:
            os.environ["JUPYTER_RUNTIME_DIR"] = scratch
            notebook = execute(path, Path(scratch), options.timeout)
        folder = options.output or path.parent
        folder.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, folder / path.name)


if __name__ == "__main__":
    main()
