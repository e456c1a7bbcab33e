"""Speculative decoding as decisions without I/O; the loop that acts on them is an engine.

``options`` what the caller may choose and is told; ``progress`` what one round means; ``carry``
the requests of each round; ``ledger`` figures over all rounds; ``lookup`` drafts from the text
itself; ``pace`` how many tokens to draft; ``shared`` what requests learn from one another.
"""

from trtllm_bls.speculative.carry import check_speculative
from trtllm_bls.speculative.options import (
    DraftSource,
    SpeculationOptions,
    SpeculationStats,
)
from trtllm_bls.speculative.shared import SpeculationShared

__all__ = [
    "DraftSource",
    "SpeculationOptions",
    "SpeculationShared",
    "SpeculationStats",
    "check_speculative",
]
