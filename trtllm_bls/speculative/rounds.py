"""Speculative decoding of one request as a state machine without I/O.

The theory. A round proposes k tokens cheaply, has the target compute all k + 1 positions in one
pass, and keeps the proposed tokens up to the first that the target would not have chosen, plus one
token of the target's own. Every token of the answer is thus the target's; a proposal (a *guess*)
only decides how many come out of one pass. Guesses come from texts (n-grams, free) or from a draft
model, which can also work while the target verifies: it then continues after the guess as if all of
it were accepted (*early*), which is of use only if that comes true. Where guessing does not pay,
the target decodes plainly, in one stream that is left as soon as guessing may pay again.

``next`` says what to do as one action; whoever does it reports with the method of that action and
asks again. What follows what:

    report                       the next action
    drafted, a guess             Verify
    verified, all came true      AskDraft without a request, if a draft was begun early
    any other, and at first      AskDraft, Verify of a guess from a text, Decode; or End, once the
                                 answer is complete

The draft model's work goes on only where the action says so. A first token waits for no draft
model: it is asked for as plain decoding would. Times are loop seconds, handed in. Knows no engine;
``engines.routing`` performs the actions.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import takewhile
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

    ``rest``: it is for all that is left of the answer.
    """

    request: EngineRequest
    rest: bool


@dataclass(frozen=True)
class End:
    """Nothing is left to do."""


Action: TypeAlias = AskDraft | Verify | Decode | End


@dataclass(frozen=True)
class DraftFailure:
    """Why there is no draft: one word, which is ``refused`` if it holds for one request alone, and
    one line."""

    why: str
    problem: str


@dataclass(frozen=True)
class _Guess:
    """Tokens to verify, and the source they come from; no tokens = it expects the end here."""

    draft: Draft
    source: DraftSource


class SpeculativeRounds:
    """The decisions of one request. ``stats`` may be read at any time."""

    def __init__(
        self,
        request: EngineRequest,
        options: SpeculationOptions,
        shared: SpeculationShared,
        *,
        has_draft_model: bool,
    ) -> None:
        self.stats = SpeculationStats()
        # The answers that may be drafted from, and that this one is to join.
        self.memory = shared.memories.of(request.tenant, options.memory_tokens)
        self._request = request
        self._options = options
        self._shared = shared
        capacity, use_logits = shared.target_capacity, options.use_draft_logits
        self._progress = Progress(request, capacity, use_draft_logits=use_logits)
        self._lengths = DraftLength(options, shared)
        source = options.draft_source
        reads_texts = source in (DraftSource.NGRAM, DraftSource.MIXED)
        self._ngrams_used = reads_texts or bool(request.speculation.prediction)
        self._ngrams: NgramDrafts | None = None  # made when first asked
        # A draft model has no table for the ids beyond its vocabulary.
        readable = "prompt_embedding_table" not in request.extras
        drafts_by_model = source in (DraftSource.MODEL, DraftSource.MIXED)
        self._model_given_up = not (has_draft_model and drafts_by_model and readable)
        self._guess: _Guess | None = None  # to verify, or being verified
        self._asked = 0  # tokens asked of the draft model
        self._early = False  # the draft model works, or has worked, on what follows the guess
        self._begun = 0.0  # when the running action began
        # When the round just before ended, moved on by the time spent waiting for the draft model.
        self._overhead_since: float | None = None
        self._plain: Decode  # the running plain request, or the last
        self._watch: Stopwatch  # its time

    # --- what next ----------------------------------------------------------------------------

    def next(self, now: float) -> Action:
        """The next action, which begins ``now``."""
        self._begun = now
        if self._progress.finish is not None:
            return End()
        if self._guess is not None:
            return self._verify(now)
        self._asked = self._model_length(now)
        if self._early and self._asked:
            self._asked += 1  # the target's own token comes first
            return AskDraft(None)
        self._drop_early()
        self._guess = self._look_up(now)
        if self._guess is not None:
            return self._verify(now)
        if not self._asked:
            return self._decode(now)
        if self._progress.generated == 0:
            return self._verify(now)
        return AskDraft(self._progress.ask_draft((), self._asked))

    def _drop_early(self) -> None:
        """What the draft model has begun early, if anything, is of no use."""
        if self._early:
            self._add(overlap_wasted=1)
            self._early = False

    # --- guessing -----------------------------------------------------------------------------

    def drafted(self, outcome: Draft | DraftFailure, now: float) -> None:
        """The draft model's answer; one without tokens means that it expects the end."""
        waited = now - self._begun
        if self._overhead_since is not None:
            self._overhead_since += waited
        early, self._early = self._early, False
        if isinstance(outcome, DraftFailure):
            self._give_up_draft(outcome.why, now)
            return
        count = self._asked
        if early:
            if len(outcome.token_ids) < 2 or outcome.token_ids[0] != self._progress.ids[-1]:
                self._add(overlap_wasted=1)
                return
            self._add(overlap_used=1)
            logits = None if outcome.logits is None else outcome.logits[1:]
            outcome, count = Draft(token_ids=outcome.token_ids[1:], logits=logits), count - 1
        elif outcome.token_ids and self.stats.drafted:  # the first also read the prompt
            self._shared.draft_times.add(len(outcome.token_ids), waited)
        self._guess = _Guess(self._fitting(outcome, count), DraftSource.MODEL)

    def _give_up_draft(self, why: str, now: float) -> None:
        """Draft no more in this request; drafting only ever saves time, so nothing else fails."""
        self._model_given_up = True
        self._add(draft_failures=1)
        self.stats = replace(self.stats, fallback=why)
        if why != "refused":  # or else every request would wait for its deadline
            self._shared.draft_off_until = inf if why == "vocabulary" else now + DRAFT_COOL_DOWN_S

    def _look_up(self, now: float) -> _Guess | None:
        """What n-grams offer, if that gains more than the draft model as it was last asked for."""
        most = min(self._lengths.most(), self._progress.max_draft)
        if not self._ngrams_used or self._shared.draining or not most:
            return None
        if self._ngrams is None:
            ids, prediction = self._progress.ids, self._request.speculation.prediction
            texts: list[NgramIndex] = []
            if prediction:
                texts.append(NgramIndex(prediction, DraftSource.PREDICTION, len(prediction)))
            if self._options.draft_source in (DraftSource.NGRAM, DraftSource.MIXED):
                texts.append(NgramIndex(ids, DraftSource.NGRAM, len(ids)))
                texts += self.memory.texts(now) if self.memory else ()
                if calls := self._request.speculation.calls:
                    texts.append(NgramIndex(calls, DraftSource.NGRAM, len(calls)))
            acceptance = (self.memory or self._shared).ngram_acceptance
            self._ngrams = NgramDrafts(ids, texts, acceptance, self._shared.best_length)
        fixed, beside = self._options.num_draft_tokens is not None, self._lengths.speed
        if (proposal := self._ngrams.propose(most, fixed=fixed, beside=beside)) is None:
            return None
        source, proposed = proposal
        draft = self._fitting(Draft(token_ids=proposed), most)
        return _Guess(draft, source) if draft.token_ids else None

    def _model_length(self, now: float) -> int:
        """Tokens to ask of the draft model; 0 = none."""
        progress, shared, capacity = self._progress, self._shared, self._shared.draft_capacity
        if self._model_given_up or shared.draining or now < shared.draft_off_until:
            self._lengths.speed = 0.0
            return 0
        room = progress.max_draft
        if capacity is not None and capacity.max_sequence_tokens is not None:
            room = min(room, max(0, capacity.max_sequence_tokens - len(progress.ids)))
        return self._lengths.length(progress.generated, room)

    def _fitting(self, draft: Draft, count: int) -> Draft:
        """Cut where the target could not follow: too long, the end id, an id it does not know.

        A draft with logits keeps its end id, as its last token.
        """
        capacity, end_id = self._shared.target_capacity, self._request.end_id
        known = (capacity and capacity.vocab_size) or sys.maxsize
        cut = draft.token_ids[:count]
        ids = tuple(takewhile(lambda t: 0 <= t < known and t != end_id, cut))
        if draft.logits is None:
            return Draft(token_ids=ids)
        if len(ids) < len(cut) and cut[len(ids)] == end_id:
            ids = cut[: len(ids) + 1]
        return Draft(token_ids=ids, logits=draft.logits[: len(ids)])

    # --- verifying ----------------------------------------------------------------------------

    def _verify(self, now: float) -> Action:
        """Verify the guess; without one, ask for a single token."""
        if self._overhead_since is not None:
            self._shared.overhead_times.add(0, now - self._overhead_since)
        draft = self._guess.draft if self._guess else None
        if draft is None or not draft.token_ids:
            return Verify(self._progress.ask_target(1))
        guessed, early = draft.token_ids, None
        request = self._progress.ask_target(len(guessed) + 1, draft=draft)
        # The draft model may guess the target's own token after the draft, and what follows.
        if self._options.overlap is not False and self._progress.remaining > len(guessed) + 2:
            count = self._model_length(now)
            if count and self._lengths.overlaps(len(guessed)):
                self._early = True
                early = self._progress.ask_draft(guessed, count + 1)
        return Verify(request, early)

    def verified(self, chunk: EngineChunk, now: float) -> EngineChunk:
        """The target's answer to ``Verify``; the part of it that belongs to the answer."""
        guess, self._guess = self._guess, None
        drafted = guess.draft.token_ids if guess else ()
        progress, shared = self._progress, self._shared
        later = progress.generated > 0  # the first also reads the prompt
        shows_end = guess is not None and guess.draft.logits is not None and bool(drafted)
        accepted, kept = progress.take_round(
            drafted, chunk.token_ids, chunk.finish_reason, shows_end=shows_end
        )
        self._overhead_since = now
        if later:
            times = shared.overlapped_times if self._early else shared.verify_times
            times.add(len(drafted), now - self._begun)
        if drafted:
            self._add(rounds=1, drafted=len(drafted), accepted=accepted)
        source = guess and guess.source
        if source is DraftSource.NGRAM:
            self._add(ngram_drafted=len(drafted))
        elif source is DraftSource.PREDICTION:
            self._add(predicted=len(drafted), predicted_accepted=accepted)
        elif source is DraftSource.MODEL:
            # Where it proposed no token, its guess was the end.
            right = accepted if drafted else int(progress.finish is FinishReason.END_ID)
            self._lengths.add_round(len(drafted) or 1, right, progress.generated)
        if accepted < len(drafted):
            self._drop_early()
        return progress.chunk(chunk, kept, self.stats)

    def refused(self, now: float) -> None:
        """The target takes no drafts; were it broken, plain decoding would say so now."""
        self._guess = None
        self._ngrams_used = False
        self._give_up_draft("refused", now)
        self._drop_early()

    def _add(self, **counts: int) -> None:
        sums = {name: getattr(self.stats, name) + count for name, count in counts.items()}
        self.stats = replace(self.stats, **sums)

    # --- plain decoding -----------------------------------------------------------------------

    def _decode(self, now: float) -> Action:
        """Ask for tokens without a draft, in a stream that may be left if guesses may pay again."""
        progress = self._progress
        count, streaming = progress.remaining, True
        pause = self._lengths.paused_until - progress.generated
        no_guesses = self._model_given_up and not self._ngrams_used
        no_guesses = no_guesses or self._lengths.ceiling < 1 or self._shared.draining
        if self._shared.one_step:
            count, streaming = 1, False
        elif no_guesses or not progress.max_draft:
            streaming = self._request.streaming
        elif not self._model_given_up and pause > 0:
            count = progress.plain_tokens(pause)
        self._overhead_since = None
        self._watch = Stopwatch(now if progress.generated else None)
        request = progress.ask_target(count, streaming=streaming)
        self._plain = Decode(request, rest=count >= progress.remaining)
        return self._plain

    def decoded(self, chunk: EngineChunk, now: float) -> EngineChunk:
        """A chunk of the plain request; the part of it that belongs to the answer."""
        progress, reason = self._progress, chunk.finish_reason
        self._watch.add(len(chunk.token_ids), now)
        kept = progress.append(chunk.token_ids)
        if chunk.final and progress.finish is None:
            # The target has ended its request: that ends the answer, unless all was given.
            has_reason = reason not in (None, FinishReason.LENGTH)
            if has_reason or self._watch.tokens < self._plain.request.max_tokens:
                progress.finish = reason or FinishReason.END_ID
        return progress.chunk(chunk, kept, self.stats)

    def may_leave(self, now: float) -> bool:
        """Whether the plain request should be left: the answer has ended, or a guess may pay."""
        if self._progress.finish is not None:
            return True
        if self._shared.draining:
            return not self._plain.rest
        if not self._lengths.most() or not self._progress.max_draft:
            return False
        return self._model_length(now) > 0 or self._look_up(now) is not None

    def stopped(self) -> None:
        """The plain request is over, or was left."""
        seconds = self._watch.seconds_per_token()
        if seconds is not None:
            self._shared.plain_times.add(0, seconds)

    # --- the answer ---------------------------------------------------------------------------

    @property
    def answer(self) -> list[int]:
        """The complete answer; nothing before its end."""
        ids = self._progress.ids
        return ids[len(self._request.input_ids) :] if self._progress.finish is not None else []
