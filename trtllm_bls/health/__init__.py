"""Can the server serve? Observations of it, and the verdict on them.

``verdict`` judges, without I/O; ``probe`` asks a server over gRPC; ``processes`` looks at its
processes on this machine. ``serve`` does so continuously, ``trtllm-bls health`` once.
"""
