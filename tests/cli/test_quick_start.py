"""Help and version are there at once: nothing that takes long is imported for them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rockmate

ROOT = Path(__file__).resolve().parents[2]
ASKED = """
import sys
from rockmate.cli import main
status = main(sys.argv[1:])
slow = [name for name in ("torch", "numpy", "scipy", "matplotlib", "rich", "networkx") if name in sys.modules]
sys.exit(f"{slow} imported" if slow else status)
"""


@pytest.mark.parametrize("asked", [("--help",), ("--version",), (), ("--unknown",), ("unknown",)], ids=" ".join)
def test_nothing_slow_is_imported_to_answer(asked):
    path = os.pathsep.join([str(ROOT), str(ROOT / "solvers")])
    environment = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(
        [sys.executable, "-c", ASKED, *asked], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert "imported" not in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout or ended.stderr


def test_all_public_names_are_there_and_no_others_are_promised():
    for name in rockmate.__all__:
        assert getattr(rockmate, name) is not None
    assert set(rockmate.__all__) <= set(dir(rockmate))
    assert set(rockmate._HOME_OF) | {"distributed"} == set(rockmate.__all__)
    with pytest.raises(AttributeError, match="module 'rockmate' has no attribute 'nothing'"):
        _ = rockmate.nothing


def test_modules_of_the_package_are_found_by_their_names_and_verify_is_the_function():
    import rockmate.cli.commands.verify

    assert rockmate.plan_files.load is not None
    assert rockmate.zoo is sys.modules["rockmate.zoo"]
    assert callable(rockmate.verify)
