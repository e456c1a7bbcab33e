"""Engine chunks and text chunks to arrays and back; the end on a wire that marks only one."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.wire_tensors import LAST_FORM
from trtllm_bls.engines.base import join_chunks
from trtllm_bls.engines.triton_model import ResponseReader, request_inputs
from trtllm_bls.errors import EngineError
from trtllm_bls.triton.tensors import ChunkWriter, text_arrays
from trtllm_bls.types import (
    CacheSalt,
    Ending,
    EngineChunk,
    EngineMetrics,
    EngineRequest,
    FinishReason,
    SpeculationStats,
    TextChunk,
    TextRequest,
    Wants,
)
from trtllm_bls.wire.contract import BLS, ENGINE

ASK = EngineRequest(request_id="r", input_ids=(7, 8), max_tokens=4)
ids = st.integers(0, 49)
# It has no way to be told that the prompt is not wanted.
ECHOES = replace(LAST_FORM, inputs={"input_ids": "INT32"})
TEXTS = ("text_output", "finish_reason", "stop_reason")


def column(*values: Any, dtype: Any = np.int32) -> Any:
    return np.array([[value] for value in values], dtype=dtype)


# --- chunks, there and back -----------------------------------------------------------------


def scored(*token_ids: int, index: int = 0, final: bool = False) -> EngineChunk:
    """A chunk with every score; values tell which token they belong to."""
    return EngineChunk(
        token_ids=token_ids,
        sequence_index=index,
        final=final,
        log_probs=tuple(-token / 4 for token in token_ids),
        cum_log_prob=-0.5,
        generation_logits=np.array([[token, index] for token in token_ids]).reshape(-1, 2),
    )


ALL = Wants(log_probs=True, context_logits=True, generation_logits=True, perf_metrics=True)


def sent(
    request: EngineRequest, chunks: list[EngineChunk], exclude: bool = True
) -> tuple[list[dict[str, Any]], list[EngineChunk]]:
    """The chunks as arrays on the wire, and as they come out at the other end."""
    writer = ChunkWriter(request, exclude, None)
    reader = ResponseReader(request, LAST_FORM if exclude else ECHOES)
    arrays = [writer.arrays(chunk) for chunk in chunks]
    for found in arrays:
        for name, array in found.items():
            row = ENGINE.output_named[name]
            assert array.dtype == row.numpy_type and array.ndim == len(row.dims) + 1, name
            assert array.shape[0] == 1
    pairs = zip(arrays, chunks, strict=True)
    return arrays, [new for found, chunk in pairs for new in reader.chunks(found, chunk.final)]


def first_chunk(arrays: dict[str, Any], request: EngineRequest, last: bool = False) -> EngineChunk:
    return next(ResponseReader(request, LAST_FORM).chunks(arrays, last))


def with_zeros(metrics: EngineMetrics | None) -> EngineMetrics:
    names = [field.name for field in fields(EngineMetrics)]
    return EngineMetrics(**{name: getattr(metrics, name, None) or 0 for name in names})


def assert_same(received: list[EngineChunk], chunks: list[EngineChunk]) -> None:
    for got, want in zip(received, chunks, strict=True):
        if got.metrics is not None:  # all of them, with zeros for what is not known
            want = replace(want, metrics=with_zeros(want.metrics))
        bare = {"context_logits": None, "generation_logits": None}
        assert replace(got, **bare) == replace(want, **bare)
        for name in bare:
            left, right = getattr(got, name), getattr(want, name)
            assert (left is None) == (right is None)
            assert left is None or left.tolist() == right.tolist()


def test_streamed_chunks_come_back() -> None:
    """Tokens are new ones only, log-probs all so far; the prompt's logits are on each response."""
    request = replace(ASK, wants=ALL)
    context = np.array([[1.0, 2.0], [3.0, 4.0]])
    first = replace(scored(3, 4), context_logits=context)
    last = replace(scored(final=True), metrics=EngineMetrics(total_draft_tokens=4))
    chunks = [first, scored(5), last]
    arrays, received = sent(request, chunks)
    assert_same(received, [replace(chunk, context_logits=context) for chunk in chunks])
    assert [a["output_log_probs"].shape for a in arrays] == [(1, 1, 2), (1, 1, 3), (1, 1, 3)]
    assert arrays[-1]["output_ids"].shape == (1, 1, 0)
    assert arrays[-1]["sequence_length"].tolist() == [[0]]
    assert arrays[0]["generation_logits"].shape == (1, 2, 1, 2)


@pytest.mark.parametrize("exclude", [True, False])
def test_a_whole_answer_comes_back(exclude: bool) -> None:
    """Not streaming: one response, the prompt in front unless it is excluded."""
    request = replace(ASK, streaming=False, wants=ALL)
    chunks = [scored(3, 4, 5, final=True)]
    (arrays,), received = sent(request, chunks, exclude)
    assert_same(received, chunks)
    prompt = [] if exclude else [7, 8]
    assert arrays["output_ids"].tolist() == [[[*prompt, 3, 4, 5]]]
    assert arrays["sequence_length"].tolist() == [[len(prompt) + 3]]
    assert arrays["output_log_probs"].shape == (1, 1, 3)
    assert arrays["generation_logits"].shape[:2] == (1, 1)


def test_logits_take_the_room_of_the_answer_not_of_the_limit() -> None:
    """A caller who allows many tokens must not make the server fill its memory with zeros."""
    request = replace(ASK, streaming=False, wants=ALL, max_tokens=2**31 - 1)
    (arrays,), _ = sent(request, [scored(3, final=True)])
    assert arrays["generation_logits"].nbytes < 1000


def test_several_sequences_keep_their_scores_apart() -> None:
    """Each chunk names its sequence, and "so far" is counted for each."""
    request = replace(ASK, wants=ALL, num_return_sequences=2)
    chunks = [scored(3), scored(9, 9, index=1), scored(4), scored(6, index=1)]
    arrays, received = sent(request, chunks)
    assert_same(received, chunks)
    assert [a["sequence_index"].tolist() for a in arrays] == [[[0]], [[1]], [[0]], [[1]]]


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(ids, max_size=3)), min_size=1, max_size=8),
    st.booleans(),
)
def test_any_chunks_come_back(parts: list[tuple[int, list[int]]], scores: bool) -> None:
    """Any number of tokens in any order of sequences, with scores or without."""
    wants = ALL if scores else Wants()
    request = replace(ASK, wants=wants, num_return_sequences=3)
    chunks = [
        scored(*tokens, index=index)
        if scores
        else EngineChunk(token_ids=tuple(tokens), sequence_index=index)
        for index, tokens in parts
    ]
    assert_same(sent(request, chunks)[1], chunks)


def test_counts_and_rows_are_told_when_asked() -> None:
    """batch_index only where there are several rows, token counts only on demand."""
    request = replace(ASK, wants=Wants(num_input_tokens=True, num_output_tokens=True))
    arrays = ChunkWriter(request, True, 3).arrays(scored(1, 2))
    assert arrays["batch_index"].tolist() == [[3]]
    assert arrays["num_input_tokens"].tolist() == arrays["num_output_tokens"].tolist() == [[2]]
    bare = ChunkWriter(ASK, True, None).arrays(EngineChunk(token_ids=(1,)))
    assert bare.keys() == {"output_ids", "sequence_length"}


def test_metrics_keep_their_types_and_give_the_rate() -> None:
    """What the engine does not tell is 0; no drafts, no division by zero."""
    asking = replace(ASK, wants=Wants(perf_metrics=True))
    metrics = EngineMetrics(
        arrival_time_ns=2**40, total_draft_tokens=4, total_accepted_draft_tokens=3
    )
    arrays = ChunkWriter(asking, True, None).arrays(
        EngineChunk(token_ids=(), final=True, metrics=metrics)
    )
    assert arrays["arrival_time_ns"].dtype == np.int64
    assert arrays["acceptance_rate"].tolist() == [[0.75]]
    assert arrays["first_token_time_ns"].tolist() == [[0]]
    none = replace(metrics, total_draft_tokens=0, total_accepted_draft_tokens=0)
    arrays = ChunkWriter(asking, True, None).arrays(
        EngineChunk(token_ids=(), final=True, metrics=none)
    )
    assert arrays["acceptance_rate"].tolist() == [[0.0]]


def test_joined_chunks_are_the_whole_answer() -> None:
    """Tokens and scores end to end; totals as last told, also when a stop cut the answer."""
    first = replace(scored(3), context_logits=np.ones((2, 2)))
    cut = EngineChunk(token_ids=(), final=True)
    whole = join_chunks([first, replace(scored(4, 5), cum_log_prob=-3.0), cut])
    assert whole.token_ids == (3, 4, 5) and whole.final
    assert whole.log_probs == (-0.75, -1.0, -1.25) and whole.cum_log_prob == -3.0
    assert whole.generation_logits is not None and whole.generation_logits.shape == (3, 2)
    assert whole.context_logits is not None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"output_ids": None}, "output_ids"),
        ({"sequence_length": None}, "sequence_length"),
        ({"output_log_probs": np.zeros((1, 1, 1), np.float32)}, "output_log_probs"),
        ({"generation_logits": np.zeros((1, 1, 1, 2), np.float32)}, "generation_logits"),
        ({"sequence_index": column(1)}, "sequence_index"),
        ({"sequence_index": column(-1)}, "sequence_index"),
        ({"sequence_length": column(-1)}, "sequence_length is -1"),
        ({"sequence_length": column(3)}, "sequence_length is 3, its output_ids hold 2"),
        ({"sequence_length": np.zeros((1, 0), np.int32)}, "cannot be read"),
        ({"sequence_length": column(np.inf, dtype=np.float32)}, "cannot be read"),
        ({"output_ids": np.zeros((1, 2), np.int32)}, r"output_ids are int32 of shape \[1, 2\]"),
        ({"output_ids": np.zeros((1, 1, 2, 1), np.int32)}, "3 dimensions of integers"),
        ({"output_ids": np.zeros((1, 1, 2), np.float32)}, "3 dimensions of integers"),
        ({"output_ids": np.zeros((0, 1, 2), np.int32)}, "cannot be read"),
        ({"output_ids": np.array([[[3, -7]]], np.int32)}, "output_ids hold -7"),
        ({"output_log_probs": np.zeros((1, 2), np.float32)}, "3 dimensions of floats"),
        ({"cum_log_probs": np.zeros(0, np.float32)}, "cannot be read"),
        ({"context_logits": np.zeros((4, 4), np.float32)}, "3 dimensions of floats"),
        ({"generation_logits": np.zeros((1, 2, 4), np.float32)}, "4 dimensions of floats"),
        ({"total_draft_tokens": np.zeros(0, np.int32)}, "cannot be read"),
    ],
)
def test_a_response_that_breaks_the_contract_is_the_engines_error(
    change: Any, problem: str
) -> None:
    """Missing tensors, fewer scores than tokens, a sequence nobody asked for."""
    request = replace(ASK, wants=ALL)
    (arrays,), _ = sent(request, [scored(3, 4)])
    arrays = {k: v for k, v in {**arrays, **change}.items() if v is not None}
    with pytest.raises(EngineError, match=problem):
        first_chunk(arrays, request)


def test_padding_behind_the_length_is_not_read() -> None:
    """Shorter beams are padded with -1."""
    (arrays,), _ = sent(ASK, [EngineChunk(token_ids=(3, 4))])
    arrays["output_ids"] = np.array([[[3, 4, -1, -1]]], np.int32)
    assert first_chunk(arrays, ASK).token_ids == (3, 4)


def test_a_score_of_the_end_token_is_not_taken_for_a_tokens() -> None:
    """More log-probs than tokens: the end token's own, which nobody shows."""
    request = replace(ASK, wants=Wants(log_probs=True))
    (arrays,), _ = sent(request, [scored(3, 4)])
    arrays["output_log_probs"] = np.array([[[-1, -2, -9]]], np.float32)
    assert first_chunk(arrays, request, last=True).log_probs == (-1.0, -2.0)


# --- the end of a request on a wire that marks only the last response -----------------------


def test_every_sequence_ends_although_the_wire_marks_one_end() -> None:
    """The last response ends what is still open, each sequence once."""
    request = replace(ASK, num_return_sequences=3)
    responses = ResponseReader(request, LAST_FORM)
    arrays, _ = sent(request, [EngineChunk(token_ids=(5,), sequence_index=1)])
    chunks = [
        *responses.chunks(arrays[0], is_last=False),
        *responses.chunks(arrays[0], is_last=True),
    ]
    assert [(c.sequence_index, c.final) for c in chunks[2:]] == [(0, True), (1, True), (2, True)]
    assert list(responses.chunks({}, is_last=True)) == []


def test_an_empty_last_response_ends_a_single_sequence() -> None:
    """As an engine sends it that marks its end with nothing."""
    chunks = list(ResponseReader(ASK, LAST_FORM).chunks({}, is_last=True))
    assert [(c.token_ids, c.final) for c in chunks] == [((), True)]


def test_metrics_survive_a_wire_that_does_not_mark_the_last_response() -> None:
    """They come with the last data, before anyone knows that it was the last."""
    request = replace(ASK, wants=ALL)
    metrics = EngineMetrics(total_draft_tokens=4)
    arrays, _ = sent(request, [replace(scored(5), metrics=metrics)])
    responses = ResponseReader(request, LAST_FORM)
    chunks = [*responses.chunks(arrays[0], is_last=False), *responses.chunks({}, is_last=True)]
    assert chunks[-1].final and chunks[-1].metrics == with_zeros(metrics)


@pytest.mark.parametrize("engine", ["llm_api", "trtllm://host:1", "embedded"])
def test_the_likeliest_ids_survive_the_wire(engine: str) -> None:
    """Of the engines that tell them; of any other they are computed from logits."""
    model = replace(LAST_FORM, parameters={"engine": engine})
    assert model.capacity.tells_top_log_probs == (engine != "embedded")
    wants = Wants(log_probs=True, top_log_probs=2)
    request = replace(ASK, wants=wants)
    assert {"top_log_prob_ids", "top_log_probs"} < set(model.outputs_for(request))
    inputs = {name: array.tolist() for name, _, array in request_inputs(request, model, 100)}
    assert inputs["return_top_log_probs"] == [[2]]
    best = (((7, -0.5), (5, -1.5)), ((6, -0.25), (9, -2.0)))
    arrays, _ = sent(request, [EngineChunk((5, 6), log_probs=(-1.5, -0.25), top_log_probs=best)])
    (chunk,) = ResponseReader(request, model).chunks(arrays[0], is_last=True)
    assert chunk.top_log_probs == best


@pytest.mark.parametrize("engine", ["llm_api", "trtllm://host:1", "embedded", ""])
def test_the_salt_of_a_key_goes_to_engines_that_tell_salts_apart(engine: str) -> None:
    """Others are sent none, and do not refuse the request; one of its own goes to any."""
    model = replace(LAST_FORM, parameters={"engine": engine})
    of_key = CacheSalt("1", required=False)
    kept = b"key:1" if engine == "llm_api" else None
    for salt, wanted in ((of_key, kept), (CacheSalt("own"), b"own")):
        request = replace(ASK, cache_salt=salt)
        inputs = {name: array for name, _, array in request_inputs(request, model, 100)}
        assert inputs.get("cache_salt", np.array([[None]])).tolist() == [[wanted]]


@pytest.mark.parametrize(
    ("parameters", "most_drafted", "may_be_one_step"),
    [
        ({"engine": "embedded", "max_draft_len": "8"}, 8, False),
        ({"engine": "embedded"}, None, False),
        ({"engine": "llm_api"}, 0, False),
        ({"engine": "trtllm://host:1"}, 0, False),
        ({"gpt_model_type": "V1"}, None, True),
        ({"gpt_model_type": "V1", "one_step_requests": "false"}, None, False),
        ({"gpt_model_type": "V1", "speculative_decoding_mode": "medusa"}, 0, False),
        (
            {"gpt_model_type": "V1", "speculative_decoding_mode": "draft_tokens_external"},
            None,
            True,
        ),
    ],
)
def test_a_models_parameters_tell_whether_it_verifies_drafts(
    parameters: dict[str, str], most_drafted: int | None, may_be_one_step: bool
) -> None:
    """An engine that speculates by itself takes none, so nobody asks it for its steps either."""
    capacity = replace(LAST_FORM, parameters=parameters).capacity
    assert (capacity.max_draft_tokens, capacity.may_be_one_step) == (most_drafted, may_be_one_step)


def test_what_was_cached_is_asked_for_where_it_is_declared() -> None:
    assert "cached_tokens" in LAST_FORM.outputs_for(ASK)
    arrays, _ = sent(ASK, [EngineChunk((5,), cached_tokens=7), EngineChunk((6,))])
    responses = ResponseReader(ASK, LAST_FORM)
    chunks = [chunk for each in arrays for chunk in responses.chunks(each, is_last=False)]
    assert [chunk.cached_tokens for chunk in chunks] == [7, None]


# --- text -----------------------------------------------------------------------------------


def test_a_text_chunk_fills_the_outputs_it_can() -> None:
    """Types as declared, texts of one dimension; the ending's figures only on the last chunk."""
    request = TextRequest(
        request_id="r",
        text="hi",
        max_tokens=5,
        num_return_sequences=2,
        wants=Wants(num_input_tokens=True, num_output_tokens=True),
    )
    ending = Ending(
        finish_reason=FinishReason.STOP,
        prompt_tokens=3,
        completion_tokens=2,
        stop_reason="né",
        seed=2**63,
    )
    chunk = TextChunk(
        text="só",
        sequence_index=1,
        log_probs=(-1.0, -2.0),
        cum_log_prob=-3.0,
        context_logits=np.ones((3, 4)),
        generation_logits=[np.ones(4), np.ones(4)],
        metrics=EngineMetrics(total_draft_tokens=1),
        ending=ending,
    )
    arrays = text_arrays(chunk, request, row=1)
    for name, array in arrays.items():
        row = BLS.output_named[name]
        assert array.dtype == row.numpy_type, name
        if name not in TEXTS:
            assert array.ndim == len(row.dims) + 1 and array.shape[0] == 1, name
    assert [arrays[name].shape for name in TEXTS] == [(1,)] * 3
    assert [arrays[name][0].decode() for name in TEXTS] == ["só", "stop", "né"]
    assert arrays["seed"].tolist() == [[2**63]]
    assert arrays["batch_index"].tolist() == arrays["sequence_index"].tolist() == [[1]]
    assert arrays["num_output_tokens"].tolist() == [[2]]
    assert "acceptance_rate" not in arrays  # the engine does not tell what it accepted
    done = SpeculationStats(rounds=2, drafted=8, accepted=6)
    rounds = text_arrays(replace(chunk, ending=replace(ending, speculation=done)), request, None)
    assert rounds["num_draft_rounds"].tolist() == [[2]]
    assert rounds["acceptance_rate"].tolist() == [[0.75]]
    open_chunk = text_arrays(replace(chunk, ending=None), request, row=None)
    assert not open_chunk.keys() & {"finish_reason", "num_input_tokens", "seed", "batch_index"}
    assert open_chunk["total_draft_tokens"].tolist() == [[1]]
    assert "kv_cache_reused_blocks" not in open_chunk
    asking = replace(request, wants=Wants(perf_metrics=True))
    filled = text_arrays(replace(chunk, ending=None), asking, row=None)
    assert filled["kv_cache_reused_blocks"].tolist() == [[0]]
    assert open_chunk["context_logits"].shape == (1, 3, 4)
