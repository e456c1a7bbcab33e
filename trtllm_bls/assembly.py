"""From tokens to the text a caller sees: one object per sequence, fed with engine chunks.

It joins the detokeniser and the stop matcher, decides why and where a sequence ends, and keeps
scores aligned with the text that has left. Knows nothing of engines, Triton or arrays (logits are
carried row by row).
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from trtllm_bls.messages import (
    Array,
    Ending,
    EngineChunk,
    EngineMetrics,
    FinishReason,
    TextChunk,
    TokenIds,
)
from trtllm_bls.stopping import StopMatcher


class Detokenizer(Protocol):
    """Ids in, text that is certain out (``trtllm_bls.detokenizer``)."""

    def feed(self, ids: TokenIds) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class TextRules:
    """What ends a sequence and what its caller wants to see of it.

    ``echo_ids``: the prompt, when the caller wants it in front of the completion.
    ``stop_sequences``: what the engine was told to stop at, one entry per stop word.
    ``max_sequence_tokens``: the engine's limit on prompt and completion together, if known.
    """

    prompt_tokens: int
    max_tokens: int
    min_tokens: int = 0
    end_ids: frozenset[int] = frozenset()
    stop_words: tuple[str, ...] = ()
    stop_sequences: tuple[TokenIds, ...] = ()
    include_stop: bool = False
    echo_ids: TokenIds = ()
    accumulate: bool = False
    seed: int | None = None
    max_sequence_tokens: int | None = None


@dataclass
class _Scored:
    """A token whose scores wait until its text has left."""

    end: int  # characters that must have left; one without text leaves with the next character
    log_prob: float | None
    logits: Array | None


class SequenceText:
    """One sequence. ``feed`` until ``ended``; what is fed after that is ignored."""

    def __init__(self, rules: TextRules, detokenizer: Detokenizer) -> None:
        self.ended = False
        self._rules = rules
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(rules.stop_words, include=rules.include_stop)
        self._tail: collections.deque[int] = collections.deque(
            maxlen=max(map(len, rules.stop_sequences), default=0)
        )
        self._tokens = 0
        self._length = 0  # characters detokenised, of the completion
        self._left = 0  # characters of the completion that may leave
        self._scored: collections.deque[_Scored] = collections.deque()
        self._log_probs: list[float] | None = None
        self._prefix = detokenizer.feed(rules.echo_ids) if rules.echo_ids else ""
        self._so_far = ""

    def feed(self, chunk: EngineChunk) -> TextChunk:
        """The text that this chunk makes certain; its ``ending`` is set exactly once."""
        text = ""
        reason: FinishReason | None = None
        stop: str | None = None
        for position, token in enumerate(chunk.token_ids):
            if token in self._rules.end_ids and self._tokens >= self._rules.min_tokens:
                reason = FinishReason.END_ID
                break
            self._tokens += 1
            self._tail.append(token)
            new = self._detokenizer.feed((token,))
            piece, stop = self._cut(new)
            self._note(chunk, position, end=self._length if new else self._length + 1)
            text += piece
            if stop is not None:
                reason = FinishReason.STOP
                break
            if self._tokens >= self._rules.max_tokens:
                reason = FinishReason.LENGTH
                break
        if reason is None and chunk.final:
            reason = self._why(chunk)
        ran_out = reason in (FinishReason.LENGTH, FinishReason.END_ID)
        if ran_out or (chunk.final and stop is None):
            rest, stop = self._flush()
            text += rest
            reason = FinishReason.STOP if stop is not None else reason
        return self._chunk(text, chunk, reason, stop)

    def give_up(self, reason: FinishReason, sequence_index: int) -> TextChunk:
        """End with what there is, held-back text included: nothing can follow that might claim it.

        ``reason`` gives way to a stop string that this text completes.
        """
        return self.feed(
            EngineChunk(
                token_ids=(), sequence_index=sequence_index, final=True, finish_reason=reason
            )
        )

    # --- text ---------------------------------------------------------------------------------

    def _cut(self, text: str) -> tuple[str, str | None]:
        self._length += len(text)
        cut = self._matcher.feed(text, armed=self._tokens >= self._rules.min_tokens)
        self._left += len(cut.text)
        return cut.text, cut.stop

    def _flush(self) -> tuple[str, str | None]:
        text, stop = self._cut(self._detokenizer.flush())
        if stop is None:
            rest = self._matcher.flush()
            self._left += len(rest)
            text += rest
        return text, stop

    def _why(self, chunk: EngineChunk) -> FinishReason:
        """Why the engine ended, from what it says or, on a wire that does not say, from counts."""
        if chunk.finish_reason is not None:
            return chunk.finish_reason
        rules = self._rules
        if self._stop_word_of_tail() is not None:
            return FinishReason.STOP
        total = rules.prompt_tokens + self._tokens
        if rules.max_sequence_tokens is not None and total >= rules.max_sequence_tokens:
            return FinishReason.LENGTH
        return FinishReason.END_ID

    def _stop_word_of_tail(self) -> str | None:
        tail = tuple(self._tail)
        for word, ids in zip(self._rules.stop_words, self._rules.stop_sequences, strict=False):
            if ids and tail[-len(ids) :] == ids:
                return word
        return None

    # --- scores -------------------------------------------------------------------------------

    def _note(self, chunk: EngineChunk, position: int, end: int) -> None:
        log_prob = chunk.log_probs[position] if chunk.log_probs is not None else None
        logits = chunk.generation_logits[position] if chunk.generation_logits is not None else None
        if log_prob is not None or logits is not None:
            self._scored.append(_Scored(end, log_prob, logits))

    def _release(self, everything: bool) -> Iterable[_Scored]:
        while self._scored and (everything or self._scored[0].end <= self._left):
            yield self._scored.popleft()

    # --- results ------------------------------------------------------------------------------

    def _chunk(
        self, text: str, chunk: EngineChunk, reason: FinishReason | None, stop: str | None
    ) -> TextChunk:
        released = list(self._release(everything=reason not in (None, FinishReason.STOP)))
        rows = [scored.logits for scored in released if scored.logits is not None]
        for scored in released:
            if scored.log_prob is not None:
                self._log_probs = self._log_probs or []
                self._log_probs.append(scored.log_prob)
        scores = None if self._log_probs is None else tuple(self._log_probs)
        return TextChunk(
            text=self._shown(text),
            sequence_index=chunk.sequence_index,
            log_probs=scores,
            cum_log_prob=None if scores is None else sum(scores),
            context_logits=chunk.context_logits,
            generation_logits=rows or None,
            ending=self._ending(reason, stop, chunk.metrics) if reason is not None else None,
        )

    def _shown(self, text: str) -> str:
        text, self._prefix = self._prefix + text, ""
        if self._rules.accumulate:
            self._so_far += text
            return self._so_far
        return text

    def _ending(
        self, reason: FinishReason, stop: str | None, metrics: EngineMetrics | None
    ) -> Ending:
        self.ended = True
        if reason is FinishReason.STOP and stop is None:
            stop = self._stop_word_of_tail()
        return Ending(
            finish_reason=reason,
            stop_reason=stop,
            prompt_tokens=self._rules.prompt_tokens,
            completion_tokens=self._tokens,
            seed=self._rules.seed,
            metrics=metrics,
        )
