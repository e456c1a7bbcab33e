"""The OpenAI API that ``serve`` starts beside a real tritonserver."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import openai
import psutil
import pytest

from tests.helpers.children import Child
from tests.helpers.http2_offers import CLIENTS, post_twice
from tests.helpers.ports import serve_ports, unused_ports
from tests.helpers.waiting import until, until_ended

pytestmark = pytest.mark.live
QUESTION = [{"role": "user", "content": "What is 12 * 9?"}]


@dataclass
class Served:
    process: Child
    url: str
    http: str
    curl: str


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """With two workers, which share the port."""
    (port,) = unused_ports(1)
    api = ["--openai-port", str(port), "--openai-workers", "2"]
    words = [sys.executable, "-m", "trtllm_bls.cli", "serve", *serve_ports(), *api]
    with Child(words, name="serve") as process:
        first = process.output.next()
        assert first.startswith("OpenAI "), process.report()
        url = first.split()[1]
        http = process.output.next()
        curl = process.output.wait_for("curl ")
        yield Served(process, url, http.split()[1], curl)


@pytest.fixture
def api(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url, api_key="any", max_retries=0) as client:
        yield client


def test_the_command_that_serve_shows_works(served: Served) -> None:
    """As a user pastes it."""
    answer = subprocess.run(served.curl, shell=True, capture_output=True, text=True, timeout=120)
    assert "108" in json.loads(answer.stdout)["choices"][0]["message"]["content"]


def test_metrics_have_tritons_own(served: Served) -> None:
    """Beside those of the API."""
    url = served.url.removesuffix("/v1") + "/metrics"
    with urllib.request.urlopen(url, timeout=30) as answer:
        text = answer.read().decode()
    assert "\nnv_inference_request_success{" in text and "\ntrtllm_bls_requests_total{" in text
    assert text.count("# TYPE trtllm_bls_requests_total ") == 1


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
def test_programs_that_offer_http2_are_answered(
    served: Served, client: str, tmp_path: Path
) -> None:
    """On the port of the API, and on Triton's."""
    chat = {"model": "demo", "messages": QUESTION, "temperature": 0}
    for answer in post_twice(client, f"{served.url}/chat/completions", chat, tmp_path):
        assert "108" in answer["choices"][0]["message"]["content"]
    asked = {"messages": json.dumps(QUESTION), "max_tokens": 40}
    generate = f"{served.http}/v2/models/tensorrt_llm_bls/generate"
    for answer in post_twice(client, generate, asked, tmp_path):
        assert "108" in answer["text_output"]


def test_a_chat_streams_and_ends(api: openai.OpenAI) -> None:
    """The same text as in one piece, with figures."""
    whole = api.chat.completions.create(model="demo", messages=QUESTION, temperature=0)
    stream = api.chat.completions.create(
        model="demo",
        messages=QUESTION,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert last.usage == whole.usage


def test_log_probs_choices_and_drafts_come_from_the_engine(api: openai.OpenAI) -> None:
    """Alternatives from logits, several choices, and a draft model that changes no text."""
    scored = api.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, logprobs=True, top_logprobs=3
    )
    content = scored.choices[0].logprobs
    assert content is not None and content.content is not None
    for entry in content.content:
        assert entry.top_logprobs[0].token == entry.token
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob, abs=1e-3)
    several = api.completions.create(model="demo", prompt=["Once", "One day"], n=2, max_tokens=5)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    texts = {
        api.completions.create(
            model="demo",
            prompt="Once upon a time",
            max_tokens=40,
            temperature=0,
            extra_body={"num_draft_tokens": drafts},
        )
        .choices[0]
        .text
        for drafts in (0, 4)
    }
    assert len(texts) == 1


COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "dark": {"type": "boolean"}},
    "required": ["colour", "dark"],
    "additionalProperties": False,
}


def test_calls_and_schemas_are_enforced_by_the_engine(api: openai.OpenAI) -> None:
    """Streamed and whole, of a model that knows nothing of tools."""
    paint = {"type": "function", "function": {"name": "paint", "parameters": COLOUR}}
    chunks = api.chat.completions.create(
        model="demo",
        messages=QUESTION,
        tools=[paint],
        tool_choice="required",
        parallel_tool_calls=False,
        stream=True,
    )
    *_, last = choices = [chunk.choices[0] for chunk in chunks]
    calls = [call.function for each in choices for call in each.delta.tool_calls or ()]
    assert (calls[0].name, last.finish_reason) == ("paint", "tool_calls")
    jsonschema.validate(json.loads("".join(call.arguments or "" for call in calls)), COLOUR)
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR}}
    answer = api.chat.completions.create(model="demo", messages=QUESTION, response_format=form)
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), COLOUR)


def ends(url: str, outcome: str = "") -> float:
    """Requests that have ended so, or in any way, of all workers."""
    with urllib.request.urlopen(f"{url.removesuffix('/v1')}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    found = [
        line
        for line in lines
        if line.startswith("trtllm_bls_requests_total{") and f'outcome="{outcome}' in line
    ]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def test_a_client_that_leaves_ends_its_request(served: Served, api: openai.OpenAI) -> None:
    """In the middle of a stream; the next request is answered."""
    asked = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 2000}
    more = {"stream": True, "extra_body": {"ignore_eos": True}}

    def is_cancelled() -> bool:
        """Return false where the whole answer had come before this client left."""
        before = ends(served.url)
        before_cancelled = ends(served.url, "cancelled")
        with api.completions.create(**asked, **more) as stream:
            next(iter(stream))
        until(lambda: ends(served.url) > before)
        return ends(served.url, "cancelled") > before_cancelled

    until(is_cancelled)
    assert api.completions.create(model="demo", prompt="Once", max_tokens=4).choices


def test_the_engines_longest_sequence_is_told(api: openai.OpenAI) -> None:
    """Though the engine itself has chosen it."""
    assert api.models.retrieve("demo").to_dict()["max_model_len"] == 2048


def test_a_prompt_that_is_too_long_is_refused_as_clients_expect(api: openai.OpenAI) -> None:
    """Also where only the engine knows how much it takes."""
    with pytest.raises(openai.BadRequestError) as caught:
        api.completions.create(model="demo", prompt="word " * 20_000)
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is" in str(caught.value)


def api_process(served: Served) -> psutil.Process | None:
    """The one that ``serve`` has started."""
    for child in psutil.Process(served.process.pid).children():
        with suppress(psutil.Error):
            if "openai" in child.cmdline():
                return child
    return None


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_an_api_that_dies_or_stops_is_started_again(
    served: Served, api: openai.OpenAI, number: int
) -> None:
    """On the same port; the server goes on meanwhile."""
    before = api_process(served)
    assert before is not None
    before.send_signal(number)

    def answers_again() -> bool:
        after = api_process(served)
        with suppress(openai.APIConnectionError):
            return after not in (None, before) and bool(api.models.list().data)
        return False

    until(answers_again, seconds=120)
    assert api.completions.create(model="demo", prompt="Once", max_tokens=4).choices


@pytest.mark.slow
def test_a_killed_server_comes_back_with_its_api(served: Served, api: openai.OpenAI) -> None:
    """The API ends before what it shares with the server is removed, so it has nothing to say."""
    (guard,) = (
        c for c in psutil.Process(served.process.pid).children() if "guard" in str(c.cmdline())
    )
    before = api_process(served)
    guard.children()[0].kill()
    until(lambda: "serving again" in served.process.errors.text(), seconds=120)
    assert api_process(served) not in (None, before)
    assert api.completions.create(model="demo", prompt="Once", max_tokens=4).choices
    assert "status_dir" not in served.process.errors.text()


def test_sigterm_ends_the_api_with_the_server(served: Served, api: openai.OpenAI) -> None:
    """A stream gets its whole text, whose rounds of drafts a stopping Triton would refuse; no
    process is left. Last: the server is gone then."""
    processes = psutil.Process(served.process.pid).children(recursive=True)
    stream = api.completions.create(
        model="demo",
        prompt="Once upon a time",
        max_tokens=120,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "num_draft_tokens": 4},
    )
    chunks = iter(stream)
    next(chunks)
    served.process.process.terminate()
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert served.process.end() == 0
    until_ended(processes)  # a helper of multiprocessing ends after its workers
