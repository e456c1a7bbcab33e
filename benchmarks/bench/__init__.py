"""The parts of ``benchmarks/orchestration.py``."""
