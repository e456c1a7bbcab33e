"""The example pipelines on a real tritonserver; the engine says the prompt back."""

from __future__ import annotations

import hashlib
import json
import pickle
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
import tritonclient.grpc as grpcclient
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

from tests.helpers.openai_server import RunningApi
from tests.helpers.openai_server import serving as openai_serving
from tests.helpers.published import AGENTS, npm_install
from tests.helpers.server_settings import DEMO
from tests.helpers.tensor_values import DTYPES, expected, same, values
from tests.helpers.tiers import FULL, budget
from tests.helpers.waiting import in_pieces, until
from tests.live import typed_models
from tests.live.pipelines import (
    ENDLESS,
    EXAMPLES,
    LONG,
    TIME_LIMIT,
    Lines,
    Stream,
    live_requests,
    texts,
)
from tests.live.test_agents import CODEX
from tests.live.test_agents import run as run_agent
from trtllm_bls.openai.openai_command import read_parameters
from trtllm_bls.operate.tritonserver import TritonServer
from trtllm_bls.orchestrator.deployment import Deployment
from trtllm_bls.pipeline.testing import Double, LoadedModel, load, serving
from trtllm_bls.settings.model_config import served_pipelines
from trtllm_bls.text.tokenizer import load_tokenizer

pytestmark = TIME_LIMIT
LOADED = pytest.mark.skipif(
    not FULL, reason="loads no such example; set TRTLLM_BLS_FULL=1 to run it"
)
TOLD = ": answer left tasks behind: 1; their calls of models are ended"


@pytest.fixture(scope="module")
def typed(pipelines: TritonServer) -> Iterator[LoadedModel]:
    """The pipeline of every type, as ``testing`` loads it."""
    repository = pipelines.settings.model_repository
    assert repository is not None
    mirror = Double(lambda inputs: inputs, config=repository / "mirror" / "config.pbtxt")
    loaded = load(repository / "typed" / "1" / "model.py")
    with serving(loaded, models={"mirror": mirror}) as model:
        yield model


def test_sound_comes_while_codes_are_still_made(pipelines: TritonServer, tmp_path: Path) -> None:
    """And all of it is what the vocoder makes of the language model's ids."""
    ids = load_tokenizer(DEMO / "target").encode(LONG, True)

    def spoken() -> list[Any]:
        """Return the results, none if this client was too slow to see the engine at work."""
        results: list[Any] = []
        is_early = False
        for result in Stream(pipelines, "speech", text=LONG, max_codes=1000):
            is_early = is_early or (not results and live_requests(pipelines) > 0)
            results.append(result)
        return results if is_early else []

    results = until(spoken)
    pcm = [result.as_numpy("pcm") for result in results]
    assert sum(int(result.as_numpy("codes")[0]) for result in results) == len(ids)
    seconds = np.arange(640, dtype=np.float32) / 16_000
    tones = np.sin(2 * np.pi * (100 + np.array(ids)[:, None] % 1000) * seconds).reshape(-1)
    sound = np.concatenate(pcm)
    np.testing.assert_allclose(sound[: len(tones)], tones.astype(np.float32), atol=1e-6)
    with wave.open(str(tmp_path / "speech.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((sound * 32_767).astype("<i2").tobytes())
    with wave.open(str(tmp_path / "speech.wav")) as file:
        assert file.getnframes() == len(sound)


def test_a_caller_who_leaves_frees_the_engine(pipelines: TritonServer) -> None:
    until(lambda: live_requests(pipelines) == 0)
    stream = Stream(pipelines, "speech", text=ENDLESS, max_codes=30_000)
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
    near = r"INTERNAL: tensorrt_lm_bls: .*unknown model.*; did you mean tensorrt_llm_bls\?"
    with pytest.raises(InferenceServerException, match=near):
        list(Stream(pipelines, "caller", what="tensorrt_lm_bls", once=1))


def test_the_log_tells_of_a_task_that_is_left_behind(pipelines: TritonServer) -> None:
    assert list(Stream(pipelines, "caller", what="left behind")) == []
    until(lambda: any("[caller] request-" in each and TOLD in each for each in Lines.texts))


def test_many_callers_that_leave_at_any_time_leave_nothing_behind(pipelines: TritonServer) -> None:
    streams = [Stream(pipelines, "guard", text_input=LONG) for _ in range(16)]
    for number, stream in enumerate(streams):
        if number % 2:
            next(iter(stream))
        stream.leave()
    until(lambda: live_requests(pipelines) == 0)
    assert list(Stream(pipelines, "guard", text_input="the fox", max_tokens=2))


@LOADED
@pytest.mark.slow
def test_the_best_of_several_answers_is_the_one_with_the_highest_reward(
    pipelines: TritonServer,
) -> None:
    results = list(Stream(pipelines, "best_of_n", prompt="the quick fox runs", n=3))
    rewards = [float(value) for result in results[:-1] for value in result.as_numpy("reward")]
    assert rewards == [4.0] * 3  # the engine says the prompt back, whatever the seed
    assert texts(results[-1], "text") == ["the quick fox runs"]


def test_an_agent_ends_with_an_object(pipelines: TritonServer) -> None:
    (result,) = Stream(pipelines, "agent", question="What is a fox?")
    answer = json.loads(texts(result, "answer")[0])
    assert "What is a fox?" in answer["answer"] and answer["sure"] is False


@LOADED
@pytest.mark.slow
def test_chunks_of_speech_tokens_grow(pipelines: TritonServer) -> None:
    """And what flow and vocoder make of them is what they would make of all at once."""
    ids = np.array(load_tokenizer(DEMO / "target").encode(LONG, True))
    results = list(Stream(pipelines, "cosy", text=LONG, max_tokens=1000))
    offsets = [int(result.as_numpy("offset")[0]) for result in results]
    assert offsets[:5] == [0, 8, 24, 56, 120] and offsets == sorted(offsets)
    seconds = np.arange(640, dtype=np.float32) / 16_000
    tones = np.sin(2 * np.pi * (100 + (ids % 100)[:, None]) * seconds).reshape(-1)
    sound = np.concatenate([result.as_numpy("pcm") for result in results])
    np.testing.assert_allclose(sound[: len(tones)], tones.astype(np.float32), atol=1e-6)


@pytest.fixture(scope="module")
def api(pipelines: TritonServer) -> Iterator[RunningApi]:
    repository = pipelines.settings.model_repository
    assert repository is not None
    given = {"engine_url": pipelines.grpc_url, "tokenizer_dir": str(DEMO / "target")}
    parameters = read_parameters(repository, given)
    examples = tuple(
        each for each in served_pipelines(repository) if (EXAMPLES / each.name).is_dir()
    )
    names = {"model_names": ("demo",), "pipelines": examples}
    digest = hashlib.sha256(b"key").digest()
    backend = Deployment(parameters, model_name="demo")
    with openai_serving(backend.engine, backend, keys=(digest,), **names) as running:
        yield running


QUESTION = "What does machine learning find in examples?"


def test_a_pipeline_answers_the_openai_package(api: RunningApi, pipelines: TritonServer) -> None:
    """Streamed and whole, with its citations and the usage of its calls."""
    client = openai.OpenAI(base_url=f"{api.url}/v1", api_key="key", max_retries=0)
    names = ["demo", "retrieval", "search", "speech", *(["vision"] if FULL else [])]
    assert [model.id for model in client.models.list()] == names
    asked: Any = {"model": "retrieval", "messages": [{"role": "user", "content": QUESTION}]}
    whole = client.chat.completions.create(**asked)
    said = whole.choices[0].message
    assert said.content and "Machine learning finds rules" in said.content
    assert whole.choices[0].finish_reason == "stop" and said.annotations
    assert len(said.annotations) == 2
    assert whole.usage and whole.usage.prompt_tokens > 20 and whole.usage.completion_tokens > 20

    def pieces() -> list[str]:
        """Return the texts of a stream, which ends as the whole answer did."""
        chunks = list(
            client.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
        )
        found = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(found) == said.content
        assert chunks[-1].usage == whole.usage
        return [text for text in found if text]

    in_pieces(pieces, 2)
    short = client.chat.completions.create(**asked, max_tokens=3)
    assert short.choices[0].finish_reason == "length"
    response = client.responses.create(model="retrieval", input=QUESTION)
    assert response.output_text == said.content
    (message,) = response.output
    assert message.type == "message"
    assert message.content[0].type == "output_text" and len(message.content[0].annotations) == 2
    messages = anthropic.Anthropic(base_url=api.url, api_key="key").messages
    answer = messages.create(
        model="retrieval", max_tokens=500, messages=[{"role": "user", "content": QUESTION}]
    )
    assert answer.content[0].type == "text" and answer.content[0].text == said.content
    told: Any = {"model": "retrieval", "max_tokens": 500, "messages": asked["messages"]}
    with messages.stream(**told) as stream:
        streamed = stream.get_final_message()
    for answered in (answer, streamed):
        (block,) = answered.content
        assert block.type == "text" and block.citations
        assert [each.type for each in block.citations] == ["search_result_location"] * 2
        names = [each.to_dict()["source"] for each in block.citations]
        assert names == [each.to_dict()["filename"] for each in said.annotations]


def test_the_guard_refuses_and_errors_are_a_models(
    api: RunningApi, pipelines: TritonServer
) -> None:
    client = openai.OpenAI(base_url=f"{api.url}/v1", api_key="key", max_retries=0)
    bad: Any = {"model": "retrieval", "messages": [{"role": "user", "content": "poison please"}]}
    refused = client.chat.completions.create(**bad)
    said = "I cannot say more about that."
    assert refused.choices[0].message.refusal == said
    asked: Any = {"model": "retrieval", "input": "poison please"}
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert "response.refusal.delta" in kinds and "response.refusal.done" in kinds
    for response in (streamed, client.responses.create(**asked)):
        message = response.output[-1]
        assert message.type == "message" and message.content[-1].type == "refusal"
        assert message.content[-1].refusal == said
    messages = anthropic.Anthropic(base_url=api.url, api_key="key").messages
    told: Any = {"model": "retrieval", "max_tokens": 500, "messages": bad["messages"]}
    with messages.stream(**told) as answered:
        final = answered.get_final_message()
    for answer in (final, messages.create(**told)):
        assert answer.stop_reason == "refusal"
        assert answer.content[-1].type == "text" and answer.content[-1].text == said
    until(lambda: live_requests(pipelines) == 0)
    with pytest.raises(openai.BadRequestError, match="n: above 1: a pipeline gives one answer"):
        client.chat.completions.create(**bad, n=2)
    with pytest.raises(openai.BadRequestError, match="is a pipeline, which answers conversations"):
        client.completions.create(model="retrieval", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{api.url}/v1", api_key="no").chat.completions.create(**bad)


def test_a_client_who_leaves_ends_the_pipeline(api: RunningApi, pipelines: TritonServer) -> None:
    client = openai.OpenAI(base_url=f"{api.url}/v1", api_key="key", max_retries=0)
    long: Any = [{"role": "user", "content": ENDLESS}]
    until(lambda: live_requests(pipelines) == 0)
    with client.chat.completions.create(model="retrieval", messages=long, stream=True) as stream:
        next(iter(stream))
        assert live_requests(pipelines) == 1
    until(lambda: live_requests(pipelines) == 0)


@settings(max_examples=budget(60, 150), deadline=None)
@given(value=values(), dtype=st.sampled_from(DTYPES))
@example(value=b"RIFFab\0\0", dtype="STRING")
@example(value=np.bytes_(b"RIFFab\0\0"), dtype="STRING")
@example(value=["a\0", "b"], dtype="STRING")
@example(value=1.0039062, dtype="BF16")
def test_a_value_is_in_triton_what_it_is_in_testing(
    pipelines: TritonServer, typed: LoadedModel, value: Any, dtype: str
) -> None:
    """Sent to another model and back, and sent to the caller: the same elements, or one error."""
    asked = typed_models.case(dtype, value)
    ask = typed.ask(case=asked).wait()
    in_testing = [next(iter(each.items())) for each in ask.responses]
    in_triton, failed = [], None
    try:
        for result in Stream(pipelines, "typed", case=asked):
            name = result.get_response().outputs[0].name
            in_triton.append((name, result.as_numpy(name)))
    except InferenceServerException as error:
        failed = error.message()
    assert failed == (ask.error and ask.error.message())
    assert [name for name, _ in in_triton] == [name for name, _ in in_testing]
    for (_, left), (_, right) in zip(in_triton, in_testing, strict=True):
        assert same(left.tolist(), right.tolist()) and left.dtype == right.dtype
    (seen,) = in_triton[0][1].tolist()
    wanted, found = expected(value, dtype), pickle.loads(seen)
    if isinstance(found, str):
        assert found.startswith(f"mirror: {dtype}: ")
    else:
        assert wanted is not None and same(found, wanted)
        if dtype != "BF16":  # a Python model cannot have such an output
            assert same(in_triton[1][1].tolist(), wanted)


@pytest.mark.slow
def test_codex_is_answered_by_a_pipeline(api: RunningApi, tmp_path: Path) -> None:
    """It chose the model by its name; the answer has what the pipeline found."""
    npm_install(tmp_path, *(each for each in AGENTS if "codex" in each), scripts=True)
    work, home = tmp_path / "work", tmp_path / "codex"
    work.mkdir()
    home.mkdir()
    (home / "config.toml").write_text(CODEX.format(model="retrieval", url=api.url))
    codex = str(tmp_path / "node_modules" / ".bin" / "codex")
    command = [codex, "exec", "--skip-git-repo-check", QUESTION]
    said = run_agent(command, work, CODEX_HOME=str(home), BLS_API_KEY="key")
    assert "Machine learning finds rules" in said
