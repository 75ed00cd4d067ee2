"""Host memory of a training process: which freed memory stays the process's own."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def reuse_host_memory() -> bool:
    """Keeps freed memory for the next allocation instead of handing it back to the system.

    A training step frees and allocates the same large buffers over and over; by default glibc gives each of them back,
    and the system maps and clears every page again (measured: 60,000 page faults a step on a model of 40 M parameters,
    and none afterwards). Affects the whole process, so it is for programs to call and not for libraries; resident
    memory stays at its peak. Returns whether it was done: elsewhere than on glibc nothing is.
    """
    return _set({_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: 2**31 - 1})


def give_back_host_memory() -> bool:
    """The opposite, for runs that keep states on a drive: every freed buffer goes back at once.

    By default glibc raises its threshold with the buffers that are freed, and resident memory stays at its peak, too.
    """
    return _set({_MMAP_THRESHOLD: 1 << 20, _TRIM_THRESHOLD: 1 << 20})


def _set(options: dict[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return all(mallopt(key, value) for key, value in options.items())
