"""The example pipelines without Triton, as a user's own tests would run them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.helpers.server_settings import ROOT
from tests.helpers.tool_tokenizer import tool_tokenizer
from trtllm_bls.pipeline import ContentPart, EngineError, testing
from trtllm_bls.pipeline.testing import Double

EXAMPLES = ROOT / "examples"


def example(name: str) -> Any:
    return testing.load(EXAMPLES / name / "1" / "model.py")


def double(name: str, play: Any) -> Double:
    return Double(play, config=EXAMPLES / name / "config.pbtxt")


async def embedded(inputs: Any) -> Any:
    texts = [text.decode() for text in inputs["texts"]]
    vectors = np.zeros((len(texts), 256), np.float32)
    for row, text in enumerate(texts):
        vectors[row, :3] = ["fox" in text, "rules" in text, "wheels" in text]
    return {"vectors": vectors}


def poison(inputs: Any) -> Any:
    return {"score": b"poison" in inputs["text"][0]}


RETRIEVAL = {"embedder": double("embedder", embedded), "classifier": double("classifier", poison)}


def test_retrieval_cites_what_it_found() -> None:
    with testing.serving(example("retrieval"), llm=["It has ", "two."], models=RETRIEVAL) as model:
        answer = model.ask(question="What has wheels?").wait()
        events = model.chat([{"role": "user", "content": "What has wheels?"}], max_tokens=9)
    assert answer.said("text") == [[b"It has "], [b"two."]]
    assert b"bicycle" in answer.said("citation")[0][0]
    assert [event["text"] for event in events if "text" in event] == ["It has ", "two."]
    cited = [event["annotation"]["filename"] for event in events if "annotation" in event]
    assert len(cited) == 2 and "bicycle" in cited[0]
    assert events[-1] == {
        "end": {"finish_reason": "end_id", "prompt_tokens": 1, "completion_tokens": 2}
    }
    assert model.llm.requests[1].max_tokens == 9
    assert "bicycle" in json.dumps(model.llm.requests[1].messages)


def test_the_guard_of_a_chat_ends_the_answer() -> None:
    with testing.serving(
        example("retrieval"), llm=["Take ", "poison", None], models=RETRIEVAL
    ) as model:
        events = model.chat([{"role": "user", "content": "?"}])
    assert events[:2] == [{"text": "Take "}, {"refusal": "I cannot say more about that."}]


def test_an_agent_calls_a_tool_and_ends_with_an_object() -> None:
    call = ["<tool_call>", '{"name": "look_up", "arguments": {"thing": "fox"}}', "</tool_call>"]
    script = [call, ["I know."], ['{"answer": "An animal.", ', '"sure": true}']]
    where = tool_tokenizer()
    with testing.serving(example("agent"), llm=script, tokenizer_dir=where) as model:
        answer = model.ask(question="What is a fox?").wait()
    assert answer.said("looked_up") == [[b"fox"]]
    assert json.loads(answer.said("answer")[0][0]) == {"answer": "An animal.", "sure": True}
    last = model.llm.requests[-1].messages or ()
    assert [each["role"] for each in last] == ["user", "assistant", "tool", "assistant", "user"]
    assert last[2]["content"] == "A small animal of the woods."
    assert model.llm.requests[-1].guide is not None


def test_the_best_of_n_has_the_highest_reward() -> None:
    reward = double("reward", lambda inputs: {"score": len(inputs["text"][0])})
    script = [["a"], ["a longer one"], ["b"]]
    with testing.serving(example("best_of_n"), llm=script, models={"reward": reward}) as model:
        answer = model.ask(prompt="?", n=3).wait()
    assert sorted(answer.said("reward")) == [[1.0], [1.0], [12.0]]
    assert answer.said("text") == [[b"a longer one"]]
    assert {request.sampling.seed for request in model.llm.requests} == {0, 1, 2}


def test_chunks_grow_and_flow_sees_what_came_before() -> None:
    seen: list[tuple[int, int]] = []

    def flow(inputs: Any) -> Any:
        tokens, (offset,) = inputs["tokens"], inputs["offset"]
        seen.append((len(tokens), int(offset)))
        return {"mel": np.repeat(tokens[offset:, None], 2, axis=0) * np.ones(80)}

    models = {
        "flow": double("flow", flow),
        "vocoder": double("vocoder", lambda inputs: {"pcm": inputs["codes"] / 100}),
    }
    with testing.serving(example("cosy"), llm=["x"] * 40, models=models) as model:
        answer = model.ask(text="hello").wait()
    assert seen == [(8, 0), (24, 8), (40, 24)]
    assert answer.said("offset") == [[0], [8], [24]]
    assert sum(len(pcm) for pcm in answer.said("pcm")) == 40


@pytest.mark.parametrize("name", ["retrieval", "agent", "best_of_n", "cosy", "speech", "guard"])
def test_an_example_survives_callers_who_leave(name: str) -> None:
    """32 callers of whom a quarter leave: each other one gets its answer or its error."""
    models = {
        **RETRIEVAL,
        "reward": double("reward", lambda inputs: {"score": 1}),
        "flow": double("flow", lambda inputs: {"mel": np.zeros((2, 80))}),
        "vocoder": double("vocoder", lambda inputs: {"pcm": [0.0]}),
    }
    loaded = example(name)
    first = loaded.inputs[0].name

    def script(request: Any) -> Any:
        asked = request.text or json.dumps(request.messages)
        return ["a", None] if "leave" in asked else ["a", "b", EngineError("lost")]

    parameters: dict[str, Any] = {}
    if name == "agent":
        parameters = {"guided": False, "tool_parser": "hermes"}
    with testing.serving(loaded, llm=script, models=models, **parameters) as model:
        asks = [model.ask(**{first: "leave" if n % 4 == 0 else "stay"}) for n in range(32)]
        for ask in asks[::4]:
            ask.leave()
        for ask in asks:
            ask.wait()
    assert {ask.error and ask.error.message() for ask in asks[1::4]} == {"INTERNAL: lost"}


def test_an_encoders_vectors_stand_where_the_prompt_has_an_image() -> None:
    """Two images of three vectors: six ids above the vocabulary, and a table of six rows."""

    async def encode(inputs: Any) -> Any:
        images = inputs["images"].tolist()
        return {"vectors": [[[len(image)] * 2] * 3 for image in images]}

    content = [ContentPart("image", data=b"a"), "and", ContentPart("image", data=b"bb"), "?"]
    models = {"image_encoder": double("image_encoder", encode)}
    where = tool_tokenizer()
    with testing.serving(
        example("vision"), llm=["A fox."], models=models, tokenizer_dir=where
    ) as model:
        (text, _) = model.chat([{"role": "user", "content": content}])
        (request,) = model.llm.requests
        vocab_size = model.model.llm.first_table_id
    assert text == {"text": "A fox."}
    table = request.extras["prompt_embedding_table"]
    assert table.dtype == np.float16
    assert table.tolist() == [[1, 1]] * 3 + [[2, 2]] * 3
    assert request.extras["prompt_vocab_size"].tolist() == [6]
    ids = [token for token in request.prompt_ids or () if token >= vocab_size]
    assert ids == list(range(vocab_size, vocab_size + 6))


def test_an_image_that_would_have_to_be_fetched_is_refused() -> None:
    content = ["Look", ContentPart("image", url="https://example.com/a.png")]
    with (
        testing.serving(example("vision"), tokenizer_dir=tool_tokenizer()) as model,
        pytest.raises(AssertionError, match="messages: send images as data: URLs"),
    ):
        model.chat([{"role": "user", "content": content}])
