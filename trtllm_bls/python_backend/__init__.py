"""Triton's requests, each answered exactly once, and the core that its threads share."""
