"""How much memory the system could still give to this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

try:
    import resource
except ImportError:  # there are no such limits on Windows
    resource = None  # type: ignore[assignment]

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
# Of both versions of Linux's control groups: limit, usage, and the part of the usage that is given back on demand.
_UNIFIED = ("memory.max", "memory.current", "inactive_file")
_MEMORY_CONTROLLER = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_host_bytes() -> int:
    """What the system says is available, within the limits of the process (RLIMIT_AS) and its container (cgroups)."""
    free = min(int(psutil.virtual_memory().available), _free_address_space_bytes())
    try:
        membership = _CGROUP_MEMBERSHIP.read_text(encoding="utf-8")
    except OSError:  # no control groups on this system
        return free
    return min(free, cgroup_free_bytes(membership, _CGROUP_ROOT))


def _free_address_space_bytes() -> int:
    """What the limit on the process's address space leaves; `sys.maxsize` where there is none."""
    limit = _address_space_limit()
    return sys.maxsize if limit < 0 else max(0, limit - int(psutil.Process().memory_info().vms))


def address_space_is_limited() -> bool:
    """Whether the process may have so much address space at most: each new thread takes tens of MiB of it."""
    return _address_space_limit() >= 0


def _address_space_limit() -> int:
    """In bytes; below 0 where there is none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS) if resource is not None else (-1, -1)
    return limit


def cgroup_free_bytes(membership: str, root: Path) -> int:
    """Bytes that the control groups leave to a process; `sys.maxsize` where they set no limit.

    `membership` is the text of the process's cgroup file, `root` the folder where the groups are mounted. Every
    group from the process's own up to the root limits it.
    """
    free = sys.maxsize
    for mount, path, names in _hierarchies(membership, root):
        group = mount / path.strip("/")
        # Within a container the path may be the host's, and not there: the root is then the container's own group.
        for folder in (group, *group.parents):
            free = min(free, _free_of_group(folder, *names))
            if folder == mount:
                break
    return free


def _hierarchies(membership: str, root: Path) -> Iterator[tuple[Path, str, tuple[str, str, str]]]:
    """Where the process's memory may be limited: mounted folder, path below it, names of the files."""
    for line in membership.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield root, path, _UNIFIED
        elif "memory" in controllers.split(","):
            yield root / "memory", path, _MEMORY_CONTROLLER


def _free_of_group(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int:
    try:
        limit, usage = (int((folder / name).read_text(encoding="utf-8")) for name in (limit_name, usage_name))
        lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
        cache = sum(int(line.split()[1]) for line in lines if line.split()[:1] == [cache_name])
    except (OSError, ValueError, IndexError):  # no such group, or no limit: the word "max" is no number
        return sys.maxsize
    return max(0, limit - max(0, usage - cache))
