"""Where an answer reasons, and what follows from it: stops, what the engine is told, the counts."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.helpers.scripted_text import tokenizer
from tests.helpers.small_tokenizers import directory
from tests.models.test_chat_templates import tokenizer_of
from trtllm_bls.text.answer import Answer, TextRules
from trtllm_bls.text.chat_formats import REASONING_TAGS, TOOL_FORMATS, answer_markup
from trtllm_bls.text.prompts import PromptMaker
from trtllm_bls.text.reasoning import ReasoningState
from trtllm_bls.text.tokenizer import Tokenizer, load_tokenizer
from trtllm_bls.types import NO_MARKUP, EngineChunk, FinishReason, Sampling, TextRequest

HELLO = [{"role": "user", "content": "Hello"}]
MESSAGE, CHANNEL, START = "<|message|>", "<|channel|>", "<|start|>assistant"
THOUGHTS, FINAL = f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}final{MESSAGE}"

# Tags, whether the prompt opened them, and pieces of an answer in turn: not the answer, the answer.
ANSWERS = [
    ("think", False, ["<think>Task: add.</think>", "It is 4."]),
    ("think", False, ["\n<think>\nHm.\n</think>", "\n\nDone."]),
    ("think", True, ["Hm. </thi </think>", "Task: done."]),
    ("think", True, ["Hm."]),
    ("think", False, ["", "It <think> is </think> so."]),
    ("think", False, ["", "<thin ice"]),
    ("mistral", False, ["[THINK]a[/THINK]", "b"]),
    ("harmony", False, [f"{THOUGHTS}One.<|end|>{START}{FINAL}", "Two."]),
    ("harmony", False, ["", "Hello"]),
    (
        "harmony",
        False,
        [f"{THOUGHTS}a<|end|>{START}{CHANNEL}commentary to=functions.f{MESSAGE}", "{}"],
    ),
]


@pytest.mark.parametrize(("tags", "opened", "parts"), ANSWERS)
def test_reasoning_is_told_from_the_answer_however_the_text_is_cut(
    tags: str, opened: bool, parts: list[str]
) -> None:
    """What is no answer is the reasoning with its tags and headers."""
    text = "".join(parts)
    for size in (1, 2, 3, 7, len(text)):
        state = ReasoningState(answer_markup(None, REASONING_TAGS[tags], opened=opened))
        pieces = []
        for place in range(0, len(text), size):
            pieces += state.feed(text[place : place + size])
        pieces += state.flush()
        assert "".join(piece.text for piece in pieces) == text
        found = ["".join(p.text for p in pieces if p.is_answer is kind) for kind in (False, True)]
        assert found == (parts if len(parts) == 2 else [*parts, ""])


def test_a_message_after_the_answer_may_reason_again() -> None:
    """Where all text is in messages."""
    state = ReasoningState(answer_markup(None, REASONING_TAGS["harmony"]))
    pieces = state.feed(f"{FINAL}Two.<|end|>{START}{THOUGHTS}Task:")
    assert pieces[-1] == ("Task:", False)
    assert state.is_reasoning


def ended(
    text: str, request: dict[str, Any], rules: dict[str, Any], size: int = 1
) -> tuple[str, Any]:
    """Return an answer's text and ending; the engine says ``text`` in chunks of ``size`` tokens."""
    reader = tokenizer()
    asked = TextRequest(
        request_id="", text="x", max_tokens=500, **{"sampling": Sampling(), **request}
    )
    answer = Answer(
        asked, TextRules(prompt_tokens=1, max_tokens=500, **rules), [reader.detokenizer()]
    )
    ids = reader.encode_word(text)
    chunks = []
    for place in range(0, len(ids), size):
        chunks += answer.feed([EngineChunk(token_ids=ids[place : place + size])])
    chunks += answer.end(FinishReason.END_ID)
    (ending,) = [chunk.ending for chunk in chunks if chunk.ending is not None]
    return "".join(chunk.text for chunk in chunks), ending


THINKS = answer_markup(None, REASONING_TAGS["think"])


@pytest.mark.parametrize("size", [1, 3, 500])
@pytest.mark.parametrize("more", [{}, {"stream": True}, {"return_tokens": True}])
def test_stops_apply_to_the_answer_alone(more: dict[str, Any], size: int) -> None:
    """The model restates the stop while it thinks."""
    text = "<think>Task: add two</think>It is 4. Task: next"
    shown, ending = ended(text, {"stop_words": ("Task:",), **more}, {"markup": THINKS}, size)
    assert shown == "<think>Task: add two</think>It is 4. "
    assert (ending.finish_reason, ending.stop_reason) == (FinishReason.STOP, "Task:")
    shown, ending = ended(text, {"stop_words": ("Task:",), **more}, {"markup": NO_MARKUP}, size)
    assert (shown, ending.reasoning_tokens) == ("<think>", None)


@pytest.mark.parametrize("size", [1, 4])
def test_the_ending_counts_the_tokens_of_the_reasoning(size: int) -> None:
    """Those of the tags too; all of them where the answer ended inside it."""
    reader = tokenizer()
    thoughts = "<think>Hm. So</think>"
    _, ending = ended(f"{thoughts}It is 4.", {}, {"markup": THINKS}, size)
    assert abs(ending.reasoning_tokens - len(reader.encode_word(thoughts))) <= 1
    _, ending = ended("<think>Hm. So it goes", {}, {"markup": THINKS}, size)
    assert ending.reasoning_tokens == ending.completion_tokens


@functools.cache
def thinking_tokenizer() -> Tokenizer:
    """A tokenizer whose template opens reasoning for those that want it."""
    found = load_tokenizer(directory("byte-level"))
    found.hf.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt and thinks %}<think>\n{% endif %}{# </think> #}"
    )
    return found


def test_stops_are_not_sent_to_an_engine_that_may_reason_first() -> None:
    """The engine would stop while it thinks; the text of a completion has no thoughts."""
    maker = PromptMaker(thinking_tokenizer(), add_special_tokens=False)
    chat = TextRequest(
        request_id="", messages=HELLO, max_tokens=5, sampling=Sampling(), stop_words=("dog",)
    )
    text = TextRequest(
        request_id="", text="Hello", max_tokens=5, sampling=Sampling(), stop_words=("dog",)
    )
    assert maker.make(chat).engine_request.stop_sequences == ()
    assert maker.make(chat).markup.reasoning_end == "</think>"
    assert maker.make(text).engine_request.stop_sequences == (maker.tokenizer.stop_ids("dog"),)
    chat.markup = NO_MARKUP  # none is looked for
    assert maker.make(chat).engine_request.stop_sequences == (maker.tokenizer.stop_ids("dog"),)


def test_a_stop_counts_in_text_after_min_tokens() -> None:
    """As in vLLM: not in the text of the last of these tokens."""
    ids = tokenizer().encode_word("the dog the dog")
    stops = {"stop_words": ("dog",)}
    count = len(tokenizer().encode_word("the dog"))
    for least, shown in ((count - 1, "the "), (count, "the dog the ")):
        request = {**stops, "sampling": Sampling(min_tokens=least)}
        assert ended("the dog the dog", request, {})[0] == shown
    assert len(ids) > count


def test_a_stop_token_is_shown_where_stops_are() -> None:
    """As in vLLM; the model's own end ids are not."""
    reader = tokenizer()
    ids = reader.encode_word("the dog")
    stop = ids[-1]
    maker = PromptMaker(reader, add_special_tokens=False)
    for include, shown in ((False, reader.decode(ids[:-1])), (True, "the dog")):
        request = TextRequest(
            request_id="",
            text="x",
            max_tokens=9,
            sampling=Sampling(),
            include_stop=include,
            stop_token_ids=(stop,),
        )
        prompt = maker.make(request)
        rules = {"end_ids": prompt.end_ids, "kept_ids": prompt.kept_ids}
        text, ending = ended("the dog", {"include_stop": include}, rules)
        assert text == shown and ending.finish_reason is FinishReason.END_ID
        # The engine has to send the token: it does not show the one end id that it is told.
        assert (
            stop,
        ) in prompt.engine_request.stop_sequences or prompt.engine_request.end_id == stop
        assert not include or (stop,) in prompt.engine_request.stop_sequences


@pytest.mark.parametrize("name", ["mistral", "gemma4", "kimi_k2", "harmony", "deepseek"])
def test_of_special_tokens_only_the_markers_of_the_format_are_kept(name: str) -> None:
    """Whatever else is a special token stays out of the text."""
    tools = TOOL_FORMATS[name]
    markup = answer_markup(tools, REASONING_TAGS.get(name))
    reader = tokenizer_of(" ".join((*tools.begin, *tools.noise, "<|other|>", '<|"|>')))
    others = reader.encode_word("<|other|><|user|>")
    marker = reader.encode_word(tools.begin[-1])
    assert len(others) == 2 and len(marker) == 1
    detokenizer = reader.detokenizer(True, markup.markers)
    text = detokenizer.feed((*others, *marker, *reader.encode_word(" dog"), *others))
    assert text + detokenizer.flush() == f"{tools.begin[-1]} dog"
