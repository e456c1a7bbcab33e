"""A detokenizer for any tokenizer: it decodes a short window of ids again and again.

The text of new ids is what a window with them has more than the same window without them. Slower
than a table (two decodes per feed), but it asks nothing of the tokenizer beyond ``decode``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trtllm_bls.detokenizer.vocabulary import Vocabulary

_REPLACEMENT = "\ufffd"
# A character has at most four bytes, so 16 ids without text to show are not an unfinished
# character but broken bytes. The same bound is what keeps the cost linear.
MAX_HELD_IDS = 16


class Window:
    """Makes the window detokenizer of one sequence when called."""

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        skipped = vocabulary.special_ids if skip_special_tokens else frozenset()

        def has_text(token_id: int) -> bool:
            return token_id not in skipped and vocabulary.token(token_id) is not None

        self.has_text = has_text
        self.decode: Callable[[list[int]], str] = lambda token_ids: vocabulary.decode(
            token_ids, skip_special_tokens
        )

    def __call__(self) -> WindowDetokenizer:
        return WindowDetokenizer(self)


class WindowDetokenizer:
    """The text of one sequence, by window. See ``Detokenizer``.

    ``_shown`` ids lead the window: their text is out, and they are there as context, because a
    decoder may treat the first token of a text otherwise.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self._ids: list[int] = []
        self._shown = 0
        self._shown_text = ""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these ids make certain; a character comes with the id that ends it."""
        # Ids without text would leave a window that begins in the middle looking like a beginning.
        self._ids.extend(filter(self._window.has_text, token_ids))
        held = len(self._ids) - self._shown
        if not held:
            return ""
        text = self._window.decode(self._ids)
        if held <= MAX_HELD_IDS and text.endswith(_REPLACEMENT):
            return ""
        new = text[len(self._shown_text) :]
        if new or held > MAX_HELD_IDS:
            self._ids = self._ids[self._shown :]
            self._shown = len(self._ids)
            self._shown_text = self._window.decode(self._ids)
        return new

    def flush(self) -> str:
        """The text held back, as it stands."""
        text = self._window.decode(self._ids)[len(self._shown_text) :]
        self._ids, self._shown, self._shown_text = [], 0, ""
        return text
