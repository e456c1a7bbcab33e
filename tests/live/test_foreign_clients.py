"""Clients that others publish, against the real server: what they send, and how they read it.

The tensors and the reading are those of LlamaIndex's package for Triton
(``llama-index-llms-nvidia-triton`` 0.6.0); TensorRT-LLM's own end-to-end client reads alike. The
package itself needs some fifty others, so it is installed, into a virtual environment of its own,
only where ``TRTLLM_BLS_INSTALL_CLIENTS`` is set.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google.protobuf.json_format
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.grpc.service_pb2 import ModelInferResponse
from tritonclient.utils import np_to_triton_dtype

from tests.helpers.server_requests import ask
from tests.helpers.waiting import STREAM_S

if TYPE_CHECKING:
    from trtllm_bls.operate.tritonserver import TritonServer

PROMPT = "Once upon a time"
TOKENS = 12
MODELS = ("tensorrt_llm_bls", "ensemble")
DRIVER = f"""
import json, sys
from llama_index.llms.nvidia_triton import NvidiaTriton
llm = NvidiaTriton(server_url=sys.argv[1], model_name=sys.argv[2], tokens={TOKENS})
whole = llm.complete({PROMPT!r}).text
print(json.dumps([whole, [part.delta for part in llm.stream_complete({PROMPT!r})]]))
"""


def sent_by_llama_index(prompt: str, tokens: int) -> dict[str, Any]:
    """Its ten inputs, at its defaults."""
    return {
        "text_input": np.array([[prompt]], object),
        "max_tokens": np.array([[tokens]], np.int32),
        "top_k": np.array([[1]], np.int32),
        "top_p": np.array([[0]], np.float32),
        "temperature": np.array([[1]], np.float32),
        "length_penalty": np.array([[1]], np.float32),
        "repetition_penalty": np.array([[1]], np.float32),
        "random_seed": np.array([[0]], np.uint64),
        "beam_width": np.array([[1]], np.int32),
        "stream": np.array([[True]]),
    }


# What it sends to the text model when it has enough: the tensors of an engine's stop request.
STOP = {
    "input_ids": np.zeros((1, 1), np.int32),
    "input_lengths": np.zeros((1, 1), np.int32),
    "request_output_len": np.zeros((1, 1), np.uint32),
    "stop": np.array([[True]]),
}


def tensors(arrays: dict[str, Any]) -> list[Any]:
    found = []
    for name, array in arrays.items():
        tensor = grpcclient.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        found.append(tensor)
    return found


def read_by_llama_index(result: Any) -> Iterator[str | None]:
    """A response's text, by way of JSON, and ``None`` after the last."""
    response = result.get_response(as_json=True)
    if "outputs" in response:
        message = google.protobuf.json_format.Parse(json.dumps(response), ModelInferResponse())
        text = grpcclient.InferResult(message).as_numpy("text_output")
        yield "".join([part.decode() for part in text])
    if response["parameters"]["triton_final_response"]["bool_param"]:
        yield None


def streamed(url: str, model: str) -> list[str]:
    """What it makes of one request; it leaves after one response fewer than ``TOKENS``."""
    came: queue.Queue[Any] = queue.Queue()

    def callback(result: Any, error: Any) -> None:
        try:
            if error:
                raise error
            for part in read_by_llama_index(result):
                came.put(part)
        except Exception as failure:  # in its own code this thread dies, and the reader waits on
            came.put(failure)

    client = grpcclient.InferenceServerClient(url)
    client.start_stream(callback, stream_timeout=STREAM_S)
    outputs = [grpcclient.InferRequestedOutput("text_output")]
    inputs = tensors(sent_by_llama_index(PROMPT, TOKENS))
    client.async_stream_infer(model, inputs, outputs=outputs, request_id="4711")
    parts: list[str] = []
    while (part := came.get(timeout=60)) is not None and len(parts) < TOKENS - 1:
        if isinstance(part, Exception):
            raise part
        parts.append(part)
    client.async_stream_infer(
        model, tensors(STOP), request_id="4711", parameters={"Streaming": True}
    )
    client.stop_stream()
    client.close()
    return parts


@pytest.mark.parametrize("model", MODELS)
def test_llama_index_s_requests_are_answered_as_it_reads_them(
    server: TritonServer, model: str
) -> None:
    """Its text is the answer, and the stop request it leaves with, which no text model knows,
    neither breaks nor delays anything."""
    text = ask(server.grpc_url, model, text_input=PROMPT, max_tokens=TOKENS).text
    for _ in range(2):
        parts = streamed(server.grpc_url, model)
        # Tokens that arrive while a response is being sent share the next one.
        assert parts[0] and text.startswith("".join(parts))
        assert len(parts) == TOKENS - 1 or "".join(parts) == text
        assert model != "ensemble" or len(parts) == 1


@pytest.fixture(scope="module")
def llama_index(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that has the package."""
    if "TRTLLM_BLS_INSTALL_CLIENTS" not in os.environ:
        pytest.skip("installs fifty packages; set TRTLLM_BLS_INSTALL_CLIENTS=1 to run it")
    folder = tmp_path_factory.mktemp("llama_index")
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    package = "llama-index-llms-nvidia-triton==0.6.0"
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", package]
    done = subprocess.run(install, capture_output=True, text=True, timeout=280)
    if done.returncode:
        problem = done.stderr.strip().splitlines()[-1]
        pytest.skip(f"cannot install {package}: {problem}; a way to PyPI runs it")
    return python


@pytest.mark.parametrize("model", MODELS)
def test_llama_index_itself(
    server: TritonServer, llama_index: str, model: str, tmp_path: Path
) -> None:
    """The published package completes and streams."""
    done = subprocess.run(
        [llama_index, "-c", DRIVER, server.grpc_url, model],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    whole, parts = json.loads(done.stdout)
    assert whole == "".join(parts) != ""
