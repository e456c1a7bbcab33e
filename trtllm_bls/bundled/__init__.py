"""What the package brings besides code: the model repository and the demo's checkpoints.

In a checkout the two are links to its own ``models`` and ``assets``; a wheel holds the files. So
both have one place, and relative paths such as ``../assets`` mean the same in both.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent

REPOSITORY = (_HERE / "models").resolve()
DEMO = (_HERE / "assets" / "demo").resolve()
