"""How a forgotten tensor comes back.

One file for each way, and one entry for it in `KINDS`: nothing else in the project knows of it.
"""

from __future__ import annotations

from rkgb.ir.restoration import Restoration
from rkgb.restore.packed_mask import PackedMask
from rkgb.restore.pool_indices import WindowIndices

KINDS: tuple[type[Restoration], ...] = (PackedMask, WindowIndices)
