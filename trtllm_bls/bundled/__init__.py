"""Files that the package brings: the model repository and the demo's checkpoints.

In a checkout the two are links to its own ``models`` and ``assets``, in a wheel the files
themselves. So relative paths such as ``../assets`` mean the same in both.
"""

from pathlib import Path

_HERE = Path(__file__).resolve().parent
REPOSITORY = (_HERE / "models").resolve()
DEMO = (_HERE / "assets" / "demo").resolve()
