"""`rockmate peak` runs a script as it is."""

import json
import re
import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
import sys
import torch
from torch import nn

model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    model(torch.randn(100, 32)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", __name__)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def run(*arguments, cwd):
    command = [sys.executable, "-m", "rockmate", "peak", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


def test_a_script_runs_and_its_peak_is_told(script, tmp_path):
    done = run("-o", "peak.html", "train.py", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("trained __main__\n")
    assert "in step" in done.stdout
    assert "train.py:" in done.stdout
    assert "no plan for half of the" in done.stdout  # two layers
    page = (tmp_path / "peak.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "relu.default" in page
    assert "http" not in page


@pytest.mark.ci
def test_as_json(script, tmp_path):
    done = run("--json", "train.py", "2", cwd=tmp_path)
    content = json.loads(done.stdout.split("\n", 1)[1])
    assert len(content["steps"]) == 3
    assert "plan" in content["plan"]
    assert sum(holder["size_bytes"] for holder in content["holders"]) == content["peak_bytes"]


@pytest.mark.ci
def test_no_plan_is_told_of_where_nobody_wants_one(script, tmp_path):
    assert "plan for half" not in run("--no-plan", "train.py", "2", cwd=tmp_path).stdout


def test_a_plan_is_told_of_a_model_that_the_script_lets_go(tmp_path):
    script = """
        import torch
        from torch import nn

        def main():
            model = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(32, 32), nn.GELU())))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                model(torch.randn(4000, 32)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        main()
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script), encoding="utf-8")
    told = run("train.py", cwd=tmp_path).stdout.splitlines()[-1]
    assert re.match(
        r"with a plan, Rockmate\(model, sample, 0.5\), a step takes .* MiB .* MiB, in about \+\d+% of the", told
    )
