"""What a server's processes hold: memory, descriptors, threads, shared memory."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

from trtllm_bls.operate.tritonserver import TritonServer

SHARED = Path("/dev/shm")


def named(server: TritonServer) -> dict[int, str]:
    """The server's processes by id: ``tritonserver``, and each stub as its model."""
    found = {}
    triton = server.process
    assert triton
    for process in (triton, *triton.children(recursive=True)):
        command = process.cmdline()
        is_stub = "stub" in command[0] if command else False
        found[process.pid] = Path(command[1]).parents[1].name if is_stub else process.name()
    return found


def memory_mb(server_processes: dict[int, str]) -> dict[str, float]:
    """Resident memory of each that is still there."""
    sizes = {}
    for pid, name in server_processes.items():
        with suppress(psutil.NoSuchProcess):
            sizes[name] = psutil.Process(pid).memory_info().rss / 1e6
    return sizes


def held(server: TritonServer) -> dict[str, float]:
    """Everything that could grow, by a name that says what it is."""
    processes = named(server)
    found = {f"{name} MB": size for name, size in memory_mb(processes).items()}
    for pid, name in processes.items():
        process = psutil.Process(pid)
        found[f"{name} descriptors"] = process.num_fds()
        found[f"{name} threads"] = process.num_threads()
    regions = SHARED.glob(f"{server.region_prefix}*")
    found["/dev/shm MB"] = sum(region.stat().st_blocks * 512 for region in regions) / 1e6
    return found
