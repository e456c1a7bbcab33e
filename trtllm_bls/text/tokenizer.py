"""One tokenizer directory: text to ids, messages to a prompt, and the ids that end a sequence.

Owns all use of ``transformers``, which is imported when a directory is loaded, and without torch:
the processes that handle text run where torch is absent or would cost seconds and memory.
``detokenizer`` makes text of ids; this module must not know how.

A chat template writes control tokens (``<|system|>``) around the texts of a conversation. If a text
spelled one itself, the model would see another turn, which the text's author could forge. So
``ChatGuard`` puts ``GUARD`` inside each such spelling before the template runs; the tokenizer
splits the finished prompt there and sees plain text on both sides.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import logging
import os
import re
import struct
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from trtllm_bls.errors import InvalidRequest, TokenizerError, half_character
from trtllm_bls.garbage import no_collections
from trtllm_bls.text.checkpoint_dir import (
    check_tokenizer,
    config_vocab_size,
    generation_eos,
    one_line,
)
from trtllm_bls.text.detokenizer import Detokenizer, KeepingVocabulary, choose_detokenizer
from trtllm_bls.text.json_values import MAX_DEPTH, SURROGATES, json_texts
from trtllm_bls.text.template_trial import problem_of
from trtllm_bls.text.transformers_import import import_transformers
from trtllm_bls.types import ChatOptions, PromptIds

logger = logging.getLogger(__name__)

_PLAIN_CHAT = ChatOptions()
_PROMPT_END = 256  # characters, more than any tag has
_MAX_ID = 2**31 - 1  # ids are int32 on the wire
# Characters. Shorter texts are tokenised faster than the interpreter's lock is released and taken.
_SHORT_TEXT = 1024
_MANY_TO_PACK = 1 << 14  # ids, which are packed in a fraction of a millisecond


# --- conversations --------------------------------------------------------------------------

GUARD = "\ufdd0"  # a code point that Unicode keeps out of texts for uses such as this

# The roles that templates are written for. A template may write any other one inside brackets
# (``<|{role}|>``), so it must be no part of a control token.
_ROLES = {
    *("system", "developer", "user", "model", "assistant", "tool", "function", "ipython"),
    *("environment", "observation", "context", "documents", "critic"),
}
_MAX_ROLE = 64  # characters


class ChatGuard:
    """Keeps texts of a conversation from being read as one of ``tokens``.

    ``normalize``: the tokenizer's normalizer, which may make a token of other characters; ``None``
    if the tokenizer looks for tokens in the text as it is.
    """

    def __init__(self, tokens: Collection[str], normalize: Callable[[str], str] | None) -> None:
        self.tokens = tokens
        self._pattern = _any_of(tokens)
        self._normalize = normalize
        self._normalized_pattern = _any_of(())
        if normalize is not None:
            self._normalized_pattern = _any_of(map(normalize, tokens))

    def guard(self, field: str, value: Any) -> Any:
        """Return a JSON value with ``GUARD`` inside every spelling; the value itself has none.

        Raises ``InvalidRequest`` if a spelling cannot be guarded, or the value is nested too
        deeply.
        """
        texts = json_texts(value)
        if texts is not None and not self._is_suspect(texts):
            return value
        return self.guard_nested(field, value)

    def guard_nested(self, field: str, value: Any, max_depth: int = MAX_DEPTH) -> Any:
        """Guard text by text, as ``guard`` does with a value that is suspect."""
        if isinstance(value, (Mapping, list, tuple)) and not max_depth:
            raise InvalidRequest(field, f"is nested more than {MAX_DEPTH} levels deep")
        if isinstance(value, Mapping):
            guarded = {}
            for key, item in value.items():
                guarded_key = self.guard_nested(field, key)
                guarded[guarded_key] = self.guard_nested(field, item, max_depth - 1)
            return guarded
        if isinstance(value, (list, tuple)):
            return [self.guard_nested(field, item, max_depth - 1) for item in value]
        if isinstance(value, str):
            return self._guard_text(field, value)
        return value

    def _guard_text(self, field: str, text: str) -> str:
        if GUARD in text:
            raise InvalidRequest(field, f"holds U+{ord(GUARD):04X}, which is not a character")
        # Tokens may overlap in a text, and one pass guards no two that do.
        while match := self._pattern.search(text):
            if len(match[0]) == 1:
                raise InvalidRequest(field, f"spells the control token {match[0]}")
            text = self._pattern.sub(lambda match: match[0][0] + GUARD + match[0][1:], text)
        self._check_normalized(field, text)
        return text

    def _is_suspect(self, texts: Sequence[str]) -> bool:
        """True if one of the texts may have to be guarded or refused."""
        # One search is many times as fast as one for each text. No token has ``GUARD`` in it, so
        # two texts spell none together.
        joined = GUARD.join(texts)
        if joined.count(GUARD) >= max(1, len(texts)) or self._pattern.search(joined):
            return True
        if self._normalize is None:
            return False
        if SURROGATES.search(joined):
            return True
        return any(self._normalized_pattern.search(self._normalize(text)) for text in texts)

    def guard_parts(self, parts: list[Any]) -> list[Any]:
        """Return the guarded parts of one content; ``parts`` are guarded one by one already.

        A template writes them one after the other, some without the white space around. So if
        their texts spell a token together, ``GUARD`` stands between them.
        """
        parts = list(parts)
        texts: dict[int, str] = {}
        for index, part in enumerate(parts):
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                texts[index] = text
        if any(map(self._pattern.search, _joined(texts.values()))):
            for index in list(texts)[1:]:
                texts[index] = GUARD + texts[index]
        for joined in _joined(texts.values()):
            self._check_normalized("messages", joined)
        for index, text in texts.items():
            if isinstance(parts[index], dict):
                parts[index] = {**parts[index], "text": text}
            else:
                parts[index] = text
        return parts

    def _check_normalized(self, field: str, text: str) -> None:
        if self._normalize is None:
            return
        _check_unicode(text, field)
        if token := self._normalized_pattern.search(self._normalize(text)):
            problem = f"spells the control token {token[0]} in other characters"
            raise InvalidRequest(field, problem)


def _joined(texts: Collection[str]) -> tuple[str, str]:
    """Join texts, with the white space around each and without it."""
    return "".join(texts), "".join(map(str.strip, texts))


def _check_messages(messages: object, tokens: Collection[str]) -> None:
    """Check that ``messages`` are messages, and that no role can become one of ``tokens``.

    Raises ``InvalidRequest``.
    """
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
        role = message["role"]
        if role in _ROLES:
            continue
        if not re.fullmatch(r"[\w-]+", role) or len(role) > _MAX_ROLE:
            problem = f"the role of message {index} is {role!r}; use letters, digits, _ and -"
            raise InvalidRequest("messages", problem)
        for token in tokens:
            if role in token:
                problem = (
                    f"the role {role!r} of message {index} is part of the control token {token}"
                )
                raise InvalidRequest("messages", problem)


class _CallForm(NamedTuple):
    """A form in which templates take an assistant's calls.

    ``text_arguments``: the arguments are JSON text. ``null_content``: the content beside calls is
    null.
    """

    text_arguments: bool
    null_content: bool


_CALL_FORMS = (  # the usual form comes first
    *(_CallForm(False, False), _CallForm(True, False)),
    *(_CallForm(False, True), _CallForm(True, True)),
)


def _calls_of(message: Mapping[str, Any]) -> list[Any]:
    """Return the calls of a message; empty if it is no assistant's or has none."""
    calls = message.get("tool_calls")
    if message["role"] == "assistant" and isinstance(calls, list):
        return calls
    return []


def without_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without its calls."""
    plain = dict(message)
    plain.pop("tool_calls", None)
    return plain


def _calls_in_form(
    messages: Iterable[Mapping[str, Any]], form: _CallForm
) -> Iterator[Mapping[str, Any]]:
    """Write calls in this form. A content that must be null becomes a message before."""
    for message in messages:
        calls = _calls_of(message)
        if not calls:
            yield message
            continue
        content = message.get("content") or ""
        if form.null_content:
            if content:
                yield without_calls(message)
            content = None
        calls = [_call_in_form(call, form) for call in calls]
        yield {**message, "content": content, "tool_calls": calls}


def _with_description(tool: Any) -> Any:
    """Return a tool with a description, whose absence some templates take for an error."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or "description" in function:
        return tool
    return {**tool, "function": {**function, "description": ""}}


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with reasoning where the template of gpt-oss looks for it.

    That template takes no content beside reasoning and calls, so the content joins the reasoning.
    """
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if message["role"] != "assistant" or not reasoning:
        return message
    content = message.get("content")
    if message.get("tool_calls") and isinstance(content, str):
        reasoning = "\n\n".join(filter(None, [reasoning, content]))
        content = ""
    return {**message, "thinking": reasoning, "content": content}


def _one_call_a_turn(messages: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Give each further call of a turn a turn of its own, with its results behind it."""
    unread = deque(messages)
    while unread:
        message = unread.popleft()
        calls = _calls_of(message)
        if not calls:
            yield message
            continue
        places: dict[str, int] = {}  # the place of the first call with an id
        for place, call in enumerate(calls):
            call_id = str(call.get("id")) if isinstance(call, Mapping) else ""
            places.setdefault(call_id, place)
        results: list[list[Any]] = [[] for _ in calls]
        while unread and unread[0]["role"] == "tool":
            result = unread.popleft()
            results[places.get(str(result.get("tool_call_id")), -1)].append(result)
        for call, results_of_call in zip(calls, results, strict=True):
            yield {**message, "tool_calls": [call]}
            yield from results_of_call
            message = {"role": "assistant", "content": ""}


def _call_in_form(call: Any, form: _CallForm) -> Any:
    """Return a call with arguments in this form; a call that has no arguments as it is."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    arguments = function["arguments"]
    is_text = isinstance(arguments, str)
    with suppress(ValueError, RecursionError):
        if form.text_arguments and not is_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif is_text and not form.text_arguments:
            parsed = json.loads(arguments)
            if isinstance(parsed, dict):
                arguments = parsed
    return {**call, "function": {**function, "arguments": arguments}}


def _calls_and_results(calls: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an assistant's turn with calls of these names and arguments, and their results.

    All results have the first name, so that a template that shows it has shown no other call.
    """
    tool_calls = []
    results = []
    for index, (name, arguments) in enumerate(calls.items()):
        call_id = f"probecal{index}"  # some templates want ids of nine characters
        function = {"name": name, "arguments": arguments}
        tool_calls.append({"id": call_id, "type": "function", "function": function})
        result = {"role": "tool", "name": next(iter(calls)), "tool_call_id": call_id}
        results.append({**result, "content": "b"})
    return [{"role": "assistant", "content": "", "tool_calls": tool_calls}, *results]


_VALUES = {"number": 0, "integer": 0, "boolean": True, "array": [], "object": {}, "null": None}


def _usual_value(schema: Mapping[str, Any]) -> Any:
    """Return a JSON value that the schema's ``enum`` or type allows, else a text."""
    if schema.get("enum"):
        return next(iter(schema["enum"]))
    kind = schema.get("type")
    return _VALUES.get(kind, "a") if isinstance(kind, str) else "a"


def _template_writes(template: str, token: str) -> bool:
    """True if the template has the token for more than a search in messages.

    Such searches are ``'X' in text`` and ``split('X')``.
    """
    quoted = rf"""['"]{re.escape(token)}['"]"""
    search = re.search(rf"{quoted}\s*(not\s+)?in\b|\.\w+\(\s*{quoted}", template)
    return token in template and search is None


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of the tokens; nothing if there is none.

    The tokens are joined by their common beginnings, so that the time of a search does not grow
    with their number.
    """
    return re.compile(_alternatives(sorted(set(filter(None, tokens)))) or "(?!)")


def _alternatives(tokens: list[str]) -> str:
    """Return the pattern of sorted tokens; an empty one among them makes the others optional."""
    solid = list(filter(None, tokens))
    if not solid:
        return ""
    patterns = []
    for char, group in itertools.groupby(solid, key=lambda token: token[0]):
        patterns.append(re.escape(char) + _alternatives([token[1:] for token in group]))
    optional = "?" if len(solid) < len(tokens) else ""
    return f"(?:{'|'.join(patterns)}){optional}"


# --- fastokens ------------------------------------------------------------------------------

# Texts that may stand beside an added token: white space of every kind, parts of words and of
# tokens, and marks that join the text before them.
_NEIGHBOURS = (
    *("", "  ", "\r\n\n", "word ", " Word", "'s", "##a", "e\u0301", "|>", "\n\n\n", "13"),
    *" \n\t\u3000\xa0\u2028a1_.\u2581\u0301\u200d\u203f\U0001f3fd\u6f22<[\ufffd",
)
_NUM_SURROGATES = 0x800  # from 0xD800 on: no characters, and UTF-8 cannot write them
_SAMPLE_SIZE = 5000  # characters of all Unicode; tokens of the table; parts of texts


class FastEncoder:
    """An encoder by ``fastokens``, which takes a fraction of the time of ``tokenizers``.

    ``backend``: the tokenizer of ``tokenizers`` whose ids it gives. Raises ``ImportError`` without
    the package, and ``ValueError`` if it gives other ids, or might. Safe to share between threads,
    and with forks of this process.
    """

    def __init__(self, backend: Any) -> None:
        # Threads of its own would take the cores of other requests. A text gains little by them.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        from fastokens import Tokenizer as FastTokenizer

        if backend.truncation or backend.padding or getattr(backend.model, "dropout", None):
            raise ValueError("the ids are cut, filled or varied")
        added = list(backend.get_added_tokens_decoder().values())
        if not _is_order_irrelevant(added):
            raise ValueError("it may find other added tokens in a text")
        self._fast = FastTokenizer.from_json_str(backend.to_str())
        self._begin = array("i", backend.encode("").ids)
        # Begin and end ids stand around a text whatever it is, so a short one shows them.
        for text, special in (("word", True), *((text, False) for text in _probes(backend, added))):
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=special)
            if self.encode([text], special)[0].tolist() != encoding.ids:
                raise ValueError("it gives other ids")

    def encode(self, texts: Sequence[str], special: bool) -> list[array[int]]:
        """Return the ids of each text, without the interpreter's lock."""
        data, bounds = self._fast.encode_batch_flat(texts)
        places = [4 * place for (place,) in struct.iter_unpack("=Q", bounds)]
        begin_ids = self._begin.tobytes() if special else b""
        return [array("i", begin_ids + data[a:b]) for a, b in itertools.pairwise(places)]


def _is_order_irrelevant(added: Collection[Any]) -> bool:
    """True if a text has the same added tokens in whichever order a tokenizer looks for them.

    ``tokenizers`` looks for the normalized ones in the texts between the others. Only behind a
    match does it take the white space beside a token along, or refuse a part of a word.
    ``fastokens`` looks for all of them at once, from left to right.
    """
    strips = any(token.lstrip or token.rstrip for token in added)
    plain: list[str] = []
    normalized: list[str] = []
    for token in added:
        text = token.content
        if token.single_word or (strips and text.strip() != text):
            return False
        if token.normalized:
            normalized.append(text)
        else:
            plain.append(text)
    plain_pattern = _any_of(plain)
    plain_begins: set[str] = set()
    for text in plain:
        plain_begins.update(itertools.accumulate(text))
    for text in normalized:
        ends = (text[begin:] for begin in range(1, len(text)))
        if plain_pattern.search(text) or not plain_begins.isdisjoint(ends):
            return False
    return True


def _probes(backend: Any, added: Collection[Any]) -> Iterator[str]:
    """Yield texts that would show a difference between two tokenizers.

    They are each special token with all that may stand beside it, the other added tokens,
    characters of all Unicode, tokens of the table, and a mixture.
    """
    chance = Random(0)
    names: list[str] = []
    special: list[str] = []
    for token in added:
        names.append(token.content)
        if token.special:
            special.append(token.content)
    names = names or [""]
    yield "".join(text + name + text for name, text in itertools.product(special, _NEIGHBOURS))
    yield "".join(name + chance.choice(_NEIGHBOURS) for name in names)
    places = chance.choices(range(0x3FFFF - _NUM_SURROGATES), k=_SAMPLE_SIZE)
    characters = (chr(at if at < 0xD800 else at + _NUM_SURROGATES) for at in places)
    yield "".join(character + chance.choice(_NEIGHBOURS) for character in characters)
    token_ids = chance.choices(range(backend.get_vocab_size()), k=_SAMPLE_SIZE)
    tokens = [token for token in map(backend.id_to_token, token_ids) if token is not None]
    if backend.decoder is None:
        yield "".join(tokens)
    else:
        yield backend.decoder.decode(tokens)
    mixture = (*_NEIGHBOURS, *map(chr, range(128)), *names)
    yield "".join(chance.choices(mixture, k=_SAMPLE_SIZE))


# --- one directory --------------------------------------------------------------------------


class Tokenizer:
    """A loaded tokenizer; made by ``load_tokenizer``. Safe to share between threads.

    ``vocab_size``: the number of tokens in the table, added ones included. ``model_vocab_size``:
    the number of the model's logits, which may be more (padded embeddings). ``first_table_id``:
    from here on, an id stands for a row of a prompt embedding table. ``end_ids``: all ids that end
    a sequence, ``eos_id`` first. ``eos_id``: ``None`` if the directory names none. ``pad_id``: the
    directory's, else ``eos_id``. ``hf``: the tokenizer of ``transformers``.
    """

    def __init__(
        self,
        hf: Any,
        generation_eos: tuple[int, ...] = (),
        config_vocab_size: int = 0,
    ) -> None:
        self.hf = hf
        self._backend = getattr(hf, "backend_tokenizer", None)  # tokenizers in Python have none
        if self._backend is not None:
            # The first encode drops the file's settings for truncation and padding. Doing it here
            # means that nothing changes the tokenizer later, when several threads share it.
            hf.encode("", verbose=False)
            # Start the library's threads now, before this process is pinned to a core.
            self._backend.encode_batch_fast([""])
        self._fast: FastEncoder | None = None
        with suppress(ImportError):  # the package is an option
            self._fast = self._fast_encoder()
        self._has_warned_of_bos = False
        self._bos_id: int | None = hf.bos_token_id  # transformers looks it up anew each time
        self.vocab_size = len(hf)
        self.model_vocab_size = max(self.vocab_size, config_vocab_size)
        self.first_table_id = config_vocab_size or self.vocab_size
        self.added_ids: frozenset[int] = frozenset(hf.added_tokens_decoder)
        added = hf.added_tokens_decoder.items()
        self.special_ids = frozenset(token_id for token_id, token in added if token.special)
        end_ids = list(generation_eos)
        if hf.eos_token_id is not None:
            end_ids.insert(0, int(hf.eos_token_id))
        self.end_ids: tuple[int, ...] = tuple(dict.fromkeys(end_ids))
        self.eos_id = next(iter(self.end_ids), None)
        self.pad_id: int | None = self.eos_id
        if hf.pad_token_id is not None:
            self.pad_id = int(hf.pad_token_id)
        self._make_keeping: dict[str, Callable[[], Detokenizer]] = {}  # by markers of formats
        self._make = {skip: choose_detokenizer(self, skip) for skip in (True, False)}
        word = self.encode_word("a")
        # These stand for all texts that may come before a word.
        self._word_contexts = [word]
        if self.eos_id is not None:
            self._word_contexts.append((*word, self.eos_id))

    def _fast_encoder(self) -> FastEncoder | None:
        """Return the encoder by ``fastokens`` if it gives the same ids. Raises ``ImportError``."""
        if self._backend is None:
            return None
        try:
            return FastEncoder(self._backend)
        except ValueError as error:
            logger.info("fastokens is not used for this tokenizer: %s", error)
            return None

    # --- text to ids ---

    def encode(self, text: str, add_special_tokens: bool, field: str = "text_input") -> PromptIds:
        """Return the ids of a prompt, with one begin-of-sequence id even if the text spells one.

        Very many ids are packed into an array, in pieces, so that other threads run in between.
        Raises ``InvalidRequest`` on ``field`` for text that is not valid Unicode.
        """
        if self._fast is not None:
            _check_unicode(text, field)
            (ids,) = self._fast.encode([text], add_special_tokens)
        else:
            ids = _packed(self._encode(text, add_special_tokens, field))
        return self._with_one_bos(tuple(ids) if len(ids) < _MANY_TO_PACK else ids)

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool) -> list[PromptIds]:
        """Return the ids of each text, as ``encode`` does, without the interpreter's lock."""
        encode = self._encode_all if self._fast is None else self._fast.encode
        return [self._with_one_bos(tuple(ids)) for ids in encode(texts, add_special_tokens)]

    def _with_one_bos(self, token_ids: PromptIds) -> PromptIds:
        """Drop all begin-of-sequence ids at the beginning but one."""
        bos = self._bos_id
        if len(token_ids) < 2 or token_ids[0] != bos or token_ids[1] != bos:
            return token_ids
        if not self._has_warned_of_bos:
            self._has_warned_of_bos = True
            logger.warning("a prompt begins with the begin-of-sequence token itself; kept one")
        num_bos = 2
        while num_bos < len(token_ids) and token_ids[num_bos] == bos:
            num_bos += 1
        return token_ids[num_bos - 1 :]

    def encode_word(self, text: str, field: str = "stop_words") -> tuple[int, ...]:
        """Return the ids of ``text`` alone, without special tokens; none for an empty word."""
        return tuple(self._encode(text, False, field))

    def stop_ids(self, word: str) -> tuple[int, ...]:
        """Return the ids of ``word`` if a text that ends with them ends with the word, else none.

        A tokenizer may normalise a text: composed accents, small letters, the unknown token. Then
        the ids spell another text, and an engine that stops at them would stop elsewhere. They must
        spell the word at the beginning of a text too, where some tokens lose their space.
        """
        token_ids = self.encode_word(word)
        if self._ends_with(word, token_ids) and self._text(token_ids).endswith(word):
            return token_ids
        return ()

    def word_ids(self, word: str) -> tuple[int, ...]:
        """Return the ids of ``word`` if they spell it in the middle of a text, else none."""
        token_ids = self.encode_word(word, "embedding_bias_words")
        return token_ids if self._ends_with(word, token_ids) else ()

    def word_variants(self, word: str) -> tuple[tuple[int, ...], ...]:
        """Return the ids of a word as a text begins with it, after a space, and within a line.

        A variant that does not spell the word is left out, since it would forbid something else. So
        is a variant that ends with another one, which already forbids it.
        """
        if not word:
            return ()
        encode = partial(self.encode_word, field="bad_words")
        anchor = encode("\n")
        encodings = []
        for text in (word, " " + word):
            encodings.append(encode(text))
            anchored = encode("\n" + text)
            if anchored[: len(anchor)] == anchor:  # else the border fell inside a token
                encodings.append(anchored[len(anchor) :])
        spellings = [ids for ids in dict.fromkeys(encodings) if ids and self._ends_with(word, ids)]
        variants = []
        for ids in spellings:
            endings = {ids[begin:] for begin in range(1, len(ids))}
            if endings.isdisjoint(spellings):
                variants.append(ids)
        return tuple(variants)

    def _ends_with(self, word: str, token_ids: tuple[int, ...]) -> bool:
        """True if every text that goes on with these ids ends with ``word``.

        Decoders treat the first token of a text differently, and some put a space after the last
        token of a word but not after other tokens.
        """
        return all(self._text(token_ids, ids).endswith(word) for ids in self._word_contexts)

    def _text(self, token_ids: tuple[int, ...], context: tuple[int, ...] = ()) -> str:
        """Return the text of ``token_ids`` behind those of ``context``, with special tokens."""
        detokenizer = self.detokenizer(skip_special_tokens=False)
        detokenizer.feed(context)
        return detokenizer.feed(token_ids) + detokenizer.flush()

    def _encode(self, text: str, add_special_tokens: bool, field: str) -> list[int]:
        _check_unicode(text, field)
        ids: list[int]
        if self._backend is not None and len(text) < _SHORT_TEXT:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            (ids,) = self._encode_all([text], add_special_tokens)
        return ids

    def _encode_all(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Return the ids of each text; ``tokenizers`` releases the interpreter's lock."""
        if self._backend is None:
            for text in texts:
                _check_unicode(text, "messages")
            options = {"add_special_tokens": add_special_tokens, "verbose": False}
            return [self.hf.encode(text, **options) for text in texts]
        # "Fast" computes no offsets.
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    @property
    def chat_template(self) -> str | None:
        """Source of the model's chat template; if there are several, all of them."""
        template = self.hf.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: ChatOptions = _PLAIN_CHAT,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt that the model's chat template makes, for ``encode_chat``.

        The template spells all special tokens. Where a message spells one, ``GUARD`` is inside.
        Raises ``InvalidRequest`` on ``messages`` if there is no template or the template refuses
        them, and on ``chat_template_kwargs`` for names that are not variables of a template.
        """
        if not self.hf.chat_template:
            raise InvalidRequest("messages", "this model has no chat template; send text_input")
        # Arguments of ``apply_chat_template`` could set another template.
        if forbidden := sorted(self._template_arguments & options.variables.keys()):
            problem = f"{forbidden[0]} cannot be set; name variables of the chat template"
            raise InvalidRequest("chat_template_kwargs", problem)
        assistant_guard, other_guard = self._chat_guards
        variables: dict[str, Any] = {}
        for name, value in options.variables.items():
            variables[name] = other_guard.guard("chat_template_kwargs", value)
        if options.continue_final_message:
            variables["continue_final_message"] = True
        variables["add_generation_prompt"] = options.add_generation_prompt
        _check_messages(messages, other_guard.tokens)
        if any("tool_calls" in message for message in messages):
            form, takes_one_call = self._call_form
            if takes_one_call:
                messages = list(_one_call_a_turn(messages))
            messages = list(_calls_in_form(messages, form))
        template = self.chat_template or ""
        if "<|channel|>analysis" in template:
            messages = list(map(_with_thinking, messages))
        conversation = []
        for message in messages:
            guard = assistant_guard if message["role"] == "assistant" else other_guard
            guarded = dict(message)
            for key, value in message.items():
                if key != "role":
                    guarded[key] = guard.guard("messages", value)
            parts = guarded.get("content")
            if isinstance(parts, list):
                guarded["content"] = guard.guard_parts(parts)
            conversation.append(guarded)
        guarded_tools = None
        if tools is not None:
            guarded_tools = other_guard.guard("tools", list(tools))
            if ".description" in template:
                guarded_tools = list(map(_with_description, guarded_tools))
        try:
            return self._render(conversation, guarded_tools, variables)
        except Exception as error:  # a template is a program: it may raise anything
            problem = f"the chat template refuses them: {one_line(error)}"
            raise InvalidRequest("messages", problem) from error

    def try_chat_template(self) -> None:
        """Render short conversations, with tools and without. Raises ``MemoryError``."""
        messages = [{"role": "user", "content": "a"}, *_calls_and_results({"probe": {"key": "a"}})]
        function = {"name": "probe", "description": "a", "parameters": {}}
        tools = [{"type": "function", "function": function}]
        conversations: list[tuple[list[Any], Any]] = [(messages[:1], None), (messages[:1], tools)]
        for form in _CALL_FORMS:
            conversations.append((list(_calls_in_form(messages, form)), tools))
        for conversation, offered_tools in conversations:
            try:
                self._render(conversation, offered_tools, {})
            except MemoryError:
                raise
            except Exception:
                continue  # it may refuse a conversation

    def prompt_end(self, options: ChatOptions) -> str:
        """Return the end of a prompt by the template, without white space behind it.

        Some templates end prompts with the tag that begins reasoning. Empty if it refuses one.
        """
        with suppress(InvalidRequest):  # rendering the whole conversation raises it again
            prompt = self.render_chat([{"role": "user", "content": "a"}], options)
            return prompt.rstrip()[-_PROMPT_END:]
        return ""

    def _render(self, conversation: list[Any], tools: Any, variables: Mapping[str, Any]) -> str:
        """Run the chat template. Raises anything, since a template is a program."""
        from transformers.utils import chat_template_utils

        render = getattr(chat_template_utils, "render_jinja_template", None)
        has_null = any(message.get("content", "") is None for message in conversation)
        if render is None or not has_null:
            return str(
                self.hf.apply_chat_template(conversation, tools=tools, tokenize=False, **variables)
            )
        # Newer releases of ``apply_chat_template`` drop a null content, which a template looks for.
        ((prompt,), _) = render(
            [conversation],
            tools=tools,
            chat_template=self.hf.get_chat_template(None, tools),
            **{**self.hf.special_tokens_map, **variables},
        )
        return str(prompt)

    @cached_property
    def _template_arguments(self) -> set[str]:
        """Names that ``apply_chat_template`` takes for itself."""
        return {"messages", *inspect.signature(self.hf.apply_chat_template).parameters}

    @cached_property
    def _call_form(self) -> tuple[_CallForm, bool]:
        """First of ``_CALL_FORMS`` in which the template shows a call.

        The second item is true if the template then shows no two calls of one turn.
        """
        for form in _CALL_FORMS:
            if self._shows_calls(1, form):
                return form, not self._shows_calls(2, form)
        return _CALL_FORMS[0], False

    def _shows_calls(self, count: int, form: _CallForm) -> bool:
        """True if the template shows so many calls of one turn, in this form."""
        calls = {}
        for index in range(count):
            calls[f"probe_name{index}"] = {"probe_key": "probe_value"}
        probe = [{"role": "user", "content": "a"}, *_calls_and_results(calls)]
        function = {"name": "probe_name0", "description": "a", "parameters": {}}
        tools = [{"type": "function", "function": function}]
        with suppress(Exception):  # a template is a program: it may raise anything
            prompt = self._render(list(_calls_in_form(probe, form)), tools, {})
            # Arguments are shown neither escaped nor in Python's spelling.
            is_altered = '\\"probe_key' in prompt or "'probe_key'" in prompt
            return all(text in prompt for text in (*calls, "probe_value")) and not is_altered
        return False

    @cached_property
    def _chat_guards(self) -> tuple[ChatGuard, ChatGuard]:
        """Guard of an assistant's own messages, and guard of all other texts.

        The first knows the tokens that never stand for text. The second also knows those of the
        other added tokens that the template writes, but does not look for in a message, as some do
        for ``</think>``.
        """
        template = str(self.hf.chat_template)
        special: set[str] = set()
        template_tokens: set[str] = set()
        for token in self.hf.added_tokens_decoder.values():
            if not token.content.strip():
                continue
            if token.special:
                special.add(token.content)
            if _template_writes(template, token.content):
                template_tokens.add(token.content)
        normalize = self._normalize_for_tokens
        return ChatGuard(special, normalize), ChatGuard(special | template_tokens, normalize)

    @property
    def _normalize_for_tokens(self) -> Callable[[str], str] | None:
        """Normalizer of a text before the tokenizer looks for added tokens in it, if it has one."""
        normalizer = getattr(self._backend, "normalizer", None)
        added = self.hf.added_tokens_decoder.values()
        if normalizer is None or not any(token.normalized for token in added):
            return None
        # DeepSeek's is a sequence of none, which would cost a pass over every message.
        if json.loads(normalizer.__getstate__()).get("normalizers") == []:
            return None
        normalize: Callable[[str], str] = normalizer.normalize_str
        return normalize

    def call_ids(self, tools: Sequence[Any]) -> tuple[int, ...]:
        """Return the ids of calls of all ``tools`` with usual values, as the template writes them.

        There are none if the template, or the tools, do not allow it.
        """
        messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        with suppress(InvalidRequest, AttributeError, KeyError, TypeError):  # tools are not checked
            for tool in tools:
                function = tool["function"]
                properties = (function.get("parameters") or {}).get("properties") or {}
                arguments = {name: _usual_value(schema) for name, schema in properties.items()}
                messages += _calls_and_results({function["name"]: arguments})
            chat = self.render_chat(messages, ChatOptions(add_generation_prompt=False))
            return tuple(self.encode_chat(chat))
        return ()

    def encode_chat(self, prompt: str) -> PromptIds:
        """Return the ids of a prompt by ``render_chat``.

        No text of a message becomes a control token. Raises ``InvalidRequest`` on ``messages``.
        """
        _check_unicode(prompt, "messages")
        beginning, *continuations = prompt.split(GUARD)
        ids = self.encode(beginning, add_special_tokens=False, field="messages")
        if not continuations:
            return ids
        # Tokenizers put a space before a text. A continuation stands in the middle of one, so it is
        # tokenised behind an anchor, whose ids are dropped.
        encode = self._encode_all if self._fast is None else self._fast.encode
        text_ids: dict[str, tuple[int, ...]] = {}
        for anchor in ("\n", "a", "."):
            anchor_ids = tuple(self._encode(anchor, False, "messages"))
            missing = list(set(continuations).difference(text_ids))
            anchored = encode([anchor + text for text in missing], False)
            for text, anchored_ids in zip(missing, map(tuple, anchored), strict=True):
                # Otherwise the border fell inside a token.
                if anchored_ids[: len(anchor_ids)] == anchor_ids:
                    text_ids[text] = anchored_ids[len(anchor_ids) :]
        for text in continuations:
            if text not in text_ids:
                problem = f"spell a control token before {text[:20]!r}"
                raise InvalidRequest("messages", f"{problem}, which cannot be told from text")
        return tuple(itertools.chain(ids, *map(text_ids.__getitem__, continuations)))

    # --- ids to text ---

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids`` as they stand; ids outside the table have none."""
        table_ids = [token_id for token_id in token_ids if self.token(token_id) is not None]
        text = self.hf.decode(
            table_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def detokenizer(self, skip_special_tokens: bool = True, markers: str = "") -> Detokenizer:
        """Make a detokenizer for one sequence.

        Special tokens whose text is in ``markers`` are in the text, also where others are not.
        """
        if not skip_special_tokens or not markers:
            return self._make[skip_special_tokens]()
        if markers not in self._make_keeping:
            marker_ids: set[int] = set()
            for token_id in self.special_ids:
                token = self.token(token_id)
                if token is not None and token in markers:
                    marker_ids.add(token_id)
            make = self._make[True]
            if marker_ids:
                make = choose_detokenizer(KeepingVocabulary(self, frozenset(marker_ids)), True)
            self._make_keeping[markers] = make
        return self._make_keeping[markers]()

    # --- the table ---

    def token(self, token_id: int) -> str | None:
        """Return the token as the table spells it; ``None`` for an id outside of the table."""
        if not 0 <= token_id <= _MAX_ID:
            return None
        find = self._tokens.get if self._backend is None else self._backend.id_to_token
        token: str | None = find(token_id)
        return token

    @cached_property
    def _tokens(self) -> dict[int, str]:
        return {token_id: token for token, token_id in self.hf.get_vocab().items()}

    @property
    def decoder(self) -> Mapping[str, Any] | None:
        """Decoder as tokenizer.json describes it, if the tokenizer has one."""
        decoder = getattr(self._backend, "decoder", None)
        return None if decoder is None else json.loads(decoder.__getstate__())

    @cached_property
    def fingerprint(self) -> str:
        """Digest that two tokenizers share exactly if every id means the same token in both."""
        digest = hashlib.sha256()
        for token_id, token in sorted(self._tokens.items()):
            digest.update(b"%d %d " % (token_id, len(token)) + token.encode("utf-8", "replace"))
        return digest.hexdigest()


def _packed(ids: list[int]) -> array[int]:
    """Return ``ids`` as an array; a long list is emptied.

    Packing or freeing half a million ids takes milliseconds with the interpreter's lock. So both
    are done in pieces, and a sleep before each lets other threads have the lock.
    """
    if len(ids) < _MANY_TO_PACK:
        return array("i", ids)
    pieces = []
    while ids:
        time.sleep(0.0001)
        piece = ids[-_MANY_TO_PACK:]
        del ids[-_MANY_TO_PACK:]
        pieces.append(struct.pack(f"={len(piece)}i", *piece))
    return array("i", b"".join(reversed(pieces)))


def _check_unicode(text: str, field: str) -> None:
    """Raise ``InvalidRequest`` for half a surrogate pair, which JSON can spell."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, half_character(error)) from None


# --- loading --------------------------------------------------------------------------------


def load_tokenizer(directory: str | Path, *, own_process: bool = True) -> Tokenizer:
    """Load a Hugging Face tokenizer directory, from this disk alone; it is read, never run.

    ``own_process``: no code of a user runs in this process. If nothing has imported
    ``transformers`` before, it then works for the rest of this process as if there were no torch,
    since to import torch takes seconds and memory; garbage collections leave out what the load
    made. Set it to false also while another thread imports torch. Raises ``TokenizerError``.
    """
    path = Path(directory)
    if not path.is_dir():
        raise TokenizerError(f"{path}: no such directory; give the model's tokenizer directory")
    check_tokenizer(path)
    end_ids = generation_eos(path)
    vocab_size = config_vocab_size(path)
    # transformers 5 has no setting for this. It looks for torch once, at its own import, and
    # ``None`` in ``sys.modules`` makes Python's import system say that there is none. Models would
    # need torch imported before the first tokenizer, while
    # ``transformers.generation.logits_process`` works either way.
    hides_torch = own_process and not sys.modules.keys() & {"torch", "transformers"}
    try:
        if hides_torch:
            sys.modules["torch"] = None  # type: ignore[assignment]
        try:
            with no_collections(freezes=hides_torch):
                if own_process:
                    import_transformers()
                from transformers.models.auto.tokenization_auto import AutoTokenizer

                hf = AutoTokenizer.from_pretrained(
                    str(path), local_files_only=True, trust_remote_code=False
                )
        finally:
            if hides_torch:
                del sys.modules["torch"]
        tokenizer = Tokenizer(hf, end_ids, vocab_size)
    except Exception as error:  # the libraries raise anything, also for a missing file
        problem = f"cannot be loaded as a tokenizer ({one_line(error)})"
        advice = "copy tokenizer.json and tokenizer_config.json of the model into it"
        raise TokenizerError(f"{path}: {problem}; {advice}") from error
    if tokenizer.chat_template:
        template_problem = problem_of(tokenizer.try_chat_template)
        if template_problem is not None:
            advice = "correct chat_template.jinja, or chat_template in tokenizer_config.json"
            raise TokenizerError(f"{path}: its chat template {template_problem}; {advice}")
    return tokenizer
