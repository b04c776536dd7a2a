"""Names of Rockmate 1, of Rockmate 2 and of MONeT, over the module of this package.

from rockmate.compat import Rockmate  # version 1's: graph, chain, sequence and code one after the other
from rockmate.compat import PureRotor, from_config, load_config  # version 2's
from rockmate.compat import MONeTWrapper
"""

from rockmate.compat.configs import Config, ConfigError, from_config, generate_config, load_config, save_config
from rockmate.compat.monet import MONeTWrapper
from rockmate.compat.pure import Hiremate, OffMate, PureCheckmate, PureRockmate, PureRotor
from rockmate.compat.rockmate1 import Rockmate

__all__ = [
    "Config",
    "ConfigError",
    "Hiremate",
    "MONeTWrapper",
    "OffMate",
    "PureCheckmate",
    "PureRockmate",
    "PureRotor",
    "Rockmate",
    "from_config",
    "generate_config",
    "load_config",
    "save_config",
]
