"""Can the server serve? Observations of it, and the verdict on them.

``verdict`` judges, without I/O; ``probe`` asks a server over gRPC; ``processes`` looks at its
processes on this machine. ``serve`` does so continuously, ``trtllm-bls health`` once.
"""

from trtllm_bls.health.probe import Canary, Probe
from trtllm_bls.health.processes import (
    ServerProcesses,
    find_server,
    free_shared_memory,
)
from trtllm_bls.health.verdict import Bounds, Observed, Verdict, evaluate

__all__ = [
    "Bounds",
    "Canary",
    "Observed",
    "Probe",
    "ServerProcesses",
    "Verdict",
    "evaluate",
    "find_server",
    "free_shared_memory",
]
