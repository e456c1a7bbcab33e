"""The interface to a tokenizer: what the detokenizers need to know of one.

Knows nothing of any tokenizer library; ``trtllm_bls.tokenizer`` implements this over one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Vocabulary(Protocol):
    """A tokenizer's table and its own decoder."""

    vocab_size: int  # tokens in the table, added ones included
    added_ids: frozenset[int]  # tokens put beside the trained ones
    special_ids: frozenset[int]  # left out of the text when special tokens are skipped

    @property
    def decoder(self) -> Mapping[str, Any] | None:
        """The decoder as tokenizer.json describes it, if the tokenizer has one."""

    def token(self, token_id: int) -> str | None:
        """The token as the table spells it; ``None`` for an id that is not in the table."""

    def encode_word(self, text: str) -> tuple[int, ...]:
        """The ids of ``text`` alone, without special tokens."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of all ids at once: what every detokenizer must agree with."""


class Detokenizer(Protocol):
    """Turns one sequence's ids into text as they come. One object per sequence.

    All that ``feed`` returned, joined, with ``flush`` at the end equals ``decode`` of all ids,
    however they were cut. What ``feed`` has returned is never taken back. An id outside the
    table has no text.
    """

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these ids make certain; a character comes with the id that ends it."""

    def feed_one(self, token_id: int) -> tuple[str, bytes]:
        """The same of one id, and the bytes that it stands for in the text."""

    def flush(self) -> str:
        """The text held back, as it stands; ends the sequence."""
