"""From an engine's tokens to the text that a caller sees: plain objects, fed with engine chunks.

``Answer`` belongs to one request, ``SequenceText`` to one of its sequences. They join the
detokenizer and the matching of stops, decide why and where a sequence ends, and keep scores aligned
with the text that has left. To feed and to emit are separate steps, so any number of engine chunks
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


@dataclass(kw_only=True)  # see EngineChunk
class TextRules:
    """What prompt, engine and deployment add to a request's own fields.

    ``max_tokens``: of each sequence, also where the request names none. ``end_ids``: all that end a
    sequence, whether the engine knows them or not. ``stop_sequences``, ``kept_ids`` and ``markup``:
    see ``Prompt``.
    ``echo_ids``: the prompt, if it is to come in front of the completion. ``accumulate``: each
    chunk has all text so far. ``max_sequence_tokens``: the engine's limit on prompt and completion
    together, if known. ``expose_kv_cache_metrics``: tell how much of the prompt was in the KV cache
    already.
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

    ``begun``: the engine has begun to answer. ``done``: every sequence has ended. ``must_cancel``:
    the answer is done, but the engine does not know and would work on. An engine that ends by
    itself is not cancelled, since the cancel would only race with its final response.
    """

    def __init__(
        self, request: TextRequest, rules: TextRules, detokenizers: Iterable[Detokenizer]
    ) -> None:
        self.begun = self.done = self.must_cancel = False
        self._request = request
        self._engine_works_on = False
        self.sequences = [
            SequenceText(request, rules, detokenizer, index)
            for index, detokenizer in enumerate(detokenizers)
        ]

    def feed(self, chunks: Sequence[EngineChunk]) -> list[TextChunk]:
        """What is to be sent now that ``chunks`` have arrived: at most one chunk per sequence.

        A request that does not stream has one chunk per sequence, at the sequence's end.
        """
        changed: dict[int, SequenceText] = {}
        for chunk in chunks:
            sequence = self.sequences[chunk.sequence_index]
            # As a value of its own: mypy would take ``ending`` to be None after ``feed``, too.
            has_ended = sequence.ending is not None
            if has_ended:
                continue  # it ended by count, and the engine only confirms that
            sequence.feed(chunk)
            changed[chunk.sequence_index] = sequence
            self.begun = True
            if sequence.ending is not None and not chunk.final:
                # Will the engine end by itself? It counts to ``max_tokens``, too. It knows the end
                # ids, unless the request has ``min_tokens``: then it was sent one end id alone.
                reason = sequence.ending.finish_reason
                unknown = reason is FinishReason.END_ID and self._request.sampling.min_tokens
                self._engine_works_on |= reason is FinishReason.STOP or bool(unknown)
        return self._emit(changed.values())

    def end(self, reason: FinishReason) -> list[TextChunk]:
        """The last chunk of each sequence that has not ended, with what there is."""
        unended = [sequence for sequence in self.sequences if sequence.ending is None]
        for sequence in unended:
            sequence.feed(EngineChunk(token_ids=(), final=True, finish_reason=reason))
        return self._emit(unended)

    def _emit(self, sequences: Iterable[SequenceText]) -> list[TextChunk]:
        chunks = []
        for sequence in sequences:
            if sequence.ending is not None:
                self.done = all([sequence.ending is not None for sequence in self.sequences])
                self.must_cancel = self.done and self._engine_works_on
            elif not self._request.stream:
                continue
            chunk = sequence.emit(self._request.stream_interval)
            if chunk is not None:
                chunks.append(chunk)
        return chunks


class SequenceText:
    """One sequence: ``feed`` until it has its ``ending``; ``emit`` what is new at any time."""

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
        self._undecided_tokens = 0  # at a beginning, which may become a tag
        self._scores = _Scores()
        # What the engine told beside the tokens is on each chunk from the first that has it.
        self._next = TextChunk("", index)
        self._speculation: SpeculationStats | None = None
        self._cached_tokens: int | None = None
        self._drafted: list[tuple[int, int]] = []  # characters of the completion, begin and end
        self._released = 0  # characters of the completion that may leave
        # Not emitted yet: text, how many tokens came, and whether context logits did.
        self._text: list[str] = []
        self._has_emitted = False
        self._new_tokens = 0
        self._new_context = False
        self._accumulated = ""
        # Whether each token's place in the text has to be known.
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
        self._new_tokens += len(chunk.token_ids)
        reasoning = self._reasoning
        tells_apart = reasoning is not None and reasoning.may_change and len(chunk.token_ids) > 1
        has_scores = chunk.log_probs is not None or chunk.generation_logits is not None
        if self._by_token or has_scores or tells_apart:
            stop, reason = self._feed_by_token(chunk)
        else:
            ids, reason = self.criteria.feed(chunk.token_ids)
            self._cut(self._detokenizer.feed(ids))
            if self._reasoning is not None:
                self._count_reasoning(self._reasoning, len(ids))
        if chunk.context_logits is not None and self._next.context_logits is None:
            self._next.context_logits, self._new_context = chunk.context_logits, True
        exposed = self._rules.expose_kv_cache_metrics
        if chunk.metrics is not None:
            self._next.metrics = chunk.metrics if exposed else chunk.metrics.without_reuse()
        if exposed and self._cached_tokens is None:
            self._cached_tokens = chunk.cached_tokens
        if chunk.speculation is not None:
            self._speculation = chunk.speculation
        if stop is None:
            if reason is None and chunk.final:
                reason = chunk.finish_reason
                if reason is None:  # the engine gives none: its longest sequence, or the end id
                    longest = self._rules.max_sequence_tokens
                    total = self._rules.prompt_tokens + self.criteria.generated
                    full = longest is not None and total >= longest
                    reason = FinishReason.LENGTH if full else FinishReason.END_ID
            if reason is not None:
                stop = self._cut(self._detokenizer.flush())
                if stop is None and self._matcher is not None:
                    stop = self._flush(self._matcher)
        reason = FinishReason.STOP if stop is not None else reason
        if self._scores.waiting:
            released_all = reason not in (None, FinishReason.STOP)
            self._scores.release(None if released_all else self._released)
        if reason is None:
            return
        request, ended_by = self._request, self.criteria.stop_sequence
        if stop is None and ended_by is not None:
            stop = request.stop_words[self._rules.stop_sequences.index(ended_by)]
        self.ending = Ending(
            finish_reason=reason,
            stop_reason=stop,
            prompt_tokens=self._rules.prompt_tokens,
            completion_tokens=self.criteria.generated,
            # The same seed without drafts draws other tokens, so telling it would help nobody.
            seed=request.sampling.seed if self._speculation is None else None,
            speculation=self._speculation,
            cached_tokens=self._cached_tokens,
            reasoning_tokens=None if self._reasoning is None else self._reasoning_tokens,
        )

    def emit(self, least_tokens: int = 0) -> TextChunk | None:
        """What is new since the last chunk; ``None`` if there is nothing to send.

        ``least_tokens``: wait for so many, unless it is the first or the sequence has ended.
        """
        text, request = "".join(self._text), self._request
        if self.ending is None:
            must_wait = self._has_emitted and self._new_tokens < least_tokens
            if must_wait or not (text or self._new_context):
                return None
        self._text.clear()
        self._new_tokens, self._new_context, self._has_emitted = 0, False, True
        chunk = self._next
        self._next = TextChunk("", chunk.sequence_index)
        self._next.context_logits, self._next.metrics = chunk.context_logits, chunk.metrics
        chunk.text, chunk.ending = text, self.ending
        if self._drafted:
            begin, end = self._released - len(text), self._released
            spans = [(a - begin, b - begin) for a, b in self._drafted if a < end]
            chunk.drafted = tuple([(max(a, 0), min(b, len(text))) for a, b in spans])
            self._drafted = [span for span in self._drafted if span[1] > end]
        if self._rules.accumulate:
            self._accumulated += text
            chunk.text = self._accumulated
        if request.return_tokens:
            chunk.tokens, self._scores.tokens = tuple(self._scores.tokens), []
        if self._scores.log_probs and not request.return_tokens:  # tokens have their own
            chunk.log_probs = self._scores.log_probs[:]
            chunk.cum_log_prob = self._scores.cum_log_prob
        if self._scores.rows:
            chunk.generation_logits, self._scores.rows = self._scores.rows, []
        return chunk

    # --- tokens and text ----------------------------------------------------------------------

    def _feed_by_token(self, chunk: EngineChunk) -> tuple[str | None, FinishReason | None]:
        """Add the chunk token by token, to know which one completes a stop and when each one's text
        leaves. Returns the stop that completed, and why the sequence ends by its ids."""
        request, token_text, accepted = self._request, None, 0
        if request.return_drafted and chunk.speculation is not None and chunk.speculation.rounds:
            # The chunk of a round has the accepted draft tokens before the target's own token. Its
            # figures count all rounds so far. An engine that speculates by itself has no rounds of
            # ours and tells the sum at its end.
            before = self._speculation.accepted if self._speculation is not None else 0
            accepted = chunk.speculation.accepted - before
        for position, token in enumerate(chunk.token_ids):
            kept, reason = self.criteria.feed((token,))
            if not kept:
                return None, reason
            log_prob = chunk.log_probs[position] if chunk.log_probs is not None else None
            if request.return_tokens:
                text, data = self._detokenizer.feed_one(token)
                best = chunk.top_log_probs[position] if chunk.top_log_probs else ()
                token_text = TokenText(token, data, log_prob, best)
            else:
                text = self._detokenizer.feed(kept)
            begin = self._released + self._held
            end = begin + len(text)
            stop = self._cut(text)
            if self._reasoning is not None:
                self._count_reasoning(self._reasoning, 1)
            if position < accepted and text:
                self._drafted.append((begin, end))
            logits = chunk.generation_logits
            row = logits[position] if logits is not None else None
            if log_prob is not None or row is not None or token_text is not None:
                # A token without text of its own leaves with the next character.
                leaves = end if text else end + 1
                self._scores.waiting.append((leaves, log_prob, row, token_text))
            if stop is not None or reason is not None:
                return stop, reason
        return None, None

    def _cut(self, text: str) -> str | None:
        """Add text, up to a stop that completes in it; return that stop."""
        pieces = [TextPiece(text, True)]
        if self._reasoning is not None:
            pieces = self._reasoning.feed(text)
        if self._matcher is None:
            self._release(text)
            return None
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
        """How many characters have come and may not leave yet."""
        if self._matcher is None:
            return 0
        return self._matcher.held + (self._reasoning.held if self._reasoning is not None else 0)

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
    """What is told of tokens beside the text, in their order.

    What is ``waiting`` is told once so many characters of the completion may leave: a stop may
    still cut off the token's text. ``log_probs`` are of all tokens since the beginning; ``rows`` of
    logits and ``tokens`` of those not emitted yet.
    """

    def __init__(self) -> None:
        # Characters, log-probability, logits, and the token itself.
        self.waiting: deque[tuple[int, float | None, Array | None, TokenText | None]] = deque()
        self.log_probs = array("d")
        self.cum_log_prob = 0.0
        self.rows: list[Array] = []
        self.tokens: list[TokenText] = []

    def release(self, characters: int | None) -> None:
        """So many characters may leave, and with them their tokens; ``None``: all of them."""
        while self.waiting and (characters is None or self.waiting[0][0] <= characters):
            _, log_prob, logits, token = self.waiting.popleft()
            if log_prob is not None:
                self.log_probs.append(log_prob)
                self.cum_log_prob += log_prob
            if logits is not None:
                self.rows.append(logits)
            if token is not None:
                self.tokens.append(token)
