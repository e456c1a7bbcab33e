"""Detokenizers that look each token's bytes up in a table: exact, and linear with a small constant.

Two spellings of bytes are known. Byte-level BPE (GPT-2, Llama 3, Qwen) writes each byte as one
printable character. SentencePiece vocabularies write a space as U+2581 and, with byte fallback,
a lone byte as ``<0xNN>``. Either way the bytes of a sequence are UTF-8 cut anywhere, which an
incremental decoder puts together: at most three bytes are ever held back.

The one place where the text differs from the tokenizer's own ``decode``: a run of ``<0xNN>``
tokens that holds whole characters *and* stray bytes (also one that ends inside a character).
``decode`` then spoils the whole run, one U+FFFD per byte, characters shown long ago included; we
keep the characters and spoil the stray bytes only, one U+FFFD each.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trtllm_bls.detokenizer.vocabulary import Vocabulary

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _one_mark_per_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("trtllm_bls.one_mark_per_byte", _one_mark_per_byte)


# --- how a table spells its bytes -----------------------------------------------------------


@dataclass(frozen=True)
class Spelling:
    """How tokens spell bytes, and what happens at the beginning of the text.

    ``strip`` is how many leading spaces of the text are dropped. ``errors`` is the codec error
    handler for stray bytes. ``runs_differ``: see the module's docstring.
    """

    name: str
    to_bytes: Callable[[str], bytes]
    strip: int = 0
    errors: str = "replace"
    runs_differ: bool = False


def _byte_characters() -> dict[str, str]:
    """The GPT-2 alphabet: printable Latin-1 stands for itself, the other bytes from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    spelled = {chr(byte): chr(byte) for byte in plain}
    return spelled | {chr(256 + index): chr(byte) for index, byte in enumerate(others)}


_ALPHABET = _byte_characters()
_TO_LATIN1 = str.maketrans(_ALPHABET)


def _byte_level(token: str) -> bytes:
    if all(character in _ALPHABET for character in token):
        return token.translate(_TO_LATIN1).encode("latin-1")
    return token.encode()  # an added token outside the alphabet is its own text


BYTE_LEVEL = Spelling("byte-level", _byte_level)


def sentencepiece(space: str, strip: int) -> Spelling:
    """Pieces with byte fallback as SentencePiece writes them; ``strip`` leading spaces are not
    text."""

    def to_bytes(token: str) -> bytes:
        found = _BYTE_TOKEN.fullmatch(token)
        return token.replace(space, " ").encode() if found is None else bytes([int(found[1], 16)])

    errors = "trtllm_bls.one_mark_per_byte"
    return Spelling("sentencepiece", to_bytes, strip, errors, runs_differ=True)


# --- the table and the detokenizer ----------------------------------------------------------


class _Table(dict[int, bytes]):
    """Token id to bytes, ``b""`` for a token without text. Filled as ids come; shared by all
    sequences."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        to_bytes: Callable[[str], bytes],
        skipped: frozenset[int],
    ) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._to_bytes = to_bytes
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped else self._vocabulary.token(token_id)
        if token is None:  # not kept, since there is no bound on ids outside the vocabulary
            return b""
        found = self[token_id] = self._to_bytes(token)
        return found


class ByteTable:
    """One tokenizer's table; calling it makes the detokenizer of one sequence."""

    def __init__(
        self, vocabulary: Vocabulary, spelling: Spelling, skip_special_tokens: bool
    ) -> None:
        skipped = vocabulary.special_ids if skip_special_tokens else frozenset()
        self.spelling = spelling
        self.bytes_of: Mapping[int, bytes] = _Table(vocabulary, spelling.to_bytes, skipped)

    def __call__(self) -> ByteTableDetokenizer:
        return ByteTableDetokenizer(self)


class ByteTableDetokenizer:
    """The text of one sequence, by table. See ``Detokenizer``."""

    def __init__(self, table: ByteTable) -> None:
        self._bytes_of = table.bytes_of
        self._errors = table.spelling.errors
        self._held = b""  # the beginning of a character, at most three bytes
        self._strip = table.spelling.strip
        self._begun = not self._strip

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these ids make certain; a character comes with the id that ends it."""
        if not self._begun:
            return "".join([self._feed_beginning(token_id) for token_id in token_ids])
        if len(token_ids) == 1:
            return self._decode(self._bytes_of[token_ids[0]])
        bytes_of = self._bytes_of
        return self._decode(b"".join([bytes_of[token_id] for token_id in token_ids]))

    def feed_one(self, token_id: int) -> tuple[str, bytes]:
        """The same of one id, and its bytes, of which the beginning of a text may lose spaces."""
        before, begun = self._held, self._begun
        text = self.feed((token_id,))
        if begun or _REPLACEMENT in text:
            return text, self._bytes_of[token_id]
        return text, (text.encode() + self._held)[len(before) :]

    def flush(self) -> str:
        """The text held back: U+FFFD for a character that was never finished."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool = False) -> str:
        # This runs once per token, and takes half the time of codecs' incremental decoder.
        known = self._held + data
        text, used = codecs.utf_8_decode(known, self._errors, final)
        self._held = known[used:]
        return text

    def _feed_beginning(self, token_id: int) -> str:
        if self._begun:
            return self._decode(self._bytes_of[token_id])
        text = self._decode(self._bytes_of[token_id])
        while self._strip and text.startswith(" "):
            text, self._strip = text[1:], self._strip - 1
        self._begun = not self._strip or bool(text)
        return text
