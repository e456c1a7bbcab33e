"""Division of a sequence's text into reasoning and answer.

Stops apply to the answer alone, so the matcher of stops reads this state. The sequence's ending
counts the tokens of the reasoning by it.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from trtllm_bls.types import AnswerMarkup

_MAX_START = 256  # characters of white space in front of a tag
# Where all text is in messages, a header is before each; these texts end one or begin the next.
_HEADER_BEGINS = ("<|channel|>", "<|start|>", "to=")
_MESSAGE_ENDS = ("<|end|>", "<|start|>", "<|channel|>", "<|call|>", "<|return|>")
_THOUGHTS = "<|channel|>analysis"
# Text is divided in parts of so many characters, since each part is read once for each tag in it.
_MAX_PART = 256


class TextPiece(NamedTuple):
    """Text of a sequence; ``is_answer``: neither reasoning nor the tags around it."""

    text: str
    is_answer: bool


class _Stage(Enum):
    """The part of a sequence that its text has reached."""

    START = "start"  # the beginning of the answer, or of a message: reasoning or a header may come
    HEADER = "header"
    REASONING = "reasoning"
    ANSWER = "answer"


class ReasoningState:
    """Divides the text of one sequence into reasoning and answer.

    The prompt or the model begins reasoning, and its tag ends it. Without tags all text is the
    answer.
    """

    def __init__(self, markup: AnswerMarkup) -> None:
        self._markup = markup
        self._stage = _Stage.ANSWER
        if markup.reasoning_end:
            self._stage = _Stage.START
            if markup.is_opened:
                self._stage = _Stage.REASONING
        self._held = ""  # text that is in no piece yet, since it may become a tag
        self._tail = ""  # the end of the last piece, which may be the beginning of a tag
        self._announces_thoughts = False  # the part of the header that has come

    @property
    def is_reasoning(self) -> bool:
        """True while the text is reasoning."""
        return self._stage is _Stage.REASONING

    @property
    def may_change(self) -> bool:
        """True where a tag may still come."""
        return self._stage is not _Stage.ANSWER or bool(self._markup.header_end)

    @property
    def held(self) -> int:
        """Number of characters that have come and are in no piece yet."""
        return len(self._held)

    def feed(self, text: str) -> list[TextPiece]:
        """Return the text in pieces, as far as their kind is known."""
        if not self.may_change:
            return [TextPiece(text, True)] if text else []
        pieces = []
        for begin in range(0, len(text), _MAX_PART):
            pieces += self._divide(text[begin : begin + _MAX_PART])
        return pieces

    def _divide(self, text: str) -> list[TextPiece]:
        pieces = []
        while text:
            if self._stage is _Stage.START:
                piece, text = self._read_start(text)
            elif self._stage is _Stage.REASONING:
                piece, text = self._read_to((self._markup.reasoning_end,), text, _Stage.START)
            elif self._stage is _Stage.HEADER:
                piece, text = self._read_header(text)
            elif self._markup.header_end:
                piece, text = self._read_to(_MESSAGE_ENDS, text, _Stage.START)
            else:
                piece = TextPiece(text, True)
                text = ""
            if piece.text:
                pieces.append(piece)
        return pieces

    def flush(self) -> list[TextPiece]:
        """Return the text held back."""
        held = self._held
        self._held = ""
        return [TextPiece(held, True)] if held else []

    def _read_start(self, text: str) -> tuple[TextPiece, str]:
        self._held += text
        solid = self._held.lstrip()
        is_short = len(self._held) < _MAX_START
        if is_short and not solid:
            return TextPiece("", False), ""
        begins: tuple[str, ...] = (self._markup.reasoning_begin,)
        stage = _Stage.REASONING
        if self._markup.header_end:
            begins = _HEADER_BEGINS
            stage = _Stage.HEADER
        if solid.startswith(begins):
            self._stage = stage
        elif is_short and any(begin.startswith(solid) for begin in begins):
            return TextPiece("", False), ""
        else:
            self._stage = _Stage.ANSWER
        held = self._held
        self._held = ""
        return TextPiece("", False), held

    def _read_header(self, text: str) -> tuple[TextPiece, str]:
        window = self._tail + text
        header, mark, _ = window.partition(self._markup.header_end)
        self._announces_thoughts |= _THOUGHTS in header
        if not mark:
            self._tail = window[1 - max(len(_THOUGHTS), len(self._markup.header_end)) :]
            return TextPiece(text, False), ""
        self._stage = _Stage.ANSWER
        if self._announces_thoughts:
            self._stage = _Stage.REASONING
        end = len(header) + len(mark) - len(self._tail)
        self._tail = ""
        self._announces_thoughts = False
        return TextPiece(text[:end], False), text[end:]

    def _read_to(
        self, ends: tuple[str, ...], text: str, following: _Stage
    ) -> tuple[TextPiece, str]:
        """Read up to the first of these texts, which is part of the piece."""
        is_answer = self._stage is _Stage.ANSWER
        window = self._tail + text
        marks = [end for end in ends if end in window]
        if not marks:
            self._tail = window[-max(map(len, ends)) + 1 :]
            return TextPiece(text, is_answer), ""
        mark = min(marks, key=window.find)
        length = window.find(mark) + len(mark) - len(self._tail)
        self._stage = following
        self._tail = ""
        if mark in _HEADER_BEGINS and self._markup.header_end:
            self._stage = _Stage.HEADER
            self._tail = mark
        return TextPiece(text[:length], is_answer), text[length:]
