"""One text request from text to text: get a place, tokenise, run the engine, answer, end once.

``Admission`` limits how many requests run at once and how many wait. ``Orchestrator`` knows engines
only through ``engines.base``, and nothing of Triton or HTTP. The engine may make tokens with one
model or by speculative decoding; ``Answer`` makes text of them. ``Orchestrator.run`` prepares and
drives a request, enforces its deadline and sends the last chunk of each sequence.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from trtllm_bls.engines.base import ChunkStream, Engine
from trtllm_bls.errors import (
    CancelCause,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    Overloaded,
    Unsupported,
)
from trtllm_bls.settings.request_limits import RequestLimits, above_limit
from trtllm_bls.text.answer import Answer, TextRules
from trtllm_bls.text.detokenizer import Detokenizer
from trtllm_bls.text.json_values import json_size
from trtllm_bls.text.prompts import Prompt, PromptMaker
from trtllm_bls.text.tokenizer import Tokenizer
from trtllm_bls.types import (
    MAX_REPORT_CHARS,
    Ending,
    EngineCapacity,
    EngineChunk,
    EngineRequest,
    FinishReason,
    Outcome,
    PromptIds,
    RequestStats,
    Sampling,
    SpeculationRequest,
    TextChunk,
    TextRequest,
    Wants,
)

if sys.version_info >= (3, 11):
    from asyncio import Timeout
    from asyncio import timeout as timeout
else:
    from async_timeout import Timeout
    from async_timeout import timeout as timeout


_DEFAULT_SAMPLING = Sampling()  # as in nearly all requests
_TOKENS_ALONE = Wants()
_EWMA_WEIGHT = 0.2  # the weight of the newest request in the average duration
_DEFAULT_ANSWER_TOKENS = 1024  # if neither the request nor the engine has a limit


@dataclass(eq=False)
class Place:
    """A request's place. ``admitted`` is done once its sequences may run.

    ``begun_at``: seconds of the event loop's clock at that time; ``None`` while the request waits.
    """

    sequences: int
    admitted: asyncio.Future[None]
    begun_at: float | None = None


class Admission:
    """Places for ``max_running`` sequences on one event loop; ``places`` is their number.

    Up to ``max_queued`` more sequences wait for one, in the order of their arrival.

    A request of n sequences takes n places at once. ``max_queue_s``: seconds after which a waiting
    request is refused; ``None``: it waits as long as its caller does.
    """

    def __init__(self, max_running: int, max_queued: int, max_queue_s: float | None) -> None:
        self.places = max_running
        self._max_queued = max_queued
        self._max_queue_s = max_queue_s
        # In the order of their arrival; any of them may leave, at the same cost.
        self._waiting: OrderedDict[Place, None] = OrderedDict()
        self._average_s = 0.0  # the time that a request runs
        self.running = 0  # sequences
        self.queued = 0

    @property
    def room(self) -> int:
        """Number of further sequences that may run or wait; any thread may read it."""
        return self.places + self._max_queued - self.running - self.queued

    @property
    def has_place(self) -> bool:
        """True if a request of one sequence would run at once."""
        return not self._waiting and self.running < self.places

    @property
    def total(self) -> int:
        """Number of sequences that may run or wait at all."""
        return self.places + self._max_queued

    def crowded(self) -> Overloaded:
        """Return the refusal of a client that has its share of all places."""
        return self._overloaded(
            "as many of this client as may beside others", "max_queued_requests"
        )

    def check_room(self) -> None:
        """Raise ``Overloaded`` if ``take`` would refuse any request now.

        This is for a caller that can refuse a request before it reads it.
        """
        if self.room <= 0:
            raise self._overloaded("as many as may", "max_queued_requests")

    @asynccontextmanager
    async def acquire(self, sequences: int) -> AsyncIterator[None]:
        """Let a request of so many sequences run while the context is entered; wait for that first.

        Entering raises what ``take`` does, and ``Overloaded`` after waiting too long.
        """
        place = self.take(sequences)
        timer = None
        if self._max_queue_s is not None and not place.admitted.done():
            loop = place.admitted.get_loop()
            timer = loop.call_later(self._max_queue_s, self._give_up, place.admitted)
        try:
            await place.admitted
            yield
        finally:
            if timer is not None:
                timer.cancel()
            self.leave(place)

    def take(self, sequences: int) -> Place:
        """Return a place for a request of so many sequences, which has to ``leave`` it.

        Raises ``InvalidRequest`` for more sequences than may ever run at once, and ``Overloaded``
        if as many wait as may.
        """
        if sequences > self.places:
            raise above_limit(
                "num_return_sequences",
                f"{sequences} is not allowed; at most {self.places} sequences run at once",
                "max_running_requests",
            )
        place = Place(sequences, asyncio.get_running_loop().create_future())
        if not self._waiting and self.running + sequences <= self.places:
            self._begin(place)
        elif self.queued + sequences > self._max_queued:
            raise self._overloaded("as many as may", "max_queued_requests")
        else:
            self._waiting[place] = None
            self.queued += sequences
        return place

    def leave(self, place: Place) -> None:
        """Give a place back: the request is over, or waits no more. A second call does nothing."""
        if place in self._waiting:
            self._stop_waiting(place)
        elif place.begun_at is not None:
            seconds = place.admitted.get_loop().time() - place.begun_at
            if self._average_s:
                self._average_s += _EWMA_WEIGHT * (seconds - self._average_s)
            else:
                self._average_s = seconds
            self.running -= place.sequences
            place.begun_at = None
        if self._waiting:
            self._admit()

    def refuse_waiting(self, refusal: Callable[[], Overloaded]) -> None:
        """Raise an error that ``refusal`` makes in each request that waits for a place."""
        for place in self._waiting:
            if not place.admitted.done():
                place.admitted.set_exception(refusal())

    def _give_up(self, admitted: asyncio.Future[None]) -> None:
        if not admitted.done():
            waited = f"this one waited {self._max_queue_s:g} s"
            admitted.set_exception(self._overloaded(waited, "max_queue_seconds"))

    def _admit(self) -> None:
        """Give free places to the requests that have waited longest."""
        while self._waiting:
            place = next(iter(self._waiting))
            if self.running + place.sequences > self.places:
                return
            self._stop_waiting(place)
            if not place.admitted.done():  # one that was refused or cancelled is about to leave
                self._begin(place)

    def _begin(self, place: Place) -> None:
        place.begun_at = place.admitted.get_loop().time()
        place.admitted.set_result(None)
        self.running += place.sequences

    def _stop_waiting(self, place: Place) -> None:
        del self._waiting[place]
        self.queued -= place.sequences

    def _overloaded(self, reason: str, parameter: str) -> Overloaded:
        seconds = math.ceil(self._average_s * (self.queued + 1) / self.places)
        problem = f"sequences running: {self.running}, waiting: {self.queued}, {reason}"
        return Overloaded.for_now(f"{problem} (parameter {parameter})", max(1, seconds), parameter)


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """A deployment's defaults for requests.

    ``engine_shows_progress``: the engine shows that it works without a response, as an engine of
    the same server does by its metrics. Any other engine streams every answer, also those that the
    caller gets in one piece, so that its responses show it.
    """

    add_special_tokens: bool = True
    draft_source: str = "off"
    skip_special_tokens: bool = True
    accumulate: bool = False
    timeout_s: float | None = None  # None: as long as it takes
    limits: RequestLimits = field(default_factory=RequestLimits)
    expose_kv_cache_metrics: bool = False
    engine_shows_progress: bool = True


class Load(NamedTuple):
    """The load of an orchestrator, or of a pipeline.

    ``running`` and ``waiting``: requests that have a token, and that have none yet. An answer that
    the engine gives in one piece shows none before its end, so its request runs as soon as the
    engine has it. ``queued``: waiting requests that the engine does not have. ``tokens``: the
    number taken from the engine so far. It also grows while an answer in one piece is read.
    """

    running: int
    waiting: int
    queued: int
    tokens: int


class TextSink(Protocol):
    """The receiver of one request's chunks.

    Chunks that arrive while the sink is not ready are answered together, so a slow reader's
    responses grow larger instead of more.
    """

    async def ready(self) -> None:
        """Return once a chunk would leave at once; without suspending if it would now."""

    def send(self, chunk: TextChunk) -> None:
        """Take a chunk; never waits. Several may come in a row, one per sequence."""


class Orchestrator:
    """Serves any number of requests at once on one event loop; usable in any process.

    ``on_end`` gets the figures of each request once it is over, also of a refused one.
    ``admission``: the limits on sequences that run and wait; ``None``: there are none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        engine: Engine,
        defaults: Defaults,
        *,
        on_end: Callable[[RequestStats], None] = lambda stats: None,
        admission: Admission | None = None,
    ) -> None:
        self.prompts = PromptMaker(
            tokenizer,
            defaults.add_special_tokens,
            defaults.draft_source,
            defaults.limits.max_prompt_bytes,
        )
        self._engine = engine
        self._defaults = defaults
        self.admission = admission or Admission(sys.maxsize, 0, None)
        self._on_end = on_end
        self._open: set[_RequestRecord] = set()
        self._tokens = 0  # those of requests that are over

    def load(self) -> Load:
        """Return the load now; from any thread."""
        records = self._open.copy()
        waiting = 0
        queued = 0
        tokens = self._tokens
        for record in records:
            waiting += record.waits
            queued += record.engine_request is None
            tokens += record.tokens
        return Load(len(records) - waiting, waiting, queued, tokens)

    def prompt_ids(self, request: TextRequest) -> PromptIds:
        """Return a prompt's ids. Takes long for a long prompt, so call it in a thread.

        Raises ``InvalidRequest``.
        """
        self._check(request)
        return self.prompts.make(request, None, _give_way).engine_request.input_ids

    def refused(self, request_id: str, error: Exception, api: str | None = None) -> None:
        """Count a request that was refused before it could run, by the ``api`` that it was for."""
        self._on_end(stats_of(request_id, error, api=api))

    @property
    def timeout_s(self) -> float | None:
        """Time limit of a request that names none, in seconds."""
        return self._defaults.timeout_s

    async def run(
        self,
        request: TextRequest,
        sink: TextSink,
        on_prompt: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """Send the chunks of every sequence; each sequence's last one has its ``ending``.

        A streaming request gets text as soon as it is certain, any other one chunk per sequence. If
        a stream that has begun fails or is cancelled, its last chunks say so and the error follows.
        Raises ``InvalidRequest``, ``Overloaded`` and the engine's errors. The engine's work has
        ended when ``run`` ends, in whichever way. A caller that cancels it gives a ``CancelCause``
        as the message of ``Task.cancel``. ``on_prompt`` gets the number of the prompt's tokens
        before the engine gets the request.
        """
        record = _RequestRecord(request, sink)
        self._open.add(record)
        ended_by: BaseException | None = None
        stream: ChunkStream | None = None
        seconds = request.timeout_s
        if seconds is None:
            seconds = self._defaults.timeout_s
        time_limit = timeout(seconds)
        try:
            self._check(request)
            async with time_limit, self.admission.acquire(request.num_return_sequences):
                engine_request, answer = await self._prepare(request)
                on_prompt(len(engine_request.input_ids))
                record.engine_request = engine_request
                record.answer = answer
                record.begun_at = asyncio.get_running_loop().time()
                stream = self._engine.generate(engine_request)
                await self._drive(stream, answer, record)
        except BaseException as error:
            ended_by = error
            reason = FinishReason.ERROR
            if isinstance(error, asyncio.CancelledError):
                reason = FinishReason.CANCELLED
            elif isinstance(error, asyncio.TimeoutError) and has_expired(time_limit):
                reason = FinishReason.TIMEOUT
            record.end_early(reason, stream)
            if reason is not FinishReason.TIMEOUT:
                raise
            ended_by = None
        finally:
            self._open.discard(record)
            self._tokens += record.tokens
            self._on_end(record.stats(ended_by))
            ended_by = None  # whose traceback refers to this frame: a reference cycle

    async def _drive(self, stream: ChunkStream, answer: Answer, record: _RequestRecord) -> None:
        """Send the answer, chunk by chunk, until both the answer and the engine have ended."""
        try:
            while not answer.must_cancel:
                await stream.wait()
                await record.sink.ready()
                chunks = stream.take()
                if not chunks:
                    break
                for chunk in answer.feed(chunks):
                    record.send(chunk)
        except EngineError:
            # A finished answer ended by count. The engine would only have confirmed that, so an
            # error in place of its last message changes nothing.
            if not answer.done:
                raise
        finally:
            await stream.aclose()
        if not answer.done:
            raise EngineError(f"{self._engine.name} ended its stream before its last chunk")

    def _check(self, request: TextRequest) -> None:
        """Refuse, by name, fields that a text stream cannot honour or that are too large."""
        beams = request.sampling.beam_width or 1
        if beams > 1:
            problem = f"{beams}: beams rewrite text that has left; send num_return_sequences"
            raise Unsupported("beam_width", problem)
        limits = self._defaults.limits
        # A text has at least as many bytes as characters.
        limits.check("max_prompt_bytes", "text_input", len(request.text or ""), "bytes")
        if request.messages is not None:
            limits.check("max_prompt_bytes", "messages", json_size(request.messages), "bytes")
        if not request.fits_max_tokens:
            limits.check("max_output_tokens", "max_tokens", request.max_tokens, "tokens")
        limits.check("max_timeout_seconds", "timeout_ms", request.timeout_s, "s")
        if request.guide is not None:
            limits.check_guide(request.guide)

    async def _prepare(self, request: TextRequest) -> tuple[EngineRequest, Answer]:
        """Return the engine's request, and the answer that its chunks will make."""
        if request.sampling != _DEFAULT_SAMPLING:
            request = _with_seed(request)
        capacity = await self._engine.capacity()
        prompt = await self._make_prompt(request, capacity)
        engine_request = prompt.engine_request
        if request.wants.top_log_probs and not capacity.tells_top_log_probs:
            # The engine does not tell the likeliest ids of a place, but its logits do.
            engine_request.wants = replace(request.wants, top_log_probs=0, generation_logits=True)
        max_tokens = self._max_tokens(request, engine_request, capacity)
        engine_request.max_tokens = max(1, max_tokens)  # engines have no smaller number
        # A stream can be ended half-way, by a stop in the text or by a time limit of the caller's
        # own, and shows that the engine works.
        engine_request.streaming = bool(
            request.stream
            or request.stop_words
            or request.sampling.min_tokens
            or request.timeout_s is not None
            or (not self._defaults.engine_shows_progress and engine_request.wants == _TOKENS_ALONE)
        )
        if engine_request.wants.context_logits or engine_request.wants.generation_logits:
            rows = engine_request.logit_rows(capacity)
            self._defaults.limits.check_logits(rows, capacity.vocab_size)
        rules = self._rules(request, prompt, max_tokens, capacity)
        skip = request.skip_special_tokens
        if skip is None:
            skip = self._defaults.skip_special_tokens
        markers = ""
        if request.markup is not None:
            markers = request.markup.markers
        detokenizers: list[Detokenizer] = []
        for _ in range(request.num_return_sequences):
            detokenizers.append(self.prompts.tokenizer.detokenizer(skip, markers))
        return engine_request, Answer(request, rules, detokenizers)

    async def _make_prompt(self, request: TextRequest, capacity: EngineCapacity) -> Prompt:
        """Tokenise the request. Raises ``InvalidRequest``, also for a prompt that is too long."""
        max_tokens = capacity.max_prompt_tokens
        if capacity.max_sequence_tokens is not None:
            longest = capacity.max_sequence_tokens - 1  # at least one new token has to fit
            if max_tokens is None or longest < max_tokens:
                max_tokens = longest
        if request.text_ids is None and self.prompts.is_long(request):
            # On the event loop, tokenising a long text would hold up every other stream.
            return await asyncio.to_thread(self.prompts.make, request, max_tokens, _give_way)
        return self.prompts.make(request, max_tokens)

    def _max_tokens(
        self, request: TextRequest, engine_request: EngineRequest, capacity: EngineCapacity
    ) -> int:
        """Return the answer's limit of tokens: the request's own, or all that fit."""
        max_tokens = request.max_tokens
        if max_tokens is not None and not request.fits_max_tokens:
            return max_tokens
        limit = max_tokens
        if limit is None:
            limit = _DEFAULT_ANSWER_TOKENS
        if capacity.max_sequence_tokens is not None:
            limit = capacity.max_sequence_tokens - len(engine_request.input_ids)
        if self._defaults.limits.max_output_tokens is not None:
            limit = min(limit, self._defaults.limits.max_output_tokens)
        if max_tokens is not None:
            limit = min(limit, max_tokens)
        return limit

    def _rules(
        self, request: TextRequest, prompt: Prompt, max_tokens: int, capacity: EngineCapacity
    ) -> TextRules:
        prompt_ids = prompt.engine_request.input_ids
        echo_ids: PromptIds = ()
        # As in TensorRT-LLM's own models, a stream repeats the prompt only if the request says so.
        if request.echo or not (request.stream or request.exclude_input_in_output):
            echo_ids = prompt_ids
        return TextRules(
            prompt_tokens=len(prompt_ids),
            max_tokens=max_tokens,
            end_ids=prompt.end_ids,
            kept_ids=prompt.kept_ids,
            stop_sequences=prompt.stop_sequences,
            markup=prompt.markup,
            echo_ids=echo_ids,
            accumulate=self._defaults.accumulate,
            max_sequence_tokens=capacity.max_sequence_tokens,
            expose_kv_cache_metrics=self._defaults.expose_kv_cache_metrics,
        )


def _with_seed(request: TextRequest) -> TextRequest:
    """Return a request whose random numbers differ from every other's, or repeat if it says so.

    An engine's default seed gives the same text every time. A request that brings its seed is to
    get the same text again, so it is decoded without drafts: how many tokens a round drafts depends
    on what else runs, and with it the random numbers that are drawn.
    """
    sampling = request.sampling
    if sampling.is_greedy:
        return request
    if sampling.seed is not None:
        return replace(request, speculation=SpeculationRequest(num_draft_tokens=0))
    return replace(request, sampling=replace(sampling, seed=secrets.randbits(63)))


class RequestTimes:
    """The times of a request's arrival, begin and responses, by the running event loop's clock."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self.arrived_at = self._clock()
        self.begun_at: float | None = None  # it does not wait any more
        self._first_at = 0.0
        self._last_at = 0.0
        self._longest_gap = 0.0
        self.responses = 0

    def note_response(self) -> None:
        """Note that a response leaves now."""
        now = self._clock()
        if not self.responses:
            self._first_at = now
        elif now - self._last_at > self._longest_gap:
            self._longest_gap = now - self._last_at
        self._last_at = now
        self.responses += 1

    def add_to(self, stats: RequestStats, streamed: bool) -> None:
        """Add the times of a request that is over; ``streamed``: its responses show its pace."""
        stats.responses = self.responses
        stats.duration_s = self._clock() - self.arrived_at
        if self.begun_at is not None:
            stats.queue_s = self.begun_at - self.arrived_at
        if streamed and self.responses:
            stats.ttft_s = self._first_at - self.arrived_at
            if self.responses > 1:
                stats.longest_gap_s = self._longest_gap


class _RequestRecord(RequestTimes):
    """Passes the chunks of one request on to ``sink``, and notes the figures of its stats."""

    def __init__(self, request: TextRequest, sink: TextSink) -> None:
        super().__init__()
        self.sink = sink
        self._request = request
        self.engine_request: EngineRequest | None = None  # once the engine gets it
        self.answer: Answer | None = None
        self._endings: list[Ending] = []

    @property
    def waits(self) -> bool:
        """True while the request has no token; see ``Load``."""
        if self.engine_request is None:
            return True
        return self.engine_request.streaming and not self.tokens

    @property
    def tokens(self) -> int:
        """Number of tokens in the answer so far."""
        if self.answer is None:
            return 0
        return sum([sequence.criteria.generated for sequence in self.answer.sequences])

    def send(self, chunk: TextChunk) -> None:
        """Pass a chunk on."""
        self.note_response()
        if chunk.ending is not None:
            self._endings.append(chunk.ending)
        self.sink.send(chunk)

    def end_early(self, reason: FinishReason, stream: ChunkStream | None) -> None:
        """Send the last chunks of a request that an error ended, and that may have begun.

        They are for a stream that has begun, and for a request whose time was up. For any other the
        error is the whole answer.
        """
        timed_out = reason is FinishReason.TIMEOUT
        answer = self.answer
        if answer is not None and (timed_out or (self._request.stream and answer.has_begun)):
            chunks: list[EngineChunk] = []
            if stream is not None:
                chunks = stream.take()
            for chunk in (*answer.feed(chunks), *answer.end(reason)):
                self.send(chunk)
        elif timed_out:  # before the prompt's tokens were counted
            ending = Ending(finish_reason=reason, prompt_tokens=0, completion_tokens=0)
            for index in range(self._request.num_return_sequences):
                self.send(TextChunk(text="", sequence_index=index, ending=ending))

    def stats(self, error: BaseException | None) -> RequestStats:
        """Return the figures of the request, which is over; ``error``: the error that ended it."""
        request = self._request
        tokens = self.tokens
        beginning = (request.text or "")[:MAX_REPORT_CHARS]
        if request.messages:
            beginning = _beginning(request.messages)
        reason = ""
        if self._endings:
            reason = self._endings[0].finish_reason.value
        stats = stats_of(
            request.request_id,
            error,
            reason,
            completion_tokens=tokens,
            sequences=request.num_return_sequences,
            traceparent=request.traceparent,
            api=request.api,
            prompt=beginning,
        )
        if self.engine_request is not None:
            stats.prompt_tokens = len(self.engine_request.input_ids)
        if self._endings:  # A request that is speculated has one sequence.
            stats.speculation = self._endings[0].speculation
        for ending in self._endings:
            if error is None and ending.finish_reason is FinishReason.TIMEOUT:
                stats.outcome = Outcome.CANCELLED
                stats.reason = CancelCause.DEADLINE.value
        streamed = request.stream and tokens > 0
        self.add_to(stats, streamed)
        gaps = tokens / request.num_return_sequences - 1
        if streamed and self.responses and gaps > 0:
            stats.inter_token_s = (self._last_at - self._first_at) / gaps
        return stats


def _beginning(messages: object) -> str:
    """Return as much of a conversation as the request log may show."""
    pieces: list[str] = []
    length = 0
    with suppress(RecursionError):  # no template takes such messages, either
        for piece in json.JSONEncoder(ensure_ascii=False).iterencode(messages):
            pieces.append(piece)
            length += len(piece)
            if length >= MAX_REPORT_CHARS:
                break
    # JSON may spell half a character, which no file can have.
    return "".join(pieces)[:MAX_REPORT_CHARS].encode(errors="replace").decode()


async def run_rows(rows: Sequence[asyncio.Task[None]]) -> None:
    """Wait for all rows of a batch. If one fails, cancel the others and wait until they have ended.

    ``gather`` alone does not wait: once a row has failed, it forgets the others.
    """
    try:
        await asyncio.gather(*rows)
    finally:
        for row in rows:
            row.cancel(CancelCause.BATCH.value)
        await asyncio.wait(rows)


def has_expired(limit: Timeout) -> bool:
    """Return true if ``limit`` raised the timeout.

    A look at the clock would not do: a timer may fire before its time, in uvloop up to 1 ms.
    """
    # In Python 3.10, ``async_timeout`` has a property in place of the method.
    if sys.version_info >= (3, 11):
        return limit.expired()
    else:
        return bool(limit.expired)


def seconds_left(limit: Timeout) -> float | None:
    """Return the seconds until ``limit`` raises the timeout; None: it never does."""
    when: float | None
    if sys.version_info >= (3, 11):
        when = limit.when()
    else:
        when = limit.deadline
    if when is None:
        return None
    return when - asyncio.get_running_loop().time()


def _give_way() -> None:
    """Sleep for 0.1 ms, so that the event loop gets the interpreter's lock. It seldom would."""
    time.sleep(0.0001)


def stats_of(
    request_id: str, error: BaseException | None, reason: str = "", **figures: Any
) -> RequestStats:
    """Return the figures of a request that is over.

    ``error``: the error that ended it; ``None``: it ended for ``reason``.
    """
    outcome = Outcome.SUCCESS
    message: str | None = None
    if error is not None:
        outcome, reason = _outcome_of(error)
    if isinstance(error, Exception):
        message = str(error)[:MAX_REPORT_CHARS]
    return RequestStats(
        request_id=request_id, outcome=outcome, reason=reason, error=message, **figures
    )


def _outcome_of(error: BaseException) -> tuple[Outcome, str]:
    """Return the outcome of a request that ``error`` ended, and its reason; see ``Outcome``."""
    if isinstance(error, asyncio.CancelledError):
        causes = [cause.value for cause in CancelCause]
        if error.args and str(error.args[0]) in causes:
            return Outcome.CANCELLED, str(error.args[0])
        return Outcome.CANCELLED, CancelCause.CALLER_LEFT.value
    if isinstance(error, DeadlineExceeded):
        return Outcome.CANCELLED, CancelCause.DEADLINE.value
    if isinstance(error, InvalidRequest):
        # The reason is a label of metrics. With the place in a list ("stop_words[7]") callers
        # could make as many series as they like.
        return Outcome.REFUSED, error.limit or error.field.partition("[")[0]
    if isinstance(error, Overloaded):
        return Outcome.OVERLOADED, error.limit or type(error).__name__
    return Outcome.FAILED, type(error).__name__
