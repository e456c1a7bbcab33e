"""An engine's request, written as tensors and read again."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import InferResult, service_pb2

from tests.helpers.packages import import_or_skip
from tests.helpers.wire_tensors import (
    ASK,
    LAST_FORM,
    VOCAB,
    column,
    declaring,
    engine,
    sent,
    text,
    words,
)
from trtllm_bls.engines.triton_model import request_inputs
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.triton.tensors import engine_requests
from trtllm_bls.types import (
    Adapter,
    CacheSalt,
    Draft,
    EngineRequest,
    Guide,
    Sampling,
    Wants,
)
from trtllm_bls.wire.contract import ENGINE
from trtllm_bls.wire.kserve import packed_infer_message

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
names = st.none() | st.text(min_size=1, max_size=4)
adapters = st.builds(
    Adapter, name=st.text(min_size=1, max_size=4), task_id=st.none() | st.just(2**63), path=names
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
    guide=st.none() | st.builds(Guide, st.sampled_from(("json", "regex")), names),
    adapter=st.none() | adapters,
    cache_salt=st.none() | st.builds(CacheSalt, st.text(min_size=1, max_size=4)),
)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(requests, st.booleans())
def test_a_request_comes_back_as_it_was_sent(request: EngineRequest, reshaped: bool) -> None:
    """Whatever is asked, the engine's side reads the very same request."""
    arrays = sent(request)
    for name, array in arrays.items():
        tensor = ENGINE.input_named[name]
        assert array.dtype == tensor.numpy_type and array.shape[0] == 1
        if tensor.scalar and reshaped:
            arrays[name] = array.reshape(1)
    assert engine_requests(arrays, "r", None, exclude_input=False) == [(request, True)]


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
    assert request.guide == Guide("json") and request.adapter == Adapter(task_id=7)
    arrays = sent(replace(ASK, guide=request.guide, adapter=request.adapter))
    assert arrays["guided_decoding_guide_type"].tolist() == [[b"json"]]
    assert arrays["lora_task_id"].dtype == np.uint64
    assert arrays["lora_task_id"].tolist() == [[7]]


def test_a_guide_without_its_kind_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"^guided_decoding_guide_type: is missing"):
        text(guided_decoding_guide=words("a+"))


def test_a_salt_that_may_be_ignored_is_still_so_behind_the_wire() -> None:
    """The engine's side reads the same salt; a draft model drafts without it all the same."""
    salts = [CacheSalt("a"), CacheSalt("a", required=False), CacheSalt("a").optional()]
    assert [CacheSalt.parsed(str(salt)) for salt in salts] == salts
    assert str(salts[1]) == "key:a"


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
    packed = packed_infer_message("tensorrt_llm", "r", inputs)
    message = service_pb2.ModelInferRequest.FromString(packed)
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
    torch = import_or_skip("torch")
    bits = np.random.default_rng(1).integers(0, 2**32, 20_000, dtype=np.uint32)
    halves = np.arange(0x3F808000, 0x3F900000, 0x8000, dtype=np.uint32)  # just between two
    floats = np.concatenate([bits, halves]).view(np.float32)
    floats = np.append(floats[np.isfinite(floats)], [np.inf, -np.inf, 0.0, -0.0]).astype(np.float32)
    packed = packed_infer_message("m", "r", [("x", "BF16", floats)])
    (raw,) = service_pb2.ModelInferRequest.FromString(packed).raw_input_contents
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


@pytest.mark.parametrize(
    ("told", "missing"),
    [
        ({}, "guided_decoding_backend and xgrammar_tokenizer_info_path"),
        ({"guided_decoding_backend": "xgrammar"}, "parameter xgrammar_tokenizer_info_path"),
    ],
)
def test_a_guide_that_the_backend_would_ignore_is_refused(
    told: dict[str, str], missing: str
) -> None:
    """The C++ backend says nothing where one of its two parameters is missing."""
    model = replace(LAST_FORM, parameters={"gpt_model_type": "inflight_batching", **told})
    asked = replace(ASK, guide=Guide("regex", "a"))
    with pytest.raises(InvalidRequest, match=missing):
        sent(asked, model)
    both = {"guided_decoding_backend": "xgrammar", "xgrammar_tokenizer_info_path": "/info.json"}
    sent(asked, replace(LAST_FORM, parameters={**model.parameters, **both}))
