"""Which detokenizer fits a tokenizer: read from its decoder, then put to the test.

A tokenizer whose decoder is one of the known shapes gets a byte table, any other the window. At
load the choice is compared with the tokenizer's own ``decode``; on any difference the next safer
one is taken, with a warning in the log.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from trtllm_bls.detokenizer.byte_table import (
    BYTE_LEVEL,
    ByteTable,
    Spelling,
    sentencepiece,
)
from trtllm_bls.detokenizer.vocabulary import Detokenizer, Vocabulary
from trtllm_bls.detokenizer.window import WindowDetokenizer

logger = logging.getLogger(__name__)

_RANDOM_LISTS = 200
_SAMPLES = (
    "The quick brown fox, it's said, jumped over 13 lazy dogs.  Twice!",
    "  def main() -> None:\n\treturn {'a': [1, 2], \"b\": None}\n\n",
    "Ĝis revido; čeština, Ελληνικά, русский язык, العربية, עברית, हिन्दी",
    "你好，世界。日本語のテキスト、한국어 문장",
    "🙂 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u00a0 \u2581 <0x41> ## </w>",
)


def choose_detokenizer(
    vocabulary: Vocabulary, skip_special_tokens: bool
) -> Callable[[], Detokenizer]:
    """What makes the detokenizers of this tokenizer, one per call; costs some milliseconds."""
    spelling = _spelling(vocabulary.decoder)
    if spelling is not None:
        table = ByteTable(vocabulary, spelling, skip_special_tokens)
        difference = _first_difference(table, vocabulary, skip_special_tokens, spelling.runs_differ)
        if difference is None:
            return table
        logger.warning(
            "the %s table differs from this tokenizer's decode (%s); using the slower window",
            spelling.name,
            difference,
        )
    window = partial(WindowDetokenizer, vocabulary, skip_special_tokens)
    difference = _first_difference(window, vocabulary, skip_special_tokens, True)
    if difference is not None:
        logger.warning("streamed text may differ from this tokenizer's decode (%s)", difference)
    return window


# --- reading the decoder --------------------------------------------------------------------


def _spelling(decoder: Mapping[str, Any] | None) -> Spelling | None:
    """The table that fits the decoder as tokenizer.json describes it; ``None``: no table does."""
    match decoder:
        case {"type": "ByteLevel"}:
            return BYTE_LEVEL
        case {"type": "Sequence", "decoders": [only]}:
            return _spelling(only)
        case {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": str(space)}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *rest,
            ],
        } if space:
            match rest:
                case []:
                    return sentencepiece(space, 0)
                case [{"type": "Strip", "content": " ", "start": int(strip), "stop": 0}]:
                    return sentencepiece(space, strip)
    return None


# --- the test at load -----------------------------------------------------------------------


def _first_difference(
    make: Callable[[], Detokenizer],
    vocabulary: Vocabulary,
    skip_special_tokens: bool,
    broken_bytes_differ: bool,
) -> str | None:
    """One line on the first list of ids whose text differs, or ``None``.

    ``broken_bytes_differ``: text with U+FFFD is not compared, as there the two may differ.
    """
    chance = random.Random(0)
    for token_ids in _lists(vocabulary, chance):
        expected = vocabulary.decode(token_ids, skip_special_tokens)
        detokenizer, text, begin = make(), "", 0
        while begin < len(token_ids):
            end = begin + chance.randint(1, 3)
            text += detokenizer.feed(token_ids[begin:end])
            begin = end
        text += detokenizer.flush()
        if text != expected and not (broken_bytes_differ and "\ufffd" in expected):
            return f"ids {token_ids[:8]}: {text[:40]!r} instead of {expected[:40]!r}"
    return None


def _lists(vocabulary: Vocabulary, chance: random.Random) -> Iterator[list[int]]:
    """Real text whole and cut at both ends, then random ids, among them added ones."""
    for sample in _SAMPLES:
        real = list(vocabulary.encode_word(sample))
        yield real
        for _ in range(4):
            begin = chance.randrange(len(real) + 1)
            yield real[begin : chance.randint(begin, len(real))]
    known = range(vocabulary.vocab_size)
    added = sorted(vocabulary.added_ids)
    for length in range(1, 1 + _RANDOM_LISTS if known else 1):
        token_ids = chance.choices(known, k=1 + length % 16)
        if added and length % 4 == 0:
            token_ids.insert(chance.randrange(len(token_ids) + 1), chance.choice(added))
        yield token_ids
