"""The scripts for torchrun do run, on two ranks."""

import re

import pytest

from tests.scripts import run_script


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("examples/train_ddp.py", []),
        pytest.param("examples/train_fsdp2.py", [], marks=pytest.mark.slow),
        pytest.param("examples/train_fsdp2.py", ["--bf16", "--budget", "400 KiB"], marks=pytest.mark.slow),
    ],
    ids=["ddp", "fsdp2", "fsdp2 in bfloat16"],
)
@pytest.mark.ci
def test_training_on_two_ranks_gets_somewhere(script, options):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    text = run_script(*launcher, script, "--steps", "10", *options)
    assert "rank 0 of 2: " in text
    assert "rank 1 of 2: " in text
    losses = [float(value) for value in re.findall(r"step +\d+: loss ([\d.]+)", text)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
