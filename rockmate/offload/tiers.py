"""The second memory of one module: opened, and its links measured, when a plan first asks for it."""

from __future__ import annotations

import threading
import warnings
from tempfile import gettempdir

import torch

from rk_solvers.links import SecondMemory
from rkgb.devices.registry import device_of
from rockmate.errors import OffloadError, OffloadWarning
from rockmate.offload.file_tier import FileTier
from rockmate.offload.host_tier import HostTier
from rockmate.offload.option import Offload
from rockmate.offload.speed import measured_links
from rockmate.offload.tier import Tier

_ELSE = "/var/tmp"  # on a disk where /tmp is in memory


class Tiers:
    """Second memories as `option` says, one for each device that asks. Pickled, it is the option."""

    def __init__(self, option: Offload) -> None:
        self.option = option
        self._tiers: dict[torch.device, Tier] = {}
        self._links: dict[torch.device, SecondMemory | None] = {}
        self._shown: set[torch.device] = set()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Tiers], tuple[Offload]]:
        return Tiers, (self.option,)

    def __deepcopy__(self, memo: object) -> Tiers:
        return Tiers(self.option)

    def on(self, device: torch.device) -> Tier:
        """The one for `device`. Raises `OffloadError` where there can be none."""
        with self._lock:
            if device not in self._tiers:
                self._tiers[device] = _opened(self.option, device)
            return self._tiers[device]

    def links_on(self, device: torch.device, typical_bytes: int | None = None) -> SecondMemory | None:
        """Both of its links, measured once. None, and a warning, where there is none and "auto" was said.

        They are measured by moving storages of `typical_bytes`, or large ones where nobody knows what will be moved.
        Raises `OffloadError` where another one was asked for, and nothing can be moved there.
        """
        if device not in self._links:
            try:
                known = () if typical_bytes is None else (typical_bytes,)
                self._links[device] = measured_links(self.on(device), device, *known)
            except OffloadError as error:
                if self.option.where != "auto":
                    raise
                self._links[device] = None
                warnings.warn(f"no data are moved: {error}", OffloadWarning, stacklevel=2)
        return self._links[device]

    def take(self, device: torch.device, links: SecondMemory) -> None:
        """Let these be the links of that device."""
        self._links[device] = links

    def show(self, device: torch.device, links: SecondMemory) -> None:
        """Steps have shown the links of that device to be so."""
        self.take(device, links)
        self._shown.add(device)

    def are_shown(self, device: torch.device) -> bool:
        """Whether steps have shown what the links of that device are."""
        return device in self._shown


def _opened(option: Offload, device: torch.device) -> Tier:
    if option.place_for(device, is_host=device_of(device).is_host) == "host":
        return HostTier(device, option.limit_bytes)
    return _file(option)


def _file(option: Offload) -> FileTier:
    """In the folder that was said, or the first of the usual ones that is on a disk."""
    folders = [option.path] if option.path is not None else [gettempdir(), _ELSE]
    refusals: list[OffloadError] = []
    for folder in dict.fromkeys(folders):
        try:
            tier = FileTier(folder, option.limit_bytes)
            tier.open()
        except OffloadError as error:
            refusals.append(error)
        else:
            return tier
    raise refusals[0]
