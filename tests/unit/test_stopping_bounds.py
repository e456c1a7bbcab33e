"""The first and the last token at which a rule of ending counts."""

from __future__ import annotations

from trtllm_bls.text.stopping import StoppingCriteria
from trtllm_bls.types import FinishReason


def test_a_stop_string_counts_in_text_after_min_tokens() -> None:
    """As in vLLM: the text of the token that completes the minimum does not count yet."""
    criteria = StoppingCriteria(10, min_tokens=2)
    seen = []
    for _ in range(3):
        criteria.feed((7,))
        seen.append(criteria.may_stop)
    assert seen == [False, False, True]
    assert StoppingCriteria(10).may_stop


def test_a_sequence_with_stops_ends_with_its_last_allowed_token() -> None:
    criteria = StoppingCriteria(2, stop_sequences=[(9, 9)])
    assert criteria.feed((7, 7, 7)) == ((7, 7), FinishReason.LENGTH)
