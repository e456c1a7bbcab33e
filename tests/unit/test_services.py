"""Both services behind a real door: one FINAL on every path, rows, stops, failures, crowds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from fake_pb_utils import Ask, FakeTriton
from saying import PROMPT, orchestrator, prompt_ids, saying, tokenizer

from trtllm_bls.door import Door
from trtllm_bls.engines.scripted import Fault, Script, ScriptedEngine
from trtllm_bls.engines.scripted_tokens import hashed, reciting
from trtllm_bls.errors import EngineError, InvalidRequest
from trtllm_bls.messages import EngineChunk, EngineRequest
from trtllm_bls.services.engine import EngineService
from trtllm_bls.services.text import TextService
from trtllm_bls.services.tokens import Postprocessor, Preprocessor

END = 0
SILENT = Fault(after_tokens=2)  # two tokens, then nothing


class Bench:
    """One service behind a door, on a fake Triton, over a scripted engine."""

    def __init__(self, engine: ScriptedEngine, door: Door, triton: FakeTriton) -> None:
        self.engine, self.door, self.triton = engine, door, triton

    def accept(self, *asks: Ask) -> Ask:
        self.door.accept(asks)
        return asks[0]

    def tokens(self, id: str = "", outputs: tuple[str, ...] = (), **inputs: Any) -> Ask:
        """A request to ``tensorrt_llm`` with the prompt (7, 8)."""
        arrays = {
            "input_ids": np.array([[7, 8]], np.int32),
            "input_lengths": np.array([2], np.int32),
            "request_output_len": np.array([10], np.int32),
            "end_id": np.array([END], np.int32),
            **inputs,
        }
        names = outputs or ("output_ids", "sequence_length")
        return self.triton.ask(arrays, *names, id=id)

    def text(self, *texts: str, outputs: tuple[str, ...] = (), **inputs: Any) -> Ask:
        """A request to ``tensorrt_llm_bls`` with a row for each text."""
        arrays = {
            "text_input": np.array([[text.encode()] for text in texts], np.object_),
            "max_tokens": np.full((len(texts), 1), 100, np.int32),
            **inputs,
        }
        return self.triton.ask(arrays, *(outputs or ("text_output", "finish_reason")))


TRUE = np.array([True])
STREAM = {"stream": np.array([[True]])}


@contextmanager
def serving(engine: Any, handle: Any) -> Iterator[Bench]:
    """Every rule of Triton is kept, and in the end nothing runs any more."""
    triton, left = FakeTriton(), []
    door = Door(triton, handle)

    async def finish() -> None:
        left.extend(asyncio.all_tasks() - {asyncio.current_task()})  # type: ignore[arg-type]
        await engine.close()

    try:
        yield Bench(engine, door, triton)
    finally:
        door.close(finish)
        assert (triton.broken, left, engine.live) == ([], [], 0)


@contextmanager
def engine_door(*answer: int, exclude: bool = True, **script: Any) -> Iterator[Bench]:
    engine = ScriptedEngine(reciting(answer, 2, END), Script(vocab_size=50, **script))
    with serving(engine, EngineService(engine, exclude).handle) as bench:
        yield bench


@contextmanager
def text_door(engine: ScriptedEngine) -> Iterator[Bench]:
    with serving(engine, TextService(orchestrator(engine), engine.close).handle) as bench:
        yield bench


def ids(ask: Ask) -> list[list[int]]:
    """What each response brings, up to its sequence length."""
    lengths = [length[0] for length in ask.said("sequence_length")]
    return [said[0][:n] for said, n in zip(ask.said("output_ids"), lengths, strict=True)]


def words(ask: Ask, row: int | None = None) -> str:
    """The text of one row; of the only one by default."""
    return b"".join(
        response["text_output"][0, 0]
        for response in ask.responses
        if row is None or response["batch_index"][0, 0] == row
    ).decode()


# --- tensorrt_llm ---------------------------------------------------------------------------


def test_tokens_stream_and_the_end_may_bring_none() -> None:
    """The final flag is on the last data response, there is no other after it."""
    with engine_door(3, 4) as bench:
        ask = bench.accept(bench.tokens(streaming=TRUE)).wait()
        assert ids(ask) == [[3], [4], []]


@pytest.mark.parametrize("default", [True, False])
@pytest.mark.parametrize("asked", [None, True, False])
def test_the_prompt_is_in_the_whole_answer_unless_excluded(
    default: bool, asked: bool | None
) -> None:
    """The request's word goes before the model's; a stream never has it."""
    more = {} if asked is None else {"exclude_input_in_output": np.array([asked])}
    with engine_door(3, 4, exclude=default) as bench:
        whole = bench.accept(bench.tokens(**more)).wait()
        streamed = bench.accept(bench.tokens(**more, streaming=TRUE)).wait()
    excluded = default if asked is None else asked
    assert ids(whole) == [[3, 4] if excluded else [7, 8, 3, 4]]
    assert ids(streamed) == [[3], [4], []]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_stop_request_ends_with_what_there_is(streaming: bool) -> None:
    """The stopped request ends normally, without error; the stop itself says nothing."""
    with engine_door(3, 4, 5, 6) as bench:
        bench.engine.fault = SILENT
        extra = {"streaming": np.array([streaming])}
        ask = bench.accept(bench.tokens("mine", **extra))
        other = bench.accept(bench.tokens("other", **extra))
        watched = bench.accept(bench.tokens("watched", streaming=TRUE))
        watched.wait(responses=2)  # so the earlier ones have their two tokens, too
        stop = bench.accept(bench.tokens("mine", stop=TRUE))
        assert (stop.wait().responses, stop.error) == ([], None)
        assert ask.wait().error is None
        assert ids(ask) == ([[3], [4], []] if streaming else [[3, 4]])
        assert not other.responses or streaming
        assert len(bench.engine.cancelled) == 1


def test_a_stop_right_behind_its_request_is_heard() -> None:
    """Even before the engine has been asked; the answer is then an empty one."""
    with engine_door(3, 4) as bench:
        bench.engine.fault = Fault()
        ask, stop = bench.tokens("mine", streaming=TRUE), bench.tokens("mine", stop=TRUE)
        bench.accept(ask, stop)
        assert ids(ask.wait()) == [[]] and ask.error is None
        assert stop.wait().error is None


def test_stopping_what_does_not_run_is_no_error_but_needs_an_id() -> None:
    """It may just have ended; without an id nobody knows what is meant."""
    with engine_door(3) as bench:
        bench.accept(bench.tokens("mine")).wait()
        unknown = bench.accept(bench.tokens("mine", stop=TRUE)).wait()
        assert (unknown.responses, unknown.error) == ([], None)
        nameless = bench.accept(bench.tokens("", stop=TRUE)).wait()
        assert nameless.error is not None and "stop" in nameless.error.message()


def test_of_two_requests_of_one_id_the_newest_is_stopped() -> None:
    """As upstream does; the older one runs on."""
    with engine_door(3, 4) as bench:
        bench.engine.fault = SILENT
        asks = [bench.tokens("mine", streaming=TRUE) for _ in range(2)]
        bench.accept(*asks)
        for ask in asks:
            ask.wait(responses=2)
        bench.accept(bench.tokens("mine", stop=TRUE)).wait()
        asks[1].wait()
        assert len(bench.engine.cancelled) == 1 and bench.engine.live == 1


def rows(**more: Any) -> dict[str, Any]:
    return {
        "input_ids": np.array([[7, 8, 0], [9, 8, 0]], np.int32),
        "input_lengths": np.array([2, 2], np.int32),
        "request_output_len": np.array([10, 10], np.int32),
        "end_id": np.array([END, END], np.int32),
        **more,
    }


def test_rows_are_answered_side_by_side() -> None:
    """Each response says its row; the last row's end ends the request; engine ids differ."""
    names = ("output_ids", "sequence_length", "batch_index")
    rule = reciting((3, 4, 5), 2, END)
    engine = ScriptedEngine(lambda c: rule(c) + c[0] // 9, Script(vocab_size=50))
    with serving(engine, EngineService(engine, True).handle) as bench:
        ask = bench.accept(bench.tokens(outputs=names, **rows(streaming=np.array([True] * 2))))
        found = list(zip([i[0] for i in ask.wait().said("batch_index")], ids(ask), strict=True))
        assert [tokens for row, tokens in found if row == 0] == [[3], [4], [5], []]
        assert [tokens for row, tokens in found if row == 1] == [[4], [5], [6]] + [[1]] * 7
        assert len({request.request_id for request in engine.requests}) == 2


@pytest.mark.parametrize("streaming", [True, False])
def test_one_failing_row_ends_the_others(streaming: bool) -> None:
    """One error for the whole request, after which no row runs on."""
    with engine_door(*[3] * 10) as bench:
        engine = bench.engine
        engine.script = Script(vocab_size=50)
        engine.fault = Fault(error=EngineError("row two"), after_requests=1, after_tokens=2)
        forever = np.array([2**31 - 1] * 2, np.int32)
        inputs = rows(request_output_len=forever, end_id=np.array([-1, -1], np.int32))
        ask = bench.accept(bench.tokens(**inputs, streaming=np.array([streaming] * 2))).wait()
        assert ask.error is not None and ask.error.message() == "INTERNAL: row two"
        assert engine.live == 0


def test_rows_and_sequences_multiply() -> None:
    """Two rows of three sequences have six ends, and then comes FINAL."""
    names = ("output_ids", "sequence_length", "batch_index", "sequence_index")
    with engine_door(3) as bench:
        count = np.array([3, 3], np.int32)
        ask = bench.accept(bench.tokens(outputs=names, **rows(num_return_sequences=count))).wait()
    pairs = zip(ask.said("batch_index"), ask.said("sequence_index"), strict=True)
    assert sorted((row[0], index[0]) for row, index in pairs) == [
        (row, index) for row in range(2) for index in range(3)
    ]


# --- tensorrt_llm_bls -----------------------------------------------------------------------


def test_text_is_answered_whole_or_streamed() -> None:
    """The same text; only the last response says how it ended."""
    with text_door(saying("It wasn't fun!")) as bench:
        whole = bench.accept(bench.text(PROMPT)).wait()
        streamed = bench.accept(bench.text(PROMPT, **STREAM)).wait()
    assert words(whole) == words(streamed) == "It wasn't fun!"
    assert len(whole.responses) == 1 < len(streamed.responses)
    assert whole.said("finish_reason") == streamed.said("finish_reason") == [[b"end_id"]]
    assert "finish_reason" in streamed.responses[-1]


def test_text_rows_are_answered_side_by_side() -> None:
    """Each with its own values; rows are told apart by batch_index."""
    names = ("text_output", "batch_index")
    with text_door(saying("one two three")) as bench:
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
    with text_door(engine) as bench:
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
        (InvalidRequest("input_ids", "no"), "INVALID_ARG: input_ids: no"),
        (KeyError("/secret"), "INTERNAL: unexpected KeyError"),
    ],
)
def test_an_engines_failure_is_told_once_and_without_secrets(
    after: int, error: Exception, said: str
) -> None:
    """Before the first word or in the middle."""
    with text_door(saying("one two three")) as bench:
        bench.engine.fault = Fault(error=error, after_tokens=after)
        ask = bench.accept(bench.text(PROMPT, **STREAM)).wait()
    assert ask.error is not None and ask.error.message().startswith(said)
    assert "secret" not in ask.error.message() and "Traceback" not in ask.error.message()
    assert len(ask.responses) == after


def test_a_bad_request_costs_the_engine_nothing() -> None:
    """Refused at the door, by the name of the tensor."""
    with text_door(saying("no")) as bench:
        ask = bench.accept(bench.text(PROMPT, top_p=np.array([[2.0]], np.float32))).wait()
        assert ask.error is not None and ask.error.code() == "INVALID_ARG"
        assert "top_p" in ask.error.message() and bench.engine.requests == []


def test_a_caller_who_leaves_ends_the_engines_work() -> None:
    """At once, not when the text would have ended."""
    with text_door(saying("one two three")) as bench:
        bench.engine.fault = SILENT
        ask = bench.accept(bench.text(PROMPT, **STREAM)).wait(responses=2)
        ask.leave()
        assert ask.wait().error is None
        assert len(bench.engine.cancelled) == 1


def test_closing_ends_what_runs() -> None:
    """With an error, since the answer is not whole."""
    with text_door(saying("one two three")) as bench:
        bench.engine.fault = SILENT
        ask = bench.accept(bench.text(PROMPT, **STREAM)).wait(responses=2)
    assert ask.wait().error is not None


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
    with text_door(engine) as bench:
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


def test_two_hundred_token_requests_at_once_with_stops_and_leaving() -> None:
    """A stop, a caller leaving and the end may meet in any order."""
    chance = random.Random(6)
    with engine_door(*range(3, 20)) as bench:
        bench.engine.fault = Fault(after_requests=100, after_tokens=3)
        asks, stops = [], []
        for number in range(200):
            asks.append(bench.tokens(f"r{number}", streaming=np.array([chance.random() < 0.7])))
            bench.accept(asks[-1])
            stops.append(bench.tokens(f"r{chance.randrange(number + 1)}", stop=TRUE))
            bench.accept(stops[-1])
            if chance.random() < 0.3:
                chance.choice(asks).leave()
        for number in range(100, 200):
            bench.accept(bench.tokens(f"r{number}", stop=TRUE))
        for ask in asks + stops:
            assert ask.wait().error is None
        assert all(ask.gone or ids(ask) for ask in asks)


def test_requests_do_not_wait_for_each_other() -> None:
    """One that never comes to an end keeps no other from its answer."""
    with text_door(ScriptedEngine(hashed(600, first=300), Script(vocab_size=1000))) as bench:
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
    """A word of several tokens biases each; a token met twice gets both weights."""
    (a,) = tokenizer().encode_word("a")
    arrays = Preprocessor(tokenizer(), True).arrays(
        {
            "QUERY": np.array([[b"x"]], np.object_),
            "REQUEST_OUTPUT_LEN": np.array([[5]], np.int32),
            "EMBEDDING_BIAS_WORDS": np.array([[b"a", b"a"]], np.object_),
            "EMBEDDING_BIAS_WEIGHTS": np.array([[1.5, 2.0]], np.float32),
        }
    )
    bias = arrays["EMBEDDING_BIAS"]
    assert bias.shape == (1, tokenizer().vocab_size)
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
