"""The three example pipelines on a real tritonserver; the engine says the prompt back."""

from __future__ import annotations

import queue
import shutil
import time
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.helpers.server_settings import DEMO, ROOT
from tests.helpers.waiting import in_pieces, until
from tests.live.conftest import echo_settings
from trtllm_bls.configure.new import config_of
from trtllm_bls.launcher import TritonServer
from trtllm_bls.tokenizer import load_tokenizer

EXAMPLES = ROOT / "examples"
LONG = "the quick brown fox jumps over the lazy dog and runs into the woods again " * 8
# Streams what a decoupled model of the same server streams; ``once`` asks for one response.
CALLER = """
from trtllm_bls.pipeline import StreamingModel, Tensor

class TritonPythonModel(StreamingModel):
    inputs = (Tensor("what", "STRING", required=True), Tensor("once", "INT32"))
    outputs = (Tensor("said", "STRING"),)

    async def answer(self, request, response):
        inputs = {"text_input": [["the fox runs"]], "max_tokens": int32(20), "stream": [[True]]}
        if "once" in request:
            await request.infer(request.text("what"), inputs)
        async for part in request.stream(request.text("what"), inputs, ["text_output"]):
            if part["text_output"][0]:
                await response.send({"said": part["text_output"]})

def int32(value):
    import numpy
    return numpy.array([[value]], numpy.int32)
"""


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    settings = echo_settings(tmp_path_factory.mktemp("pipelines"))
    assert settings.model_repository is not None
    for model in EXAMPLES.iterdir():
        if model.is_dir():
            shutil.copytree(model, settings.model_repository / model.name)
    caller = settings.model_repository / "caller"
    (caller / "1").mkdir(parents=True)
    (caller / "1" / "model.py").write_text(CALLER)
    (caller / "config.pbtxt").write_text(config_of(caller / "1" / "model.py", {}))
    with TritonServer(settings) as running:
        yield running


class Stream:
    """One request to a decoupled model, its responses as they come."""

    def __init__(self, server: TritonServer, model: str, **inputs: Any) -> None:
        self.client = grpcclient.InferenceServerClient(server.grpc_url)
        self.arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.client.start_stream(lambda result, error: self.arrived.put((result, error)))
        tensors = []
        for name, value in inputs.items():
            text = isinstance(value, str)
            array = np.array([value.encode()], np.object_) if text else np.array([value], np.int32)
            tensors.append(grpcclient.InferInput(name, [1], "BYTES" if text else "INT32"))
            tensors[-1].set_data_from_numpy(array)
        self.client.async_stream_infer(model, tensors, enable_empty_final_response=True)

    def __iter__(self) -> Iterator[Any]:
        while True:
            result, error = self.arrived.get(timeout=60)
            if error is not None:
                self.client.stop_stream()  # a server does not end while a stream is open
                raise error
            if result.get_response().outputs:
                yield result
            if result.get_response().parameters["triton_final_response"].bool_param:
                self.client.stop_stream()
                return

    def leave(self) -> None:
        self.client.stop_stream(cancel_requests=True)


def texts(result: Any, name: str) -> list[str]:
    array = result.as_numpy(name)
    return [] if array is None else [each.decode() for each in array]


def live_requests(server: TritonServer) -> float:
    lines = httpx.get(server.metrics_url).text.splitlines()
    found = [line for line in lines if line.startswith("echo_live_requests")]
    return float(found[0].rpartition(" ")[2])


def test_sound_comes_while_codes_are_still_made(pipelines: TritonServer, tmp_path: Path) -> None:
    """And all of it is what the vocoder makes of the language model's ids."""
    ids = load_tokenizer(DEMO / "target").encode(LONG, True)
    began, arrivals, pcm, codes = time.monotonic(), [], [], 0
    for result in Stream(pipelines, "speech", text=LONG, max_codes=1000):
        arrivals.append(time.monotonic() - began)
        pcm.append(result.as_numpy("pcm"))
        codes += int(result.as_numpy("codes")[0])
    assert codes == len(ids)
    seconds = np.arange(640, dtype=np.float32) / 16_000
    tones = np.sin(2 * np.pi * (100 + np.array(ids)[:, None] % 1000) * seconds).reshape(-1)
    sound = np.concatenate(pcm)
    np.testing.assert_allclose(sound[: len(tones)], tones.astype(np.float32), atol=1e-6)
    assert arrivals[0] < arrivals[-1] / 2
    with wave.open(str(tmp_path / "speech.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((sound * 32_767).astype("<i2").tobytes())
    with wave.open(str(tmp_path / "speech.wav")) as file:
        assert file.getnframes() == len(sound)


def test_a_caller_who_leaves_frees_the_engine(pipelines: TritonServer) -> None:
    stream = Stream(pipelines, "speech", text=LONG * 4, max_codes=1000)
    next(iter(stream))
    assert live_requests(pipelines) == 1
    stream.leave()
    until(lambda: live_requests(pipelines) == 0)


def test_an_answer_from_passages_ends_with_its_citations(pipelines: TritonServer) -> None:
    question = "What does machine learning find in examples?"
    results = list(Stream(pipelines, "retrieval", question=question))
    said = "".join(text for result in results for text in texts(result, "text"))
    cited = texts(results[-1], "citation")
    assert cited[0] == "Machine learning finds rules in examples instead of being told them."
    assert len(cited) == 2
    assert not any(texts(result, "citation") for result in results[:-1])
    assert cited[0][:20] in said  # the engine says its prompt back


def test_the_guard_ends_an_answer_with_its_own_reason(pipelines: TritonServer) -> None:
    prompt = f"the fox eats poison now {LONG}"
    results = list(Stream(pipelines, "guard", text_input=prompt))
    said = "".join(text for result in results for text in texts(result, "text_output"))
    assert prompt.startswith(said.strip()) and "poison" not in said
    assert texts(results[-1], "finish_reason") == ["guard"]
    until(lambda: live_requests(pipelines) == 0)


def test_an_answer_that_the_guard_lets_pass_ends_as_the_model_ended(
    pipelines: TritonServer,
) -> None:
    results = list(Stream(pipelines, "guard", text_input="the fox runs", max_tokens=3))
    assert texts(results[-1], "finish_reason") == ["length"]


def test_another_models_failure_is_told_with_its_name(pipelines: TritonServer) -> None:
    """And a decoupled model is read response by response."""
    client = grpcclient.InferenceServerClient(pipelines.grpc_url)
    assert client.is_model_ready("caller")

    def said() -> list[str]:
        results = Stream(pipelines, "caller", what="tensorrt_llm_bls")
        found = [texts(result, "said")[0] for result in results]
        assert "".join(found) == "the fox runs"
        return found

    in_pieces(said, 1)
    with pytest.raises(InferenceServerException, match=r"INTERNAL: nobody: .*unknown model"):
        list(Stream(pipelines, "caller", what="nobody"))


def test_one_response_of_a_model_that_is_not_there_is_an_error(pipelines: TritonServer) -> None:
    with pytest.raises(InferenceServerException, match=r"INTERNAL: nobody: .*unknown model"):
        list(Stream(pipelines, "caller", what="nobody", once=1))


def test_many_callers_that_leave_at_any_time_leave_nothing_behind(pipelines: TritonServer) -> None:
    streams = [Stream(pipelines, "guard", text_input=LONG) for _ in range(16)]
    for number, stream in enumerate(streams):
        if number % 2:
            next(iter(stream))
        stream.leave()
    until(lambda: live_requests(pipelines) == 0)
    assert list(Stream(pipelines, "guard", text_input="the fox", max_tokens=2))
