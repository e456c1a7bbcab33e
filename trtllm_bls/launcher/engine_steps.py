"""Whether the server's engines go on, from Triton's ``/metrics``.

Requests that do not stream leave no trace until they end, and a canary waits where they have every
place in the engine. Then the engine's own count of its steps tells work from a standstill.
"""

from __future__ import annotations

import re
import urllib.request

from trtllm_bls.status import ENGINE_STEPS, STEPS_LABEL

_SAMPLE = re.compile(rf"{ENGINE_STEPS}{{[^}}]*{STEPS_LABEL[0]}=\"{STEPS_LABEL[1]}\"[^}}]*}} (\S+)")


def engine_steps(metrics_url: str, timeout: float) -> float | None:
    """Steps of all engines so far; ``None`` where the server does not tell. Blocks."""
    try:
        with urllib.request.urlopen(metrics_url, timeout=timeout) as answer:
            text = answer.read().decode()
    except OSError:  # late, which is for the verdict to judge
        return None
    counts = [float(count) for count in _SAMPLE.findall(text)]
    return sum(counts) if counts else None
