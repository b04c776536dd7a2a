"""Convolutional models as given and in channels_last: eager, planned in either layout, and compiled by inductor.

    python benchmarks/layouts.py                                        # five models; hours
    python benchmarks/layouts.py --models densenet121 --no-inductor     # one of them, without what takes longest
    python benchmarks/layouts.py --skip "budget 0.0" "budget 0.3"       # all, without inductor's smallest budgets
    python benchmarks/layouts.py --quick --output folder                # tiny models, whose times mean nothing

Each model's contenders take turns in one process, each round in another order; ratios are of medians, peaks are exact.
Budgets are shares of the peak of the eager step as given. Each model is compiled in both layouts: on the CPU inductor
always computes convolutions in channels_last. Its budget is a share of the activations, which it does not always keep.
What it takes until its first step is compiling. Models that are named are measured anew, and take the place of those of
an earlier run. Nothing else should be computed on the machine.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")  # kernels of all contenders, not of the last

from benchmarks.peers import layouts
from benchmarks.peers.by_model import measured_models
from benchmarks.reporting import option_parser

MODELS = ("densenet121", "resnet50", "googlenet", "mobilenet-v2", "unet")
SHARES = (0.7, 0.5, 0.4, 0.3)


def main() -> None:
    """Runs the benchmark."""
    measured_models(option_parser(__doc__, "tiny models"), MODELS, SHARES, "layouts", layouts.peers)


if __name__ == "__main__":
    main()
