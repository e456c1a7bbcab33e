"""Messages to arrays and back: what one side packs, the other unpacks."""

from __future__ import annotations

from array import array as packed_array
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import InferResult, service_pb2

from trtllm_bls.contract import BLS, ENGINE
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.messages import (
    Draft,
    EngineRequest,
    Sampling,
    TextRequest,
    Wants,
)
from trtllm_bls.wire.engine_client import DeployedModel, request_inputs
from trtllm_bls.wire.engine_server import engine_requests, is_stop
from trtllm_bls.wire.fields import read_rows
from trtllm_bls.wire.infer_message import infer_message
from trtllm_bls.wire.text import text_requests
from trtllm_bls.wire.words import pack_words

VOCAB = 50
LAST_FORM = DeployedModel()
ASK = EngineRequest(request_id="r", input_ids=(7, 8), max_tokens=4)
quick = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def declaring(**inputs: str | None) -> DeployedModel:
    """A model of the last form that declares some inputs in another type, or not at all."""
    declared = {**LAST_FORM.inputs, **inputs}
    return DeployedModel({name: kind for name, kind in declared.items() if kind is not None})


def sent(request: EngineRequest, model: DeployedModel = LAST_FORM) -> dict[str, Any]:
    """The inputs of a request as arrays by name; each in the type that the model declares."""
    inputs = request_inputs(request, model, VOCAB)
    assert all(model.inputs[name] == datatype for name, datatype, _ in inputs)
    return {name: array for name, _, array in inputs}


def test_a_packed_prompt_is_sent_as_it_is() -> None:
    """Its bytes are those of the same ids in a tuple, and they are not copied."""
    ids = packed_array("i", range(1000))
    packed = sent(EngineRequest(request_id="r", input_ids=ids, max_tokens=1))
    plain = sent(EngineRequest(request_id="r", input_ids=tuple(ids), max_tokens=1))
    assert packed.keys() == plain.keys()
    assert all(np.array_equal(packed[name], plain[name]) for name in plain)
    assert packed["input_ids"].dtype == np.int32
    assert np.shares_memory(packed["input_ids"], np.frombuffer(ids, dtype=np.int32))


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
    (call,) = engine_requests(inputs, "r", None)
    return call.request


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
        ("repetition_penalty", 0.0),
        ("frequency_penalty", float("inf")),
        ("top_k", -1),
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
        None,
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


@pytest.mark.parametrize("length", [1, 8, 10])
def test_a_bias_that_does_not_fit_the_vocabulary_is_refused(length: int) -> None:
    """With both lengths; an empty one is as good as absent."""
    inputs = {"input_ids": np.array([[7]], np.int32), "request_output_len": column(4)}
    biased = {**inputs, "embedding_bias": np.ones((1, length), np.float32)}
    with pytest.raises(InvalidRequest, match=f"^embedding_bias: holds {length} .* has 9 tokens"):
        engine_requests(biased, "r", 9)
    (call,) = engine_requests({**inputs, "embedding_bias": np.zeros((1, 0), np.float32)}, "r", 9)
    assert call.request.embedding_bias == ()
    fitting = {**inputs, "embedding_bias": np.ones((1, 9), np.float32)}
    (call,) = engine_requests(fitting, "r", 9)
    assert len(call.request.embedding_bias) == 9


@pytest.mark.parametrize("missing", ["input_ids", "request_output_len"])
def test_a_missing_input_is_named_as_the_wire_names_it(missing: str) -> None:
    """Not by our own field name."""
    inputs = {"input_ids": np.array([[7]], np.int32), "request_output_len": column(4)}
    del inputs[missing]
    with pytest.raises(InvalidRequest, match=f"^{missing}: is missing"):
        engine_requests(inputs, "r", None)


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
    """Whatever is asked, the engine's side reads the very same request."""
    arrays = sent(request)
    for name, array in arrays.items():
        tensor = ENGINE.input_named[name]
        assert array.dtype == tensor.numpy_type and array.shape[0] == 1
        if tensor.scalar and reshaped:
            arrays[name] = array.reshape(1)
    (call,) = engine_requests(arrays, "r", None)
    assert (call.request, call.exclude_input) == (request, True)


def test_draft_logits_and_extras_come_back_too() -> None:
    """Arrays are passed on; single values among the extras stay what they were."""
    given = {
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
    arrays = sent(engine(**given))
    for name, array in given.items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].tolist() == array.tolist(), name


def test_extras_of_a_text_request_reach_the_engine() -> None:
    """A guide given to the text model arrives at tensorrt_llm in its own type and shape."""
    request = text(guided_decoding_guide_type=words("json"), lora_task_id=np.array([7], np.uint64))
    arrays = sent(replace(ASK, extras=request.extras))
    assert arrays["guided_decoding_guide_type"].tolist() == [[b"json"]]
    assert arrays["lora_task_id"].dtype == np.uint64
    assert arrays["lora_task_id"].tolist() == [[7]]


def test_a_prompt_tables_id_is_one_number() -> None:
    """Of 64 bits; it is spread over the tokens once there are any."""
    assert text(prompt_table_extra_id=column(2**63, dtype=np.uint64)).prompt_table_extra_id == 2**63
    assert text().prompt_table_extra_id is None


def test_an_option_the_engine_has_no_input_for_is_refused() -> None:
    """Dropping it would change the answer in silence."""
    asked = replace(ASK, sampling=Sampling(top_p_min=0.5))
    with pytest.raises(InvalidRequest, match="runtime_top_p_min: this engine version"):
        sent(asked, declaring(runtime_top_p_min=None))
    with pytest.raises(InvalidRequest, match="draft_input_ids"):
        sent(replace(ASK, draft=Draft(token_ids=(1,))), declaring(draft_input_ids=None))


def test_the_engines_own_spelling_is_used() -> None:
    """Older engines know random_seed and min_length alone."""
    older = declaring(seed=None, min_tokens=None, random_seed="UINT64", min_length="INT32")
    asked = replace(ASK, sampling=Sampling(seed=5, min_tokens=2))
    assert {"random_seed", "min_length"} <= sent(asked, older).keys()
    assert {"seed", "min_tokens"} <= sent(asked).keys()
    assert "exclude_input_in_output" not in sent(ASK, declaring(exclude_input_in_output=None))


@pytest.mark.parametrize("datatype", ["FP32", "FP16", "BF16"])
def test_draft_logits_are_sent_in_the_type_that_the_engine_declares(datatype: str) -> None:
    """Triton refuses any other; what BF16 and FP16 hold exactly arrives unchanged."""
    logits = np.array([[0.5, -2.0], [1.25, 96.0]], np.float32)
    drafted = replace(ASK, draft=Draft(token_ids=(3, 4), logits=logits))
    inputs = request_inputs(drafted, declaring(draft_logits=datatype), VOCAB)
    message = infer_message("tensorrt_llm", "r", inputs)
    names = [header.name for header in message.inputs]
    place = names.index("draft_logits")
    header, raw = message.inputs[place], message.raw_input_contents[place]
    assert (header.datatype, [*header.shape]) == (datatype, [1, 2, 2])
    # The published client's own reader of such a tensor.
    reply = service_pb2.ModelInferResponse(raw_output_contents=[raw])
    reply.outputs.add(name="echo", datatype=datatype, shape=[1, 2, 2])
    received = InferResult(reply).as_numpy("echo")
    assert received is not None and received.astype(np.float32).tolist() == [logits.tolist()]


def test_bf16_is_rounded_as_torch_rounds_it() -> None:
    """To the nearest, to even where there are two; infinities stay what they are."""
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(1).integers(0, 2**32, 20_000, dtype=np.uint32)
    halves = np.arange(0x3F808000, 0x3F900000, 0x8000, dtype=np.uint32)  # just between two
    floats = np.concatenate([bits, halves]).view(np.float32)
    floats = np.append(floats[np.isfinite(floats)], [np.inf, -np.inf, 0.0, -0.0]).astype(np.float32)
    (raw,) = infer_message("m", "r", [("x", "BF16", floats)]).raw_input_contents
    expected = torch.from_numpy(floats).to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    assert raw == expected


def test_empty_drafts_and_biases_count_as_none() -> None:
    """Zero-length tensors are how an ensemble says "nothing"."""
    request = engine(
        draft_input_ids=np.zeros((1, 0), np.int32),
        embedding_bias=np.zeros((1, 0), np.float32),
        stop_words_list=np.zeros((1, 2, 0), np.int32),
    )
    assert (request.draft, request.embedding_bias, request.stop_sequences) == (None, (), ())
