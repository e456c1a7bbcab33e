"""Responses of an engine as Triton's protocol delivers them, well formed or not."""

from __future__ import annotations

import collections
import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.helpers.random_cases import run_cases
from tests.helpers.wire_tensors import LAST_FORM
from trtllm_bls.engines.base import wire_id
from trtllm_bls.engines.triton_model import ResponseReader
from trtllm_bls.errors import EngineError
from trtllm_bls.types import EngineChunk, EngineRequest, Wants

ASK = EngineRequest(request_id="r", input_ids=(7, 8), max_tokens=4)


@dataclass
class Output:
    """One output of a response, whose parts need not fit together."""

    name: str
    datatype: str
    shape: list[int]
    raw: bytes


def token_outputs(*tokens: int, length: int | None = None, pad: int = 0) -> list[Output]:
    values = [*tokens, *[-1] * pad]
    number = np.array([len(tokens) if length is None else length], np.int32)
    return [
        Output("output_ids", "INT32", [1, 1, len(values)], np.array(values, np.int32).tobytes()),
        Output("sequence_length", "INT32", [1, 1], number.tobytes()),
    ]


def message(outputs: list[Output], last: bool = False, raws: int | None = None) -> Any:
    """As it arrives: through bytes. ``raws``: the contents of only so many outputs."""
    reply = service_pb2.ModelInferResponse(model_name="tensorrt_llm", id="r")
    reply.parameters["triton_final_response"].bool_param = last
    for output in outputs:
        reply.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
    reply.raw_output_contents.extend(output.raw for output in outputs[:raws])
    return service_pb2.ModelInferResponse.FromString(reply.SerializeToString())


def logits_output(datatype: str, raw: bytes) -> Output:
    return Output("generation_logits", datatype, [1, 1, 1, 2], raw)


@pytest.mark.parametrize(
    ("datatype", "raw"),
    [
        ("FP32", np.array([0.5, -2], np.float32).tobytes()),
        ("FP16", np.array([0.5, -2], np.float16).tobytes()),
        ("BF16", bytes([0x00, 0x3F, 0x00, 0xC0])),
    ],
)
def test_logits_are_read_in_whatever_type_the_engine_sends_them(datatype: str, raw: bytes) -> None:
    """BF16 too, which numpy does not know."""
    request = replace(ASK, wants=Wants(generation_logits=True))
    reply = message([*token_outputs(3), logits_output(datatype, raw)])
    (chunk,), last = ResponseReader(request, LAST_FORM).read(reply)
    assert chunk.generation_logits is not None and not last
    assert chunk.generation_logits.tolist() == [[0.5, -2.0]]


SECOND = token_outputs(3, 4)[1]
BROKEN = {
    "contents missing": (token_outputs(3, 4), 1),
    "contents beside their outputs": ([*token_outputs(3, 4), SECOND], 2),
    "unknown type": ([replace(token_outputs(3, 4)[0], datatype="INT3"), SECOND], None),
    "type of other values": ([replace(token_outputs(3, 4)[0], datatype="FP32"), SECOND], None),
    "shape of more values": ([replace(token_outputs(3, 4)[0], shape=[1, 1, 3]), SECOND], None),
    "shape of too many values": ([replace(token_outputs(1)[0], shape=[2**62, 4]), SECOND], None),
    "two dimensions": ([replace(token_outputs(3, 4)[0], shape=[1, 2]), SECOND], None),
    "four dimensions": ([replace(token_outputs(3, 4)[0], shape=[1, 1, 1, 2]), SECOND], None),
    "no dimension": ([replace(token_outputs(3)[0], shape=[]), SECOND], None),
    "half a value": ([replace(token_outputs(3, 4)[0], raw=b"abcdef"), SECOND], None),
    "texts that are none": ([replace(SECOND, datatype="BYTES"), token_outputs(3)[0]], None),
    "a number below 0": (token_outputs(3, 4, length=-1), None),
    "a number too large": (token_outputs(3, 4, length=3), None),
    "another output": ([token_outputs(3)[0], replace(SECOND, name="sequence_index")], None),
    "ids alone": (token_outputs(3)[:1], None),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("before", [0, 1])
def test_a_message_that_breaks_the_contract_is_the_engines_error(kind: str, before: int) -> None:
    """As the first response and as the last."""
    outputs, raws = BROKEN[kind]
    reader = ResponseReader(ASK, LAST_FORM)
    for _ in range(before):
        assert reader.read(message(token_outputs(5)))[0][0].token_ids == (5,)
    with pytest.raises(EngineError, match="the engine's"):
        reader.read(message(outputs, last=bool(before), raws=raws))


@pytest.mark.parametrize(
    "outputs",
    [token_outputs(3, 4, length=-1), token_outputs(3, 4, length=3), token_outputs(3)[:1]],
)
def test_values_are_checked_in_the_middle_of_a_stream(outputs: list[Output]) -> None:
    """Also where the headers are known from the first response."""
    reader = ResponseReader(ASK, LAST_FORM)
    for _ in range(2):
        reader.read(message(token_outputs(5)))
    with pytest.raises(EngineError, match="the engine's"):
        reader.read(message(outputs))


def random_outputs(chance: random.Random, turned: bool, headers: bool) -> list[Output]:
    """Of one response; mostly well formed, with broken ``headers`` only where they may be."""
    tokens = [chance.randrange(50) for _ in range(chance.choice([0, 1, 1, 1, 2, 3]))]
    lengths = [*[None] * 6, -1, 0, 1, len(tokens) + 1, 2**31 - 1]
    outputs = token_outputs(*tokens, length=chance.choice(lengths), pad=chance.choice([0, 0, 2]))
    if chance.random() < 0.1:
        outputs.append(Output("cum_log_probs", "FP32", [1, 1], b"abcd"))
    if chance.random() < 0.1:
        outputs = chance.sample(outputs, chance.randrange(2))
    if headers and chance.random() < 0.5:
        turned = not turned
        broken = chance.choice(outputs) if outputs else None
        if broken is not None and chance.random() < 0.8:
            broken.name = chance.choice([broken.name, "sequence_index", "output_ids", ""])
            broken.datatype = chance.choice(["INT32", "INT64", "FP32", "BYTES", "BOOL", "X"])
            broken.shape = [chance.choice([-1, 0, 1, 1, 2, 3]) for _ in range(chance.randrange(5))]
    return outputs[::-1] if turned else outputs


def test_what_is_read_in_a_hurry_is_what_is_read_with_care() -> None:
    """The same chunks, or the same kind of error, whatever an engine answers."""
    outcomes: collections.Counter[str] = collections.Counter()

    def case(chance: random.Random) -> None:
        request = replace(ASK, streaming=chance.random() < 0.9)
        hasty = ResponseReader(request, LAST_FORM)
        careful = ResponseReader(replace(request, wants=Wants(perf_metrics=True)), LAST_FORM)
        turned, count = chance.random() < 0.5, chance.randint(1, 5)
        for number in range(count):
            edge = number in (0, count - 1)
            outputs = random_outputs(chance, turned, headers=edge)
            raws = chance.randrange(3) if chance.random() < 0.05 else None
            if number == 0:
                turned = bool(outputs) and outputs[0].name == "sequence_length"
            reply = message(outputs, last=number == count - 1, raws=raws)
            found: list[Any] = []
            packed = service_pb2.ModelStreamInferResponse(infer_response=reply).SerializeToString()
            if (ids := hasty.next_id(packed)) is not None:
                outcomes["repeated"] += 1
                found.append(([EngineChunk(token_ids=ids)], False))
            for reader in (hasty, careful)[len(found) :]:
                try:
                    found.append(reader.read(reply, packed))
                except EngineError:
                    found.append(None)
            assert found[0] == found[1], outputs
            outcomes["error" if found[0] is None else "chunks"] += 1
            if found[0] is None:
                break

    run_cases(case, 4000)
    assert min(outcomes["error"], outcomes["chunks"]) > 1000
    assert outcomes["repeated"] > 50


def test_only_the_id_of_a_repeated_message_may_differ() -> None:
    """Any other byte, and a number below 0, has the message read with care."""
    reader = ResponseReader(ASK, LAST_FORM)
    five, six, wrong = (message(token_outputs(id)).SerializeToString() for id in (5, 6, -6))
    assert reader.next_id(five) is None
    reader.read(service_pb2.ModelInferResponse.FromString(five), five)
    assert (reader.next_id(six), reader.next_id(wrong)) == ((6,), None)
    (place,) = (n for n, (a, b) in enumerate(zip(five, six, strict=True)) if a != b)
    for n in set(range(len(five))) - set(range(place, place + 4)):
        other = bytearray(five)
        other[n] ^= 1
        assert reader.next_id(bytes(other)) is None
    assert reader.next_id(b"") is reader.next_id(five + b"!") is None


def test_ids_on_the_wire_begin_with_a_number_of_their_own() -> None:
    """Release 0.9 of TensorRT-LLM takes nothing but the number; what follows is for the logs."""
    request = EngineRequest(request_id="7-3/ab", input_ids=(1,), max_tokens=1)
    ids = [wire_id(request) for _ in range(100)]
    numbers = {int(id.partition("/")[0]) for id in ids}
    assert len(numbers) == 100 and max(numbers) < 2**63
    assert {id.partition("/")[2] for id in ids} == {"7-3/ab"}
