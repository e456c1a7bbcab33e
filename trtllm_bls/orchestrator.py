"""One text request from words to words: tokenise, run the engine, assemble text, end once.

Knows engines only through the seam and nothing of Triton. Whether tokens come from one model or
from speculation is decided by ``source_for``; everything after that is the same.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from trtllm_bls.assembly import SequenceText, TextRules
from trtllm_bls.engines.base import Engine
from trtllm_bls.errors import EngineError, InvalidRequest, Unsupported
from trtllm_bls.messages import (
    Ending,
    EngineChunk,
    EngineLimits,
    EngineRequest,
    FinishReason,
    Sampling,
    Speculation,
    TextChunk,
    TextRequest,
)
from trtllm_bls.prompts import Prompt, PromptMaker
from trtllm_bls.tokenizer import Tokenizer

if sys.version_info >= (3, 11):
    from asyncio import timeout_at
else:
    from async_timeout import timeout_at

# The time was up before the engine was asked, perhaps before the prompt's tokens were counted.
_TOO_LATE = Ending(finish_reason=FinishReason.TIMEOUT, prompt_tokens=0, completion_tokens=0)

# Tokenising holds the event loop; longer prompts go to a thread so that streams do not notice.
_LONG_TEXT = 4096


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What a deployment decides where a request is silent."""

    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    accumulate: bool = False
    timeout_s: float | None = None  # None: as long as it takes


@dataclass(frozen=True, kw_only=True)
class Source:
    """The engine one request runs on, and what to do with it afterwards.

    ``speculation`` tells what drafting has done so far, ``None`` if it plays no part; ``done`` is
    called once, however the request ended.
    """

    engine: Engine
    speculation: Callable[[], Speculation | None] = lambda: None
    done: Callable[[], None] = lambda: None


class Orchestrator:
    """Serves any number of requests at once on one event loop.

    ``source_for(request)`` gives the engine to run a request on. Raises what the engine raises.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        source_for: Callable[[TextRequest], Awaitable[Source]],
        defaults: Defaults,
    ) -> None:
        self._tokenizer = tokenizer
        self._prompts = PromptMaker(tokenizer, defaults.add_special_tokens)
        self._source_for = source_for
        self._defaults = defaults

    async def run(self, request: TextRequest) -> AsyncGenerator[TextChunk, None]:
        """Chunks of every sequence; each sequence's last carries its ``ending``.

        A streaming request gets text as soon as it is certain, any other one chunk per sequence.
        Closing the generator ends the engine's work.
        """
        _refuse(request)
        deadline = self._deadline(request)
        source: Source | None = None
        try:
            try:
                async with timeout_at(deadline):
                    source = await self._source_for(request)
                    limits = await source.engine.limits()
                    prompt = await self._prompt(request, limits)
            except asyncio.TimeoutError:
                if not _is_past(deadline):
                    raise
                for index in range(request.num_return_sequences):
                    yield TextChunk(text="", sequence_index=index, ending=_TOO_LATE)
                return
            async with aclosing(self._run(request, source, prompt, limits, deadline)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            if source is not None:
                source.done()

    async def _run(
        self,
        request: TextRequest,
        source: Source,
        prompt: Prompt,
        limits: EngineLimits,
        deadline: float | None,
    ) -> AsyncGenerator[TextChunk, None]:
        sampling = _drawable(request.sampling)
        rules = self._rules(request, prompt, sampling, limits)
        skip = self._defaults.skip_special_tokens
        if request.skip_special_tokens is not None:
            skip = request.skip_special_tokens
        sequences = [
            SequenceText(rules, self._tokenizer.detokenizer(skip_special_tokens=skip))
            for _ in range(request.num_return_sequences)
        ]
        # In one piece only where no text and no clock can end it half-way.
        whole = not (request.stream or request.stop_words or sampling.min_tokens or deadline)
        answer = _Answer(request, source.engine, sequences, deadline)
        parts: list[list[TextChunk]] = [[] for _ in sequences]
        async with aclosing(
            answer.pieces(_engine_request(request, prompt, sampling, streaming=not whole))
        ) as pieces:
            async for unmarked in pieces:
                piece = _with_speculation(unmarked, source)
                if request.stream:
                    if _worth_sending(piece):
                        yield piece
                    continue
                parts[piece.sequence_index].append(piece)
                if piece.ending is not None:
                    yield _joined(parts[piece.sequence_index], self._defaults.accumulate)

    def _deadline(self, request: TextRequest) -> float | None:
        seconds = self._defaults.timeout_s if request.timeout_s is None else request.timeout_s
        return None if seconds is None else asyncio.get_running_loop().time() + seconds

    # --- the engine's request -----------------------------------------------------------------

    async def _prompt(self, request: TextRequest, limits: EngineLimits) -> Prompt:
        length = len(request.text or request.messages or "")
        if length < _LONG_TEXT:
            prompt = self._prompts.make(request)
        else:
            prompt = await asyncio.to_thread(self._prompts.make, request)
        longest = limits.max_sequence_tokens
        if longest is not None and len(prompt.ids) >= longest:
            raise InvalidRequest(
                "text_input" if request.messages is None else "messages",
                f"{len(prompt.ids)} tokens; the model takes at most {longest - 1} "
                "so that one new token fits",
            )
        return prompt

    def _rules(
        self, request: TextRequest, prompt: Prompt, sampling: Sampling, limits: EngineLimits
    ) -> TextRules:
        return TextRules(
            prompt_tokens=len(prompt.ids),
            max_tokens=request.max_tokens,
            min_tokens=sampling.min_tokens or 0,
            end_ids=frozenset(prompt.end_ids),
            stop_words=request.stop_words,
            stop_sequences=prompt.stop_sequences,
            include_stop=request.include_stop,
            echo_ids=() if request.exclude_input_in_output else prompt.ids,
            accumulate=self._defaults.accumulate,
            seed=sampling.seed,
            max_sequence_tokens=limits.max_sequence_tokens,
        )


class _Answer:
    """Reads one engine request into its sequences, until all have ended or something ends them."""

    def __init__(
        self,
        request: TextRequest,
        engine: Engine,
        sequences: list[SequenceText],
        deadline: float | None,
    ) -> None:
        self._request = request
        self._engine = engine
        self._sequences = sequences
        self._deadline = deadline
        self._begun = False

    async def pieces(self, request: EngineRequest) -> AsyncGenerator[TextChunk, None]:
        """Every sequence's last piece has its ending, whatever happens.

        Where a stream that has begun is cancelled or fails, that is told by its last pieces, and
        the error follows.
        """
        try:
            async with aclosing(self._read(request)) as pieces:
                async for piece in pieces:
                    yield piece
        except (asyncio.CancelledError, Exception) as error:
            reason = self._reason(error)
            if reason is FinishReason.TIMEOUT or (self._begun and self._request.stream):
                for index, sequence in enumerate(self._sequences):
                    if not sequence.ended:
                        yield sequence.give_up(reason, index)
            if reason is not FinishReason.TIMEOUT:
                raise

    def _reason(self, error: BaseException) -> FinishReason:
        if isinstance(error, asyncio.CancelledError):
            return FinishReason.CANCELLED
        timeout = isinstance(error, asyncio.TimeoutError) and _is_past(self._deadline)
        return FinishReason.TIMEOUT if timeout else FinishReason.ERROR

    async def _read(self, request: EngineRequest) -> AsyncGenerator[TextChunk, None]:
        cut_short = False
        async with aclosing(self._engine.generate(request)) as chunks:
            while True:
                async with timeout_at(self._deadline):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    break
                self._begun = True
                sequence = self._sequences[chunk.sequence_index]
                if sequence.ended:
                    continue  # it ended by count; the engine is about to say so itself
                piece = sequence.feed(chunk)
                yield piece
                cut_short = cut_short or _cut_short(piece, chunk, self._request)
                if cut_short and all(sequence.ended for sequence in self._sequences):
                    return  # closing the generator cancels the engine's work
        if not all(sequence.ended for sequence in self._sequences):
            raise EngineError(f"{self._engine.name} fell silent before its last chunk")


def _is_past(deadline: float | None) -> bool:
    """Whether a ``TimeoutError`` is the deadline's, and not somebody else's."""
    return deadline is not None and asyncio.get_running_loop().time() >= deadline


def _engine_request(
    request: TextRequest, prompt: Prompt, sampling: Sampling, *, streaming: bool
) -> EngineRequest:
    return EngineRequest(
        request_id=f"{request.request_id}/{uuid.uuid4().hex[:12]}",
        input_ids=prompt.ids,
        max_tokens=request.max_tokens,
        streaming=streaming,
        sampling=sampling,
        num_return_sequences=request.num_return_sequences,
        end_id=prompt.end_id,
        pad_id=prompt.pad_id,
        # An engine would act on them before min_tokens; then only we watch for them.
        stop_sequences=() if sampling.min_tokens else prompt.engine_stops,
        bad_sequences=prompt.bad_sequences,
        embedding_bias=prompt.embedding_bias,
        wants=request.wants,
        extras=request.extras,
    )


def _refuse(request: TextRequest) -> None:
    """What a text stream cannot honour is refused by name, never ignored."""
    beams = request.sampling.beam_width or 1
    if beams > 1:
        raise Unsupported(
            "beam_width", f"{beams}: beams rewrite text that has left; send num_return_sequences"
        )


def _drawable(sampling: Sampling) -> Sampling:
    """Sampling as it was meant, on an engine that takes things literally; greedy needs nothing.

    TensorRT-LLM stays greedy with a temperature alone, so "all tokens" is said aloud; and its
    default seed gives the same text every time, so a fresh one is chosen.
    """
    asked = (sampling.temperature, sampling.top_k, sampling.top_p) != (None, None, None)
    if not asked or sampling.top_k == 1 or sampling.temperature == 0:
        return sampling
    if not sampling.top_k and sampling.top_p is None:
        sampling = replace(sampling, top_p=1.0)
    if sampling.seed is None:
        sampling = replace(sampling, seed=secrets.randbits(63))
    return sampling


def _with_speculation(piece: TextChunk, source: Source) -> TextChunk:
    if piece.ending is None:
        return piece
    return replace(piece, ending=replace(piece.ending, speculation=source.speculation()))


def _worth_sending(piece: TextChunk) -> bool:
    return bool(piece.text) or piece.ending is not None or piece.context_logits is not None


def _cut_short(piece: TextChunk, chunk: EngineChunk, request: TextRequest) -> bool:
    """Whether the sequence ended at something of which the engine knows nothing.

    That is a stop string, and with min_tokens a further end id. At its token limit the engine
    ends by itself, and a cancel then would only race with that.
    """
    if piece.ending is None or chunk.final:
        return False
    reason = piece.ending.finish_reason
    untold = bool(request.sampling.min_tokens)
    return reason is FinishReason.STOP or (untold and reason is FinishReason.END_ID)


def _joined(parts: list[TextChunk], accumulated: bool) -> TextChunk:
    rows = [row for part in parts for row in part.generation_logits or ()]
    return replace(
        parts[-1],
        text=parts[-1].text if accumulated else "".join(part.text for part in parts),
        context_logits=parts[0].context_logits,
        generation_logits=rows or None,
    )
