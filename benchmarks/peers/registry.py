"""All ways to train, in the order of the tables."""

from __future__ import annotations

from collections.abc import Collection

from benchmarks.peers import auto_sac, checkpointing, compiled, compiled_parts, layouts, library, ours
from benchmarks.peers.case import Peer
from benchmarks.peers.families import Family


def peers_for(shares: tuple[float, ...], skipped: Collection[Family] = ()) -> tuple[Peer, ...]:
    """Every way to train but those of the skipped families; ours is planned for these shares of the eager peak."""
    everyone = (
        *checkpointing.PEERS,
        *compiled.PEERS,
        *auto_sac.PEERS,
        *library.PEERS,
        *layouts.peers(shares),
        *compiled_parts.peers(shares),
        *ours.peers(shares),
    )
    return tuple(peer for peer in everyone if peer.family not in skipped)
