"""Guided decoding: grammars that an answer must follow, as masks over the vocabulary.

``Guides`` compiles what a request asks for. That may take many milliseconds, so never call it on
the engine's thread. ``GrammarMatcher`` is one sequence's place in its grammar: it bars tokens
before one is chosen, and tells when the text is complete. It is llguidance that does the work.

The grammar decides when the end id may come: where the text is complete, and only there. Where
nothing may follow, the sequence ends by itself, whatever its end id and minimum of tokens say.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trtllm_bls.engines.trtllm_fields import guide_of
from trtllm_bls.errors import EngineError, InvalidRequest, Unsupported
from trtllm_bls.types import Array, EngineRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

GUIDE, GUIDE_TYPE = "guided_decoding_guide", "guided_decoding_guide_type"
_KINDS = ("json", "json_schema", "regex", "ebnf_grammar")
_CACHED = 64  # compiled grammars
# llguidance reads numbers as doubles: a larger integer may come out as another, and the smallest
# of 64 bits ends the process.
_MOST_NUMBER = 2**53 - 1
# JSON on one line: a model may otherwise write white space for ever. A schema's own "x-guidance"
# could lift what is enforced, so all of it is set.
_JSON_RULES = {
    "whitespace_pattern": "[ ]?",
    "coerce_one_of": False,
    "lenient": False,
}


class GrammarMatcher:
    """One sequence's place in its grammar; ``ends``: tokens that may end a complete text."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: Collection[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = list(ends)
        self._bits = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
        self.ended = False  # the text is complete, and nothing may follow
        self._update()

    def copy(self) -> GrammarMatcher:
        """Another sequence at the same place."""
        return GrammarMatcher(self._matcher.deep_copy(), self._vocab_size, self._ends)

    def mask(self, row: Array) -> None:
        """Bar, in ``row`` [vocab], every token that the grammar does not allow next."""
        row[~self._allowed] = -np.inf

    def push(self, token: int) -> None:
        """The token now belongs to the text. Raises ``EngineError`` where no text can follow."""
        self._matcher.consume_token(token)
        self._update()

    def _update(self) -> None:
        matcher, bits = self._matcher, self._bits
        complete = not matcher.is_error() and matcher.is_accepting()
        if matcher.is_stopped():
            bits[:] = 0
        else:
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if matcher.is_error():
            raise EngineError(f"the guide cannot be followed: {_first_line(matcher.get_error())}")
        unpacked = np.unpackbits(bits.view(np.uint8), count=self._vocab_size, bitorder="little")
        self._allowed = unpacked.astype(np.bool_)
        self._allowed[self._ends] = False
        if not self._allowed.any():
            if not complete:
                raise EngineError("no token of the vocabulary continues what the guide allows")
            self.ended = True
        self._allowed[self._ends] = complete


class Guides:
    """Compiles the guides of requests to one checkpoint's vocabulary. Safe to share between
    threads."""

    def __init__(self, model_dir: str | Path, vocab_size: int) -> None:
        self._file = Path(model_dir) / "tokenizer.json"
        self._vocab_size = vocab_size
        self._matcher = lru_cache(maxsize=_CACHED)(self._compiled)

    def of(self, request: EngineRequest) -> GrammarMatcher | None:
        """What the request's guided-decoding fields ask for; ``None`` where they are absent.

        Raises ``InvalidRequest`` naming the field, and ``Unsupported`` where the checkpoint's
        vocabulary or this installation cannot.
        """
        guide = guide_of(request.extras, _KINDS, empty=True)
        if guide is None:
            return None
        matcher = self._matcher(guide.kind, "" if guide.kind == "json" else guide.text)
        stops = [stop[0] for stop in request.stop_sequences if len(stop) == 1]
        ends = {token for token in stops if self._tokenizer.is_special_token(token)}
        if request.end_id is not None and request.end_id >= 0:
            ends.add(request.end_id)
        return GrammarMatcher(matcher.deep_copy(), self._vocab_size, ends)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ModuleNotFoundError:
            problem = "needs llguidance: run `pip install 'trtllm-bls[embedded]'`"
            raise Unsupported(GUIDE_TYPE, problem) from None
        try:
            return LLTokenizer(self._file.read_text(encoding="utf-8"), n_vocab=self._vocab_size)
        except Exception as error:  # a missing file, or whatever the library says of it
            problem = f"cannot be kept with {self._file}: {_first_line(str(error))}"
            raise Unsupported(GUIDE_TYPE, problem) from error

    def _compiled(self, kind: str, text: str) -> LLMatcher:
        tokenizer = self._tokenizer
        from llguidance import LLMatcher, LLParserLimits

        try:
            grammar = _grammar(kind, text)
        except ValueError as error:
            raise InvalidRequest(GUIDE, f"is no {kind}: {_first_line(str(error))}") from None
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            problem = f"cannot be enforced: {_first_line(matcher.get_error())}"
            raise InvalidRequest(GUIDE, problem)
        return matcher


def _grammar(kind: str, text: str) -> str:
    """The guide in llguidance's form. Raises ``ValueError`` for one that is not of its kind."""
    from llguidance import LLMatcher, grammar_from

    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "ebnf_grammar":
        grammar = grammar_from("ebnf", text)
        if grammar == text and "%json" in text:  # Lark's own, whose schema nobody has checked
            raise ValueError("%json is not allowed in it; send a json_schema")
        return grammar
    try:
        schema = _schema(text) if kind == "json_schema" else {"type": "object"}
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(schema, (dict, bool)):
        raise ValueError("a schema is an object or a boolean")
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema),
        overrides=_JSON_RULES,  # type: ignore[arg-type]
    )


def _schema(text: str) -> Any:
    integer, other = partial(_exact, int), partial(_exact, float)
    return json.loads(text, parse_int=integer, parse_float=other, parse_constant=other)


def _exact(kind: type[int] | type[float], written: str) -> float:
    number = kind(written)
    if not abs(number) <= _MOST_NUMBER:  # NaN, too
        raise ValueError(f"the number {written[:40]} in it is beyond {_MOST_NUMBER}")
    return number


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0][:300] if lines else "no reason given"
