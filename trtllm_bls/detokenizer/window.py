"""A detokenizer for any tokenizer: it decodes a short window of ids again and again.

The text of new ids is what a window with them has more than the same window without them. Slower
than a table (two decodes per feed), but it asks nothing of the tokenizer beyond ``decode``.
"""

from __future__ import annotations

from collections.abc import Sequence

from trtllm_bls.detokenizer.vocabulary import Vocabulary

_REPLACEMENT = "\ufffd"
# A character has at most four bytes, so 16 ids without text are broken bytes and not the beginning
# of a character. The bound also keeps the cost linear.
MAX_HELD_IDS = 16


class WindowDetokenizer:
    """The text of one sequence, by window. See ``Detokenizer``.

    ``_shown`` ids lead the window: their text is out, and they are there as context, because a
    decoder may treat the first token of a text otherwise.
    """

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skips = skip_special_tokens
        self._ids: list[int] = []
        self._shown = 0
        self._shown_text = ""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these ids make certain; a character comes with the id that ends it."""
        # A window that began with ids without text would decode like the beginning of a text.
        return "".join([self._feed_one(each) for each in token_ids if self._has_text(each)])

    def feed_one(self, token_id: int) -> tuple[str, bytes]:
        """The same of one id, and the text's bytes; those of half a character are unknown."""
        text = self.feed((token_id,))
        return text, text.encode()

    def _feed_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        held = len(self._ids) - self._shown
        if held <= MAX_HELD_IDS and text.endswith(_REPLACEMENT):
            return ""
        new = text[len(self._shown_text) :]
        if new or held > MAX_HELD_IDS:
            self._show(self._ids[self._shown :])
        return new

    def _show(self, token_ids: list[int]) -> None:
        self._ids, self._shown = token_ids, len(token_ids)
        self._shown_text = self._decode(token_ids)

    def _has_text(self, token_id: int) -> bool:
        skipped = self._skips and token_id in self._vocabulary.special_ids
        return not skipped and self._vocabulary.token(token_id) is not None

    def _decode(self, token_ids: list[int]) -> str:
        return self._vocabulary.decode(token_ids, self._skips)

    def flush(self) -> str:
        """The text held back, as it stands."""
        text = self._decode(self._ids)[len(self._shown_text) :]
        self._ids, self._shown, self._shown_text = [], 0, ""
        return text
