"""`torch.compile` under a budget of bytes: its partitioner, and what a step then takes, measured."""

from rockmate.compile.checking import Checked, check, compile_within
from rockmate.compile.partitioner import Division, Partitioner

__all__ = ["Checked", "Division", "Partitioner", "check", "compile_within"]
