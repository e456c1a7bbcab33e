"""Token ids to text as they come: exactly the tokenizer's own text, at a cost linear in the ids.

Tokens that spell bytes are looked up in a table. For any other tokenizer, a window of ids is
decoded again and again. ``choose_detokenizer`` finds out which of the two fits. This module knows
no tokenizer library; ``trtllm_bls.text.tokenizer`` implements ``Vocabulary`` over one.

The ``tokenizers`` library's ``DecodeStream`` is not used: it cannot flush, so a text's tail is
lost; after one invalid prefix every further step raises; and a token of a run of U+FFFD costs the
more, the longer the run is.
"""

from __future__ import annotations

import codecs
import logging
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

logger = logging.getLogger(__name__)

_REPLACEMENT = "\ufffd"


class Vocabulary(Protocol):
    """A tokenizer's table and its own decoder."""

    vocab_size: int  # tokens in the table, added ones included
    added_ids: frozenset[int]  # tokens put beside the trained ones
    special_ids: frozenset[int]  # left out of the text when special tokens are skipped

    @property
    def decoder(self) -> Mapping[str, Any] | None:
        """Decoder as tokenizer.json describes it, if the tokenizer has one."""

    def token(self, token_id: int) -> str | None:
        """Return the token as the table spells it; ``None`` for an id outside of the table."""

    def encode_word(self, text: str) -> tuple[int, ...]:
        """Return the ids of ``text`` alone, without special tokens."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of all ids at once, with which every detokenizer must agree."""


class KeepingVocabulary:
    """A vocabulary with special tokens, ``kept_ids``, that always stay in the text."""

    def __init__(self, vocabulary: Vocabulary, kept_ids: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self.vocab_size = vocabulary.vocab_size
        self.added_ids = vocabulary.added_ids
        self.special_ids = vocabulary.special_ids - kept_ids
        self.decoder = vocabulary.decoder
        self.token = vocabulary.token
        self.encode_word = vocabulary.encode_word

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of all ids at once."""
        if skip_special_tokens:
            token_ids = [token_id for token_id in token_ids if token_id not in self.special_ids]
        return self._vocabulary.decode(token_ids, False)


class Detokenizer(Protocol):
    """Turns one sequence's ids into text as they come. One object per sequence.

    All that ``feed`` returned, joined, with ``flush`` at the end equals ``decode`` of all ids,
    however they were cut. What ``feed`` has returned is never taken back. An id outside the
    table has no text.
    """

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these ids make certain; a character comes with its last id."""

    def feed_one(self, token_id: int) -> tuple[str, bytes]:
        """Feed one id, and return its text and the bytes that it stands for in the text."""

    def flush(self) -> str:
        """Return the text held back, as it stands; ends the sequence."""


# --- by table -------------------------------------------------------------------------------
#
# Two spellings of bytes are known. Byte-level BPE (GPT-2, Llama 3, Qwen) writes each byte as one
# printable character. SentencePiece vocabularies write a space as U+2581 and, with byte fallback,
# a lone byte as ``<0xNN>``. Either way the bytes of a sequence are UTF-8 cut anywhere, which an
# incremental decoder puts together: at most three bytes are ever held back.
#
# The one place where the text differs from the tokenizer's own ``decode``: a run of ``<0xNN>``
# tokens that holds whole characters *and* stray bytes (also one that ends inside a character).
# ``decode`` replaces each byte of such a run by U+FFFD, also the bytes of characters that have been
# sent. Here the characters stay, and each stray byte becomes one U+FFFD.


def _one_mark_per_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("trtllm_bls.one_mark_per_byte", _one_mark_per_byte)


_PRINTABLE_BYTES = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of GPT-2's alphabet.

    Printable Latin-1 stands for itself, and the characters from U+0100 on for the other bytes.
    """
    alphabet: dict[str, int] = {}
    next_character = 0x100
    for byte in range(256):
        if byte in _PRINTABLE_BYTES:
            alphabet[chr(byte)] = byte
        else:
            alphabet[chr(next_character)] = byte
            next_character += 1
    return alphabet


_BYTE_OF = _byte_alphabet()


def byte_level(token: str) -> bytes:
    """Return the bytes of a token of byte-level BPE."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()  # an added token outside the alphabet is its own text


def _sentencepiece_bytes(space: str, token: str) -> bytes:
    """Return the bytes of a token of SentencePiece, which writes a space as ``space``."""
    byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
    if byte is not None:
        return bytes.fromhex(byte[1])
    return token.replace(space, " ").encode()


class ByteTable(dict[int, bytes]):
    """The bytes of tokens, by token id; ``b""`` for a token without text.

    It is filled as ids come, and shared by all sequences. ``strip``: the number of leading spaces
    of a text that are dropped. ``byte_fallback``: stray bytes come as ``<0xNN>``, and runs of them
    may differ from ``decode``, as the comment at "by table" says.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        skip_special_tokens: bool,
        to_bytes: Callable[[str], bytes],
        *,
        strip: int = 0,
        byte_fallback: bool = False,
    ) -> None:
        super().__init__()
        self._token = vocabulary.token
        self._skipped_ids: frozenset[int] = frozenset()
        if skip_special_tokens:
            self._skipped_ids = vocabulary.special_ids
        self._to_bytes = to_bytes
        self.strip = strip
        self.byte_fallback = byte_fallback

    def __missing__(self, token_id: int) -> bytes:
        if token_id in self._skipped_ids:
            return b""
        token = self._token(token_id)
        if token is None:  # no entry, since there is no bound on ids outside the vocabulary
            return b""
        data = self._to_bytes(token)
        self[token_id] = data
        return data


class ByteTableDetokenizer:
    """The text of one sequence, by table. See ``Detokenizer``."""

    def __init__(self, table: ByteTable) -> None:
        self._bytes_of = table
        self._errors = "replace"
        if table.byte_fallback:
            self._errors = "trtllm_bls.one_mark_per_byte"
        self._held = b""  # the beginning of a character, at most three bytes
        self._strip = table.strip  # spaces to drop before the text has begun

    def feed(self, token_ids: Sequence[int]) -> str:
        if self._strip:
            return "".join([self._feed_beginning(token_id) for token_id in token_ids])
        if len(token_ids) == 1:
            return self._decode(self._bytes_of[token_ids[0]])
        bytes_of = self._bytes_of
        return self._decode(b"".join([bytes_of[token_id] for token_id in token_ids]))

    def feed_one(self, token_id: int) -> tuple[str, bytes]:
        """Feed one id. At the beginning of a text, its bytes may lose spaces."""
        num_held = len(self._held)
        may_strip = self._strip > 0
        text = self.feed((token_id,))
        if not may_strip or _REPLACEMENT in text:
            return text, self._bytes_of[token_id]
        return text, (text.encode() + self._held)[num_held:]

    def flush(self) -> str:
        """Return U+FFFD for a character that was never finished."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool = False) -> str:
        # This runs once per token, and takes half the time of codecs' incremental decoder.
        data = self._held + data
        text, num_bytes = codecs.utf_8_decode(data, self._errors, final)
        self._held = data[num_bytes:]
        return text

    def _feed_beginning(self, token_id: int) -> str:
        text = self._decode(self._bytes_of[token_id])
        while self._strip and text.startswith(" "):
            text = text[1:]
            self._strip -= 1
        if text:
            self._strip = 0
        return text


# --- by window ------------------------------------------------------------------------------

# A character has at most four bytes, so 16 ids without text are broken bytes, and no beginning of a
# character. The bound also keeps the cost linear.
MAX_HELD_IDS = 16


class WindowDetokenizer:
    """The text of one sequence, for any tokenizer. See ``Detokenizer``.

    A window of ids is decoded with the new ids and without them; the difference is their text. That
    is slower than a table (two decodes per id), but needs nothing of the tokenizer beyond
    ``decode``. The first ``_num_context`` ids of the window are context, whose text has left: a
    decoder may treat the first token of a text differently.
    """

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skips = skip_special_tokens
        self._ids: list[int] = []
        self._num_context = 0
        self._context_text = ""

    def feed(self, token_ids: Sequence[int]) -> str:
        certain = ""
        for token_id in token_ids:
            is_skipped = self._skips and token_id in self._vocabulary.special_ids
            if is_skipped or self._vocabulary.token(token_id) is None:
                # A window that began with ids without text would decode like the beginning of a
                # text.
                continue
            self._ids.append(token_id)
            text = self._decode(self._ids)
            num_held = len(self._ids) - self._num_context
            if num_held <= MAX_HELD_IDS and text.endswith(_REPLACEMENT):
                continue
            new_text = text[len(self._context_text) :]
            certain += new_text
            if new_text or num_held > MAX_HELD_IDS:
                self._ids = self._ids[self._num_context :]
                self._num_context = num_held
                self._context_text = self._decode(self._ids)
        return certain

    def feed_one(self, token_id: int) -> tuple[str, bytes]:
        """Feed one id. The bytes of half a character are unknown."""
        text = self.feed((token_id,))
        return text, text.encode()

    def flush(self) -> str:
        text = self._decode(self._ids)[len(self._context_text) :]
        self._ids = []
        self._num_context = 0
        self._context_text = ""
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._vocabulary.decode(token_ids, self._skips)


# --- which of them fits: read from the decoder, then put to the test at load ------------------

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
    """Return the function that makes this tokenizer's detokenizers. The choice takes milliseconds.

    On any difference from the tokenizer's own ``decode`` the next safer one is taken, with a
    warning in the log.
    """
    table = _table(vocabulary, skip_special_tokens, vocabulary.decoder)
    if table is not None:
        make = partial(ByteTableDetokenizer, table)
        difference = _first_difference(make, vocabulary, skip_special_tokens, table.byte_fallback)
        if difference is None:
            return make
        kind = "byte-level"
        if table.byte_fallback:
            kind = "sentencepiece"
        logger.warning(
            "the %s table differs from this tokenizer's decode (%s); using the slower window",
            kind,
            difference,
        )
    window = partial(WindowDetokenizer, vocabulary, skip_special_tokens)
    difference = _first_difference(window, vocabulary, skip_special_tokens, True)
    if difference is not None:
        logger.warning("streamed text may differ from this tokenizer's decode (%s)", difference)
    return window


def _table(vocabulary: Vocabulary, skip: bool, decoder: Any) -> ByteTable | None:
    """Return the table for a decoder as tokenizer.json describes it; ``None`` if none fits."""
    match decoder:
        case {"type": "ByteLevel"}:
            return ByteTable(vocabulary, skip, byte_level)
        case {"type": "Sequence", "decoders": [only]}:
            return _table(vocabulary, skip, only)
        case {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": str(space)}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *rest,
            ],
        } if space:
            to_bytes = partial(_sentencepiece_bytes, space)
            match rest:
                case []:
                    return ByteTable(vocabulary, skip, to_bytes, byte_fallback=True)
                case [{"type": "Strip", "content": " ", "start": int(strip), "stop": 0}]:
                    return ByteTable(vocabulary, skip, to_bytes, strip=strip, byte_fallback=True)
    return None


def _first_difference(
    make: Callable[[], Detokenizer],
    vocabulary: Vocabulary,
    skip_special_tokens: bool,
    broken_bytes_differ: bool,
) -> str | None:
    """Describe the first list of ids whose text differs, in one line; ``None`` without one.

    ``broken_bytes_differ``: text with U+FFFD is not compared, as there the two may differ.
    """
    rng = random.Random(0)
    for token_ids in _lists(vocabulary, rng):
        expected = vocabulary.decode(token_ids, skip_special_tokens)
        detokenizer = make()
        text = ""
        begin = 0
        while begin < len(token_ids):
            end = begin + rng.randint(1, 3)
            text += detokenizer.feed(token_ids[begin:end])
            begin = end
        text += detokenizer.flush()
        if text != expected and not (broken_bytes_differ and _REPLACEMENT in expected):
            return f"ids {token_ids[:8]}: {text[:40]!r} instead of {expected[:40]!r}"
    return None


def _lists(vocabulary: Vocabulary, rng: random.Random) -> Iterator[list[int]]:
    """Yield ids of real text, whole and cut at both ends, then random ids with added ones."""
    for sample in _SAMPLES:
        real_ids = list(vocabulary.encode_word(sample))
        yield real_ids
        for _ in range(4):
            begin = rng.randrange(len(real_ids) + 1)
            yield real_ids[begin : rng.randint(begin, len(real_ids))]
    table_ids = range(vocabulary.vocab_size)
    if not table_ids:
        return
    added = sorted(vocabulary.added_ids)
    for length in range(1, 1 + _RANDOM_LISTS):
        token_ids = rng.choices(table_ids, k=1 + length % 16)
        if added and length % 4 == 0:
            token_ids.insert(rng.randrange(len(token_ids) + 1), rng.choice(added))
        yield token_ids
