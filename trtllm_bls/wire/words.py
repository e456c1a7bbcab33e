"""Word lists as token ids in the ``[2, N]`` layout of stop and bad words, and biases of tokens.

Row 0 has the ids of all words end to end. Row 1 has each word's end offset in row 0, then -1.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from trtllm_bls.errors import InvalidRequest
from trtllm_bls.types import Array, TokenIds


def pack_words(words: Sequence[TokenIds], columns: int = 0) -> Array:
    """Return the ``[2, N]`` layout as INT32. N is the number of ids, or ``columns`` if larger."""
    words = [word for word in words if word]
    ids = array("i", itertools.chain.from_iterable(words))
    width = max(len(ids), columns)
    packed = np.zeros((2, width), dtype=np.int32)
    packed[1] = -1
    packed[0, : len(ids)] = ids
    packed[1, : len(words)] = np.cumsum([len(word) for word in words])
    return packed


def unpack_words(name: str, packed: Array) -> tuple[TokenIds, ...]:
    """Return the words of one batch row.

    Raises ``InvalidRequest`` for a layout that the engine would refuse.
    """
    if packed.ndim != 2 or packed.shape[0] != 2:
        raise InvalidRequest(name, f"shape {list(packed.shape)} is not [2, N]")
    ids, offsets = packed.tolist()
    words: list[TokenIds] = []
    start = 0
    is_padding = False
    for offset in offsets:
        if offset == -1:
            is_padding = True
        elif is_padding or offset > len(ids) or offset <= start:
            raise InvalidRequest(
                name,
                f"end offsets {offsets} must rise strictly, stay within {len(ids)} and then be -1",
            )
        else:
            words.append(tuple(ids[start:offset]))
            start = offset
    return tuple(words)


def dense_bias(bias: Iterable[tuple[int, float]], vocab_size: int) -> Array:
    """Return an ``embedding_bias`` as one number for each token id."""
    weights = np.zeros(vocab_size, np.float32)
    for token_id, weight in bias:
        weights[token_id] += weight
    return weights
