"""Text behind a request server."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from doubles.generated import GeneratedChunks
from doubles.scripted import Fault, Script, ScriptedEngine
from doubles.scripted_tokens import hashed
from tests.helpers.scripted_text import (
    PROMPT,
    prompt_ids,
    saying,
    tokenizer,
)
from tests.helpers.services_on_fake_backend import SILENT, STREAM, serving, text_service, words
from trtllm_bls.engines.base import ChunkStream, QueuedChunks, TaskChunks
from trtllm_bls.errors import EngineError, InvalidRequest
from trtllm_bls.orchestrator.orchestrator import Admission, Defaults, Orchestrator
from trtllm_bls.pipeline.testing import SECONDS
from trtllm_bls.text.tokenizer import Tokenizer
from trtllm_bls.triton.text_service import TextService
from trtllm_bls.types import EngineChunk, EngineRequest

# --- tensorrt_llm_bls -----------------------------------------------------------------------


def test_text_is_answered_whole_or_streamed() -> None:
    """The same text; only the last response says how it ended."""
    with text_service(saying("It wasn't fun!")) as bench:
        whole = bench.accept(bench.text(PROMPT)).wait()
        streamed = bench.accept(bench.text(PROMPT, **STREAM)).wait()
    assert words(whole) == words(streamed) == "It wasn't fun!"
    assert len(whole.responses) == 1 < len(streamed.responses)
    assert whole.said("finish_reason") == streamed.said("finish_reason") == [[b"end_id"]]
    assert "finish_reason" in streamed.responses[-1]


def test_texts_have_one_dimension() -> None:
    """As TensorRT-LLM's own models send them; clients decode each element."""
    names = ("text_output", "finish_reason", "stop_reason")
    for more in ({}, STREAM):
        with text_service(saying("one two! three")) as bench:
            words_of_stop = np.array([[b"!"]], np.object_)
            ask = bench.text(PROMPT, outputs=names, stop_words=words_of_stop, **more)
            bench.accept(ask).wait()
        for response in ask.responses:
            assert {array.shape for array in response.values()} == {(1,)}
        assert all(type(response["text_output"][0]) is bytes for response in ask.responses)
        assert words(ask) == "one two"
        assert ask.responses[-1]["finish_reason"].tolist() == [b"stop"]
        assert ask.responses[-1]["stop_reason"].tolist() == [b"!"]


def test_prompts_that_come_together_are_tokenised_together() -> None:
    """All but a refused and a long one; each request has the answer that it would have alone."""
    together: list[list[str]] = []
    alone: list[str] = []

    class Noting(Tokenizer):
        def encode(self, text: str, *arguments: Any, **more: Any) -> Any:
            alone.append(text)
            return super().encode(text, *arguments, **more)

        def encode_all(self, texts: Sequence[str], *arguments: Any) -> Any:
            together.append(list(texts))
            return super().encode_all(texts, *arguments)

    engine = saying("one two")
    with text_service(engine, other=Noting(tokenizer().hf)) as bench:
        bare = {"add_special_tokens": np.array([[False]])}
        asks = [bench.text(PROMPT), bench.text(PROMPT), bench.text("The slow", **bare)]
        asks.append(bench.text("a fox " * 1000))
        wrong = bench.text(PROMPT, top_p=np.array([[7]], np.float32))
        bench.accept(*asks, wrong)
        for ask in (*asks, wrong):
            ask.wait()
        bench.accept(bench.text("Tell me")).wait()
        broken = wrong.error
    assert [set(texts) for texts in together] == [{PROMPT}, {"The slow"}]
    assert alone == ["a fox " * 1000, "Tell me"]
    assert [words(ask) for ask in asks[:2]] == ["one two", "one two"]
    assert broken is not None and "top_p" in broken.message()
    prompts = {request.input_ids for request in engine.requests}
    assert {prompt_ids(), tokenizer().encode("The slow", False), prompt_ids("Tell me")} < prompts


def test_a_request_without_a_place_is_not_tokenised() -> None:
    """Of five that come together one runs and one waits; the others are refused as they are."""
    tokenised: list[str] = []

    class Noting(Tokenizer):
        def encode(self, text: str, *arguments: Any, **more: Any) -> Any:
            tokenised.append(text)
            return super().encode(text, *arguments, **more)

        def encode_all(self, texts: Sequence[str], *arguments: Any) -> Any:
            tokenised.extend(texts)
            return super().encode_all(texts, *arguments)

    engine = saying("one two")
    admission = Admission(1, 1, None)
    service = TextService(
        Orchestrator(Noting(tokenizer().hf), engine, Defaults(), admission=admission)
    )
    with serving(engine, service.handle, prepare_batch=service.prepare_batch) as bench:
        asks = [bench.text(f"{PROMPT} {number}") for number in range(5)]
        bench.accept(*asks)
        errors = [ask.wait().error for ask in asks]
    assert [error and error.code() for error in errors] == [None, None, *["UNAVAILABLE"] * 3]
    assert tokenised == [f"{PROMPT} 0", f"{PROMPT} 1"]
    assert not service._read_ahead, "nothing is kept of requests that are over"


class Eager:
    """An engine that runs ahead of its reader, as one behind a connection does."""

    name = "eager"

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self.close, self.capacity = engine.close, engine.capacity
        self.done = threading.Event()

    @property
    def live(self) -> int:
        return self._engine.live

    def generate(self, request: EngineRequest) -> TaskChunks:
        async def work(chunks: QueuedChunks) -> None:
            async with aclosing(self._engine.generate(request)) as stream:
                async for chunk in stream:
                    chunks.put([chunk])
            self.done.set()

        return TaskChunks(work)


def test_a_slow_caller_gets_fewer_and_larger_responses() -> None:
    """What arrives while a response is on its way goes out in one."""
    engine = Eager(saying("one two three four five six"))
    with text_service(engine) as bench:
        ask = bench.text(PROMPT, **STREAM)
        ask.on_send = lambda _: engine.done.wait(SECONDS)
        bench.accept(ask).wait()
    assert words(ask) == "one two three four five six"
    assert len(ask.responses) == 2
    assert ask.said("finish_reason") == [[b"end_id"]]


@pytest.mark.parametrize("interval", [1, 2, 3, 50])
def test_a_streamed_response_has_so_many_tokens(interval: int) -> None:
    """All but the first, which waits for none, and the last, with what is left and the end."""
    text = "one two three four five six"
    count = len(tokenizer().encode_word(text))
    with text_service(saying(text)) as bench:
        ask = bench.text(PROMPT, stream_interval=np.array([[interval]], np.int32), **STREAM)
        bench.accept(ask).wait()
    assert words(ask) == text
    assert len(ask.responses) == 1 + (count - 1) // interval + 1
    assert ask.said("text_output")[0][0]


def test_log_probs_of_a_whole_answer_are_sent_once() -> None:
    """Although the engine streams them, since a stop word may end the answer half-way."""
    text = "one two three"
    count = len(tokenizer().encode_word(text))
    names = ("text_output", "output_log_probs", "cum_log_probs")
    with text_service(saying(text)) as bench:
        asked = {
            "return_log_probs": np.array([[True]]),
            "stop_words": np.array([[b"!"]], np.object_),
        }
        whole = bench.accept(bench.text(PROMPT, outputs=names, **asked)).wait()
        streamed = bench.accept(bench.text(PROMPT, outputs=names, **asked, **STREAM)).wait()
        assert all(request.streaming for request in bench.engine.requests)
    assert [len(row[0]) for row in whole.said("output_log_probs")] == [count]
    lengths = [len(row[0]) for row in streamed.said("output_log_probs")]
    assert lengths == sorted(lengths) and lengths[-1] == count  # of a stream: all so far


def test_scores_of_a_stream_are_on_every_response_once_they_are_known() -> None:
    """As TensorRT-LLM sends them, whose clients read the last response or any."""
    names = ("text_output", "output_log_probs", "cum_log_probs", "context_logits")
    with text_service(saying("one two three")) as bench:
        asked = {name: np.array([[True]]) for name in ("return_log_probs", "return_context_logits")}
        ask = bench.accept(bench.text(PROMPT, outputs=names, **asked, **STREAM)).wait()
    assert len(ask.responses) > 3
    assert all(response.keys() == set(names) for response in ask.responses)
    prompt = len(prompt_ids())
    assert {response["context_logits"].shape[1] for response in ask.responses} == {prompt}


# --- not decoupled --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "more", "problem"),
    [
        (1, STREAM, "UNSUPPORTED: stream: true: this deployment"),
        (2, {}, "UNSUPPORTED: text_input: 2 rows: this deployment"),
        (
            1,
            {"num_return_sequences": np.array([[2]], np.int32)},
            "UNSUPPORTED: num_return_sequences: above 1: this deployment",
        ),
    ],
)
def test_what_takes_several_responses_is_refused_by_name(
    texts: int, more: Any, problem: str
) -> None:
    """Where the model is not decoupled, Triton takes one response per request."""
    with text_service(saying("no"), decoupled=False) as bench:
        ask = bench.accept(bench.text(*[PROMPT] * texts, **more)).wait()
        assert ask.error is not None and ask.error.message().startswith(problem)
        assert bench.engine.requests == []


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stream": np.array([[False]])},
        {"stop_words": np.array([[b"two"]], np.object_)},
        {"max_tokens": np.array([[1]], np.int32)},
        {"exclude_input_in_output": np.array([[False]])},
        {"timeout_ms": np.array([[1]], np.int32)},
        {"top_p": np.array([[2]], np.float32)},
    ],
)
def test_without_decoupling_every_request_has_one_response(more: Any) -> None:
    """An answer or an error, with the final flag in the same send."""
    sends: list[Any] = []
    with text_service(saying("one two three"), decoupled=False) as bench:
        if "timeout_ms" in more:
            bench.engine.fault = SILENT
        ask = bench.text(PROMPT, **more)
        ask.on_send = sends.append
        bench.accept(ask).wait()
    assert len(sends) == 1
    assert len(ask.responses) == (0 if "top_p" in more else 1)


# --- failing and leaving --------------------------------------------------------------------------


def test_text_rows_are_answered_side_by_side() -> None:
    """Each with its own values; rows are told apart by batch_index."""
    names = ("text_output", "batch_index")
    with text_service(saying("one two three")) as bench:
        two = bench.text(
            PROMPT,
            PROMPT,
            outputs=names,
            max_tokens=np.array([[100], [2]], np.int32),
            stream=np.array([[True], [True]]),
        )
        bench.accept(two).wait()
        assert words(two, 0) == "one two three"
        assert words(two, 1) == tokenizer().decode(tokenizer().encode_word("one two three")[:2])
        assert len({request.request_id for request in bench.engine.requests}) == 2


def test_one_failing_text_row_ends_the_others() -> None:
    """The caller gets one error, and no engine works on for the other rows."""
    engine = ScriptedEngine(hashed(600, first=300), Script(vocab_size=1000))
    with text_service(engine) as bench:
        engine.fault = Fault(error=EngineError("row two"), after_requests=1, after_tokens=2)
        forever = np.full((2, 1), 2**31 - 1, np.int32)
        ask = bench.text(PROMPT, PROMPT, max_tokens=forever, stream=np.array([[True], [True]]))
        bench.accept(ask).wait()
        assert ask.error is not None and ask.error.message() == "INTERNAL: row two"
        assert engine.live == 0


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (EngineError("broken"), "INTERNAL: broken"),
        (InvalidRequest("lora_task_id", "no"), "INVALID_ARG: lora_task_id: no"),
        (KeyError("/secret"), "INTERNAL: unexpected KeyError"),
    ],
)
def test_an_engines_failure_is_told_once_and_without_secrets(
    after: int, error: Exception, said: str
) -> None:
    """Before the first word or in the middle."""
    with text_service(saying("one two three")) as bench:
        bench.engine.fault = Fault(error=error, after_tokens=after)
        ask = bench.accept(bench.text(PROMPT, **STREAM)).wait()
    assert ask.error is not None and ask.error.message().startswith(said)
    assert "secret" not in ask.error.message() and "Traceback" not in ask.error.message()
    assert [r["finish_reason"].item() for r in ask.responses[after:]] == [b"error"] * bool(after)
    assert all("finish_reason" not in response for response in ask.responses[:after])


def test_a_bad_request_costs_the_engine_nothing() -> None:
    """Refused before anything runs, by the name of the tensor."""
    with text_service(saying("no")) as bench:
        ask = bench.accept(bench.text(PROMPT, top_p=np.array([[2.0]], np.float32))).wait()
        assert ask.error is not None and ask.error.code() == "INVALID_ARG"
        assert "top_p" in ask.error.message() and bench.engine.requests == []


def test_a_caller_who_leaves_ends_the_engines_work() -> None:
    """At once, not when the text would have ended."""
    with text_service(saying("one two three")) as bench:
        bench.engine.fault = SILENT
        ask = bench.accept(bench.text(PROMPT, **STREAM)).wait(responses=2)
        ask.leave()
        assert ask.wait().error is None
        assert len(bench.engine.cancelled) == 1
        assert ask.responses[-1]["finish_reason"].item() == b"cancelled"


def test_closing_ends_what_runs() -> None:
    """With an error, since the answer is not whole."""
    with text_service(saying("one two three")) as bench:
        bench.engine.fault = SILENT
        ask = bench.accept(bench.text(PROMPT, **STREAM)).wait(responses=2)
    assert ask.wait().error is not None
    assert ask.responses[-1]["finish_reason"].item() == b"cancelled"


class Bumpy:
    """A text engine that fails, hangs or ends, at random, after a random number of steps."""

    name = "bumpy"

    def __init__(self) -> None:
        self.live = 0
        self._engine = ScriptedEngine(hashed(600, first=300), Script(vocab_size=1000))
        self._chance = random.Random(11)
        self.close, self.capacity = self._engine.close, self._engine.capacity

    def generate(self, request: EngineRequest) -> ChunkStream:
        return GeneratedChunks(self._chunks(request))

    async def _chunks(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        self.live += 1
        fate, steps = self._chance.randrange(4), self._chance.randrange(12)
        try:
            async for chunk in self._engine.generate(request):
                yield chunk
                steps -= 1
                if steps == 0 and fate == 0:
                    raise EngineError("at random")
                if steps == 0 and fate == 1:
                    await asyncio.Event().wait()
        finally:
            self.live -= 1


def test_two_hundred_texts_at_once_of_which_many_are_left() -> None:
    """Whatever fails, hangs or is left: each ends once, and nothing runs on."""
    chance = random.Random(5)
    engine: Any = Bumpy()
    with text_service(engine) as bench:
        asks = [
            bench.text(
                PROMPT,
                PROMPT,
                max_tokens=np.array([[chance.randint(1, 30)], [20]], np.int32),
                stream=np.array([[chance.random() < 0.8]] * 2),
            )
            for _ in range(200)
        ]
        for begin in range(0, 200, 25):
            bench.accept(*asks[begin : begin + 25])
            for ask in chance.sample(asks[: begin + 25], 8):
                ask.leave()
        for ask in asks:
            if chance.random() < 0.5:
                ask.leave()
    for ask in asks:  # closed by now: those that hung were told so
        reasons = ask.wait().said("finish_reason")
        whole = len(reasons) == 2 and not {b"cancelled", b"error"} & {each for (each,) in reasons}
        assert ask.gone or whole == (ask.error is None)


def test_requests_do_not_wait_for_each_other() -> None:
    """One that never comes to an end keeps no other from its answer."""
    with text_service(ScriptedEngine(hashed(600, first=300), Script(vocab_size=1000))) as bench:
        most = np.array([[2**31 - 1]], np.int32)
        endless = bench.accept(bench.text(PROMPT, max_tokens=most, **STREAM)).wait(responses=1)
        short = bench.accept(bench.text(PROMPT, max_tokens=np.array([[3]], np.int32))).wait()
        assert short.said("finish_reason") == [[b"length"]]
        endless.leave()
        assert endless.wait().error is None
