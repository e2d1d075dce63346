"""Tells the C library to keep the memory of large temporaries.

By default glibc maps every large allocation afresh and unmaps it when freed, so each
activation of each step pays a page fault per 4 KiB: up to half of an operator's time.
"""

from __future__ import annotations

import ctypes
import platform

# From malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Older versions accept 32 MiB at most.
_MMAP_THRESHOLD_BYTES = (1 << 30, 32 << 20)
_TRIM_THRESHOLD_BYTES = 2**31 - 1


def keep_freed_memory() -> bool:
    """Raises glibc's thresholds for the whole process; returns whether it did.

    Other C libraries are left alone.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    mapped_later = any(libc.mallopt(_M_MMAP_THRESHOLD, size) == 1 for size in _MMAP_THRESHOLD_BYTES)
    return mapped_later and libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES) == 1


def return_freed_memory() -> None:
    """Gives the system back what is freed but lies between what is used; it takes milliseconds.

    Other C libraries than glibc are left alone.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
