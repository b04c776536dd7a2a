"""PyTorch's automatic selective checkpointing: `torch.distributed._tools` estimates a block and solves for a budget."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.peers.case import Built, Case, NotForThisModel, Peer


def automatic(case: Case, eager_peak_bytes: int) -> Built:
    raise NotForThisModel("todo")


PEERS = (Peer("auto-SAC, budget 0.5", "auto-sac", automatic),)
