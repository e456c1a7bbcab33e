"""How much text a token can stand for, by what its tokenizer does."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

# Steps that leave at least one character for every so many of the text; others may drop any number.
# A composed character is made of at most four: no canonical decomposition is longer.
_SHRINK = {
    **dict.fromkeys(("Prepend", "NFD", "NFKD", "ByteLevel", "Metaspace", "Digits"), 1),
    **dict.fromkeys(("NFC", "NFKC"), 4),
}


def most_characters(backend: Any) -> int | None:
    """The most characters of a text that one token stands for; ``None``: there may be no limit.

    A limit is known for byte-pair encoding that can spell every byte, where no step before it
    drops text: a token then stands for its own spelling at most. Elsewhere a token may stand for
    any number of characters: blanks and control characters vanish, an unknown word is one token
    however long it is, and an added token may swallow the blanks beside it.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    added = backend.get_added_tokens_decoder().values()
    steps = [*_steps(backend.normalizer), *_steps(backend.pre_tokenizer)]
    shrinks = [_shrink(step) for step in steps]
    if None in shrinks or any(token.lstrip or token.rstrip for token in added):
        return None
    vocabulary, model = backend.get_vocab(), backend.model
    byte_tokens = {f"<0x{byte:02X}>" for byte in range(256)}
    if any(step["type"] == "ByteLevel" for step in steps):
        byte_tokens = set(ByteLevel.alphabet())
    elif not getattr(model, "byte_fallback", False):
        return None
    if type(model).__name__ != "BPE" or not byte_tokens <= vocabulary.keys():
        return None
    spellings = [*vocabulary]
    if backend.normalizer is not None:  # an added token may be looked for in normalised text
        spellings += [backend.normalizer.normalize_str(token.content) for token in added]
    return max(map(len, spellings)) * math.prod(shrink for shrink in shrinks if shrink)


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer as tokenizer.json tells them, in one list."""
    waiting = [] if part is None else [json.loads(part.__getstate__())]
    while waiting:
        step = waiting.pop()
        waiting += step.get("normalizers", step.get("pretokenizers", ()))
        if step["type"] != "Sequence":
            yield step


def _shrink(step: Mapping[str, Any]) -> int | None:
    """How many characters the step may make one of; ``None``: any number."""
    if step["type"] == "Replace":
        found = step["pattern"].get("String", "")
        return 1 if 0 < len(found) <= len(step["content"]) else None
    if step["type"] == "Split":
        return None if step["behavior"] == "Removed" else 1
    return _SHRINK.get(step["type"])
