"""Speculative decoding as decisions without I/O; ``engines.speculative`` acts on them.

``rounds`` what to do next, the state machine that all the others serve; ``options`` what callers
may choose, and the figures; ``progress`` what one round means; ``round_requests`` the engine
requests of each round; ``answer_figures`` sums over all rounds; ``prompt_lookup`` drafts from the
text itself, ``predicted_text`` from one that the caller expects; ``cost_model`` and
``draft_length`` how many tokens to draft; ``shared`` what requests learn from one another.
"""

from trtllm_bls.speculative.options import (
    DraftSource,
    SpeculationOptions,
    SpeculationStats,
)
from trtllm_bls.speculative.round_requests import check_speculative, one_step_probe
from trtllm_bls.speculative.shared import SpeculationShared

__all__ = [
    "DraftSource",
    "SpeculationOptions",
    "SpeculationShared",
    "SpeculationStats",
    "check_speculative",
    "one_step_probe",
]
