"""From tokens to the text a caller sees: plain objects, fed with the chunks of an engine.

``Answer`` is one request's, ``SequenceText`` one sequence's. They join the detokeniser and the stop
matcher, decide why and where a sequence ends, and keep scores aligned with the text that has left.
What is fed and what is emitted are two steps: any number of engine chunks becomes one text chunk.
Nothing here knows engines, Triton, clocks or arrays (logits are passed on row by row).
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trtllm_bls.detokenizer.vocabulary import Detokenizer
from trtllm_bls.stopping import StopMatcher
from trtllm_bls.types import (
    Array,
    Ending,
    EngineChunk,
    EngineMetrics,
    FinishReason,
    SpeculationCounts,
    TextChunk,
    TextRequest,
    TokenIds,
    TokenText,
)


@dataclass(kw_only=True)  # see EngineChunk
class TextRules:
    """What ends a sequence and what its caller wants to see of it.

    ``echo_ids``: the prompt, when the caller wants it in front of the completion.
    ``stop_sequences``: what the engine was given to stop at, one entry per stop word.
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
    expose_kv_cache_metrics: bool = False  # whether to tell how much of the prompt was cached
    return_tokens: bool = False
    return_drafted: bool = False


class Answer:
    """The sequences of one request: engine chunks in, text chunks out."""

    def __init__(
        self, request: TextRequest, rules: TextRules, detokenizers: Iterable[Detokenizer]
    ) -> None:
        self.begun = False  # the engine has begun to answer
        self._stream = request.stream
        self._interval = request.stream_interval
        # An engine that was sent no further end ids does not end at them.
        self._knows_end_ids = not rules.min_tokens
        self._cut_short = False
        self._sequences = [
            SequenceText(rules, detokenizer, index)
            for index, detokenizer in enumerate(detokenizers)
        ]

    @property
    def done(self) -> bool:
        """Whether every sequence has ended."""
        return all(sequence.ending is not None for sequence in self._sequences)

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far, of all sequences."""
        return sum(sequence.completion_tokens for sequence in self._sequences)

    @property
    def must_cancel(self) -> bool:
        """Whether the answer is done but the engine does not know, and would work on.

        Where the engine ends by itself, a cancel would only race with its final response.
        """
        return self._cut_short and self.done

    def take(self, chunks: Sequence[EngineChunk]) -> list[TextChunk]:
        """What is to be sent now that ``chunks`` have arrived: at most one chunk per sequence.

        A request that does not stream has one chunk per sequence, at the sequence's end.
        """
        if len(chunks) == 1 and chunks[0].ids_only and self._stream and self._interval <= 1:
            sequence = self._sequences[chunks[0].sequence_index]
            text = sequence.plain_text(chunks[0].token_ids)
            if text is not None:
                self.begun = True
                return [_text_chunk(text, chunks[0].sequence_index)] if text else []
        touched: dict[int, SequenceText] = {}
        for chunk in chunks if len(self._sequences) > 1 else _joined(chunks):
            sequence = self._sequences[chunk.sequence_index]
            if sequence.ending is not None:
                continue  # it ended by count; the engine is about to say so itself
            sequence.feed(chunk)
            touched[chunk.sequence_index] = sequence
            if sequence.ending is not None and not chunk.final:
                self._note_end(sequence.ending.finish_reason)
        self.begun = self.begun or bool(touched)
        return self._emitted(touched.values())

    def end(self, reason: FinishReason) -> list[TextChunk]:
        """The last chunk of each sequence that has not ended, with what there is."""
        open_ones = [sequence for sequence in self._sequences if sequence.ending is None]
        for sequence in open_ones:
            sequence.feed(EngineChunk(token_ids=(), final=True, finish_reason=reason))
        return self._emitted(open_ones)

    def _note_end(self, reason: FinishReason) -> None:
        unknown = reason is FinishReason.END_ID and not self._knows_end_ids
        self._cut_short = self._cut_short or reason is FinishReason.STOP or unknown

    def _emitted(self, sequences: Iterable[SequenceText]) -> list[TextChunk]:
        if self._stream:
            found = [sequence.emit(self._interval) for sequence in sequences]
        else:
            found = [sequence.emit() for sequence in sequences if sequence.ending is not None]
        return [chunk for chunk in found if chunk is not None]


@dataclass
class _Scored:
    """A token whose scores wait until its text has left."""

    end: int  # characters that must have left; one without text leaves with the next character
    log_prob: float | None
    logits: Array | None
    token: TokenText | None


class SequenceText:
    """One sequence: ``feed`` until it has its ``ending``; ``emit`` what is new at any time."""

    def __init__(self, rules: TextRules, detokenizer: Detokenizer, index: int = 0) -> None:
        self.ending: Ending | None = None
        self._rules = rules
        self._detokenizer = detokenizer
        self._index = index
        self._matcher: StopMatcher | None = None
        if rules.stop_words:
            self._matcher = StopMatcher(rules.stop_words, include=rules.include_stop)
        self._tail: collections.deque[int] = collections.deque(
            maxlen=max(map(len, rules.stop_sequences), default=0)
        )
        self._tokens = 0
        self._length = 0  # characters detokenised, of the completion
        self._released = 0  # characters of the completion that may leave
        self._scored: collections.deque[_Scored] = collections.deque()
        self._log_probs: list[float] = []  # of tokens whose text may leave, all so far
        self._cum_log_prob = 0.0
        self._context_logits: Array | None = None
        self._metrics: EngineMetrics | None = None
        self._speculation: SpeculationCounts | None = None
        # Not emitted yet: tokens, text, rows of logits, how many tokens came, and whether context
        # logits are among it.
        self._new: list[TokenText] = []
        self._drafted: list[tuple[int, int]] = []  # where, in the completion
        self._accepted_before = 0  # draft tokens, in all chunks so far
        self._emitted = 0  # characters of the completion
        self._text = self._echo() if rules.echo_ids else []
        self._so_far = ""
        self._rows: list[Array] = []
        self._new_tokens = 0
        self._new_context = False

        # Whether each token's place in the text has to be known.
        self._each = rules.return_tokens or rules.return_drafted or self._matcher is not None
        self._plain = not (self._each or rules.accumulate)  # and nothing but text so far

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far."""
        return self._tokens

    def _echo(self) -> list[str]:
        ids = self._rules.echo_ids
        if not self._rules.return_tokens:
            return [self._detokenizer.feed(ids)]
        fed = [self._detokenizer.feed_one(token) for token in ids]
        self._new += [
            TokenText(token, data, None) for token, (_, data) in zip(ids, fed, strict=True)
        ]
        return [text for text, _ in fed]

    def feed(self, chunk: EngineChunk) -> None:
        """Add a chunk; what follows the end is ignored."""
        if self.ending is not None:
            return
        if not _is_plain(chunk):
            self._plain = False
            self._note_figures(chunk)
        self._new_tokens += len(chunk.token_ids)
        kept, reason = self._before_end(chunk.token_ids)
        stop = None
        if not self._each and chunk.log_probs is None and chunk.generation_logits is None:
            self._tokens += len(kept)
            self._tail.extend(kept)
            text = self._detokenizer.feed(kept)
            self._length += len(text)
            self._release(text)  # there is no stop to look for
        else:
            stop = self._feed_each(kept, chunk)
        if stop is None:
            if reason is None and chunk.final:
                reason = self._why(chunk)
            if reason in (FinishReason.LENGTH, FinishReason.END_ID) or chunk.final:
                stop = self._flush()
        if stop is not None:
            reason = FinishReason.STOP
        if self._scored:
            self._release_scores(everything=reason not in (None, FinishReason.STOP))
        if reason is not None:
            self.ending, self._plain = self._ending(reason, stop), False

    def plain_text(self, ids: TokenIds) -> str | None:
        """What ``feed`` and ``emit`` make of ids alone, in a third of their time; ``None`` where
        it may be more than text, which those two are to find out."""
        tokens = self._tokens + len(ids)
        if not self._plain or self._text or tokens >= self._rules.max_tokens:
            return None
        if not self._rules.end_ids.isdisjoint(ids):
            return None
        self._tokens = tokens
        self._tail.extend(ids)
        text = self._detokenizer.feed(ids)
        self._length += len(text)
        self._released += len(text)
        self._emitted = self._released
        return text

    def emit(self, least_tokens: int = 0) -> TextChunk | None:
        """What is new since the last chunk; ``None`` if there is nothing to send.

        ``least_tokens``: wait for so many, unless the sequence has ended.
        """
        text = "".join(self._text)
        waits = self._new_tokens < least_tokens or not (text or self._new_context)
        if waits and self.ending is None:
            return None
        self._text.clear()
        if self._rules.accumulate:
            self._so_far += text
            text = self._so_far
        rows, self._rows = self._rows, []
        tokens: tuple[TokenText, ...] | None = None
        if self._rules.return_tokens:
            tokens = tuple(self._new)
            self._new.clear()
        self._new_tokens, self._new_context = 0, False
        drafted = self._drafted_text() if self._drafted else ()
        self._emitted = self._released
        scored = bool(self._log_probs)
        return TextChunk(
            text=text,
            sequence_index=self._index,
            log_probs=tuple(self._log_probs) if scored else None,
            cum_log_prob=self._cum_log_prob if scored else None,
            context_logits=self._context_logits,
            generation_logits=rows or None,
            metrics=self._metrics,
            tokens=tokens,
            drafted=drafted,
            ending=self.ending,
        )

    # --- tokens and text ----------------------------------------------------------------------

    def _before_end(self, ids: TokenIds) -> tuple[TokenIds, FinishReason | None]:
        """The ids before an end id or the token limit, and which of the two there is."""
        rules, remaining = self._rules, self._rules.max_tokens - self._tokens
        if len(ids) == 1 and remaining > 1 and ids[0] not in rules.end_ids:  # nearly always
            return ids, None
        for place, token in enumerate(ids[:remaining]):
            if token in rules.end_ids and self._tokens + place >= rules.min_tokens:
                return ids[:place], FinishReason.END_ID
        if len(ids) >= remaining:
            return ids[:remaining], FinishReason.LENGTH
        return ids, None

    def _feed_each(self, ids: TokenIds, chunk: EngineChunk) -> str | None:
        """Token by token, to know which one completes a stop; that stop, if one does."""
        accepted = self._accepted(chunk) if self._rules.return_drafted else 0
        for position, token in enumerate(ids):
            self._tokens += 1
            self._tail.append(token)
            if self._rules.return_tokens:
                new, data = self._detokenizer.feed_one(token)
            else:
                new, data = self._detokenizer.feed((token,)), b""
            stop = self._cut(new)
            if position < accepted and new:
                self._drafted.append((self._length - len(new), self._length))
            end = self._length if new else self._length + 1
            self._note_scores(chunk, position, end, token, data)
            if stop is not None:
                return stop
        return None

    def _cut(self, text: str) -> str | None:
        """Add text, up to a stop that completes in it."""
        self._length += len(text)
        stop = None
        if self._matcher is not None:
            cut = self._matcher.feed(text, armed=self._tokens >= self._rules.min_tokens)
            text, stop = cut.text, cut.stop
        self._release(text)
        return stop

    def _flush(self) -> str | None:
        stop = self._cut(self._detokenizer.flush())
        if stop is None and self._matcher is not None:
            self._release(self._matcher.flush())
        return stop

    def _release(self, text: str) -> None:
        if text:
            self._released += len(text)
            self._text.append(text)

    # --- drafts -------------------------------------------------------------------------------

    def _accepted(self, chunk: EngineChunk) -> int:
        """How many of the chunk's tokens, its first ones, are accepted draft tokens.

        A round's chunk has them before the target's own token; its figures count all rounds so far.
        """
        if chunk.speculation is None:
            return 0
        before, self._accepted_before = self._accepted_before, chunk.speculation.accepted
        return chunk.speculation.accepted - before

    def _drafted_text(self) -> tuple[tuple[int, int], ...]:
        """The parts of the text that leaves now; what a stop cuts off has none."""
        begin, end = self._emitted, self._released
        inside = [(max(a, begin) - begin, min(b, end) - begin) for a, b in self._drafted if a < end]
        self._drafted = [part for part in self._drafted if part[1] > end]
        return tuple(inside)

    # --- the end ------------------------------------------------------------------------------

    def _why(self, chunk: EngineChunk) -> FinishReason:
        """Why the engine ended, from the reason it gives or, where it gives none, from counts."""
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

    def _ending(self, reason: FinishReason, stop: str | None) -> Ending:
        if reason is FinishReason.STOP and stop is None:
            stop = self._stop_word_of_tail()
        return Ending(
            finish_reason=reason,
            stop_reason=stop,
            prompt_tokens=self._rules.prompt_tokens,
            completion_tokens=self._tokens,
            # The same seed without drafts draws other tokens: there is nothing to repeat.
            seed=self._rules.seed if self._speculation is None else None,
            speculation=self._speculation,
        )

    # --- scores and figures -------------------------------------------------------------------

    def _note_figures(self, chunk: EngineChunk) -> None:
        if chunk.context_logits is not None and self._context_logits is None:
            self._context_logits, self._new_context = chunk.context_logits, True
        if chunk.metrics is not None:
            exposed = self._rules.expose_kv_cache_metrics
            self._metrics = chunk.metrics if exposed else chunk.metrics.without_reuse()
        if chunk.speculation is not None:
            self._speculation = chunk.speculation

    def _note_scores(
        self, chunk: EngineChunk, position: int, end: int, token_id: int, data: bytes
    ) -> None:
        log_prob = chunk.log_probs[position] if chunk.log_probs is not None else None
        logits = chunk.generation_logits[position] if chunk.generation_logits is not None else None
        token = None
        if self._rules.return_tokens:
            best = chunk.top_log_probs[position] if chunk.top_log_probs else ()
            token = TokenText(token_id, data, log_prob, best)
        if log_prob is not None or logits is not None or token is not None:
            self._scored.append(_Scored(end, log_prob, logits, token))

    def _release_scores(self, everything: bool) -> None:
        while self._scored and (everything or self._scored[0].end <= self._released):
            scored = self._scored.popleft()
            if scored.log_prob is not None:
                self._log_probs.append(scored.log_prob)
                self._cum_log_prob += scored.log_prob
            if scored.logits is not None:
                self._rows.append(scored.logits)
            if scored.token is not None:
                self._new.append(scored.token)


def _joined(chunks: Sequence[EngineChunk]) -> Sequence[EngineChunk]:
    """The same, with those at the beginning that have nothing but ids as one: each costs a feed."""
    if len(chunks) < 2:
        return chunks
    plain = 0
    while plain < len(chunks) and _is_plain(chunks[plain]):
        plain += 1
    if plain < 2:
        return chunks
    ids = tuple([token for chunk in chunks[:plain] for token in chunk.token_ids])
    return [EngineChunk(token_ids=ids), *chunks[plain:]]


def _is_plain(chunk: EngineChunk) -> bool:
    return not (
        chunk.final
        or chunk.log_probs is not None
        or chunk.generation_logits is not None
        or chunk.context_logits is not None
        or chunk.metrics is not None
        or chunk.speculation is not None
    )


def too_late(sequences: int) -> Sequence[TextChunk]:
    """The answer to a request whose time was up before its prompt's tokens were counted."""
    ending = Ending(finish_reason=FinishReason.TIMEOUT, prompt_tokens=0, completion_tokens=0)
    return [TextChunk(text="", sequence_index=i, ending=ending) for i in range(sequences)]


def _text_chunk(text: str, sequence_index: int) -> TextChunk:
    """Text and nothing else, as ``engines.base.ids_chunk`` is ids alone."""
    chunk = object.__new__(TextChunk)
    chunk.text, chunk.sequence_index, chunk.ending = text, sequence_index, None
    return chunk
