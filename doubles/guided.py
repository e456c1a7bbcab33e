"""Short answers that obey a guide, for engines that are scripts: a text, and no model's choice."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trtllm_bls.engines.grammars import compiled, load_tokenizer
from trtllm_bls.types import TokenIds

_CLOSING = frozenset(b'"}])')


class GuidedAnswers:
    """Answers in the vocabulary of ``tokenizer_file``, a tokenizer.json."""

    def __init__(self, tokenizer_file: Path, vocab_size: int) -> None:
        self._tokenizer = load_tokenizer(tokenizer_file, vocab_size)
        order = sorted(range(vocab_size), key=self._length)
        self._rank = np.argsort(order)

    def answer(self, kind: str, guide: str, most: int) -> TokenIds:
        """As few tokens as come to mind that are a whole text of the guide, at most ``most``.

        Raises ``ValueError`` for a guide that cannot be enforced.
        """
        matcher = compiled(self._tokenizer, kind, guide)
        ids: list[int] = []
        while len(ids) < most and not matcher.is_accepting():
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            if not len(allowed):
                raise ValueError("no token continues what the guide allows")
            ids.append(int(allowed[self._rank[allowed].argmin()]))
            matcher.consume_token(ids[-1])
        return tuple(ids)

    def _length(self, token: int) -> tuple[bool, bool, int]:
        """What ends strings and objects comes first, white space last."""
        text = self._tokenizer.decode_bytes([token])
        return not text.strip(), not _CLOSING.issuperset(text), len(text)
