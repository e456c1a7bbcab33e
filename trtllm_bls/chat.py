"""What a chat template is given: conversations that are well formed and spell no control token.

A template writes control tokens (``<|system|>``) around the texts of a conversation. Were a text
to spell one itself, the model would see another turn, which whoever wrote that text could forge.
So ``ChatGuard`` puts ``GUARD`` inside each such spelling before the template runs; the tokenizer
splits the finished prompt there and sees plain text on both sides. Knows nothing of tokenizers but
the tokens it is given.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trtllm_bls.errors import InvalidRequest

GUARD = "\ufdd0"  # a code point that Unicode keeps out of texts for uses such as this

# What templates are written for; any other role must not complete a control token (``<|{role}|>``).
_ROLES = {"system", "developer", "user", "model", "assistant", "tool", "function", "ipython"} | {
    "environment",
    "observation",
    "context",
    "documents",
    "critic",
}
_MAX_ROLE = 64  # characters


class ChatGuard:
    """Keeps texts of a conversation from being read as control tokens.

    ``special``: the tokens that never stand for text. ``added``: further tokens of the tokenizer,
    of which only those count that the template writes itself and does not look for in a message,
    as some do for ``</think>``; an assistant's own message may spell them. ``normalize``: what the
    tokenizer does to a text before it looks for these tokens, if anything.
    """

    def __init__(
        self,
        special: Iterable[str],
        added: Iterable[str],
        template: str,
        normalize: Callable[[str], str] | None = None,
    ) -> None:
        special = {token for token in special if token.strip()}
        written = {
            token
            for token in added
            if token.strip() and token in template and not _looked_for(token, template)
        }
        self._all = special | written
        self._everywhere = _Spellings(self._all, normalize)
        self._by_assistant = _Spellings(special, normalize)

    def messages(self, messages: Any) -> list[dict[str, Any]]:
        """The checked messages; their own texts are as they were unless they spell a token."""
        check_messages(messages)
        for index, message in enumerate(messages):
            self._check_role(index, message["role"])
        return [self._message(message) for message in messages]

    def value(self, field: str, value: Any) -> Any:
        """The same of any other JSON value that the template writes; names ``field`` in errors."""
        return self._guarded(field, value, self._everywhere)

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        spelled = self._by_assistant if message["role"] == "assistant" else self._everywhere
        return {
            key: value if key == "role" else self._guarded("messages", value, spelled)
            for key, value in message.items()
        }

    def _check_role(self, index: int, role: str) -> None:
        if role in _ROLES:
            return
        if not re.fullmatch(r"[\w-]+", role) or len(role) > _MAX_ROLE:
            problem = f"the role of message {index} is {role!r}; use letters, digits, _ and -"
            raise InvalidRequest("messages", problem)
        if found := next((token for token in self._all if role in token), None):
            problem = f"the role {role!r} of message {index} is part of the control token {found}"
            raise InvalidRequest("messages", problem)

    def _guarded(self, field: str, value: Any, spelled: _Spellings) -> Any:
        if isinstance(value, str):
            return spelled.guard(field, value)
        if isinstance(value, Mapping):
            return {
                self._guarded(field, key, spelled): self._guarded(field, item, spelled)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._guarded(field, item, spelled) for item in value]
        return value


class _Spellings:
    """Where texts spell one of some tokens, also in characters that ``normalize`` makes them of."""

    def __init__(self, tokens: Iterable[str], normalize: Callable[[str], str] | None) -> None:
        self._written = _any_of(tokens)
        self._normalize = normalize
        self._normalized = _any_of(map(normalize, tokens)) if normalize else _any_of(())

    def guard(self, field: str, text: str) -> str:
        """The text with ``GUARD`` inside every spelling. Raises ``InvalidRequest`` if it cannot."""
        if GUARD in text:
            raise InvalidRequest(field, f"holds U+{ord(GUARD):04X}, which is not a character")
        while found := self._written.search(text):
            if len(found[0]) == 1:
                raise InvalidRequest(field, f"spells the control token {found[0]}")
            text = self._written.sub(lambda match: match[0][0] + GUARD + match[0][1:], text)
        hidden = self._normalize and self._normalized.search(self._normalize(text))
        if hidden:
            problem = f"spells the control token {hidden[0]} in other characters"
            raise InvalidRequest(field, problem)
        return text


def check_messages(messages: object) -> None:
    """Raises ``InvalidRequest`` for what is no list of messages."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise InvalidRequest("messages", "must be a list of at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            problem = f"message {index} must be an object with a 'role' and a 'content'"
            raise InvalidRequest("messages", problem)
        content = message.get("content", None if "tool_calls" in message else 0)
        if not isinstance(content, (str, list, type(None))):
            problem = f"the content of message {index} must be text or a list of parts"
            raise InvalidRequest("messages", problem)


def _looked_for(token: str, template: str) -> bool:
    """Whether the template compares messages with the token: ``'X' in text``, ``split('X')``."""
    quoted = rf"""['"]{re.escape(token)}['"]"""
    return re.search(rf"{quoted}\s*(not\s+)?in\b|\.\w+\(\s*{quoted}", template) is not None


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches any of them, the longest; nothing where there is none.

    By common beginnings, so that the time does not grow with the number of tokens.
    """
    return re.compile(_alternatives(sorted({token for token in tokens if token})) or "(?!)")


def _alternatives(tokens: list[str]) -> str:
    """Of sorted tokens; an empty one among them makes the rest optional."""
    rest = [token for token in tokens if token]
    if not rest:
        return ""
    groups = itertools.groupby(rest, key=lambda token: token[0])
    found = "|".join(
        re.escape(first) + _alternatives([token[1:] for token in group]) for first, group in groups
    )
    return f"(?:{found}){'?' if len(rest) < len(tokens) else ''}"
