"""Memory that a process has freed, kept for its next tensors: worth it where tensors pass 32 MB.

The GNU C library takes each block above a threshold from the operating system by itself and gives it back
when it is freed. So every large tensor costs the clearing of all its pages again, which takes longer than an
operation of little arithmetic.
"""

import ctypes
import platform

# malloc.h of the GNU C library: when to give back the end of the heap, how many blocks may lie outside of it.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_NEVER, _NONE = -1, 0


def keep_freed_memory() -> bool:
    """From now on this process keeps what it frees, for what it needs next.

    For programs and not for libraries, as it is a setting of the whole process, whose memory no longer
    shrinks. Every `lintra` command begins with it. Returns whether it was done: no other C library than
    GNU's has these settings. mallopt(3)."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_TRIM_THRESHOLD, _NEVER) and mallopt(_MMAP_MAX, _NONE))


def release_freed_memory() -> bool:
    """Gives back what the process has freed so far. Returns whether it was done. malloc_trim(3).

    For long loops of a process that keeps it: gaps between blocks of many sizes are not always found again.
    """
    return platform.libc_ver()[0] == "glibc" and bool(ctypes.CDLL(None).malloc_trim(0))
