"""All ways to train, in the order of the tables."""

from __future__ import annotations

from benchmarks.peers import auto_sac, checkpointing, compiled, library, ours
from benchmarks.peers.case import Peer

FAMILIES = (
    "eager",
    "checkpoint",
    "selective",
    "compile",
    "auto-sac",
    "hugging face",
    "offload",
    ours.FAMILY,
    ours.OTHER_SOLVERS,
)
KEYS = {family.replace(" ", "-").replace("'", ""): family for family in FAMILIES}  # as the command line has them


def peers_for(shares: tuple[float, ...], skipped: tuple[str, ...] = ()) -> tuple[Peer, ...]:
    """Every way to train but those of the skipped families; ours is planned for these shares of the eager peak."""
    everyone = (
        *checkpointing.PEERS,
        *compiled.PEERS,
        *auto_sac.PEERS,
        *library.PEERS,
        *ours.peers(shares),
    )
    return tuple(peer for peer in everyone if peer.family not in skipped)
