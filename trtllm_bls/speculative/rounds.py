"""Speculative decoding of one request as a state machine without I/O.

The theory. A round proposes k tokens cheaply, has the target compute all k + 1 positions in one
pass, and keeps the proposed tokens up to the first that the target would not have chosen, plus one
token of the target's own. Every token of the answer is thus the target's; a proposal (a *guess*)
only decides how many come out of one pass. Guesses come from texts (n-grams, free) or from a draft
model. The draft model can also work while the target verifies: it then continues after the guess as
if all of it were accepted (*early*), which is of use only if that comes true. Where guessing does
not pay, the target decodes plainly, in one stream that ends as soon as guessing may pay again.

``next`` returns one action. The caller performs it, reports with the method that the action names,
and calls ``next`` again:

    report                       the next action
    drafted, a guess             Verify
    verified, all came true      AskDraft without a request, if a draft was begun early
    any other, and at first      AskDraft, Verify of a guess from a text, Decode; or End, once the
                                 answer is complete

The draft model's work goes on only if the action says so. A first token waits for no draft model:
it is requested as in plain decoding. Times are loop seconds, handed in. Knows no engine;
``engines.routing`` performs the actions.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from math import inf
from typing import TypeAlias

from trtllm_bls.speculative.learned import (
    DRAFT_COOL_DOWN_S,
    DraftLength,
    SpeculationShared,
    Stopwatch,
)
from trtllm_bls.speculative.ngrams import NgramDrafts, NgramIndex
from trtllm_bls.speculative.options import DraftSource, SpeculationOptions
from trtllm_bls.speculative.progress import Progress
from trtllm_bls.types import (
    Draft,
    EngineChunk,
    EngineRequest,
    FinishReason,
    SpeculationStats,
    TokenIds,
)


@dataclass(frozen=True)
class AskDraft:
    """Have the draft model answer ``request``; report ``drafted``.

    Without a request: wait for the draft that was begun early.
    """

    request: EngineRequest | None


@dataclass(frozen=True)
class Verify:
    """Have the target answer ``request``, whole; report ``verified`` or ``refused``.

    ``early``: what the draft model is to begin meanwhile.
    """

    request: EngineRequest
    early: EngineRequest | None = None


@dataclass(frozen=True)
class Decode:
    """Stream ``request`` from the target; report each chunk by ``decoded``, then ``stopped``.

    ``to_end``: the request is for all remaining tokens of the answer.
    """

    request: EngineRequest
    to_end: bool


@dataclass(frozen=True)
class End:
    """The answer is complete."""


Action: TypeAlias = AskDraft | Verify | Decode | End


@dataclass(frozen=True)
class DraftFailure:
    """A reason for the lack of a draft, in one word and in one line.

    The word is ``refused`` if the reason holds for one request alone.
    """

    reason: str
    problem: str


@dataclass(frozen=True)
class _Guess:
    """Tokens to verify and their source; without tokens, a guess that the answer ends here."""

    draft: Draft
    source: DraftSource


class SpeculativeRounds:
    """Decisions about one request. ``stats`` may be read at any time."""

    def __init__(
        self,
        request: EngineRequest,
        options: SpeculationOptions,
        shared: SpeculationShared,
        *,
        has_draft_model: bool,
    ) -> None:
        self.stats = SpeculationStats()
        # The tenant's finished answers to draft from; this one joins them.
        self.memory = shared.memories.of(request.tenant, options.memory_tokens)
        self._request = request
        self._options = options
        self._shared = shared
        self._progress = Progress(
            request, shared.target_capacity, use_draft_logits=options.use_draft_logits
        )
        self._lengths = DraftLength(options, shared)
        source = options.draft_source
        reads_texts = source in (DraftSource.NGRAM, DraftSource.MIXED)
        self._ngrams_used = reads_texts or bool(request.speculation.prediction)
        self._ngrams: NgramDrafts | None = None  # made for the first look-up
        # A draft model has no table for the ids beyond its vocabulary.
        readable = "prompt_embedding_table" not in request.extras
        drafts_by_model = source in (DraftSource.MODEL, DraftSource.MIXED)
        self._model_given_up = not (has_draft_model and drafts_by_model and readable)
        self._guess: _Guess | None = None  # to verify, or being verified
        self._num_draft_tokens = 0  # tokens requested of the draft model
        self._early = False  # the draft model works, or has worked, on what follows the guess
        self._action_since = 0.0  # when the running action began
        # When the previous round ended, moved on by the time spent waiting for the draft model.
        self._overhead_since: float | None = None
        self._plain: Decode  # the running plain request, or the latest
        self._stopwatch: Stopwatch  # measures that request

    # --- what next ----------------------------------------------------------------------------

    def next(self, now: float) -> Action:
        """Return the next action, which begins ``now``."""
        self._action_since = now
        if self._progress.finish is not None:
            return End()
        if self._guess is not None:
            return self._verify(now)
        self._num_draft_tokens = self._model_length(now)
        if self._early and self._num_draft_tokens:
            self._num_draft_tokens += 1  # the target's own token comes first
            return AskDraft(None)
        self._drop_early()
        self._guess = self._look_up(now)
        if self._guess is not None:
            return self._verify(now)
        if not self._num_draft_tokens:
            return self._decode(now)
        if self._progress.generated == 0:
            return self._verify(now)
        return AskDraft(self._progress.ask_draft((), self._num_draft_tokens))

    def _drop_early(self) -> None:
        """Count the early draft, if there is one, as wasted."""
        if self._early:
            self._add(overlap_wasted=1)
            self._early = False

    # --- guessing -----------------------------------------------------------------------------

    def drafted(self, outcome: Draft | DraftFailure, now: float) -> None:
        """Take the draft model's answer; one without tokens means that it expects the end."""
        waited = now - self._action_since
        if self._overhead_since is not None:
            self._overhead_since += waited
        was_early = self._early
        self._early = False
        if isinstance(outcome, DraftFailure):
            self._give_up_draft(outcome.reason, now)
            return
        draft = outcome
        limit = self._num_draft_tokens
        if was_early:
            if len(draft.token_ids) < 2 or draft.token_ids[0] != self._progress.ids[-1]:
                self._add(overlap_wasted=1)
                return
            self._add(overlap_used=1)
            logits = draft.logits
            if logits is not None:
                logits = logits[1:]
            draft = Draft(token_ids=draft.token_ids[1:], logits=logits)
            limit -= 1
        elif draft.token_ids and self.stats.drafted:
            # The first draft is not measured, since the draft model also read the prompt.
            self._shared.draft_times.add(len(draft.token_ids), waited)
        self._guess = _Guess(self._fitting(draft, limit), DraftSource.MODEL)

    def _give_up_draft(self, reason: str, now: float) -> None:
        """Draft no more in this request; drafting only ever saves time, so nothing else fails."""
        self._model_given_up = True
        self._add(draft_failures=1)
        self.stats = replace(self.stats, fallback=reason)
        # Without a pause for all, every other request would wait for its own deadline.
        if reason == "vocabulary":
            self._shared.draft_off_until = inf
        elif reason != "refused":
            self._shared.draft_off_until = now + DRAFT_COOL_DOWN_S

    def _look_up(self, now: float) -> _Guess | None:
        """Return the n-grams' guess, if it gains more than the draft model's next draft would."""
        limit = min(self._lengths.limit(), self._progress.max_draft)
        if not self._ngrams_used or self._shared.draining or not limit:
            return None
        if self._ngrams is None:
            self._ngrams = self._index_texts(now)
        fixed = self._options.num_draft_tokens is not None
        proposal = self._ngrams.propose(limit, fixed=fixed, model_speed=self._lengths.speed)
        if proposal is None:
            return None
        source, ids = proposal
        draft = self._fitting(Draft(token_ids=ids), limit)
        if not draft.token_ids:
            return None
        return _Guess(draft, source)

    def _index_texts(self, now: float) -> NgramDrafts:
        """Index the texts to draft from: prediction, prompt and answer, memory, tool calls."""
        ids = self._progress.ids
        prediction = self._request.speculation.prediction
        calls = self._request.speculation.calls
        texts: list[NgramIndex] = []
        if prediction:
            texts.append(NgramIndex(prediction, DraftSource.PREDICTION, len(prediction)))
        if self._options.draft_source in (DraftSource.NGRAM, DraftSource.MIXED):
            texts.append(NgramIndex(ids, DraftSource.NGRAM, len(ids)))
            if self.memory:
                texts += self.memory.texts(now)
            if calls:
                texts.append(NgramIndex(calls, DraftSource.NGRAM, len(calls)))
        acceptance = (self.memory or self._shared).ngram_acceptance
        return NgramDrafts(ids, texts, acceptance, self._shared.best_length)

    def _model_length(self, now: float) -> int:
        """Return the number of tokens to request of the draft model."""
        progress = self._progress
        shared = self._shared
        capacity = shared.draft_capacity
        if self._model_given_up or shared.draining or now < shared.draft_off_until:
            self._lengths.speed = 0.0
            return 0
        room = progress.max_draft
        if capacity is not None and capacity.max_sequence_tokens is not None:
            room = min(room, max(0, capacity.max_sequence_tokens - len(progress.ids)))
        return self._lengths.length(progress.generated, room)

    def _fitting(self, draft: Draft, limit: int) -> Draft:
        """Return the part of a draft that the target can follow.

        It ends at ``limit`` tokens, before the end id, and before an id that the target does not
        know. A draft with logits keeps its end id, as its last token.
        """
        capacity = self._shared.target_capacity
        end_id = self._request.end_id
        vocab_size = (capacity and capacity.vocab_size) or sys.maxsize
        ids = draft.token_ids[:limit]
        length = 0
        while length < len(ids) and 0 <= ids[length] < vocab_size and ids[length] != end_id:
            length += 1
        if draft.logits is None:
            return Draft(token_ids=ids[:length])
        if length < len(ids) and ids[length] == end_id:
            length += 1
        return Draft(token_ids=ids[:length], logits=draft.logits[:length])

    # --- verifying ----------------------------------------------------------------------------

    def _verify(self, now: float) -> Action:
        """Verify the guess; without one, ask for a single token."""
        if self._overhead_since is not None:
            self._shared.overhead_times.add(0, now - self._overhead_since)
        if self._guess is None or not self._guess.draft.token_ids:
            return Verify(self._progress.ask_target(1))
        draft = self._guess.draft
        guessed = draft.token_ids
        request = self._progress.ask_target(len(guessed) + 1, draft=draft)
        early = None
        # The draft model may guess the target's own token after the draft, and those that follow.
        if self._options.overlap is not False and self._progress.remaining > len(guessed) + 2:
            count = self._model_length(now)
            if count and self._lengths.overlaps(len(guessed)):
                self._early = True
                early = self._progress.ask_draft(guessed, count + 1)
        return Verify(request, early)

    def verified(self, chunk: EngineChunk, now: float) -> EngineChunk:
        """Take the target's response to ``Verify``; return the part that belongs to the answer."""
        progress = self._progress
        guess = self._guess
        self._guess = None
        guessed: TokenIds = ()
        by_logits = False
        if guess is not None:
            guessed = guess.draft.token_ids
            by_logits = guess.draft.logits is not None and bool(guessed)
        read_prompt = progress.generated == 0  # then its time says nothing about a verification
        num_accepted, num_kept = progress.take_round(
            guessed, chunk.token_ids, chunk.finish_reason, shows_end=by_logits
        )
        self._overhead_since = now
        if not read_prompt:
            times = self._shared.verify_times
            if self._early:
                times = self._shared.overlapped_times
            times.add(len(guessed), now - self._action_since)
        if guessed:
            self._add(rounds=1, drafted=len(guessed), accepted=num_accepted)
        if guess is not None:
            self._count_source(guess.source, len(guessed), num_accepted)
        if num_accepted < len(guessed):
            self._drop_early()
        return progress.chunk(chunk, num_kept, self.stats)

    def _count_source(self, source: DraftSource, num_guessed: int, num_accepted: int) -> None:
        """Count a verified guess for its source, and learn from the draft model's."""
        if source is DraftSource.NGRAM:
            self._add(ngram_drafted=num_guessed)
        elif source is DraftSource.PREDICTION:
            self._add(predicted=num_guessed, predicted_accepted=num_accepted)
        elif num_guessed:
            self._lengths.add_round(num_guessed, num_accepted, self._progress.generated)
        else:
            # Without a token, the draft model's guess was the end of the answer.
            has_ended = self._progress.finish is FinishReason.END_ID
            self._lengths.add_round(1, int(has_ended), self._progress.generated)

    def refused(self, now: float) -> None:
        """Give up drafts, which the target refused; if it is broken, plain decoding will tell."""
        self._guess = None
        self._ngrams_used = False
        self._give_up_draft("refused", now)
        self._drop_early()

    def _add(self, **counts: int) -> None:
        sums = {name: getattr(self.stats, name) + count for name, count in counts.items()}
        self.stats = replace(self.stats, **sums)

    # --- plain decoding -----------------------------------------------------------------------

    def _decode(self, now: float) -> Action:
        """Request tokens without a draft, in a stream that may end early if guesses pay again."""
        progress = self._progress
        count = progress.remaining
        streaming = True
        pause = self._lengths.paused_until - progress.generated
        no_source = self._model_given_up and not self._ngrams_used
        no_guesses = no_source or self._lengths.ceiling < 1 or self._shared.draining
        if self._shared.one_step:
            count = 1
            streaming = False
        elif no_guesses or not progress.max_draft:
            streaming = self._request.streaming
        elif not self._model_given_up and pause > 0:
            count = progress.plain_tokens(pause)
        self._overhead_since = None
        self._stopwatch = Stopwatch(now if progress.generated else None)
        request = progress.ask_target(count, streaming=streaming)
        self._plain = Decode(request, to_end=count >= progress.remaining)
        return self._plain

    def decoded(self, chunk: EngineChunk, now: float) -> EngineChunk:
        """Take a chunk of the plain request, and return the part that belongs to the answer."""
        progress = self._progress
        reason = chunk.finish_reason
        self._stopwatch.add(len(chunk.token_ids), now)
        num_kept = progress.append(chunk.token_ids)
        if chunk.final and progress.finish is None:
            # The target has ended its request. That ends the answer, too, unless the request's
            # number of tokens has come.
            has_reason = reason not in (None, FinishReason.LENGTH)
            if has_reason or self._stopwatch.num_tokens < self._plain.request.max_tokens:
                progress.finish = reason or FinishReason.END_ID
        return progress.chunk(chunk, num_kept, self.stats)

    def may_leave(self, now: float) -> bool:
        """Return true if the plain request may end: the answer has ended, or guesses may pay."""
        if self._progress.finish is not None:
            return True
        if self._shared.draining:
            return not self._plain.to_end
        if not self._lengths.limit() or not self._progress.max_draft:
            return False
        return self._model_length(now) > 0 or self._look_up(now) is not None

    def stopped(self) -> None:
        """Measure the plain request, which is over or was ended early."""
        seconds = self._stopwatch.seconds_per_token()
        if seconds is not None:
            self._shared.plain_times.add(0, seconds)

    # --- the answer ---------------------------------------------------------------------------

    @property
    def answer(self) -> list[int]:
        """The ids of the complete answer; none before its end."""
        if self._progress.finish is None:
            return []
        return self._progress.ids[len(self._request.input_ids) :]
