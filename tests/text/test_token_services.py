"""The services on both sides of an ensemble's engine: text to ids, ids to text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.scripted_text import PROMPT, prompt_ids, tokenizer, tokenizer_of_padded_model
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.services.tokens import Postprocessor, Preprocessor


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
