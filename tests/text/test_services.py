"""Text requests as Triton hands them over, and the models on both sides of an ensemble's engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest

from tests.helpers.scripted_text import (
    PROMPT,
    asking,
    prompt_ids,
    saying,
    tokenizer,
    tokenizer_of_padded_model,
    tokenizer_of_two_ends,
)
from tests.helpers.services_on_fake_backend import SILENT, STREAM, text_service, words
from tests.helpers.small_tokenizers import directory
from trtllm_bls.engines.scripted import Fault, Script, ScriptedEngine
from trtllm_bls.engines.scripted_tokens import hashed
from trtllm_bls.errors import EngineError, InvalidRequest
from trtllm_bls.messages import EngineChunk, EngineRequest
from trtllm_bls.prompts import MAX_WORD_CHARS, MAX_WORDS, PromptMaker
from trtllm_bls.services.tokens import Postprocessor, Preprocessor
from trtllm_bls.tokenizer import load_tokenizer

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
    """Refused before any work, by the name of the tensor."""
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
        self.close, self.limits = self._engine.close, self._engine.limits

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
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


def test_preprocessing_tells_no_stop_that_an_engine_would_obey_before_min_tokens() -> None:
    """Neither stop words nor further end ids, just as the orchestrator does."""
    service = Preprocessor(tokenizer_of_two_ends(), add_special_tokens=True)
    inputs = {
        "QUERY": np.array([[PROMPT.encode()]], np.object_),
        "REQUEST_OUTPUT_LEN": np.array([[5]], np.int32),
        "STOP_WORDS_DICT": np.array([[b"!"]], np.object_),
    }
    assert service.arrays(inputs)["STOP_WORDS_IDS"].shape == (1, 2, 2)
    least = {"MIN_TOKENS": np.array([[3]], np.int32)}
    assert service.arrays(inputs | least)["STOP_WORDS_IDS"].shape == (1, 2, 0)


# --- limits ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        ({"stop_words": ("x",) * 101}, "stop_words: 101 words; at most 100 are allowed"),
        ({"stop_words": ("x" * 257,)}, "stop_words: a word of 257 characters; at most 256"),
        ({"bad_words": ("x",) * 1025}, "bad_words: 1025 words; at most 1024 are allowed"),
        ({"bad_words": ("x" * 150_000,)}, "bad_words: a word of 150000 characters; at most 256"),
        ({"embedding_bias": (("x", 1.0),) * 50_000}, "embedding_bias_words: 50000 words; at most"),
        ({"embedding_bias": (("x" * 257, 1.0),)}, "embedding_bias_words: a word of 257 charac"),
    ],
)
def test_lists_are_bounded_before_they_cost_time(lists: dict[str, Any], said: str) -> None:
    """Repeated words count too; the line has the field and its limit."""
    maker = PromptMaker(tokenizer(), True)
    with pytest.raises(InvalidRequest, match=f"^{said}"):
        maker.make(asking(**lists))


def test_the_longest_lists_are_taken() -> None:
    """The limits themselves are allowed."""
    words = tuple(f"{index}".rjust(MAX_WORD_CHARS, "x") for index in range(3)) + ("dog",) * 1021
    prompt = PromptMaker(tokenizer(), True).make(asking(bad_words=words))
    assert len(words) == MAX_WORDS
    assert len(prompt.bad_sequences) <= 2 * 4, "a repeated word is sent once"


@pytest.mark.parametrize("tokens", [3, 2])
def test_a_prompt_too_long_is_refused(tokens: int) -> None:
    """By its tokens, or by its characters alone where even the longest tokens would be too many."""
    maker, taken = PromptMaker(tokenizer(), True), "so that one new token fits"
    assert len(maker.make(asking("The"), len(prompt_ids("The"))).ids) == len(prompt_ids("The"))
    with pytest.raises(InvalidRequest, match=f"^text_input: [0-9]+ tokens; .* {tokens} {taken}"):
        maker.make(asking("The quick brown fox"), tokens)
    with pytest.raises(InvalidRequest, match=f"^text_input: at least [0-9]+ tokens; .* {tokens} "):
        maker.make(asking("x" * 10_000), tokens)


@pytest.mark.parametrize(
    ("request_", "long"),
    [
        ({}, False),
        ({"text": "x" * 4096}, True),
        ({"text": None, "messages": "x" * 4096}, True),
        ({"stop_words": ("x",) * 15}, False),
        ({"stop_words": ("x",) * 100_000}, True),
        ({"bad_words": ("x" * 150_000,)}, True),
        ({"embedding_bias": (("x", 1.0),) * 8, "bad_words": ("x",) * 8}, True),
    ],
)
def test_long_work_is_known_before_it_is_done(request_: dict[str, Any], long: bool) -> None:
    """By the characters of the prompt and of every list, and by the number of words."""
    assert PromptMaker(tokenizer(), True).is_long(asking(**request_)) is long


def test_an_engine_is_told_only_words_that_its_ids_spell() -> None:
    """The text matcher watches for the others; a bad or biased word that no ids spell is none."""
    wordpiece = load_tokenizer(directory("wordpiece"))
    told = PromptMaker(wordpiece, True).make(
        asking(
            "dogs",
            stop_words=("\u2603", "dogs"),
            bad_words=("\u2603",),
            embedding_bias=(("\u2603", 1.0), ("dogs", 2.0)),
            end_id=-1,
        )
    )
    dogs = wordpiece.encode_word("dogs")
    assert told.stop_sequences == ((), dogs)
    assert told.engine_stops == (dogs,)
    assert told.bad_sequences == ()
    assert told.embedding_bias == tuple((token, 2.0) for token in dogs)


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
