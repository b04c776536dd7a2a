"""The families of ways to train, in the order of the tables."""

from __future__ import annotations

from enum import StrEnum


class Family(StrEnum):
    """What a way to train belongs to; its value is what tables and result files say."""

    EAGER = "eager"
    CHECKPOINT = "checkpoint"
    SELECTIVE = "selective"
    COMPILE = "compile"
    AUTO_SAC = "auto-sac"
    HUGGING_FACE = "hugging face"
    OFFLOAD = "offload"
    LAYOUT = "channels_last"
    PARTS = "compiled parts"
    KERNELS = "other kernels"
    OURS = "rockmate"
    OTHER_SOLVERS = "rockmate's other solvers"

    @property
    def key(self) -> str:
        """Its name on the command line."""
        return self.value.replace(" ", "-").replace("'", "")
