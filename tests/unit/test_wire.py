"""Messages to arrays and back: what one side packs, the other unpacks."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_bls.contract import BLS, ENGINE
from trtllm_bls.engines.dialect import Dialect, Responses
from trtllm_bls.errors import EngineError, InvalidRequest
from trtllm_bls.messages import (
    Draft,
    Ending,
    EngineChunk,
    EngineMetrics,
    EngineRequest,
    FinishReason,
    Sampling,
    TextChunk,
    TextRequest,
    Wants,
)
from trtllm_bls.wire.engine import (
    ChunkReader,
    ChunkWriter,
    EngineCall,
    engine_requests,
    is_stop,
    join_chunks,
    request_arrays,
)
from trtllm_bls.wire.fields import read_rows
from trtllm_bls.wire.text import text_arrays, text_requests
from trtllm_bls.wire.words import pack_words, unpack_words

VOCAB = 50
DECLARED = Dialect().inputs
ASK = EngineRequest(request_id="r", input_ids=(7, 8), max_tokens=4)
quick = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def column(*values: Any, dtype: Any = np.int32) -> Any:
    return np.array([[value] for value in values], dtype=dtype)


def words(*texts: str | bytes) -> Any:
    encoded = [text.encode() if isinstance(text, str) else text for text in texts]
    return np.array([encoded], dtype=np.object_)


def text_inputs(**more: Any) -> dict[str, Any]:
    return {"text_input": words("hi"), "max_tokens": column(5), **more}


def text(**more: Any) -> TextRequest:
    (request,) = text_requests(text_inputs(**more), "r")
    return request


def engine(**more: Any) -> EngineRequest:
    inputs = {
        "input_ids": np.array([[7, 8]], np.int32),
        "input_lengths": column(2),
        "request_output_len": column(4),
        **more,
    }
    (call,) = engine_requests(inputs, "r")
    return call.request


# --- word lists -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "columns", "ids", "offsets"),
    [
        (((10, 11), (12,)), 0, [10, 11, 12], [2, 3, -1]),
        (((5,),), 0, [5], [1]),
        (((7,), (8,), (9,)), 0, [7, 8, 9], [1, 2, 3]),
        ((), 0, [], []),
        (((), ()), 0, [], []),
        (((), (5,), ()), 0, [5], [1]),
        (((5,),), 3, [5, 0, 0], [1, -1, -1]),
        ((), 2, [0, 0], [-1, -1]),
    ],
)
def test_word_lists_have_the_wires_layout(
    said: tuple[tuple[int, ...], ...], columns: int, ids: list[int], offsets: list[int]
) -> None:
    """All ids end to end above, running end offsets below, then -1; batches are padded."""
    packed = pack_words(said, columns)
    assert packed.dtype == np.int32 and packed.tolist() == [ids, offsets]
    assert unpack_words("stop_words_list", packed) == tuple(word for word in said if word)


@pytest.mark.parametrize(
    ("packed", "said"),
    [
        ([[0], [-1]], ()),
        ([[10, 11, 12, 13], [2, -1, -1, -1]], ((10, 11),)),
        ([[1, 2, 3], [1, 3, -1]], ((1,), (2, 3))),
    ],
)
def test_word_lists_of_others_are_read(packed: Any, said: Any) -> None:
    """An empty list spelt as 0 over -1, and ids after the last offset, which do not count."""
    assert unpack_words("stop_words_list", np.array(packed, np.int32)) == said


@pytest.mark.parametrize(
    "packed",
    [
        [[1, 2], [3, -1]],
        [[1, 2], [0, -1]],
        [[1, 2], [2, 1]],
        [[1, 2], [1, 1]],
        [[1, 2], [-1, 2]],
        [[1, 2], [-2, -1]],
        [[1, 2]],
        [[1], [1], [1]],
        [1, 2],
    ],
)
def test_a_malformed_word_list_is_refused(packed: Any) -> None:
    """Offsets rise strictly, stay within the ids and end in -1 only; the shape is [2, N]."""
    with pytest.raises(InvalidRequest, match="bad_words_list"):
        unpack_words("bad_words_list", np.array(packed, np.int32))


# --- fields ---------------------------------------------------------------------------------


def test_either_spelling_is_taken() -> None:
    """min_length is min_tokens, random_seed is seed, on both levels."""
    for name in ("min_length", "min_tokens"):
        assert text(**{name: column(3)}).sampling.min_tokens == 3
        assert engine(**{name: np.array([3], np.int32)}).sampling.min_tokens == 3
    big = 2**64 - 1
    for name in ("random_seed", "seed"):
        assert text(**{name: column(big, dtype=np.uint64)}).sampling.seed == big


def test_both_spellings_may_agree_but_not_contradict() -> None:
    """Which one counts would be a guess."""
    assert text(seed=column(3), random_seed=column(3)).sampling.seed == 3
    with pytest.raises(InvalidRequest, match="random_seed: 4 contradicts seed = 3"):
        text(seed=column(3), random_seed=column(4))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("top_p", 1.5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", float("nan")),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", float("inf")),
        ("top_k", -1),
        ("end_id", -2),
        ("beam_width", 0),
        ("num_return_sequences", 0),
        ("num_return_sequences", 2**31 - 1),
        ("runtime_top_p_decay", 0.0),
        ("num_draft_tokens", -1),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    """NaN, infinity and numbers an engine would choke on; what would fill memory included."""
    dtype = BLS.input_named[name].numpy_type
    with pytest.raises(InvalidRequest, match=f"^{name}: .* is not allowed"):
        text(**{name: column(value, dtype=dtype)})


def test_what_was_not_sent_stays_unsaid() -> None:
    """Absent options are None, never a default of ours; top_p <= 0 is the wire's "not set"."""
    assert text() == TextRequest(request_id="r", text="hi", max_tokens=5)
    assert text(top_p=column(0, dtype=np.float32)).sampling == Sampling()
    assert engine() == ASK.__class__(**{**vars(ASK), "streaming": False})


@pytest.mark.parametrize("scalar", [np.array([9], np.int32), column(9)])
def test_reshaped_scalars_are_read_in_both_shapes(scalar: Any) -> None:
    """A Python model receives [B] where clients send [B, 1]."""
    assert engine(end_id=scalar).end_id == 9


def test_text_that_is_not_utf8_is_refused() -> None:
    """Triton checks nothing of this; the first bad byte is named."""
    with pytest.raises(InvalidRequest, match="text_input: not valid UTF-8 at byte 2"):
        text(text_input=words(b"ab\xff"))
    with pytest.raises(InvalidRequest, match="stop_words"):
        text(stop_words=words("fine", b"\xc3"))
    assert text(text_input=words("a\0b")).text == "a\0b"


def test_one_value_means_one() -> None:
    """Two values where one belongs are refused, not cut."""
    with pytest.raises(InvalidRequest, match="temperature: expected one value"):
        text(temperature=np.zeros((1, 2), np.float32))


def test_rows_must_agree_on_their_number_and_there_must_be_one() -> None:
    """A batch of nothing has no answer."""
    with pytest.raises(InvalidRequest, match="batch size"):
        read_rows(BLS, text_inputs(temperature=np.zeros((2, 1), np.float32)))
    for empty in ({}, {"text_input": np.zeros((0, 1), np.object_)}):
        with pytest.raises(InvalidRequest):
            text_requests(empty, "r")


@pytest.mark.parametrize(
    ("weights", "problem"),
    [([1.0], "1 weights for 2"), ([1.0, float("nan")], "not finite"), (None, "0 weights for 2")],
)
def test_bias_words_and_weights_come_in_pairs(weights: Any, problem: str) -> None:
    """Neither a missing weight nor one that is no number."""
    more = {} if weights is None else {"embedding_bias_weights": np.array([weights], np.float32)}
    with pytest.raises(InvalidRequest, match=problem):
        text(embedding_bias_words=words("a", "b"), **more)


def test_empty_words_are_no_words() -> None:
    """An empty string is how clients spell "none"."""
    assert text(stop_words=words("", "x"), bad_words=words("")).stop_words == ("x",)
    weights = np.array([[1, 2]], np.float32)
    request = text(embedding_bias_words=words("", "b"), embedding_bias_weights=weights)
    assert request.embedding_bias == (("b", 2.0),)


def test_each_row_of_a_batch_is_a_request() -> None:
    """Values go to their row; ids are cut to their length; the first row says if all stream."""
    one, two = text_requests(
        {
            "text_input": np.array([[b"a"], [b"b"]], np.object_),
            "max_tokens": column(1, 2),
            "temperature": column(0.5, 0.25, dtype=np.float32),
        },
        "r",
    )
    assert (one.text, one.max_tokens, one.sampling.temperature) == ("a", 1, 0.5)
    assert (two.text, two.max_tokens, two.sampling.temperature) == ("b", 2, 0.25)
    rows = engine_requests(
        {
            "input_ids": np.array([[1, 2, 3], [4, 0, 0]], np.int32),
            "input_lengths": np.array([3, 1], np.int32),
            "request_output_len": column(1, 2),
            "streaming": column(True, False, dtype=np.bool_),
            "stop_words_list": np.stack([pack_words([(5,)]), pack_words([], 1)]),
        },
        "r",
    )
    assert [row.request.input_ids for row in rows] == [(1, 2, 3), (4,)]
    assert [row.request.streaming for row in rows] == [True, True]
    assert [row.request.stop_sequences for row in rows] == [((5,),), ()]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"request_output_len": column(0)}, "request_output_len"),
        ({"input_lengths": column(3)}, "input_lengths"),
        ({"input_lengths": column(0)}, "input_lengths"),
        ({"input_ids": np.zeros((1, 0), np.int32)}, "input_lengths"),
        ({"embedding_bias": np.array([[np.nan]], np.float32)}, "embedding_bias"),
        ({"draft_logits": np.zeros((1, 2, 9), np.float32)}, "draft_logits"),
        ({"draft_acceptance_threshold": column(1.5, dtype=np.float32)}, "acceptance_threshold"),
        ({"temperature": column(np.inf, dtype=np.float32)}, "temperature"),
    ],
)
def test_an_engine_request_that_cannot_be_meant_is_refused(more: Any, problem: str) -> None:
    """By the name of the tensor."""
    with pytest.raises(InvalidRequest, match=problem):
        engine(**more)


@pytest.mark.parametrize("missing", ["input_ids", "request_output_len"])
def test_a_missing_input_is_named_as_the_wire_names_it(missing: str) -> None:
    """Not by our own field name."""
    inputs = {"input_ids": np.array([[7]], np.int32), "request_output_len": column(4)}
    del inputs[missing]
    with pytest.raises(InvalidRequest, match=f"^{missing}: is missing"):
        engine_requests(inputs, "r")


def test_a_stop_request_is_told_by_its_flag() -> None:
    """Only true counts, in either shape."""
    assert is_stop({"stop": column(True, dtype=np.bool_)})
    assert is_stop({"stop": np.array([True])})
    assert not is_stop({"stop": np.array([[False]])}) and not is_stop({})


# --- requests, there and back ---------------------------------------------------------------

ids = st.integers(0, VOCAB - 1)
some_ids = st.lists(ids, min_size=1, max_size=4).map(tuple)
f32 = st.floats(0.125, 1, width=32)
maybe_f32 = st.none() | f32
count = st.none() | st.integers(1, 2**31 - 1)
bias = st.dictionaries(ids, f32, max_size=4).map(lambda found: tuple(sorted(found.items())))
samplings = st.builds(
    Sampling,
    **{
        field.name: maybe_f32 if "float" in str(field.type) else count
        for field in fields(Sampling)
        if field.name not in ("early_stopping", "seed")
    },
    early_stopping=st.none() | st.booleans(),
    seed=st.none() | st.integers(0, 2**64 - 1),
)
requests = st.builds(
    EngineRequest,
    request_id=st.just("r"),
    input_ids=some_ids,
    max_tokens=st.integers(1, 2**31 - 1),
    streaming=st.booleans(),
    sampling=samplings,
    num_return_sequences=st.integers(1, 5),
    end_id=st.none() | st.integers(-1, 60),
    pad_id=count,
    stop_sequences=st.lists(some_ids, max_size=3).map(tuple),
    bad_sequences=st.lists(some_ids, max_size=3).map(tuple),
    embedding_bias=bias,
    draft=st.none() | st.builds(Draft, token_ids=some_ids, acceptance_threshold=maybe_f32),
    wants=st.builds(
        Wants,
        log_probs=st.booleans(),
        context_logits=st.booleans(),
        generation_logits=st.booleans(),
        perf_metrics=st.booleans(),
    ),
)


@quick
@given(requests, st.booleans())
def test_a_request_comes_back_as_it_was_sent(request: EngineRequest, reshaped: bool) -> None:
    """Whatever is asked, the engine's door reads the very same request."""
    arrays = request_arrays(request, DECLARED, VOCAB)
    for name, array in arrays.items():
        tensor = ENGINE.input_named[name]
        assert array.dtype == tensor.numpy_type and array.shape[0] == 1
        if tensor.scalar and reshaped:
            arrays[name] = array.reshape(1)
    (call,) = engine_requests(arrays, "r")
    assert (call.request, call.exclude_input) == (request, True)


def test_draft_logits_and_extras_come_back_too() -> None:
    """Arrays are carried; single values among the extras stay what they were."""
    sent = {
        "lora_task_id": column(2**63, dtype=np.uint64),
        "lora_weights": np.ones((1, 2, 3), np.float16),
        "lora_config": np.array([[[0, 1, 8]]], np.int32),
        "prompt_vocab_size": column(9),
        "guided_decoding_guide_type": words("regex"),
        "guided_decoding_guide": words("[ä-ü]+"),
        "lookahead_window_size": column(4),
        "draft_input_ids": np.array([[3, 4]], np.int32),
        "draft_logits": np.arange(2 * VOCAB, dtype=np.float32).reshape(1, 2, VOCAB),
    }
    request = engine(**sent)
    arrays = request_arrays(request, DECLARED, VOCAB)
    for name, array in sent.items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].tolist() == array.tolist(), name


def test_extras_of_a_text_request_reach_the_engine() -> None:
    """A guide given to the text model arrives at tensorrt_llm in its own type and shape."""
    request = text(guided_decoding_guide_type=words("json"), lora_task_id=np.array([7], np.uint64))
    arrays = request_arrays(replace(ASK, extras=request.extras), DECLARED, VOCAB)
    assert arrays["guided_decoding_guide_type"].tolist() == [[b"json"]]
    assert arrays["lora_task_id"].dtype == np.uint64
    assert arrays["lora_task_id"].tolist() == [[7]]


def test_an_option_the_engine_has_no_input_for_is_refused() -> None:
    """Dropping it would change the answer in silence."""
    asked = replace(ASK, sampling=Sampling(top_p_min=0.5))
    with pytest.raises(InvalidRequest, match="runtime_top_p_min: this engine version"):
        request_arrays(asked, DECLARED - {"runtime_top_p_min"}, VOCAB)
    with pytest.raises(InvalidRequest, match="draft_input_ids"):
        request_arrays(
            replace(ASK, draft=Draft(token_ids=(1,))), DECLARED - {"draft_input_ids"}, VOCAB
        )


def test_the_engines_own_spelling_is_used() -> None:
    """Older engines know random_seed and min_length alone."""
    older = (DECLARED - {"seed", "min_tokens"}) | {"random_seed", "min_length"}
    asked = replace(ASK, sampling=Sampling(seed=5, min_tokens=2))
    assert {"random_seed", "min_length"} <= request_arrays(asked, older, VOCAB).keys()
    assert {"seed", "min_tokens"} <= request_arrays(asked, DECLARED, VOCAB).keys()
    assert "exclude_input_in_output" not in request_arrays(
        ASK, DECLARED - {"exclude_input_in_output"}, VOCAB
    )


def test_empty_drafts_and_biases_count_as_none() -> None:
    """Zero-length tensors are how an ensemble says "nothing"."""
    request = engine(
        draft_input_ids=np.zeros((1, 0), np.int32),
        embedding_bias=np.zeros((1, 0), np.float32),
        stop_words_list=np.zeros((1, 2, 0), np.int32),
    )
    assert (request.draft, request.embedding_bias, request.stop_sequences) == (None, (), ())


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
    writer = ChunkWriter(EngineCall(request, None), exclude, None)
    reader = ChunkReader(request, prompt_included=not exclude)
    arrays = [writer.arrays(chunk) for chunk in chunks]
    for found in arrays:
        for name, array in found.items():
            row = ENGINE.output_named[name]
            assert array.dtype == row.numpy_type and array.ndim == len(row.dims) + 1, name
            assert array.shape[0] == 1
    return arrays, [reader.chunk(a, c.final) for a, c in zip(arrays, chunks, strict=True)]


def assert_same(received: list[EngineChunk], chunks: list[EngineChunk]) -> None:
    for got, want in zip(received, chunks, strict=True):
        bare = {"context_logits": None, "generation_logits": None}
        assert replace(got, **bare) == replace(want, **bare)
        for name in bare:
            left, right = getattr(got, name), getattr(want, name)
            assert (left is None) == (right is None)
            assert left is None or left.tolist() == right.tolist()


def test_streamed_chunks_come_back() -> None:
    """Tokens are new ones only, log-probs on the wire all so far; the last may hold nothing."""
    request = replace(ASK, wants=ALL)
    first = replace(scored(3, 4), context_logits=np.array([[1.0, 2.0], [3.0, 4.0]]))
    last = replace(scored(final=True), metrics=EngineMetrics(total_draft_tokens=4))
    chunks = [first, scored(5), last]
    arrays, received = sent(request, chunks)
    assert_same(received, chunks)
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


@quick
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
    arrays = ChunkWriter(EngineCall(request, None), True, 3).arrays(scored(1, 2))
    assert arrays["batch_index"].tolist() == [[3]]
    assert arrays["num_input_tokens"].tolist() == arrays["num_output_tokens"].tolist() == [[2]]
    bare = ChunkWriter(EngineCall(ASK, None), True, None).arrays(EngineChunk(token_ids=(1,)))
    assert bare.keys() == {"output_ids", "sequence_length"}


def test_metrics_keep_their_types_and_give_the_rate() -> None:
    """What the engine does not tell is left out; no drafts, no division by zero."""
    metrics = EngineMetrics(
        arrival_time_ns=2**40, total_draft_tokens=4, total_accepted_draft_tokens=3
    )
    arrays = ChunkWriter(EngineCall(ASK, None), True, None).arrays(
        EngineChunk(token_ids=(), final=True, metrics=metrics)
    )
    assert arrays["arrival_time_ns"].dtype == np.int64
    assert arrays["acceptance_rate"].tolist() == [[0.75]]
    assert "first_token_time_ns" not in arrays
    none = replace(metrics, total_draft_tokens=0, total_accepted_draft_tokens=0)
    arrays = ChunkWriter(EngineCall(ASK, None), True, None).arrays(
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
        ChunkReader(request, False).chunk(arrays, final=False)


def test_padding_behind_the_length_is_not_read() -> None:
    """Shorter beams are padded with -1."""
    (arrays,), _ = sent(ASK, [EngineChunk(token_ids=(3, 4))])
    arrays["output_ids"] = np.array([[[3, 4, -1, -1]]], np.int32)
    assert ChunkReader(ASK, False).chunk(arrays, final=False).token_ids == (3, 4)


def test_a_score_of_the_end_token_is_not_taken_for_a_tokens() -> None:
    """More log-probs than tokens: the end token's own, which nobody shows."""
    request = replace(ASK, wants=Wants(log_probs=True))
    (arrays,), _ = sent(request, [scored(3, 4)])
    arrays["output_log_probs"] = np.array([[[-1, -2, -9]]], np.float32)
    assert ChunkReader(request, False).chunk(arrays, final=True).log_probs == (-1.0, -2.0)


# --- the end of a request on a wire that marks only the last response -----------------------


def test_every_sequence_ends_although_the_wire_marks_one_end() -> None:
    """The last response ends what is still open, each sequence once."""
    request = replace(ASK, num_return_sequences=3)
    responses = Responses(request, Dialect())
    arrays, _ = sent(request, [EngineChunk(token_ids=(5,), sequence_index=1)])
    chunks = [*responses.chunks(arrays[0], last=False), *responses.chunks(arrays[0], last=True)]
    assert [(c.sequence_index, c.final) for c in chunks[2:]] == [(0, True), (1, True), (2, True)]
    assert list(responses.rest()) == []


def test_an_empty_last_response_ends_a_single_sequence() -> None:
    """As an engine sends it that marks its end with nothing."""
    chunks = list(Responses(ASK, Dialect()).chunks({}, last=True))
    assert [(c.token_ids, c.final) for c in chunks] == [((), True)]


def test_metrics_survive_a_wire_that_does_not_mark_the_last_response() -> None:
    """They come with the last data, before anyone knows that it was the last."""
    request = replace(ASK, wants=ALL)
    metrics = EngineMetrics(total_draft_tokens=4)
    arrays, _ = sent(request, [replace(scored(5), metrics=metrics)])
    responses = Responses(request, Dialect())
    chunks = [*responses.chunks(arrays[0], last=False), *responses.rest()]
    assert chunks[-1].final and chunks[-1].metrics == metrics


# --- text -----------------------------------------------------------------------------------


def test_a_text_chunk_fills_the_outputs_it_can() -> None:
    """Types and ranks as declared; the ending's figures only on the last chunk."""
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
        metrics=EngineMetrics(total_draft_tokens=1),
    )
    chunk = TextChunk(
        text="só",
        sequence_index=1,
        log_probs=(-1.0, -2.0),
        cum_log_prob=-3.0,
        context_logits=np.ones((3, 4)),
        generation_logits=[np.ones(4), np.ones(4)],
        ending=ending,
    )
    arrays = text_arrays(chunk, request, row=1)
    for name, array in arrays.items():
        row = BLS.output_named[name]
        assert array.dtype == row.numpy_type and array.ndim == len(row.dims) + 1, name
        assert array.shape[0] == 1
    assert arrays["text_output"][0, 0].decode() == "só"
    assert arrays["finish_reason"][0, 0] == b"stop"
    assert arrays["stop_reason"][0, 0].decode() == "né"
    assert arrays["seed"].tolist() == [[2**63]]
    assert arrays["batch_index"].tolist() == arrays["sequence_index"].tolist() == [[1]]
    assert arrays["num_output_tokens"].tolist() == [[2]]
    open_chunk = text_arrays(replace(chunk, ending=None), request, row=None)
    assert not open_chunk.keys() & {"finish_reason", "num_input_tokens", "seed", "batch_index"}
