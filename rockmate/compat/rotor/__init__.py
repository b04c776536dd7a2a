"""rotor's names: a Sequential that trains under a limit for its activations.

from rockmate.compat import rotor

model = rotor.Checkpointable(rotor.models.resnet101(), mem_limit=2 * 2**30)
"""

from rockmate.compat.rotor import Memory, models
from rockmate.compat.rotor.checkpointable import Checkpointable
from rockmate.compat.rotor.sequence import Operation, Sequence

__all__ = ["Checkpointable", "Memory", "Operation", "Sequence", "models"]
