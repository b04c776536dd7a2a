"""`torch.compile` under a budget of bytes: its partitioner, and a check of what a step then takes."""

from rockmate.compile.checking import Checked, check
from rockmate.compile.partitioner import Partitioner

__all__ = ["Checked", "Partitioner", "check"]
