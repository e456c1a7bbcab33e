"""Two engines made to look like one: drafts are proposed cheaply and verified by the target.

One object per request; what requests learn from one another is in ``SpeculationShared``. Owns the
order of the calls and their ends: at every await either engine's work stops when the reader goes.
All decisions are in ``trtllm_bls.speculative``, the draft engine's failures in ``drafting``.

A first token is asked for as plain decoding would. Then each round drafts, verifies and yields what
was accepted; where drafting does not pay, one plain stream runs until it may.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import takewhile

from trtllm_bls.chunks import join_chunks
from trtllm_bls.engines.base import Engine
from trtllm_bls.engines.drafting import DraftModel
from trtllm_bls.errors import EngineError, EngineStalled, EngineUnavailable, InvalidRequest
from trtllm_bls.messages import (
    Draft,
    EngineChunk,
    EngineLimits,
    EngineRequest,
    FinishReason,
    Sampling,
    TokenIds,
)
from trtllm_bls.speculative.carry import Carrier, check_speculative, draft_can_follow
from trtllm_bls.speculative.ledger import Ledger
from trtllm_bls.speculative.lookup import PromptLookup
from trtllm_bls.speculative.options import DraftSource, SpeculationOptions, SpeculationStats
from trtllm_bls.speculative.pace import Stopwatch
from trtllm_bls.speculative.pacer import Pacer
from trtllm_bls.speculative.progress import Progress
from trtllm_bls.speculative.shared import SpeculationShared

UNSTREAMED_STRETCH = 64  # plain tokens per request that cannot be left half-way


class SpeculativeEngine:
    """An ``Engine`` for one request: ``target`` decides every token, ``draft`` only guesses.

    ``stats`` may be read while the stream runs and after it. ``draft`` may be absent: then only
    n-grams draft. The engines stay the caller's, who closes them.
    """

    def __init__(
        self,
        target: Engine,
        draft: Engine | None = None,
        options: SpeculationOptions | None = None,
        shared: SpeculationShared | None = None,
    ) -> None:
        self.name = target.name
        self.target = target
        self.draft = draft
        self.options = options or SpeculationOptions()
        self.shared = shared or SpeculationShared()
        self.stats = SpeculationStats()

    async def limits(self) -> EngineLimits:
        return await self.target.limits()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        """As any engine; raises ``Unsupported`` for fields that rounds would not keep."""
        check_speculative(request)
        shared = self.shared
        shared.in_flight += 1
        try:
            if shared.target_limits is None:
                shared.target_limits = await _limits(self.target)
            async with aclosing(_Run(self, request).chunks()) as chunks:
                if request.streaming:
                    async for chunk in chunks:
                        yield chunk
                else:
                    yield join_chunks([chunk async for chunk in chunks])
        finally:
            shared.in_flight -= 1

    async def close(self) -> None:
        """Nothing is held: a stream ends its work when it is closed."""


async def _limits(target: Engine) -> EngineLimits:
    try:
        return await target.limits()
    except EngineError:  # plain decoding would not have asked
        return EngineLimits()


@dataclass(frozen=True)
class _Guess:
    """Tokens to verify and where they come from; none = the source expects the end here.

    Without a source there was no guess: the target is asked for one token.
    """

    draft: Draft
    source: DraftSource | None


_NO_GUESS = _Guess(Draft(token_ids=()), None)


class _Run:
    """One request on its way through rounds and plain stretches."""

    def __init__(self, engine: SpeculativeEngine, request: EngineRequest) -> None:
        options, shared = engine.options, engine.shared
        limits = shared.target_limits or EngineLimits()
        self._target = engine.target
        self._request = request
        self._options = options
        self._shared = shared
        self._stats = engine.stats
        self._progress = Progress(request, limits.max_sequence_tokens)
        self._carrier = Carrier(request, options.use_draft_logits)
        self._ledger = Ledger()
        self._pacer = Pacer(options, shared)
        self._vocab_size = limits.vocab_size
        ids = self._progress.ids
        self._lookup = PromptLookup(ids, options.min_match) if options.uses_lookup else None
        drafter = engine.draft if options.uses_model and draft_can_follow(request) else None
        self._model = DraftModel(drafter, options.draft_deadline_s, shared, engine.stats)
        self._asked = 0  # tokens of the running draft, where it continues the answer so far
        self._round_over: float | None = None  # loop time; None = no round just before
        self._waited_s = 0.0  # for the draft model, since then

    async def chunks(self) -> AsyncGenerator[EngineChunk, None]:
        try:
            while self._progress.finish is None:
                guess = await self._guess()
                if guess is not None:
                    first = self._progress.generated == 0  # delayed by nothing at all
                    chunk = await self._verify(guess)
                    if chunk is not None:
                        if not first and self._begin_draft():
                            await asyncio.sleep(0)  # it sets out; then the chunk may take its time
                        yield chunk
                    continue
                async with aclosing(self._plain()) as stretch:
                    async for chunk in stretch:
                        yield chunk
        finally:
            await self._model.cancel()

    # --- what to guess ------------------------------------------------------------------------

    async def _guess(self) -> _Guess | None:
        """What to verify next, or ``None`` for plain decoding."""
        if self._model.running and not self._asked:  # begun a round ago, and all of it came true
            ahead = await self._guess_from_ahead()
            if ahead is not None:
                return ahead
        if not self._asked:
            found = self._look_up()
            if found is not None:
                return found
            if self._model_length() == 0:
                return None
            if not self._begin_draft():  # a first token waits for no draft model
                return _NO_GUESS
        count, self._asked = self._asked, 0
        draft = await self._drafted()
        if draft is None:
            return None
        if draft.token_ids and self._stats.drafted:  # the first also read the prompt
            self._shared.draft_times.add(len(draft.token_ids), self._waited_s)
        return _Guess(self._fitting(draft, count), DraftSource.MODEL)

    def _begin_draft(self) -> bool:
        """Ask the draft model to go on after the answer so far, if it is its turn."""
        progress = self._progress
        if progress.finish is not None or progress.generated == 0 or self._model.running:
            return False
        if self._look_up() is not None:
            return False
        self._asked = self._model_length()
        if self._asked:
            self._model.start(self._carrier.draft(progress, (), self._asked))
        return self._asked > 0

    async def _guess_from_ahead(self) -> _Guess | None:
        count = self._model_length()
        draft = await self._drafted() if count else None
        ids = draft.token_ids if draft else ()
        if draft is None or len(ids) < 2 or ids[0] != self._progress.ids[-1]:
            await self._model.cancel()
            self._stats.overlap_wasted += 1
            return None
        self._stats.overlap_used += 1
        rest = Draft(token_ids=ids[1:], logits=None if draft.logits is None else draft.logits[1:])
        return _Guess(self._fitting(rest, count), DraftSource.MODEL)

    async def _drafted(self) -> Draft | None:
        begun = _now()
        draft = await self._model.result()
        self._waited_s += _now() - begun
        return draft

    def _look_up(self) -> _Guess | None:
        progress, lookup = self._progress, self._lookup
        resting = progress.generated < self._pacer.rest_until(DraftSource.NGRAM)
        if lookup is None or resting or not self._pacer.most():
            return None
        if not lookup.propose(1):  # cheap, and most often the end of it
            return None
        count = self._pacer.length(DraftSource.NGRAM, progress.generated, progress.max_draft)
        draft = self._fitting(Draft(token_ids=lookup.propose(count)), count)
        return _Guess(draft, DraftSource.NGRAM) if draft.token_ids else None

    def _model_length(self) -> int:
        """Tokens to ask of the draft model now; 0 = none."""
        if not self._model.usable:
            return 0
        room = min(self._progress.max_draft, self._model.room(self._progress.ids))
        return self._pacer.length(DraftSource.MODEL, self._progress.generated, room)

    def _fitting(self, draft: Draft, count: int) -> Draft:
        """Cut where the target could not follow: too long, the end id, an id it does not know."""
        known = sys.maxsize if self._vocab_size is None else self._vocab_size
        fits = takewhile(
            lambda token: 0 <= token < known and token != self._request.end_id,
            draft.token_ids[:count],
        )
        ids = tuple(fits)
        logits = None if draft.logits is None else draft.logits[: len(ids)]
        return Draft(token_ids=ids, logits=logits)

    # --- a round ------------------------------------------------------------------------------

    async def _verify(self, guess: _Guess) -> EngineChunk | None:
        """Verify a guess; ``None`` if the target refused it, and plain decoding follows."""
        drafted, progress = guess.draft.token_ids, self._progress
        begun, later = _now(), progress.generated > 0  # the first also reads the prompt
        if self._round_over is not None:
            self._shared.overhead_times.add(0, begun - self._round_over - self._waited_s)
        ahead = self._start_ahead(drafted)
        request = (
            self._carrier.verify(progress, guess.draft)
            if drafted
            else self._carrier.plain(progress, 1, False)
        )
        try:
            chunk = await self._ask(request)
        except (InvalidRequest, EngineError) as error:
            if not drafted or isinstance(error, (EngineUnavailable, EngineStalled)):
                raise
            await self._refuse(error)
            return None
        self._round_over, self._waited_s = _now(), 0.0
        verdict = progress.take_round(drafted, chunk.token_ids, chunk.finish_reason)
        if later:
            times = self._shared.ahead_times if ahead else self._shared.verify_times
            times.add(len(drafted), self._round_over - begun)
        self._count(guess, verdict.accepted)
        if self._model.running and verdict.accepted < len(drafted):
            await self._model.cancel()
            self._stats.overlap_wasted += 1
        return self._ledger.enter(chunk, verdict.kept, progress.finish)

    def _start_ahead(self, drafted: TokenIds) -> bool:
        """Let the draft model guess the target's own token after ``drafted``, and what follows."""
        if self._options.overlap is False or self._progress.remaining <= len(drafted) + 2:
            return False
        count = self._model_length()
        if not count or not self._pacer.overlaps(len(drafted)):
            return False
        self._model.start(self._carrier.draft(self._progress, drafted, count + 1))
        return True

    async def _ask(self, request: EngineRequest) -> EngineChunk:
        self._ledger.begin_request()
        async with aclosing(self._target.generate(request)) as stream:
            return join_chunks([chunk async for chunk in stream])

    async def _refuse(self, error: Exception) -> None:
        """The target takes no drafts: were it broken, plain decoding would say so now."""
        await self._model.cancel()
        self._model.give_up("refused", str(error))
        self._lookup = None

    def _count(self, guess: _Guess, accepted: int) -> None:
        drafted, generated = len(guess.draft.token_ids), self._progress.generated
        if guess.source is None:
            return
        if drafted:
            self._stats.add_round(guess.source, drafted, accepted)
            self._shared.totals.add_round(guess.source, drafted, accepted)
            self._pacer.add_round(guess.source, drafted, accepted, generated)
        else:  # the end itself was the guess
            ended = self._progress.finish is FinishReason.END_ID
            self._pacer.add_round(guess.source, 1, int(ended), generated)

    # --- plain decoding -----------------------------------------------------------------------

    async def _plain(self) -> AsyncGenerator[EngineChunk, None]:
        """One plain request, left early as soon as drafting may pay again."""
        progress = self._progress
        asked, streaming = self._stretch()
        request = self._carrier.plain(progress, asked, streaming)
        watch = Stopwatch(_now(), reads_prompt=progress.generated == 0)
        self._ledger.begin_request()
        self._round_over = None
        async with aclosing(self._target.generate(request)) as stream:
            async for chunk in stream:
                watch.add(len(chunk.token_ids), _now())
                kept = progress.take(chunk.token_ids)
                if chunk.final:
                    await self._end_stretch(chunk.finish_reason, watch.tokens, asked)
                entered = self._ledger.enter(chunk, kept, progress.finish)
                if entered.token_ids or entered.final:
                    yield entered
                if progress.finish is not None or (not chunk.final and self._may_draft()):
                    break
        seconds = watch.seconds_per_token()
        if seconds is not None:
            self._shared.plain_times.add(0, seconds)

    def _stretch(self) -> tuple[int, bool]:
        """How many tokens to ask for, and whether as a stream, which can be left half-way."""
        remaining = self._progress.remaining
        if self._shared.one_step:
            return 1, False
        if self._pacer.never or (self._lookup is None and self._model.given_up):
            return remaining, self._request.streaming
        streaming = self._request.streaming or self._lookup is not None
        rest = self._pacer.rest_until(DraftSource.MODEL) - self._progress.generated
        if self._model.usable and rest > 0:
            return min(remaining, rest), streaming
        return remaining if streaming else min(remaining, UNSTREAMED_STRETCH), streaming

    def _may_draft(self) -> bool:
        if not self._pacer.most():
            return False
        return self._look_up() is not None or self._model_length() > 0

    async def _end_stretch(self, reason: FinishReason | None, got: int, asked: int) -> None:
        """The target ended its request: find out whether it ended the answer."""
        if got > 1:
            self._shared.one_step = False
        if self._progress.finish is not None:
            return
        told = reason not in (None, FinishReason.LENGTH)
        if told or got == 0 or (got < asked and not (got == 1 and await self._is_one_step())):
            self._progress.finish = reason or FinishReason.END_ID

    async def _is_one_step(self) -> bool:
        """Whether the target ends every request after one token, which looks like an end id.

        Asked once, by a request for two tokens that has no end.
        """
        if self._shared.one_step is None:
            probe = EngineRequest(
                request_id=f"{self._request.request_id}-steps",
                input_ids=(self._progress.ids[-1],),
                max_tokens=2,
                streaming=False,
                sampling=Sampling(top_k=1),
            )
            async with aclosing(self._target.generate(probe)) as stream:
                answer = join_chunks([chunk async for chunk in stream])
            self._shared.one_step = len(answer.token_ids) < 2
        return self._shared.one_step


def _now() -> float:
    return asyncio.get_running_loop().time()
