"""What TrtllmService is sent for a request, and what it cannot be asked."""

from __future__ import annotations

import re
from array import array
from dataclasses import fields, replace
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from tests.helpers.scripted_services import (
    ASK,
    EOS,
    answered,
)
from trtllm_bls.engines.trtllm_service import service_messages as messages
from trtllm_bls.engines.trtllm_service.service_engine import service_request
from trtllm_bls.errors import (
    InvalidRequest,
    Unsupported,
)
from trtllm_bls.types import (
    Adapter,
    CacheSalt,
    Draft,
    EngineCapacity,
    EngineRequest,
    Guide,
    PromptIds,
    Sampling,
    Wants,
)

NO_LIMITS = EngineCapacity()


def sent(request: EngineRequest) -> Any:
    """The message that becomes of a request."""
    packed, _ = service_request(request, "id", EOS, NO_LIMITS)
    return messages.GenerateRequest.FromString(packed)


# --- what is sent ---------------------------------------------------------------------------


def test_greedy_is_said_aloud() -> None:
    """A service request that says nothing samples; temperature alone stays greedy, as ever."""
    for sampling in (Sampling(), Sampling(temperature=1.5), Sampling(top_p=0.0), Sampling(top_k=0)):
        config = sent(replace(ASK, sampling=sampling)).sampling_config
        assert (config.top_k, config.HasField("top_p")) == (1, False)


def test_sampling_fields_keep_their_names_and_neutral_ones_stay_out() -> None:
    drawn = Sampling(top_p=0.9, top_k=0, seed=2**64 - 1, temperature=0.5, top_p_reset_id=7)
    config = sent(replace(ASK, sampling=drawn)).sampling_config
    assert not config.HasField("top_k")
    assert (config.seed, config.temperature, config.top_p_reset_ids) == (2**64 - 1, 0.5, 7)
    assert round(config.top_p, 6) == 0.9
    neutral = Sampling(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    likeliest = sent(replace(ASK, sampling=Sampling(top_k=5, top_p=0.0))).sampling_config
    assert (likeliest.top_k, likeliest.HasField("top_p")) == (5, False)
    names = {
        field.name for field, _ in sent(replace(ASK, sampling=neutral)).sampling_config.ListFields()
    }
    assert names == {"beam_width", "num_return_sequences", "top_k"}


@pytest.mark.parametrize(
    ("request_", "ignore_eos", "stop_ids", "include"),
    [
        (ASK, False, [], False),
        (replace(ASK, end_id=-1), True, [], False),
        (replace(ASK, end_id=None), True, [], False),
        (replace(ASK, end_id=13), True, [], False),
        (replace(ASK, end_id=13, sampling=Sampling(min_tokens=1)), True, [], False),
        (replace(ASK, stop_sequences=((13,),)), False, [13], True),
        (replace(ASK, stop_sequences=((13,), (14, 15))), False, [13], True),
        (replace(ASK, end_id=12, stop_sequences=((13,),)), True, [], False),
        (replace(ASK, stop_sequences=((13,),), sampling=Sampling(min_tokens=4)), False, [], False),
        (replace(ASK, stop_sequences=((13,),), sampling=Sampling(min_tokens=1)), False, [13], True),
    ],
)
def test_ends_are_sent_as_far_as_the_service_knows_them(
    request_: EngineRequest, ignore_eos: bool, stop_ids: list[int], include: bool
) -> None:
    """Its own end id; stops of one id, which stay in the answer; the rest is watched for here."""
    message = sent(request_)
    assert message.ignore_eos is ignore_eos
    assert list(message.stop_token_ids) == stop_ids
    assert message.include_stop_token_in_output is include


def test_guides_and_adapters_are_sent() -> None:
    def guided(kind: str, text: str | None = None) -> Any:
        return sent(replace(ASK, guide=Guide(kind, text)))

    def adapted(task_id: int) -> Any:
        return sent(replace(ASK, adapter=Adapter(task_id=task_id)))

    schema = guided("json_schema", "{}")
    assert (schema.guided_decoding.guide_type, schema.guided_decoding.guide) == (2, "{}")
    plain = guided("json").guided_decoding
    assert plain.guide_type == 1 and plain.guide  # an empty guide would be ignored
    assert adapted(7).lora_config.task_id == 7
    assert not adapted(0).HasField("lora_config")
    with pytest.raises(InvalidRequest, match="guided_decoding_guide_type: 'xml' is unknown"):
        guided("xml", "<a>")
    with pytest.raises(InvalidRequest, match="guided_decoding_guide: is missing"):
        guided("regex")


@pytest.mark.parametrize("ids", [(3, 10**6, 4), array("i", [3, 10**6, 4])])
def test_an_id_that_is_no_token_is_refused(ids: PromptIds) -> None:
    """Also in the array of a long prompt."""
    with pytest.raises(InvalidRequest, match=r"^input_ids: token 1000000 is not in 0\.\.999$"):
        service_request(replace(ASK, input_ids=ids), "id", EOS, EngineCapacity(vocab_size=1000))


def test_the_callers_trace_goes_along() -> None:
    """As metadata of the call, where tracers of gRPC look: the messages have no field for it."""
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    _, service = answered(replace(ASK, traceparent=trace))
    assert service.traces == [trace]
    _, service = answered()
    assert service.traces == [None]


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("draft_input_ids", {"draft": Draft(token_ids=(1,))}),
        ("embedding_bias", {"embedding_bias": ((1, 2.0),)}),
        ("return_context_logits", {"wants": Wants(context_logits=True)}),
        ("return_generation_logits", {"wants": Wants(generation_logits=True)}),
        ("return_perf_metrics", {"wants": Wants(perf_metrics=True)}),
        ("bad_words_list", {"bad_sequences": ((1, 2),)}),
        ("beam_width", {"sampling": Sampling(beam_width=2)}),
        ("min_tokens", {"end_id": 13, "sampling": Sampling(min_tokens=3)}),
        ("lora_weights", {"adapter": Adapter(weights=np.zeros((1, 1)))}),
        ("cache_salt", {"cache_salt": CacheSalt("a")}),
    ],
)
def test_what_the_service_cannot_honour_is_refused_by_name(
    field: str, more: dict[str, Any]
) -> None:
    with pytest.raises(Unsupported, match=f"^{field}: "):
        sent(replace(ASK, **more))


# One value of each field that is not what an absent one means.
SAMPLING: dict[str, Any] = {
    "top_k": 5,
    "top_p": 0.5,
    "top_p_min": 0.1,
    "min_p": 0.2,
    "no_repeat_ngram_size": 3,
    "top_p_reset_id": 7,
    "top_p_decay": 0.9,
    "temperature": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "min_tokens": 3,
    "seed": 9,
    "beam_width": 2,
    "length_penalty": 0.5,
    "early_stopping": True,
    "beam_search_diversity_rate": 0.5,
}
REQUEST: dict[str, Any] = {
    "input_ids": (1,),
    "max_tokens": 3,
    "streaming": False,
    "num_return_sequences": 2,
    "end_id": 13,
    "stop_sequences": ((7,),),
    "bad_sequences": ((7,),),
    "embedding_bias": ((1, 1.0),),
    "draft": Draft(token_ids=(1,)),
    "wants": Wants(log_probs=True),
    "guide": Guide("json"),
    "adapter": Adapter(task_id=7),
    "extras": {"lookahead_window_size": np.array([7])},
}
NOT_SENT = {
    "request_id",  # made unique
    "pad_id",  # answers are not padded
    "speculation",  # for engines that verify drafts
    "tenant",  # whose answers may be drafted from
    "cache_salt",  # for engines that keep KV cache blocks apart
    "traceparent",  # in the call's metadata
    "sampling",  # field by field
}


def test_no_field_of_a_request_is_dropped_in_silence() -> None:
    """Each changes what is sent, or how the answer is read, or is refused by its name."""
    assert SAMPLING.keys() == {field.name for field in fields(Sampling)}
    assert REQUEST.keys() | NOT_SENT == {field.name for field in fields(EngineRequest)}
    drawn = replace(ASK, sampling=Sampling(top_p=0.9))
    changed = {name: replace(drawn, **{name: value}) for name, value in REQUEST.items()} | {
        name: replace(drawn, sampling=replace(drawn.sampling, **{name: value}))
        for name, value in SAMPLING.items()
    }
    asked = service_request(drawn, "id", EOS, NO_LIMITS)
    names = {"draft": "draft_input_ids", "extras": "lookahead_window_size"}
    for name, request in changed.items():
        try:
            assert service_request(request, "id", EOS, NO_LIMITS) != asked, name
        except Unsupported as error:
            assert error.field == names.get(name, name)


def test_the_descriptor_is_that_of_the_proto() -> None:
    """After a change of the .proto: `make generate`. Its digest tells; its fields are looked at."""
    proto = messages.DESCRIPTOR.with_suffix(".proto")
    digest = proto.with_suffix(".sha256").read_text().split()[0]
    assert digest == sha256(proto.read_bytes()).hexdigest(), "run make generate"
    text = re.sub(r"//.*", "", proto.read_text())
    written = sorted(re.findall(r"(\w+) = (\d+);", text))
    compiled: list[tuple[str, str]] = []
    for made in messages.MESSAGES.values():
        descriptor = made.DESCRIPTOR
        compiled += [(field.name, str(field.number)) for field in descriptor.fields]
        values = [value for kind in descriptor.enum_types for value in kind.values]
        compiled += [(value.name, str(value.number)) for value in values]
    assert sorted(compiled) == written


def test_the_proto_has_the_fields_that_are_used() -> None:
    """A field that is present is told from one that is not, and lists are packed."""
    message = messages.GenerateRequest()
    assert not message.sampling_config.HasField("top_k")
    message.sampling_config.top_k = 0
    assert message.sampling_config.HasField("top_k")
    message.tokenized.input_token_ids.extend([1, 2, 3])
    assert message.tokenized.SerializeToString() == b"\x12\x03\x01\x02\x03"
    complete = messages.GenerateResponse()
    complete.complete.matched_token_id = 0
    assert complete.WhichOneof("response") == "complete"
    assert complete.complete.WhichOneof("matched_stop") == "matched_token_id"


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 5000])
@pytest.mark.parametrize("kind", [tuple, partial(array, "i")])
def test_the_ids_of_a_long_prompt_are_those_of_the_request(count: int, kind: Any) -> None:
    """Of every length that protobuf gives a number."""
    sizes = [0, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152, 2**28, 2**31 - 1]
    ids = [sizes[n % len(sizes)] for n in range(count)]
    message = messages.GenerateRequest(request_id="r", max_tokens=7)
    wanted = messages.GenerateRequest(request_id="r", max_tokens=7)
    wanted.tokenized.input_token_ids.extend(ids)
    packed = messages.packed_request(message, kind(ids))
    assert messages.GenerateRequest.FromString(packed) == wanted
