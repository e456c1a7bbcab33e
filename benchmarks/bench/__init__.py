"""What the programs of ``benchmarks/`` share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # for ``doubles`` and ``tests.helpers``
