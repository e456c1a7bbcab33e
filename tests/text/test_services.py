"""Text behind a real door, and the services on both sides of an ensemble's engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest

from tests.helpers.scripted_text import (
    PROMPT,
    prompt_ids,
    saying,
    tokenizer,
    tokenizer_of_padded_model,
)
from tests.helpers.services_on_fake_backend import SILENT, STREAM, text_service, words
from trtllm_bls.engines.scripted import Fault, Script, ScriptedEngine
from trtllm_bls.engines.scripted_tokens import hashed
from trtllm_bls.errors import EngineError, InvalidRequest
from trtllm_bls.messages import EngineChunk, EngineRequest
from trtllm_bls.services.tokens import Postprocessor, Preprocessor

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
    """Refused at the door, by the name of the tensor."""
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
    """A text engine that fails, hangs or ends, by lot, after a chance number of steps."""

    name = "bumpy"

    def __init__(self) -> None:
        self.live = 0
        self._engine = ScriptedEngine(hashed(600, first=300), Script(vocab_size=1000))
        self._chance = random.Random(11)
        self.close, self.limits = self._engine.close, self._engine.limits

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        self.live += 1
        fate, steps = self._chance.randrange(4), self._chance.randrange(12)
        try:
            async for chunk in self._engine.generate(request):
                yield chunk
                steps -= 1
                if steps == 0 and fate == 0:
                    raise EngineError("by lot")
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
        assert ask.wait().gone or ask.error is not None or len(ask.said("finish_reason")) == 2


def test_requests_do_not_wait_for_each_other() -> None:
    """One that never comes to an end keeps no other from its answer."""
    with text_service(ScriptedEngine(hashed(600, first=300), Script(vocab_size=1000))) as bench:
        most = np.array([[2**31 - 1]], np.int32)
        endless = bench.accept(bench.text(PROMPT, max_tokens=most, **STREAM)).wait(responses=1)
        short = bench.accept(bench.text(PROMPT, max_tokens=np.array([[3]], np.int32))).wait()
        assert short.said("finish_reason") == [[b"length"]]
        endless.leave()
        assert endless.wait().error is None


# --- preprocessing and postprocessing -------------------------------------------------------


def test_preprocessing_makes_the_orchestrators_prompt() -> None:
    """Ids, lengths, words and the end id of every row; shorter rows are padded."""
    service = Preprocessor(tokenizer(), add_special_tokens=True)
    arrays = service.arrays(
        {
            "QUERY": np.array([[PROMPT.encode()], [b"The"]], np.object_),
            "REQUEST_OUTPUT_LEN": np.array([[5], [6]], np.int32),
            "STOP_WORDS_DICT": np.array([[b"!"], [b""]], np.object_),
        }
    )
    long, short = prompt_ids(), prompt_ids("The")
    pad = tokenizer().pad_id
    assert arrays["INPUT_ID"].tolist() == [list(long), [*short, *[pad] * (len(long) - len(short))]]
    assert arrays["REQUEST_INPUT_LEN"].tolist() == [[len(long)], [len(short)]]
    assert arrays["REQUEST_OUTPUT_LEN"].tolist() == [[5], [6]]
    (stop,) = tokenizer().encode_word("!")
    assert arrays["STOP_WORDS_IDS"].tolist() == [[[stop], [1]], [[0], [-1]]]
    assert arrays["BAD_WORDS_IDS"].shape == (2, 2, 0)
    assert arrays["OUT_END_ID"].tolist() == [[tokenizer().eos_id]] * 2
    assert arrays["EMBEDDING_BIAS"].shape == (2, 0)
    assert all(array.dtype != np.int64 for array in arrays.values())


def test_a_bias_is_dense_when_one_row_asks_for_it() -> None:
    """A token met twice gets both weights; there is a value for each of the model's logits."""
    (a,) = tokenizer().encode_word("a")
    arrays = Preprocessor(tokenizer_of_padded_model(), True).arrays(
        {
            "QUERY": np.array([[b"x"]], np.object_),
            "REQUEST_OUTPUT_LEN": np.array([[5]], np.int32),
            "EMBEDDING_BIAS_WORDS": np.array([[b"a", b"a"]], np.object_),
            "EMBEDDING_BIAS_WEIGHTS": np.array([[1.5, 2.0]], np.float32),
        }
    )
    bias = arrays["EMBEDDING_BIAS"]
    assert bias.shape == (1, tokenizer().vocab_size + 64)
    assert (bias[0, a], bias.sum()) == (3.5, 3.5)


def test_postprocessing_writes_each_beam_to_its_length() -> None:
    """Padding is not text; special tokens are left out unless they are wanted."""
    one, two = tokenizer().encode_word("Hello 世界"), tokenizer().encode_word("Hi")
    end = tokenizer().eos_id
    width = len(one) + 1
    batch = [[*one, end], [*two, *[-1] * (width - len(two))]]
    inputs = {
        "TOKENS_BATCH": np.array([batch], np.int32),
        "SEQUENCE_LENGTH": np.array([[width, len(two)]], np.int32),
    }
    for skip, shown in ((True, "Hello 世界"), (False, "Hello 世界</s>")):
        output = Postprocessor(tokenizer(), skip).arrays(inputs)["OUTPUT"]
        assert [text.decode() for text in output[0]] == [shown, "Hi"]


@pytest.mark.parametrize(
    ("ids", "lengths"), [([[[5, -1]]], [[2]]), ([[[5, 6]]], [[3]]), ([[[5], [6]]], [[1]])]
)
def test_postprocessing_refuses_what_is_no_answer(ids: Any, lengths: Any) -> None:
    """Padding within the length, a length beyond the ids, a length for each beam missing."""
    with pytest.raises(InvalidRequest):
        Postprocessor(tokenizer(), True).arrays(
            {
                "TOKENS_BATCH": np.array(ids, np.int32),
                "SEQUENCE_LENGTH": np.array(lengths, np.int32),
            }
        )
