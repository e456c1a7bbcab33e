"""The models on both sides of an ensemble's engine: text to ids, ids to text; their limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.scripted_text import (
    PROMPT,
    asking,
    prompt_ids,
    tokenizer,
    tokenizer_of_padded_model,
    tokenizer_of_two_ends,
)
from tests.helpers.small_tokenizers import directory
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.text.prompts import MAX_WORD_CHARS, MAX_WORDS, PromptMaker
from trtllm_bls.text.tokenizer import load_tokenizer
from trtllm_bls.triton.text_service import Postprocessor, Preprocessor


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
    prompt = PromptMaker(tokenizer(), True).make(asking(bad_words=words)).engine_request
    assert len(words) == MAX_WORDS
    assert len(prompt.bad_sequences) <= 2 * 4, "a repeated word is sent once"


@pytest.mark.parametrize("tokens", [3, 2])
def test_a_prompt_too_long_is_refused(tokens: int) -> None:
    maker, taken = PromptMaker(tokenizer(), True), "are allowed so that one new token fits"
    assert len(maker.make(asking("The"), len(prompt_ids("The"))).engine_request.input_ids) == len(
        prompt_ids("The")
    )
    with pytest.raises(InvalidRequest, match=f"^text_input: [0-9]+ tokens; .* {tokens} {taken}"):
        maker.make(asking("The quick brown fox"), tokens)


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
    assert told.engine_request.stop_sequences == (dogs,)
    assert told.engine_request.bad_sequences == ()
    assert told.engine_request.embedding_bias == tuple((token, 2.0) for token in dogs)


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
        assert output.shape == (2,)
        assert [text.decode() for text in output] == [shown, "Hi"]


def test_postprocessing_writes_row_after_row() -> None:
    """One text for each row's each beam, in one dimension."""
    (a,), (b,) = tokenizer().encode_word("a"), tokenizer().encode_word("b")
    inputs = {
        "TOKENS_BATCH": np.array([[[a, a], [a, b]], [[b, a], [b, b]]], np.int32),
        "SEQUENCE_LENGTH": np.array([[2, 2], [2, 1]], np.int32),
    }
    output = Postprocessor(tokenizer(), True).arrays(inputs)["OUTPUT"]
    assert output.tolist() == [b"aa", b"ab", b"ba", b"b"]


@pytest.mark.parametrize(
    ("ids", "lengths"),
    [
        ([[[5, -1]]], [[2]]),
        ([[[5, 6]]], [[3]]),
        ([[[5, 6]]], [[-1]]),
        ([[[5], [6]]], [[1]]),
    ],
)
def test_postprocessing_refuses_what_is_no_answer(ids: Any, lengths: Any) -> None:
    """Padding within the length, a length beyond the ids or below 0, one for each beam missing."""
    with pytest.raises(InvalidRequest):
        Postprocessor(tokenizer(), True).arrays(
            {
                "TOKENS_BATCH": np.array(ids, np.int32),
                "SEQUENCE_LENGTH": np.array(lengths, np.int32),
            }
        )
