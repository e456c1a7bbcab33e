"""What one answer has so far, and what a round of verification adds to it.

An engine sees the tokens of earlier rounds as prompt, and its wire does not say why it ended. So
the ids must show it. With k drafted tokens, m ids in the answer and a of them equal to the draft's
beginning, the target ends each round with one token of its own: m = a + 1. Only where the sequence
ended is that token missing: m = a. Stop sequences and the limits are counted here, over all rounds.

A round that is verified by logits shows its end id instead, because there a missing token would be
ambiguous: some runtimes draw the very token again that they have just rejected.

Owns one sequence's ids and its end. Knows no engine.
"""

from __future__ import annotations

from itertools import takewhile

from trtllm_bls.stopping import StoppingCriteria
from trtllm_bls.types import EngineCapacity, EngineRequest, FinishReason, TokenIds


class Progress:
    """The prompt and the answer so far; ``finish`` is set once the answer is complete."""

    def __init__(self, request: EngineRequest, capacity: EngineCapacity | None = None) -> None:
        capacity = capacity or EngineCapacity()
        self.ids = list(request.input_ids)
        self.finish: FinishReason | None = None
        self._longest = capacity.max_sequence_tokens
        self._longest_prompt = capacity.max_prompt_tokens
        most = request.max_tokens
        if self._longest is not None:  # a prompt too long is for the target to refuse
            most = min(most, max(1, self._longest - len(self.ids)))
        self._criteria = StoppingCriteria.of(request, most)

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return self._criteria.generated

    @property
    def remaining(self) -> int:
        """Tokens the answer may still have."""
        return self._criteria.max_tokens - self.generated

    @property
    def may_end(self) -> bool:
        """Whether an end id counts from the next token on."""
        return self._criteria.may_end

    @property
    def max_draft(self) -> int:
        """The longest draft whose whole round fits the answer and the engine.

        The engine counts prompt, draft and new tokens against its longest sequence. What follows
        the round has the answer so far as its prompt, which may not exceed the longest prompt.
        """
        most = self.remaining - 1
        if self._longest is not None:
            most = min(most, (self._longest - len(self.ids) - 1) // 2)
        if self._longest_prompt is not None:
            most = min(most, self._longest_prompt - len(self.ids) - 1)
        return max(0, most)

    def stretch(self, tokens: int) -> int:
        """How many tokens to decode plainly where ``tokens`` are meant.

        All that remain, if the answer would then be longer than the longest prompt, since no
        further request could continue it.
        """
        longest = self._longest_prompt
        if longest is not None and len(self.ids) + tokens > longest:
            return self.remaining
        return min(self.remaining, tokens)

    def append(self, ids: TokenIds) -> int:
        """Append ids until the answer ends; how many were kept."""
        if self.finish is not None:
            return 0
        kept, self.finish = self._criteria.feed(ids)
        self.ids += kept
        return len(kept)

    def take_round(
        self,
        drafted: TokenIds,
        ids: TokenIds,
        reason: FinishReason | None,
        *,
        shows_end: bool = False,
    ) -> tuple[int, int]:
        """Append what the target answered to ``drafted``; ``reason`` as the engine gave it.

        Returns how many drafted tokens the target accepted, and how many ids the answer keeps.
        ``shows_end``: the target was sent no end id, so it is among ``ids`` if it was drawn.
        """
        equal = takewhile(lambda pair: pair[0] == pair[1], zip(drafted, ids, strict=False))
        accepted = sum(1 for _ in equal)
        kept = self.append(ids)
        missing = not shows_end and _ended(len(drafted), len(ids), accepted, reason)
        if self.finish is None and missing:
            self.finish = reason or FinishReason.END_ID
        return accepted, kept


def _ended(drafted: int, answered: int, accepted: int, reason: FinishReason | None) -> bool:
    if reason in (FinishReason.END_ID, FinishReason.STOP):
        return True
    if answered > accepted + 1:  # an engine that ignored the draft, and decoded drafted + 1 tokens
        return answered <= drafted
    return answered == accepted
