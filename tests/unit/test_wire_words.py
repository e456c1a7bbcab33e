"""Word lists on the wire: token ids laid end to end, and where each word ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from trtllm_bls.errors import InvalidRequest
from trtllm_bls.wire.words import dense_bias, pack_words, unpack_words

quick = settings(max_examples=40, deadline=None, derandomize=True, database=None)


@pytest.mark.parametrize(
    ("said", "columns", "ids", "offsets"),
    [
        (((10, 11), (12,)), 0, [10, 11, 12], [2, 3, -1]),
        (((5,),), 0, [5], [1]),
        (((7,), (8,), (9,)), 0, [7, 8, 9], [1, 2, 3]),
        ((), 0, [], []),
        (((), (5,), ()), 0, [5], [1]),
        (((5,),), 3, [5, 0, 0], [1, -1, -1]),
        ((), 2, [0, 0], [-1, -1]),
    ],
)
def test_word_lists_have_the_wires_layout(
    said: tuple[tuple[int, ...], ...], columns: int, ids: list[int], offsets: list[int]
) -> None:
    """All ids end to end above, running end offsets below, then -1; batches are padded."""
    packed = pack_words(said, columns)
    assert packed.dtype == np.int32 and packed.tolist() == [ids, offsets]
    assert unpack_words("stop_words_list", packed) == tuple(word for word in said if word)


@pytest.mark.parametrize(
    ("packed", "said"),
    [
        ([[0], [-1]], ()),
        ([[10, 11, 12, 13], [2, -1, -1, -1]], ((10, 11),)),
        ([[1, 2, 3], [1, 3, -1]], ((1,), (2, 3))),
    ],
)
def test_word_lists_of_others_are_read(packed: Any, said: Any) -> None:
    """An empty list spelt as 0 over -1, and ids after the last offset, which do not count."""
    assert unpack_words("stop_words_list", np.array(packed, np.int32)) == said


@pytest.mark.parametrize(
    "packed",
    [
        [[1, 2], [3, -1]],
        [[1, 2], [0, -1]],
        [[1, 2], [2, 1]],
        [[1, 2], [1, 1]],
        [[1, 2], [-1, 2]],
        [[1, 2], [-2, -1]],
        [[1, 2]],
        [[1], [1], [1]],
        [1, 2],
    ],
)
def test_a_malformed_word_list_is_refused(packed: Any) -> None:
    """Offsets rise strictly, stay within the ids and end in -1 only; the shape is [2, N]."""
    with pytest.raises(InvalidRequest, match="bad_words_list"):
        unpack_words("bad_words_list", np.array(packed, np.int32))


def test_biases_of_one_token_add_up() -> None:
    """Two words may begin with the same token, and a caller may name it beside them."""
    assert dense_bias([(1, 2.0), (3, -1.0), (1, 0.5)], 4).tolist() == [0.0, 2.5, 0.0, -1.0]
