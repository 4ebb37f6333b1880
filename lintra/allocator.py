"""Memory: how much is free, and keeping what a process frees for its next tensors.

The GNU C library requests each block above a threshold from the operating system separately and returns it
when it is freed. Every large tensor then costs the clearing of all its pages again, which takes longer than
an operation with little arithmetic.
"""

import ctypes
import os
import platform
import re
from pathlib import Path

import torch

# malloc.h of the GNU C library: when to give back the end of the heap, how many blocks may lie outside of it.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_NEVER, _NONE = -1, 0

# Files of a container's control group: the limit, the use, and statistics; version 2, version 1.
_CONTAINERS = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


def keep_freed_memory() -> bool:
    """Make malloc keep freed memory for reuse instead of returning it to the system.

    For programs, not libraries: it is a setting of the whole process, whose memory no longer shrinks. Every
    `lintra` command begins with it. Returns whether it was done: only the GNU C library has these settings.
    mallopt(3)."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_TRIM_THRESHOLD, _NEVER) and mallopt(_MMAP_MAX, _NONE))


def release_freed_memory() -> bool:
    """Return freed memory to the system -> whether it was done. malloc_trim(3).

    For long loops in a process that keeps it: gaps between blocks of many sizes are not always reused.
    """
    return platform.libc_ver()[0] == "glibc" and bool(ctypes.CDLL(None).malloc_trim(0))


def available(device: torch.device) -> int | None:
    """Return the free bytes of a device, for this process; None if the system does not report them."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = [x for x in (_of_machine(), *map(_of_container, _CONTAINERS)) if x is not None]
    return min(limits, default=None)


def _of_machine() -> int | None:
    try:
        match = re.search(r"^MemAvailable:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
        return int(match[1]) * 1024 if match else None
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _of_container(files: tuple[str, str, str]) -> int | None:
    """The bytes a control group may still use, from its files of limit, use and statistics; None where
    there is no such group or no limit. Its cache of files counts as free, as it can give that back."""
    try:
        limit, used, parts = ((Path("/sys/fs/cgroup") / file).read_text() for file in files)
        given_back = re.search(r"^(?:total_)?inactive_file (\d+)$", parts, re.MULTILINE)
        return max(0, int(limit) - int(used) + (int(given_back[1]) if given_back else 0))
    except (OSError, ValueError):  # there is none, or its limit is "max"
        return None
