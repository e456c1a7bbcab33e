"""TensorRT-LLM's LLM API, in this process, as an engine: ``tensorrt_llm.LLM``.

Written from the public surface of ``LLM``, ``SamplingParams`` and ``RequestOutput`` and tested
against objects that have that surface; not run on a TensorRT-LLM so far.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trtllm_bls.contract import ENGINE
from trtllm_bls.engines import trtllm_fields as trtllm
from trtllm_bls.engines.base import ChunkStream, QueuedChunks, TaskChunks
from trtllm_bls.engines.ends import SequenceEnds, end_id_of, sequence_ends
from trtllm_bls.errors import (
    EngineError,
    EngineUnavailable,
    SetupError,
    TrtllmBlsError,
    Unsupported,
)
from trtllm_bls.types import EngineCapacity, EngineChunk, EngineRequest, FinishReason

_NOWHERE = "this package does not pass it on to the LLM API"
_TAKEN = {"guided_decoding_guide_type", "guided_decoding_guide"}
_REFUSED = {tensor.name: _NOWHERE for tensor in ENGINE.inputs if tensor.name not in _TAKEN} | {
    "draft_input_ids": "the LLM API takes no drafts; it speculates as it was set up",
    "bad_words_list": "the LLM API takes bad words of one token only",
}
_GUIDES = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tag",
}


def open_llm(
    name: str, model_dir: Path, sizes: Mapping[str, int], vocab_size: Callable[[], int]
) -> LlmApiEngine:
    """Load ``model_dir`` (a checkpoint or a built engine). Raises ``SetupError`` without
    TensorRT-LLM. Of ``sizes``, the ``tensorrt_llm`` model's parameters, two have a meaning here.
    """
    try:
        api = importlib.import_module("tensorrt_llm")
    except ImportError as error:
        raise SetupError(f"engine llm_api needs TensorRT-LLM in this Python: {error}") from error
    names = {"max_batch": "max_batch_size", "max_sequence_tokens": "max_seq_len"}
    options = {names[key]: value for key, value in sizes.items() if key in names}
    llm = api.LLM(model=str(model_dir), guided_decoding_backend="xgrammar", **options)
    capacity = EngineCapacity(
        vocab_size=vocab_size(),  # not before: a tokenizer that is loaded first hides torch
        max_sequence_tokens=sizes.get("max_sequence_tokens"),
        max_draft_tokens=0,
    )
    return LlmApiEngine(name, api, llm, capacity)


class LlmApiEngine:
    """``llm``, made by module ``api``. Implements ``trtllm_bls.engines.base.Engine``."""

    def __init__(self, name: str, api: Any, llm: Any, capacity: EngineCapacity) -> None:
        self.name = name
        self._api = api
        self._llm = llm
        self._capacity = capacity
        self._closed = False

    async def capacity(self) -> EngineCapacity:
        """What the parameters tell."""
        if self._closed:
            raise EngineUnavailable(f"{self.name}: the engine is closed")
        return self._capacity

    def generate(self, request: EngineRequest) -> ChunkStream:
        """See ``Engine.generate``."""
        refused = {name: _NOWHERE for name in request.extras if name not in _TAKEN} | _REFUSED
        trtllm.check(request, self._capacity, refused)
        return TaskChunks(partial(self._run, request, self._sampling_params(request)))

    async def close(self) -> None:
        """Shut the LLM down."""
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._llm.shutdown)

    def _sampling_params(self, request: EngineRequest) -> Any:
        end_id, least = end_id_of(request), request.sampling.min_tokens
        single, _ = trtllm.stop_ids(request)
        given: dict[str, Any] = trtllm.sampling_fields(request.sampling)
        if least:
            given["min_tokens"] = least
        if single:
            given |= {"stop_token_ids": single, "include_stop_str_in_output": True}
        if request.bad_sequences:
            given["bad_token_ids"] = [words[0] for words in request.bad_sequences]
        if request.wants.log_probs:
            given["logprobs"] = 1
        guide = trtllm.guide_of(request.extras)
        if guide is not None:
            kind = _GUIDES.get(guide[0])
            how = {kind: guide[1]} if kind else {"json_object": True}
            llmapi = importlib.import_module("tensorrt_llm.llmapi")
            given["guided_decoding"] = llmapi.GuidedDecodingParams(**how)
        end = -1 if end_id is None else end_id
        known = getattr(self._api.SamplingParams, "__dataclass_fields__", given)
        for name in given.keys() - known.keys():
            raise Unsupported(name, "the LLM API of this TensorRT-LLM has no such parameter")
        return self._api.SamplingParams(
            max_tokens=request.max_tokens,
            n=len(sequence_ends(request)),
            end_id=end,
            pad_id=end if request.pad_id is None else request.pad_id,
            detokenize=False,
            **given,
        )

    async def _run(self, request: EngineRequest, params: Any, chunks: QueuedChunks) -> None:
        sequences = sequence_ends(request)
        try:
            result = self._llm.generate_async(
                {"prompt_token_ids": list(request.input_ids)},
                sampling_params=params,
                streaming=True,
            )
        except ValueError as error:
            raise EngineError(f"{self.name}: {error}") from error
        try:
            async for step in result:
                for output in step.outputs:
                    sequence = sequences[output.index]
                    chunks.put(_read(output, sequence, request.wants.log_probs, step.finished))
                if all(sequence.done for sequence in sequences):
                    return
            raise EngineError(f"{self.name} ended its stream before its last token")
        except TrtllmBlsError:
            raise
        except Exception as error:  # of an API that is not ours
            raise EngineError(f"{self.name}: {error}") from error
        finally:
            if not result.finished:
                result.abort()


def _read(output: Any, sequence: SequenceEnds, scored: bool, finished: bool) -> list[EngineChunk]:
    """The chunks of what is new in an output, which the LLM API repeats as it grows.

    ``finished``: all sequences have ended. The LLM API may tell only the last one why.
    """
    if sequence.done:
        return []
    num_read = sequence.received
    ids = tuple(output.token_ids[num_read:])
    scores = _log_probs(ids, output.logprobs[num_read:]) if scored else None
    reason, ended = (
        trtllm.REASONS.get(output.finish_reason),
        output.finish_reason is not None or finished,
    )
    if reason is FinishReason.END_ID and output.stop_reason in sequence.stop_ids:
        reason = FinishReason.STOP
    return sequence.feed(ids, scores, ended=ended, reason=reason)


def _log_probs(ids: tuple[int, ...], entries: Iterable[Any]) -> tuple[float, ...]:
    """Of each id; an entry is its number, or those of several ids by id."""
    values = []
    for token, entry in zip(ids, entries, strict=False):
        listed: Any = entry[token] if isinstance(entry, Mapping) else entry
        value: float = getattr(listed, "logprob", listed)
        values.append(value)
    if len(values) != len(ids):
        raise EngineError("the engine's log-probabilities are not those of its tokens")
    return tuple(values)
