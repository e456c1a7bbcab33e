"""From an engine's tokens to the text that a caller sees: plain objects, fed with engine chunks.

``Answer`` belongs to one request, ``SequenceText`` to one of its sequences. They join the
detokenizer and the matching of stops, decide why and where a sequence ends, and keep scores aligned
with the text that has left. Feeding and emitting are separate steps, so any number of engine chunks
becomes one text chunk. Nothing here knows engines, Triton, clocks or arrays: logits are passed on
row by row.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trtllm_bls.text.detokenizer import Detokenizer
from trtllm_bls.text.reasoning import ReasoningState, TextPiece
from trtllm_bls.text.stopping import StopMatcher, StoppingCriteria
from trtllm_bls.types import (
    NO_MARKUP,
    AnswerMarkup,
    Array,
    Ending,
    EngineChunk,
    FinishReason,
    PromptIds,
    SpeculationStats,
    TextChunk,
    TextRequest,
    TokenIds,
    TokenText,
)


@dataclass(kw_only=True)
class TextRules:
    """Values that the prompt, the engine and the deployment add to a request.

    ``max_tokens``: the limit of each sequence, also if the request names none. ``end_ids``: all ids
    that end a sequence, whether the engine knows them or not. ``stop_sequences``, ``kept_ids`` and
    ``markup``: see ``Prompt``. ``echo_ids``: the prompt, if it comes in front of the completion.
    ``accumulate``: each chunk has all text so far. ``max_sequence_tokens``: the engine's limit on
    prompt and completion together, if known. ``expose_kv_cache_metrics``: endings and metrics show
    how much of the prompt was in the KV cache already.
    """

    prompt_tokens: int
    max_tokens: int
    end_ids: TokenIds = ()
    kept_ids: TokenIds = ()
    stop_sequences: tuple[TokenIds, ...] = ()
    markup: AnswerMarkup = NO_MARKUP
    echo_ids: PromptIds = ()
    accumulate: bool = False
    max_sequence_tokens: int | None = None
    expose_kv_cache_metrics: bool = False


class Answer:
    """The sequences of one request: engine chunks in, text chunks out.

    ``has_begun``: the engine has begun to answer. ``done``: every sequence has ended.
    ``must_cancel``: the answer is done, but the engine does not know and would work on. An engine
    that ends by itself is not cancelled, since the cancel would only race with its final response.
    """

    def __init__(
        self, request: TextRequest, rules: TextRules, detokenizers: Iterable[Detokenizer]
    ) -> None:
        self.has_begun = False
        self.done = False
        self.must_cancel = False
        self._request = request
        self._engine_works_on = False
        self.sequences: list[SequenceText] = []
        for index, detokenizer in enumerate(detokenizers):
            self.sequences.append(SequenceText(request, rules, detokenizer, index))

    def feed(self, chunks: Sequence[EngineChunk]) -> list[TextChunk]:
        """Feed engine chunks and return the text chunks to send, at most one per sequence.

        A request that does not stream has one chunk per sequence, at the sequence's end.
        """
        changed: dict[int, SequenceText] = {}
        for chunk in chunks:
            sequence = self.sequences[chunk.sequence_index]
            if sequence.ending is not None:
                continue  # it has ended already, and the engine only confirms that
            sequence.feed(chunk)
            changed[chunk.sequence_index] = sequence
            self.has_begun = True
            if sequence.ending is not None and not chunk.final:
                # An engine counts to ``max_tokens``, too. It knows the end ids, unless the request
                # has ``min_tokens``: then it was sent one end id alone. It knows no stop words.
                reason = sequence.ending.finish_reason
                has_minimum = bool(self._request.sampling.min_tokens)
                if reason is FinishReason.STOP or (reason is FinishReason.END_ID and has_minimum):
                    self._engine_works_on = True
        return self._emit(changed.values())

    def end(self, reason: FinishReason) -> list[TextChunk]:
        """End every sequence that has not ended, and return its last chunk."""
        open_sequences = [sequence for sequence in self.sequences if sequence.ending is None]
        for sequence in open_sequences:
            sequence.feed(EngineChunk(token_ids=(), final=True, finish_reason=reason))
        return self._emit(open_sequences)

    def _emit(self, sequences: Iterable[SequenceText]) -> list[TextChunk]:
        chunks = []
        for sequence in sequences:
            if sequence.ending is not None:
                self.done = all([other.ending is not None for other in self.sequences])
                self.must_cancel = self.done and self._engine_works_on
            elif not self._request.stream:
                continue
            chunk = sequence.emit(self._request.stream_interval)
            if chunk is not None:
                chunks.append(chunk)
        return chunks


class SequenceText:
    """The text of a sequence: ``feed`` until it has its ``ending``, and ``emit`` at any time."""

    def __init__(
        self, request: TextRequest, rules: TextRules, detokenizer: Detokenizer, index: int = 0
    ) -> None:
        self.ending: Ending | None = None
        self._request = request
        self._rules = rules
        self._detokenizer = detokenizer
        self.criteria = StoppingCriteria(
            rules.max_tokens,
            min_tokens=request.sampling.min_tokens,
            end_ids=rules.end_ids,
            kept_ids=rules.kept_ids,
            stop_sequences=rules.stop_sequences,
        )
        self._matcher: StopMatcher | None = None
        if request.stop_words:
            self._matcher = StopMatcher(request.stop_words, include=request.include_stop)
        self._reasoning: ReasoningState | None = None
        if rules.markup.reasoning_end:
            self._reasoning = ReasoningState(rules.markup)
        self._is_reasoning = rules.markup.is_opened
        self._reasoning_tokens = 0
        self._undecided_tokens = 0  # tokens at a beginning, which may become a tag
        self._scores = _Scores()
        # Context logits and metrics are on each chunk from the first one that has them.
        self._next = TextChunk("", index)
        self._speculation: SpeculationStats | None = None
        self._cached_tokens: int | None = None
        # The parts of the completion that accepted draft tokens wrote: begin and end in characters.
        self._draft_spans: list[tuple[int, int]] = []
        self._released = 0  # characters of the completion that may leave
        # These have not been emitted yet.
        self._text: list[str] = []
        self._num_new_tokens = 0
        self._has_new_context = False
        self._has_emitted = False
        self._accumulated = ""
        # True if each token's place in the text has to be known.
        self._by_token = bool(request.return_tokens or request.return_drafted or self._matcher)
        if rules.echo_ids and request.return_tokens:
            for token in rules.echo_ids:
                text, data = detokenizer.feed_one(token)
                self._text.append(text)
                self._scores.tokens.append(TokenText(token, data, None))
        elif rules.echo_ids:
            self._text.append(detokenizer.feed(rules.echo_ids))

    def feed(self, chunk: EngineChunk) -> None:
        """Add a chunk; what follows the end is ignored."""
        if self.ending is not None:
            return
        stop = None
        self._num_new_tokens += len(chunk.token_ids)
        reasoning = self._reasoning
        may_divide = reasoning is not None and reasoning.may_change and len(chunk.token_ids) > 1
        has_scores = chunk.log_probs is not None or chunk.generation_logits is not None
        if self._by_token or has_scores or may_divide:
            stop, reason = self._feed_by_token(chunk)
        else:
            ids, reason = self.criteria.feed(chunk.token_ids)
            self._cut(self._detokenizer.feed(ids))
            if reasoning is not None:
                self._count_reasoning(reasoning, len(ids))
        if chunk.context_logits is not None or chunk.metrics is not None:
            self._note_figures(chunk)
        if self._rules.expose_kv_cache_metrics and self._cached_tokens is None:
            self._cached_tokens = chunk.cached_tokens
        if chunk.speculation is not None:
            self._speculation = chunk.speculation
        if stop is None:
            if reason is None and chunk.final:
                reason = chunk.finish_reason
                if reason is None:  # the engine gives none: its longest sequence, or the end id
                    reason = FinishReason.END_ID
                    limit = self._rules.max_sequence_tokens
                    total = self._rules.prompt_tokens + self.criteria.generated
                    if limit is not None and total >= limit:
                        reason = FinishReason.LENGTH
            if reason is not None:
                stop = self._cut(self._detokenizer.flush())
                if stop is None and self._matcher is not None:
                    stop = self._flush(self._matcher)
        if stop is not None:
            reason = FinishReason.STOP
        if self._scores.waiting:
            self._release_scores(reason)
        if reason is not None:
            self.ending = self._ending(reason, stop)

    def _note_figures(self, chunk: EngineChunk) -> None:
        """Keep the engine's context logits and metrics for the next text chunks."""
        if chunk.context_logits is not None and self._next.context_logits is None:
            self._next.context_logits = chunk.context_logits
            self._has_new_context = True
        if chunk.metrics is not None:
            self._next.metrics = chunk.metrics
            if not self._rules.expose_kv_cache_metrics:
                self._next.metrics = chunk.metrics.without_reuse()

    def _release_scores(self, reason: FinishReason | None) -> None:
        """Let the scores of released text leave; an end without a stop releases all of them."""
        if reason is None or reason is FinishReason.STOP:
            self._scores.release(self._released)
        else:
            self._scores.release_all()

    def _ending(self, reason: FinishReason, stop: str | None) -> Ending:
        """Return the ending of the sequence; ``stop``: the stop word that completed in its text."""
        stop_sequence = self.criteria.stop_sequence
        if stop is None and stop_sequence is not None:
            stop = self._request.stop_words[self._rules.stop_sequences.index(stop_sequence)]
        ending = Ending(
            finish_reason=reason,
            stop_reason=stop,
            prompt_tokens=self._rules.prompt_tokens,
            completion_tokens=self.criteria.generated,
            speculation=self._speculation,
            cached_tokens=self._cached_tokens,
        )
        if self._speculation is None:
            # With drafts, the same seed draws other tokens, so it would repeat nothing.
            ending.seed = self._request.sampling.seed
        if self._reasoning is not None:
            ending.reasoning_tokens = self._reasoning_tokens
        return ending

    def emit(self, min_new_tokens: int = 0) -> TextChunk | None:
        """Return all that is new since the last chunk; ``None`` if there is nothing to send.

        ``min_new_tokens``: wait for so many tokens, unless the chunk is the sequence's first or
        last.
        """
        text = "".join(self._text)
        if self.ending is None:
            must_wait = self._has_emitted and self._num_new_tokens < min_new_tokens
            if must_wait or not (text or self._has_new_context):
                return None
        self._text.clear()
        self._num_new_tokens = 0
        self._has_new_context = False
        self._has_emitted = True
        chunk = self._next
        self._next = TextChunk("", chunk.sequence_index)
        self._next.context_logits = chunk.context_logits
        self._next.metrics = chunk.metrics
        chunk.text = text
        chunk.ending = self.ending
        if self._draft_spans:
            chunk.draft_spans = self._spans_in(text)
        if self._rules.accumulate:
            self._accumulated += text
            chunk.text = self._accumulated
        scores = self._scores
        if self._request.return_tokens:
            chunk.tokens = tuple(scores.tokens)
            scores.tokens = []
        elif scores.log_probs:  # tokens have their own
            chunk.log_probs = scores.log_probs[:]
            chunk.cum_log_prob = scores.cum_log_prob
        if scores.rows:
            chunk.generation_logits = scores.rows
            scores.rows = []
        return chunk

    def _spans_in(self, text: str) -> tuple[tuple[int, int], ...]:
        """Return the draft spans in the text that leaves now, and keep those of later text."""
        text_end = self._released
        text_begin = text_end - len(text)
        spans: list[tuple[int, int]] = []
        later: list[tuple[int, int]] = []
        for begin, end in self._draft_spans:
            if begin < text_end:
                span = (max(begin, text_begin) - text_begin, min(end, text_end) - text_begin)
                spans.append(span)
            if end > text_end:
                later.append((begin, end))
        self._draft_spans = later
        return tuple(spans)

    # --- tokens and text ----------------------------------------------------------------------

    def _feed_by_token(self, chunk: EngineChunk) -> tuple[str | None, FinishReason | None]:
        """Add the chunk token by token.

        So it is known which token completes a stop, and when each one's text leaves. Returns the
        stop that completed, and the reason why the sequence ends by its ids.
        """
        request = self._request
        token_text: TokenText | None = None
        num_accepted = 0
        if request.return_drafted and chunk.speculation is not None:
            num_accepted = self._num_accepted(chunk.speculation)
        for position, token in enumerate(chunk.token_ids):
            ids, reason = self.criteria.feed((token,))
            if not ids:
                return None, reason
            log_prob = chunk.log_probs[position] if chunk.log_probs is not None else None
            if request.return_tokens:
                text, data = self._detokenizer.feed_one(token)
                token_text = TokenText(token, data, log_prob)
                if chunk.top_log_probs:
                    top_log_probs = chunk.top_log_probs[position]
                    token_text = TokenText(token, data, log_prob, top_log_probs)
            else:
                text = self._detokenizer.feed(ids)
            begin = self._released + self._held
            end = begin + len(text)
            stop = self._cut(text)
            if self._reasoning is not None:
                self._count_reasoning(self._reasoning, 1)
            if position < num_accepted and text:
                self._draft_spans.append((begin, end))
            logits = chunk.generation_logits
            row = logits[position] if logits is not None else None
            if log_prob is not None or row is not None or token_text is not None:
                if not text:
                    end += 1  # a token without text of its own leaves with the next character
                self._scores.waiting.append((end, log_prob, row, token_text))
            if stop is not None or reason is not None:
                return stop, reason
        return None, None

    def _num_accepted(self, speculation: SpeculationStats) -> int:
        """Return the number of accepted draft tokens in a chunk with these figures.

        The chunk of a round has them before the target's own token, and its figures count all
        rounds so far. An engine that speculates by itself has no rounds of ours, and gives the sum
        at its end.
        """
        if not speculation.rounds:
            return 0
        if self._speculation is None:
            return speculation.accepted
        return speculation.accepted - self._speculation.accepted

    def _cut(self, text: str) -> str | None:
        """Add text, up to a stop that completes in it; return that stop."""
        if self._matcher is None:
            if self._reasoning is not None:
                self._reasoning.feed(text)
            self._released += len(text)
            self._text.append(text)
            return None
        pieces = [TextPiece(text, True)]
        if self._reasoning is not None:
            pieces = self._reasoning.feed(text)
        return self._cut_pieces(self._matcher, pieces)

    def _count_reasoning(self, reasoning: ReasoningState, num_tokens: int) -> None:
        """Count tokens whose text has been added, if they are of the reasoning."""
        if self._is_reasoning or reasoning.is_reasoning:
            self._reasoning_tokens += num_tokens + self._undecided_tokens
            self._undecided_tokens = 0
        elif reasoning.held:
            self._undecided_tokens += num_tokens
        else:
            self._undecided_tokens = 0
        self._is_reasoning = reasoning.is_reasoning

    def _cut_pieces(self, matcher: StopMatcher, pieces: Iterable[TextPiece]) -> str | None:
        """Add pieces of text, up to a stop that completes in the answer; return that stop."""
        for text, is_answer in pieces:
            if not is_answer:
                self._release(matcher.flush() + text)
            else:
                cut = matcher.feed(text, armed=self.criteria.may_stop)
                self._release(cut.text)
                if cut.stop is not None:
                    return cut.stop
        return None

    @property
    def _held(self) -> int:
        """Number of characters that have come and may not leave yet."""
        if self._matcher is None:
            return 0
        if self._reasoning is None:
            return self._matcher.held
        return self._matcher.held + self._reasoning.held

    def _flush(self, matcher: StopMatcher) -> str | None:
        """Release what was held back, up to a stop that completes in it; return that stop."""
        stop = None
        if self._reasoning is not None:
            stop = self._cut_pieces(matcher, self._reasoning.flush())
        if stop is None:
            self._release(matcher.flush())
        return stop

    def _release(self, text: str) -> None:
        self._released += len(text)
        self._text.append(text)


class _Scores:
    """The scores of tokens, in the order of the tokens.

    Those in ``waiting`` leave once so many characters of the completion may: a stop may still cut
    off the token's text. ``log_probs``: those of all tokens since the beginning. ``rows`` of logits
    and ``tokens``: those that have not been emitted.
    """

    def __init__(self) -> None:
        # The end of the token's text in characters, log-probability, logits, and the token.
        self.waiting: deque[tuple[int, float | None, Array | None, TokenText | None]] = deque()
        self.log_probs = array("d")
        self.cum_log_prob = 0.0
        self.rows: list[Array] = []
        self.tokens: list[TokenText] = []

    def release(self, characters: int) -> None:
        """Let the scores of tokens in so many characters leave."""
        while self.waiting and self.waiting[0][0] <= characters:
            _, log_prob, logits, token = self.waiting.popleft()
            if log_prob is not None:
                self.log_probs.append(log_prob)
                self.cum_log_prob += log_prob
            if logits is not None:
                self.rows.append(logits)
            if token is not None:
                self.tokens.append(token)

    def release_all(self) -> None:
        """Let all scores leave, of a sequence whose end cuts nothing off."""
        last_end = self.waiting[-1][0]
        self.release(last_end)
