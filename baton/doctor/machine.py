"""This machine: cores, memory, shared memory and the limits of this user."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from baton.cluster.config import usable_cores
from baton.doctor.check import Check, ok, warning
from baton.host_memory import available_host_bytes

SHM_FOLDER = Path("/dev/shm")
# What a decode worker asks for by default is 48 MiB (arena_bytes), and a local Ray wants more than that.
SHM_BYTES = 64 << 20
MEMORY_BYTES = 1 << 30
# A connection of a client, of a worker and of a transfer is a descriptor each.
OPEN_FILES = 4096
PROCESSES = 1024

# (soft, hard) limits of a resource.
Limits = Callable[[int], tuple[int, int]]


def checks(limits: Limits = resource.getrlimit, shm_folder: Path = SHM_FOLDER) -> Iterator[Check]:
    """All of them."""
    yield ok("cores", f"{usable_cores()} usable of {os.cpu_count()}")
    yield memory(available_host_bytes())
    yield shared_memory(shm_folder)
    yield open_files(limits(resource.RLIMIT_NOFILE))
    yield from other_limits(limits)


def memory(available: int | None) -> Check:
    """What allocations can get."""
    if available is None:
        return ok("memory", "not known on this system")
    found = f"{available / (1 << 30):.1f} GiB available"
    if available < MEMORY_BYTES:
        return warning("memory", found, "stop something, or let workers have less: kv_cache_bytes")
    return ok("memory", found)


def shared_memory(folder: Path) -> Check:
    """Where KV travels between workers of one machine."""
    if not folder.is_dir():
        return warning(
            str(folder), "there is none", "KV between workers of one machine goes over gRPC; set shm_folder"
        )
    status = os.statvfs(folder)
    total, free = status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail
    found = f"{free >> 20} MiB free of {total >> 20} MiB"
    if free < SHM_BYTES:
        return warning(
            str(folder),
            found,
            "a decode worker takes 48 MiB (arena_bytes) and falls back to gRPC without; in a container, "
            "docker run --shm-size=1g, or a memory volume on /dev/shm",
        )
    return ok(str(folder), found)


def open_files(limit: tuple[int, int]) -> Check:
    """Descriptors that one process may have."""
    soft, hard = limit
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        remedy = f"ulimit -n {OPEN_FILES}"
        if hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
            remedy = f"the hard limit is {hard}: raise it in limits.conf or the unit's LimitNOFILE="
        return warning("open files", f"at most {soft} per process", remedy)
    return ok("open files", f"at most {_shown(soft)} per process")


def other_limits(limits: Limits) -> Iterator[Check]:
    """Limits that are usually high enough."""
    threads, _ = limits(resource.RLIMIT_NPROC)
    if threads != resource.RLIM_INFINITY and threads < PROCESSES:
        yield warning(
            "processes", f"at most {threads} of this user", f"ulimit -u {PROCESSES}: threads count too"
        )
    else:
        yield ok("processes", f"at most {_shown(threads)} of this user, threads included")
    space, _ = limits(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        yield warning(
            "address space",
            f"at most {space >> 20} MiB",
            "ulimit -v unlimited: mapped weights and CUDA take more than they use",
        )
    locked, _ = limits(resource.RLIMIT_MEMLOCK)
    if find_spec("nixl") is not None and locked != resource.RLIM_INFINITY:
        yield warning(
            "locked memory",
            f"at most {locked >> 10} KiB, and nixl is installed",
            "ulimit -l unlimited, if it is to use RDMA",
        )


def _shown(limit: int) -> str:
    return "any number" if limit == resource.RLIM_INFINITY else str(limit)
