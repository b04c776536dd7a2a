"""Models eager, planned, planned with compiled parts, and compiled whole by inductor.

    python benchmarks/compiled_parts.py                                  # five models; an hour
    python benchmarks/compiled_parts.py --models hf-llama --no-inductor  # one of them, without what takes longest
    python benchmarks/compiled_parts.py --quick --output folder          # tiny models, whose times mean nothing

Each model's contenders take turns in one process, each round in another order; ratios are of medians, peaks are exact.
Budgets are shares of the peak of the eager step. Nothing is taken from a cache of plans or of compiled code. Models
that are named are measured anew, and take the place of those of an earlier run. Nothing else should be computed on the
machine.
"""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")  # kernels of all contenders, not of the last

from benchmarks.peers import compiled_parts
from benchmarks.peers.by_model import measured_models
from benchmarks.reporting import option_parser

MODELS = ("hf-llama", "hf-bert", "vit", "gpt2", "resnet50")
SHARES = (0.7, 0.5, 0.4)


def main() -> None:
    """Runs the benchmark."""
    with tempfile.TemporaryDirectory() as fresh:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = fresh
        measured_models(option_parser(__doc__, "tiny models"), MODELS, SHARES, "compiled-parts", compiled_parts.peers)


if __name__ == "__main__":
    main()
