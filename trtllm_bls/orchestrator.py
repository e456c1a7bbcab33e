"""One text request from text to text: tokenise, run the engine, answer, end once.

Knows engines only through ``engines.base`` and nothing of Triton or HTTP. Whether tokens come from
one model or from speculative decoding is the engine's business; what becomes of them is decided by
``Answer``. This module is the one loop between the two, with its deadline and its endings.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace

from trtllm_bls.admission import Admission, RequestLimits
from trtllm_bls.answer import Answer, TextRules, too_late
from trtllm_bls.engines.base import ChunkStream, Engine
from trtllm_bls.errors import EngineError, Unsupported
from trtllm_bls.prompts import Prompt, PromptMaker
from trtllm_bls.request_stats import RequestRecord, RequestStats, TextSink
from trtllm_bls.tokenizer import Tokenizer
from trtllm_bls.types import (
    EngineCapacity,
    EngineRequest,
    FinishReason,
    Sampling,
    SpeculationRequest,
    TextRequest,
    Wants,
)

if sys.version_info >= (3, 11):
    from asyncio import timeout_at
else:
    from async_timeout import timeout_at


_GREEDY = Sampling()  # of nearly every request that asks for nothing
_NOTHING_MORE = Wants()
_UNKNOWN_ROOM = 1024  # tokens, where neither the request nor the engine has a limit


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What a deployment decides where a request is silent.

    ``shown``: so many answers in one piece are read from the engine as they grow, which tells that
    it goes on. For an engine that tells so by nothing else.
    """

    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    accumulate: bool = False
    timeout_s: float | None = None  # None: as long as it takes
    limits: RequestLimits = field(default_factory=RequestLimits)
    expose_kv_cache_metrics: bool = False
    shown: int = 0


def _ignore(stats: RequestStats) -> None:
    pass


def _never() -> bool:
    return False


class Orchestrator:
    """Serves any number of requests at once on one event loop; usable in any process.

    ``on_end`` is given the figures of each request once it is over, also of a refused one.
    ``admission``: how many sequences may run and wait; ``None`` = any number.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        engine: Engine,
        defaults: Defaults,
        *,
        on_end: Callable[[RequestStats], None] = _ignore,
        admission: Admission | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._prompts = PromptMaker(tokenizer, defaults.add_special_tokens)
        self._engine = engine
        self._defaults = defaults
        self._admission = admission
        self._on_end = on_end
        self._open: set[RequestRecord] = set()
        self.encode_ahead = self._prompts.encode_ahead  # of requests that are about to be run
        self._tokens = 0

    def load(self) -> tuple[int, int]:
        """Requests that run in the engine, and that wait to be given to it; from any thread."""
        records = self._open.copy()
        running = sum(record.running for record in records)
        return running, len(records) - running

    @property
    def tokens(self) -> int:
        """Those taken so far for answers in one piece, of which no response tells before their end;
        any thread may ask."""
        return self._tokens + sum(record.tokens for record in self._open.copy() if record.shown)

    def refused(self, request_id: str, error: Exception) -> None:
        """A request was refused before it could be run: it counts as one that was."""
        self._on_end(RequestStats.of_refusal(request_id, error))

    async def run(
        self, request: TextRequest, sink: TextSink, is_ready: Callable[[], bool] = _never
    ) -> None:
        """Send the chunks of every sequence; each sequence's last one has its ``ending``.

        A streaming request gets text as soon as it is certain, any other one chunk per sequence.
        Where a stream that has begun fails or is cancelled, its last chunks say so and the error
        follows. ``is_ready``: whether ``sink.ready`` would return at once; if so, chunks are sent
        where the engine's arrive, without a turn of the event loop. Raises ``InvalidRequest``,
        ``Overloaded`` and what the engine raises. By the time that ``run`` has ended, however it
        ends, the engine's work has ended. Whoever cancels it says why, by a ``CancelCause`` as the
        message of ``Task.cancel``.
        """
        record = RequestRecord(request, sink, asyncio.get_running_loop().time)
        self._open.add(record)
        try:
            await self._run(request, record, is_ready)
        except BaseException as error:
            self._over(record, error)
            raise
        self._over(record)

    def _over(self, record: RequestRecord, error: BaseException | None = None) -> None:
        self._open.discard(record)
        self._tokens += record.tokens * record.shown
        self._on_end(record.stats(error))

    async def _run(
        self, request: TextRequest, sink: RequestRecord, is_ready: Callable[[], bool]
    ) -> None:
        self._refuse(request)
        request = _with_seed(request)
        deadline = self._deadline(request)
        answer: Answer | None = None
        stream: ChunkStream | None = None
        try:
            in_time = nullcontext() if deadline is None else timeout_at(deadline)
            async with in_time, self._place(request):
                capacity = await self._engine.capacity()
                prompt = await self._prompt(request, capacity)
                max_tokens = self._max_tokens(request, prompt, capacity)
                request = _with_logits(request, capacity)
                asked = self._engine_request(request, prompt, max_tokens)
                sink.shown = asked.streaming and not request.stream
                if request.wants.context_logits or request.wants.generation_logits:
                    self._defaults.limits.check_logits(
                        asked.logit_rows(capacity), capacity.vocab_size
                    )
                answer = self._answer(request, prompt, capacity, max_tokens)
                sink.begin(len(prompt.ids), answer)
                stream = self._engine.generate(asked)
                try:
                    await _drive(stream, answer, sink, is_ready)
                except EngineError:
                    if not answer.done:  # else by count: the engine had only to say so, too
                        raise
                if not answer.done:
                    raise EngineError(f"{self._engine.name} ended its stream before its last chunk")
        except (asyncio.CancelledError, Exception) as error:
            reason = _reason(error, deadline)
            if reason is FinishReason.TIMEOUT and answer is None:
                chunks = too_late(request.num_return_sequences)
            elif answer and (reason is FinishReason.TIMEOUT or (request.stream and answer.begun)):
                arrived = stream.take() if stream is not None else []
                chunks = [*answer.take(arrived), *answer.end(reason)]
            else:
                chunks = []
            for chunk in chunks:
                sink.send(chunk)
            if reason is not FinishReason.TIMEOUT:
                raise

    def _refuse(self, request: TextRequest) -> None:
        """What a text stream cannot honour is refused by name, never ignored."""
        beams = request.sampling.beam_width or 1
        if beams > 1:
            problem = f"{beams}: beams rewrite text that has left; send num_return_sequences"
            raise Unsupported("beam_width", problem)
        limits = self._defaults.limits
        for name, text in (("text_input", request.text), ("messages", request.messages)):
            limits.check_text_bytes(name, len(text or ""))  # bytes are no fewer
        limits.check_output_tokens("max_tokens", request.max_tokens or 0)
        if request.timeout_s is not None:
            limits.check_timeout("timeout_ms", request.timeout_s)

    def _place(self, request: TextRequest) -> AbstractAsyncContextManager[None]:
        if self._admission is None:
            return nullcontext()
        return self._admission.place(request.num_return_sequences)

    def _deadline(self, request: TextRequest) -> float | None:
        seconds = self._defaults.timeout_s if request.timeout_s is None else request.timeout_s
        return None if seconds is None else asyncio.get_running_loop().time() + seconds

    async def _prompt(self, request: TextRequest, capacity: EngineCapacity) -> Prompt:
        longest = _longest_prompt(capacity)
        # Tokenising what is long would hold up every other stream.
        if request.text_ids is None and self._prompts.is_long(request):
            return await asyncio.to_thread(self._prompts.make, request, longest, _give_way)
        return self._prompts.make(request, longest)

    def _max_tokens(self, request: TextRequest, prompt: Prompt, capacity: EngineCapacity) -> int:
        """As many as the request allows; all that fit and may be asked for where it is open."""
        if request.max_tokens is not None:
            return request.max_tokens
        room = _UNKNOWN_ROOM
        if capacity.max_sequence_tokens is not None:
            room = capacity.max_sequence_tokens - len(prompt.ids)
        most = self._defaults.limits.max_output_tokens
        return room if most is None else min(room, most)

    def _answer(
        self, request: TextRequest, prompt: Prompt, capacity: EngineCapacity, max_tokens: int
    ) -> Answer:
        # As in TensorRT-LLM's own models, a stream repeats the prompt only where that is spelled.
        whole_with_prompt = not (request.stream or request.exclude_input_in_output)
        rules = TextRules(
            prompt_tokens=len(prompt.ids),
            max_tokens=max_tokens,
            min_tokens=request.sampling.min_tokens or 0,
            end_ids=frozenset(prompt.end_ids),
            stop_words=request.stop_words,
            stop_sequences=prompt.stop_sequences,
            include_stop=request.include_stop,
            echo_ids=tuple(prompt.ids) if request.echo or whole_with_prompt else (),
            accumulate=self._defaults.accumulate,
            seed=request.sampling.seed,
            max_sequence_tokens=capacity.max_sequence_tokens,
            expose_kv_cache_metrics=self._defaults.expose_kv_cache_metrics,
            return_tokens=request.return_tokens,
            return_drafted=request.return_drafted,
        )
        skip = self._defaults.skip_special_tokens
        if request.skip_special_tokens is not None:
            skip = request.skip_special_tokens
        detokenizers = [
            self._tokenizer.detokenizer(skip_special_tokens=skip)
            for _ in range(request.num_return_sequences)
        ]
        return Answer(request, rules, detokenizers)

    def _shows(self, request: TextRequest) -> bool:
        """Whether the request's answer, which is to be in one piece, is read as it grows."""
        if request.wants != _NOTHING_MORE or request.num_return_sequences > 1:
            return False
        return sum(record.shown for record in self._open) < self._defaults.shown

    def _engine_request(
        self, request: TextRequest, prompt: Prompt, max_tokens: int
    ) -> EngineRequest:
        # In one piece only where neither text nor the caller's own time limit can end it half-way.
        timed = request.timeout_s is not None
        watched = request.stop_words or request.sampling.min_tokens or timed
        return EngineRequest(
            request_id=request.request_id,
            input_ids=prompt.ids,
            max_tokens=max_tokens,
            streaming=bool(request.stream or watched or self._shows(request)),
            sampling=request.sampling,
            num_return_sequences=request.num_return_sequences,
            end_id=prompt.end_id,
            pad_id=prompt.pad_id,
            stop_sequences=prompt.engine_stops,
            bad_sequences=prompt.bad_sequences,
            embedding_bias=prompt.embedding_bias,
            speculation=_with_prediction(request.speculation, prompt),
            wants=request.wants,
            traceparent=request.traceparent,
            extras=prompt.extras,
        )


async def _drive(
    stream: ChunkStream, answer: Answer, sink: TextSink, is_ready: Callable[[], bool]
) -> None:
    """Send what the engine's chunks become, until both the answer and the engine have ended."""
    failure: Exception | None = None
    pass_on = sink.send

    def send_now() -> bool:
        nonlocal failure
        if not is_ready():
            return False
        try:
            for piece in answer.take(stream.take()):
                pass_on(piece)
        except Exception as error:  # it is this request's, not that of whoever brought the chunks
            failure = error
        return failure is None and not answer.must_cancel

    stream.on_arrival(send_now)
    try:
        while not answer.must_cancel:
            await stream.wait()
            if failure is not None:
                raise failure
            if answer.must_cancel:
                break
            await sink.ready()
            chunks = stream.take()
            if not chunks:
                break
            for piece in answer.take(chunks):
                pass_on(piece)
    finally:
        await stream.aclose()


def _give_way() -> None:
    """Let the event loop have the interpreter's lock, which without a sleep it seldom gets."""
    time.sleep(0.0001)


def _with_logits(request: TextRequest, capacity: EngineCapacity) -> TextRequest:
    """Where the engine does not tell the likeliest ids of a place, its logits do."""
    if not request.wants.top_log_probs or capacity.tells_top_log_probs:
        return request
    wants = replace(request.wants, top_log_probs=0, generation_logits=True)
    return replace(request, wants=wants)


def _with_seed(request: TextRequest) -> TextRequest:
    """The request with a seed of its own where it samples and has none.

    An engine's default seed gives the same text every time. A request that brings its seed is to
    get the same text again, so it is decoded without drafts: how many tokens a round drafts depends
    on what else runs, and with it the random numbers that are drawn.
    """
    sampling = request.sampling
    if sampling == _GREEDY or sampling.is_greedy:
        return request
    if sampling.seed is not None:
        return replace(request, speculation=SpeculationRequest(num_draft_tokens=0))
    return replace(request, sampling=replace(sampling, seed=secrets.randbits(63)))


def _with_prediction(asked: SpeculationRequest, prompt: Prompt) -> SpeculationRequest:
    return replace(asked, prediction=prompt.prediction) if prompt.prediction else asked


def _longest_prompt(capacity: EngineCapacity) -> int | None:
    """In tokens; at least one new token must fit behind it."""
    longest = capacity.max_prompt_tokens
    if capacity.max_sequence_tokens is not None:
        room = capacity.max_sequence_tokens - 1
        longest = room if longest is None else min(longest, room)
    return longest


def _reason(error: BaseException, deadline: float | None) -> FinishReason:
    if isinstance(error, asyncio.CancelledError):
        return FinishReason.CANCELLED
    past = deadline is not None and asyncio.get_running_loop().time() >= deadline
    timeout = isinstance(error, asyncio.TimeoutError) and past  # not somebody else's
    return FinishReason.TIMEOUT if timeout else FinishReason.ERROR
