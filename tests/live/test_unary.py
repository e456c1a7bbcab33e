"""``serve --decoupled false``: every model answers unary requests, as TensorRT-LLM's models did.

The calls are those of its clients: ``end_to_end_test.py``, the unary
``inflight_batcher_llm_client.py`` and ``e2e_grpc_speculative_decoding_client.py``.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.helpers.server_settings import DEMO, free_ports
from tests.helpers.watched import watched
from trtllm_bls.configure.engine_dir import models_for
from trtllm_bls.operate.serve import announcement
from trtllm_bls.operate.tritonserver import TritonServer
from trtllm_bls.settings.cpp_backend import Version
from trtllm_bls.wire.contract import ENSEMBLE

pytestmark = pytest.mark.slow

PROMPT = "The answer of the engine is"
TOKENS = 12


@pytest.fixture(scope="module")
def unary() -> Iterator[TritonServer]:
    """Several processes of the orchestrator, none of which streams."""
    models = {"model": DEMO / "target", "draft_model": DEMO / "draft"}
    with watched(free_ports(**models, decoupled=False, bls_instances=2), "unary") as running:
        yield running


def test_the_announced_request_is_answered_in_one_piece(unary: TritonServer) -> None:
    curl = announcement(unary, health_port=0).splitlines()[-1]
    assert "/generate " in curl
    told = subprocess.run(curl, shell=True, capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(told.stdout)["text_output"].strip()


@pytest.fixture(params=["grpc", "http"])
def client(unary: TritonServer, request: pytest.FixtureRequest) -> Iterator[Any]:
    module = tritonclient.grpc if request.param == "grpc" else tritonclient.http
    url = unary.grpc_url if request.param == "grpc" else unary.http_url.removeprefix("http://")
    with module.InferenceServerClient(url) as made:
        made.module = module
        yield made


def infer(client: Any, model: str, **inputs: Any) -> Any:
    """One unary request; the values have their batch dimension."""
    tensors = []
    for name, value in inputs.items():
        array = np.array(value)
        if array.dtype.kind == "U":
            array = array.astype(object)
        kind = np_to_triton_dtype(array.dtype)
        tensors.append(client.module.InferInput(name, array.shape, kind))
        tensors[-1].set_data_from_numpy(array)
    return client.infer(model, tensors, request_id="1")


@pytest.mark.parametrize("model", ["tensorrt_llm_bls", "ensemble"])
def test_every_metric_that_is_asked_for_comes(client: Any, model: str) -> None:
    """``end_to_end_grpc_client.py --return-perf-metrics`` reads each of them on each response."""
    inputs = {"text_input": [[PROMPT]], "max_tokens": ints(3), "return_perf_metrics": [[True]]}
    found = infer(client, model, **inputs)
    before, since = (
        models_for(Version(0, minor), "FP32")[ENSEMBLE.name].output_named for minor in (18, 19)
    )
    names = since.keys() - before.keys()
    told = {name: found.as_numpy(name)[0][0] for name in names}
    assert len(told) == 10
    assert told["last_token_time_ns"] >= told["arrival_time_ns"] > 0
    assert told["kv_cache_reused_blocks"] == told["kv_cache_alloc_new_blocks"] == 0  # not exposed
    assert told["kv_cache_alloc_total_blocks"] > 0


def ints(*values: int) -> Any:
    return np.array([values], dtype=np.int32)


def test_the_steps_by_hand_the_ensemble_and_the_orchestrator_agree(client: Any) -> None:
    """``end_to_end_test.py --test-bls``: each begins with the prompt."""
    no_words = {"BAD_WORDS_DICT": [[""]], "STOP_WORDS_DICT": [[""]]}
    asked = ints(TOKENS)
    made = infer(client, "preprocessing", QUERY=[[PROMPT]], REQUEST_OUTPUT_LEN=asked, **no_words)
    assert made.as_numpy("REQUEST_DECODER_INPUT_LEN").tolist() == [[1]]
    answer = infer(
        client,
        "tensorrt_llm",
        input_ids=made.as_numpy("INPUT_ID"),
        decoder_input_ids=made.as_numpy("DECODER_INPUT_ID"),
        input_lengths=made.as_numpy("REQUEST_INPUT_LEN"),
        request_output_len=made.as_numpy("REQUEST_OUTPUT_LEN"),
        end_id=made.as_numpy("OUT_END_ID"),
        pad_id=made.as_numpy("OUT_PAD_ID"),
    )
    lengths = answer.as_numpy("sequence_length")
    texts = [
        infer(
            client,
            "postprocessing",
            TOKENS_BATCH=answer.as_numpy("output_ids"),
            SEQUENCE_LENGTH=lengths,
        ).as_numpy("OUTPUT")
    ]
    for model in ("ensemble", "tensorrt_llm_bls"):
        inputs = {"text_input": [[PROMPT]], "max_tokens": asked}
        found = infer(client, model, **inputs, bad_words=[[""]], stop_words=[[""]])
        texts.append(found.as_numpy("text_output"))
    assert texts[0] == texts[1] == texts[2]
    assert texts[0][0].decode().startswith(PROMPT)


@pytest.mark.parametrize("repeated", [True, False])
def test_a_request_for_tokens_has_one_answer(client: Any, repeated: bool) -> None:
    """``inflight_batcher_llm_client.py`` without ``--streaming``."""
    excluded = {} if repeated else {"exclude_input_in_output": [[True]]}
    ids = ints(40, 41, 42)
    inputs = {"input_ids": ids, "input_lengths": ints(3), "request_output_len": ints(TOKENS)}
    found = infer(client, "tensorrt_llm", **inputs, **excluded, streaming=[[False]])
    output = found.as_numpy("output_ids")[0, 0].tolist()
    assert len(output) == TOKENS + 3 * repeated
    assert (output[:3] == ids[0].tolist()) == repeated
    with pytest.raises(InferenceServerException, match="streaming: true: this deployment"):
        infer(client, "tensorrt_llm", **inputs, streaming=[[True]])


def test_a_loop_of_drafts_in_the_client_says_what_the_target_says(client: Any) -> None:
    """``e2e_grpc_speculative_decoding_client.py``: the draft proposes, the target verifies."""
    made = infer(client, "preprocessing", QUERY=[[PROMPT]], REQUEST_OUTPUT_LEN=ints(TOKENS))
    prompt = made.as_numpy("INPUT_ID")[0].tolist()
    words = {
        "bad_words_list": made.as_numpy("BAD_WORDS_IDS"),
        "stop_words_list": made.as_numpy("STOP_WORDS_IDS"),
        "beam_width": ints(1),
        "temperature": np.array([[1]], dtype=np.float32),
        "end_id": made.as_numpy("OUT_END_ID"),
        "pad_id": made.as_numpy("OUT_PAD_ID"),
    }

    def output(model: str, ids: list[int], tokens: int, **more: Any) -> list[int]:
        lengths = {"input_lengths": ints(len(ids)), "request_output_len": ints(tokens)}
        found = infer(client, model, input_ids=ints(*ids), **lengths, **words, **more)
        length = found.as_numpy("sequence_length")[0, 0]
        told: list[int] = found.as_numpy("output_ids")[0, 0, :length].tolist()
        return told

    ids, rounds = prompt, 0
    while len(ids) < len(prompt) + TOKENS:
        drafts = min(5, len(prompt) + TOKENS - len(ids) - 1)
        before, more = ids, {}
        if drafts > 0:
            draft = output("tensorrt_llm_draft", ids, drafts)[len(ids) :]
            more = {"draft_input_ids": ints(*draft)} if draft else {}
            drafts = len(draft)
        ids = output("tensorrt_llm", ids, drafts + 1, **more)
        rounds += 1
        if ids == before:
            break
    assert ids == output("tensorrt_llm", prompt, TOKENS)
    assert rounds < TOKENS
