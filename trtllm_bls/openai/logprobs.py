"""Log-probabilities in OpenAI's two shapes: a chat's, and the older one of completions.

The engine gives the chosen token's log-probability, and some engines give those of the likeliest
other tokens. All others, and those of a prompt's tokens, are computed from logits: one row per
token, as wide as the vocabulary, which has to be transferred.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import numpy as np

from trtllm_bls.tokenizer import Tokenizer
from trtllm_bls.types import Array, TextChunk, TokenText

_LOWEST = -9999.0  # JSON has no minus infinity


def spelled(data: bytes) -> str:
    """A token as a string; OpenAI writes one with half characters as ``bytes:\\x…``."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TokenScores:
    """Log-probabilities of a chunk's tokens and, if asked for, of the likeliest alternatives."""

    def __init__(self, tokenizer: Tokenizer, alternatives: int) -> None:
        self._tokenizer = tokenizer
        self._alternatives = alternatives
        self._spelled: dict[int, bytes] = {}

    def of(self, chunk: TextChunk) -> list[tuple[TokenText, list[tuple[bytes, float]]]]:
        """Each token, the prompt's included, with its alternatives, the likeliest first."""
        tokens = chunk.tokens or ()
        rows: list[Array | None] = list(chunk.generation_logits or ())
        echoed = len(tokens) - len(rows) if rows else sum(t.log_prob is None for t in tokens)
        found = []
        for index, token in enumerate(tokens):
            row = None
            if index >= echoed:
                row = rows[index - echoed] if rows else None
            elif index and chunk.context_logits is not None:
                row = chunk.context_logits[index - 1]
                log_probs = _log_softmax(row)
                token = token._replace(log_prob=float(log_probs[token.token_id]))
            told = [(self._bytes(other), log_prob) for other, log_prob in token.top_log_probs]
            found.append((token, told if row is None else self._best(row)))
        return found

    def _best(self, row: Array) -> list[tuple[bytes, float]]:
        if not self._alternatives:
            return []
        log_probs = _log_softmax(row)[: self._tokenizer.vocab_size]
        count = min(self._alternatives, len(log_probs))
        best = np.argpartition(-log_probs, count - 1)[:count]
        best = best[np.argsort(-log_probs[best], kind="stable")]
        return [(self._bytes(int(token)), float(log_probs[token])) for token in best]

    def _bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds in the middle of a text."""
        if token_id not in self._spelled:
            detokenizer = self._tokenizer.detokenizer(skip_special_tokens=False)
            detokenizer.feed(self._tokenizer.encode_word("a"))
            self._spelled[token_id] = detokenizer.feed_one(token_id)[1]
        return self._spelled[token_id]


def chat_logprobs(scores: Sequence[tuple[TokenText, list[tuple[bytes, float]]]]) -> dict[str, Any]:
    """``logprobs`` of a chat's choice; the bytes, joined, are the text."""

    def entry(data: bytes, log_prob: float | None) -> dict[str, Any]:
        return {"token": spelled(data), "logprob": _finite(log_prob), "bytes": list(data)}

    content = [
        entry(token.data, token.log_prob) | {"top_logprobs": [entry(*other) for other in others]}
        for token, others in scores
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """``logprobs`` of a completion's choice; ``text_offset`` goes on from chunk to chunk."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def next(self, scores: Sequence[tuple[TokenText, list[tuple[bytes, float]]]]) -> dict[str, Any]:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        told: dict[str, list[Any]] = {name: [] for name in names}
        for token, others in scores:
            told["tokens"].append(spelled(token.data))
            known = token.log_prob is not None
            told["token_logprobs"].append(_finite(token.log_prob) if known else None)
            both = [*others, (token.data, token.log_prob)]  # the chosen one beside the others
            likely = {spelled(data): _finite(log_prob) for data, log_prob in both}
            told["top_logprobs"].append(likely if others else None)
            told["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(token.data))
        return told if any(told["top_logprobs"]) else {**told, "top_logprobs": None}


def _finite(log_prob: float | None) -> float:
    return _LOWEST if log_prob is None or not log_prob > _LOWEST else log_prob


def _log_softmax(row: Array) -> Array:
    values = np.asarray(row, dtype=np.float64)
    values = values - values.max()
    result: Array = values - np.log(np.exp(values).sum())
    return result
