"""The parts of ``benchmarks/orchestration.py`` and ``benchmarks/openai_servers.py``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # for ``doubles``
