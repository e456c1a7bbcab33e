"""One tokenizer directory: text to ids, messages to a prompt, and the ids that end a sequence.

Owns everything that is asked of ``transformers``, which is imported when a directory is loaded,
and without torch: the processes that handle text run where torch is absent or would cost seconds
and memory. Text comes out of ids by ``detokenizer``; this module must not know how.

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
from typing import Any

from trtllm_bls.errors import InvalidRequest, TokenizerError, half_character
from trtllm_bls.text.checkpoint_dir import (
    check_tokenizer,
    config_vocab_size,
    generation_eos,
    one_line,
)
from trtllm_bls.text.detokenizer import Detokenizer, KeepingVocabulary, choose_detokenizer
from trtllm_bls.text.json_values import MAX_DEPTH, SURROGATES, json_texts
from trtllm_bls.text.template_trial import problem_of
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

# What templates are written for; any other role must not complete a control token (``<|{role}|>``).
_ROLES = {
    *("system", "developer", "user", "model", "assistant", "tool", "function", "ipython"),
    *("environment", "observation", "context", "documents", "critic"),
}
_MAX_ROLE = 64  # characters


class ChatGuard:
    """Keeps texts of a conversation from being read as one of ``tokens``, also where a text has
    other characters that ``normalize`` makes them of."""

    def __init__(self, tokens: Collection[str], normalize: Callable[[str], str] | None) -> None:
        self.tokens = tokens
        self._written = _any_of(tokens)
        self._normalize = normalize
        self._normalized = _any_of(map(normalize, tokens)) if normalize else _any_of(())

    def guard(self, field: str, value: Any) -> Any:
        """Return a JSON value with ``GUARD`` inside every spelling; the value itself has none.

        Raises ``InvalidRequest`` where it cannot be, and where the value is nested too deeply.
        """
        texts = json_texts(value)
        if texts is not None and not self._is_suspect(texts):
            return value
        return self.guard_each(field, value)

    def guard_each(self, field: str, value: Any, room: int = MAX_DEPTH) -> Any:
        """Guard text by text: what ``guard`` does where it has to. ``room``: further levels."""
        if isinstance(value, (Mapping, list, tuple)) and not room:
            raise InvalidRequest(field, f"is nested more than {MAX_DEPTH} levels deep")
        if isinstance(value, Mapping):
            guarded = {}
            for key, item in value.items():
                guarded[self.guard_each(field, key)] = self.guard_each(field, item, room - 1)
            return guarded
        if isinstance(value, (list, tuple)):
            return [self.guard_each(field, item, room - 1) for item in value]
        if not isinstance(value, str):
            return value
        if GUARD in value:
            raise InvalidRequest(field, f"holds U+{ord(GUARD):04X}, which is not a character")
        while match := self._written.search(value):
            if len(match[0]) == 1:
                raise InvalidRequest(field, f"spells the control token {match[0]}")
            value = self._written.sub(lambda match: match[0][0] + GUARD + match[0][1:], value)
        self._check_normalized(field, value)
        return value

    def _is_suspect(self, texts: Sequence[str]) -> bool:
        """True if one of the texts may have to be guarded or refused."""
        # One search is many times as fast as one for each text. No token has ``GUARD`` in it, so
        # two texts spell none together.
        joined = GUARD.join(texts)
        if joined.count(GUARD) >= max(1, len(texts)) or self._written.search(joined):
            return True
        if self._normalize is None:
            return False
        if SURROGATES.search(joined):
            return True
        return any(self._normalized.search(self._normalize(text)) for text in texts)

    def guard_parts(self, parts: list[Any]) -> list[Any]:
        """Guarded parts of one content, with ``GUARD`` between their texts if two together spell a
        token.

        A template writes them one after the other, some without the white space around.
        """
        parts = list(parts)
        texts: dict[int, str] = {}
        for index, part in enumerate(parts):
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                texts[index] = text
        if any(map(self._written.search, _joined(texts.values()))):
            for index in list(texts)[1:]:
                texts[index] = GUARD + texts[index]
        for joined in _joined(texts.values()):
            self._check_normalized("messages", joined)
        for index, text in texts.items():
            part = parts[index]
            parts[index] = {**part, "text": text} if isinstance(part, dict) else text
        return parts

    def _check_normalized(self, field: str, text: str) -> None:
        if self._normalize is None:
            return
        _check_unicode(text, field)
        if hidden := self._normalized.search(self._normalize(text)):
            problem = f"spells the control token {hidden[0]} in other characters"
            raise InvalidRequest(field, problem)


def _joined(texts: Collection[str]) -> tuple[str, str]:
    """The texts one after the other, with the white space around each and without it."""
    return "".join(texts), "".join(map(str.strip, texts))


def _check_messages(messages: object, tokens: Collection[str]) -> None:
    """Raises ``InvalidRequest`` for what is no list of messages, and for roles of which a template
    might make one of ``tokens``."""
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
        if token := next((token for token in tokens if role in token), None):
            problem = f"the role {role!r} of message {index} is part of the control token {token}"
            raise InvalidRequest("messages", problem)


# How a template wants an assistant's calls: whether their arguments are JSON text, and whether the
# content beside them is null. The usual form comes first.
_CALL_FORMS = ((False, False), (True, False), (False, True), (True, True))


def _calls_of(message: Mapping[str, Any]) -> list[Any]:
    """The calls of an assistant's message, if it has any."""
    calls = message.get("tool_calls")
    return calls if message["role"] == "assistant" and isinstance(calls, list) else []


def _calls_in_form(
    messages: Iterable[Mapping[str, Any]], form: tuple[bool, bool]
) -> Iterator[Mapping[str, Any]]:
    """The messages with calls in one of ``_CALL_FORMS``; content that must be null comes before."""
    as_text, without_content = form
    for message in messages:
        calls = _calls_of(message)
        if not calls:
            yield message
            continue
        content = message.get("content") or ""
        if content and without_content:
            yield {key: value for key, value in message.items() if key != "tool_calls"}
        calls = [_call_in_form(call, as_text) for call in calls]
        content = None if without_content else content
        yield {**message, "content": content, "tool_calls": calls}


def _with_description(tool: Any) -> Any:
    """Return a tool with a description, whose absence some templates take for an error."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or "description" in function:
        return tool
    return {**tool, "function": {**function, "description": ""}}


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with reasoning where the template of gpt-oss looks for it.

    It takes no content beside reasoning and calls, so the content joins the reasoning there.
    """
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if message["role"] != "assistant" or not reasoning:
        return message
    content = message.get("content")
    if message.get("tool_calls") and isinstance(content, str):
        reasoning, content = "\n\n".join(filter(None, [reasoning, content])), ""
    return {**message, "thinking": reasoning, "content": content}


def _one_call_a_turn(messages: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The messages with each further call of a turn in a turn of its own, before its result."""
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        calls = _calls_of(message)
        if not calls:
            yield message
            continue
        ids = [str(call.get("id")) if isinstance(call, Mapping) else "" for call in calls]
        places: dict[str, int] = {}  # of the first call with an id
        for place, call_id in enumerate(ids):
            places.setdefault(call_id, place)
        results: list[list[Any]] = [[] for _ in calls]
        while rest and rest[0]["role"] == "tool":
            result = rest.popleft()
            results[places.get(str(result.get("tool_call_id")), -1)].append(result)
        for call, results_of_call in zip(calls, results, strict=True):
            yield {**message, "tool_calls": [call]}
            yield from results_of_call
            message = {"role": "assistant", "content": ""}


def _call_in_form(call: Any, as_text: bool) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    arguments = function["arguments"]
    with suppress(ValueError, RecursionError):
        if as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str) and not as_text:
            parsed = json.loads(arguments)
            arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


def _calls_and_results(calls: Mapping[str, Any]) -> list[dict[str, Any]]:
    """An assistant's turn with calls of these names and arguments, and a result of each.

    All results have the first name, so that a template that shows it has shown no other call.
    """
    tool_calls, results = [], []
    for index, (name, arguments) in enumerate(calls.items()):
        call_id = f"probecal{index}"  # some templates want ids of nine characters
        function = {"name": name, "arguments": arguments}
        tool_calls.append({"id": call_id, "type": "function", "function": function})
        result = {"role": "tool", "name": next(iter(calls)), "tool_call_id": call_id}
        results.append({**result, "content": "b"})
    return [{"role": "assistant", "content": "", "tool_calls": tool_calls}, *results]


_VALUES = {"number": 0, "integer": 0, "boolean": True, "array": [], "object": {}, "null": None}


def _usual_value(schema: Mapping[str, Any]) -> Any:
    """One of the JSON values that a schema allows, as far as its type tells."""
    if schema.get("enum"):
        return next(iter(schema["enum"]))
    kind = schema.get("type")
    return _VALUES.get(kind, "a") if isinstance(kind, str) else "a"


def _written_by(template: str, token: str) -> bool:
    """Whether the template has the token, other than to look for it in messages, as
    ``'X' in text`` and ``split('X')`` do."""
    quoted = rf"""['"]{re.escape(token)}['"]"""
    looked_for = re.search(rf"{quoted}\s*(not\s+)?in\b|\.\w+\(\s*{quoted}", template)
    return token in template and looked_for is None


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
    patterns = []
    for first, group in itertools.groupby(rest, key=lambda token: token[0]):
        patterns.append(re.escape(first) + _alternatives([token[1:] for token in group]))
    return f"(?:{'|'.join(patterns)}){'?' if len(rest) < len(tokens) else ''}"


# --- fastokens ------------------------------------------------------------------------------

# What may stand beside an added token: white space of every kind, parts of words and of tokens,
# and marks that join what precedes them.
_BESIDE = (
    *("", "  ", "\r\n\n", "word ", " Word", "'s", "##a", "e\u0301", "|>", "\n\n\n", "13"),
    *" \n\t\u3000\xa0\u2028a1_.\u2581\u0301\u200d\u203f\U0001f3fd\u6f22<[\ufffd",
)
_SAMPLE_SIZE = 5000  # characters of all Unicode; tokens of the table; parts of texts


class FastEncoder:
    """The ids of texts by ``fastokens``, which gives those of ``backend``, a tokenizer of the
    library, in a fraction of the time.

    Raises ``ImportError`` without that package, and ``ValueError`` where it gives other ids, or
    might. Safe to share between threads, and with forks of this process.
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
        for text in _probes(backend, added):
            for special in (False, True):
                (encoding,) = backend.encode_batch_fast([text], add_special_tokens=special)
                if self.encode([text], special)[0].tolist() != encoding.ids:
                    raise ValueError("it gives other ids")

    def encode(self, texts: Sequence[str], special: bool) -> list[array[int]]:
        """The ids of each text, without the interpreter's lock."""
        data, bounds = self._fast.encode_batch_flat(texts)
        places = [4 * place for (place,) in struct.iter_unpack("=Q", bounds)]
        begin = self._begin.tobytes() if special else b""
        return [array("i", begin + data[a:b]) for a, b in itertools.pairwise(places)]


def _is_order_irrelevant(added: Collection[Any]) -> bool:
    """Whether a text has the same added tokens however they are looked for.

    ``tokenizers`` looks for normalized ones in what the others leave, and only when it has found a
    token takes the white space beside it along, or gives it up as a part of a word. ``fastokens``
    looks for all at once, from left to right.
    """
    strips = any(token.lstrip or token.rstrip for token in added)
    if strips and any(token.content.strip() != token.content for token in added):
        return False
    first = [token.content for token in added if not token.normalized]
    last = [token.content for token in added if token.normalized]
    begins = {text[:end] for text in first for end in range(1, len(text) + 1)}
    overlap = any(text[begin:] in begins for text in last for begin in range(1, len(text)))
    whole_words = any(token.single_word for token in added)
    return not (whole_words or overlap or any(map(_any_of(first).search, last)))


def _probes(backend: Any, added: Collection[Any]) -> Iterator[str]:
    """Texts that show a difference: each special token with all that may stand beside it, the other
    added tokens, characters of all Unicode, and tokens of the table in any order."""
    chance = Random(0)
    special = [token.content for token in added if token.special]
    names = [token.content for token in added] or [""]
    yield "".join(text + name + text for name in special for text in _BESIDE)
    yield "".join(name + chance.choice(_BESIDE) for name in names)
    points = chance.choices([*range(0xD800), *range(0xE000, 0x3FFFF)], k=_SAMPLE_SIZE)
    yield "".join(chr(point) + chance.choice(_BESIDE) for point in points)
    table = sorted(backend.get_vocab())
    decoder = backend.decoder
    tokens = chance.choices(table, k=_SAMPLE_SIZE)
    yield "".join(tokens) if decoder is None else decoder.decode(tokens)
    yield "".join(chance.choices((*_BESIDE, *map(chr, range(128)), *names), k=_SAMPLE_SIZE))


# --- one directory --------------------------------------------------------------------------


class Tokenizer:
    """A loaded tokenizer; made by ``load_tokenizer``. Safe to share between threads.

    ``vocab_size`` counts every token of the table, added ones included; ``model_vocab_size`` is
    how many logits the model has, which may be more (padded embeddings); from ``first_table_id`` on
    an id stands for a row of a prompt embedding table. ``eos_id`` and ``pad_id`` are ``None`` where
    the directory names none (``pad_id`` falls back to ``eos_id``); ``end_ids`` are all ids that end
    a sequence, ``eos_id`` first. ``hf`` is the tokenizer of ``transformers``.
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
        try:
            self._fast = FastEncoder(self._backend) if self._backend is not None else None
        except ImportError:
            pass
        except ValueError as error:
            logger.info("fastokens is not used for this tokenizer: %s", error)
        self._warned_of_bos = False
        self._bos_id: int | None = hf.bos_token_id  # which transformers looks up anew each time
        self.vocab_size = len(hf)
        self.model_vocab_size = max(self.vocab_size, config_vocab_size)
        self.first_table_id = config_vocab_size or self.vocab_size
        self.added_ids: frozenset[int] = frozenset(hf.added_tokens_decoder)
        added = hf.added_tokens_decoder.items()
        self.special_ids = frozenset(token_id for token_id, token in added if token.special)
        own_eos = () if hf.eos_token_id is None else (int(hf.eos_token_id),)
        self.end_ids: tuple[int, ...] = tuple(dict.fromkeys(own_eos + generation_eos))
        self.eos_id = self.end_ids[0] if self.end_ids else None
        self.pad_id: int | None = self.eos_id if hf.pad_token_id is None else int(hf.pad_token_id)
        self._make_keeping: dict[str, Callable[[], Detokenizer]] = {}  # by markers of formats
        self._make = {skip: choose_detokenizer(self, skip) for skip in (True, False)}
        word = self.encode_word("a")
        # These stand for all texts that may come before a word.
        self._texts_before = (word,) if self.eos_id is None else (word, (*word, self.eos_id))

    # --- text to ids ---

    def encode(self, text: str, add_special_tokens: bool, field: str = "text_input") -> PromptIds:
        """The ids of a prompt; never two begin-of-sequence ids, also if the text spells one.

        Very many ids are packed into an array, in pieces, so that other threads run in between.
        Raises ``InvalidRequest`` on ``field`` for text that is not valid Unicode.
        """
        if self._fast is not None:
            _check_unicode(text, field)
            (ids,) = self._fast.encode([text], add_special_tokens)
        else:
            ids = _packed(self._encode(text, add_special_tokens, field))
        return self._begun_once(tuple(ids) if len(ids) < _MANY_TO_PACK else ids)

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool) -> list[PromptIds]:
        """What ``encode`` gives for each text; releases the interpreter's lock meanwhile."""
        encode = self._encode_all if self._fast is None else self._fast.encode
        return [self._begun_once(tuple(ids)) for ids in encode(texts, add_special_tokens)]

    def _begun_once(self, token_ids: PromptIds) -> PromptIds:
        """The ids with a single begin-of-sequence id where they begin with several."""
        bos = self._bos_id
        if len(token_ids) < 2 or token_ids[0] != bos or token_ids[1] != bos:
            return token_ids
        if not self._warned_of_bos:
            self._warned_of_bos = True
            logger.warning("a prompt begins with the begin-of-sequence token itself; kept one")
        begin = next((n for n, token in enumerate(token_ids) if token != bos), len(token_ids))
        return token_ids[begin - 1 :]

    def encode_word(self, text: str, field: str = "stop_words") -> tuple[int, ...]:
        """The ids of ``text`` alone, without special tokens; none for an empty word."""
        return tuple(self._encode(text, False, field))

    def stop_ids(self, word: str) -> tuple[int, ...]:
        """The ids of ``word`` if a text that ends with them ends with the word, else none.

        A tokenizer may normalise what it reads: composed accents, small letters, the unknown token.
        Then the ids spell another text, and an engine that stops at them would stop elsewhere. They
        must spell the word at the beginning of a text too, where some tokens lose their space.
        """
        token_ids = self.encode_word(word)
        spelled = self._ends_with(word, token_ids) and self._text(token_ids).endswith(word)
        return token_ids if spelled else ()

    def word_ids(self, word: str) -> tuple[int, ...]:
        """The ids of ``word`` if they spell it in the middle of a text, else none."""
        token_ids = self.encode_word(word, "embedding_bias_words")
        return token_ids if self._ends_with(word, token_ids) else ()

    def word_variants(self, word: str) -> tuple[tuple[int, ...], ...]:
        """Every way a word can begin: the text, after a space, and in the middle of a line.

        A variant that does not spell the word is left out, since it would forbid something else. So
        is a variant that ends with another one, which already forbids it.
        """
        encode = partial(self.encode_word, field="bad_words")
        anchor = encode("\n")
        encodings = []
        for text in (word, " " + word) if word else ():
            encodings.append(encode(text))
            anchored = encode("\n" + text)
            if anchored[: len(anchor)] == anchor:  # else the border fell inside a token
                encodings.append(anchored[len(anchor) :])
        variants = [ids for ids in dict.fromkeys(encodings) if ids and self._ends_with(word, ids)]
        chosen = []
        for ids in variants:
            others = [other for other in variants if other != ids]
            if not any(ids[-len(other) :] == other for other in others):
                chosen.append(ids)
        return tuple(chosen)

    def _ends_with(self, word: str, token_ids: tuple[int, ...]) -> bool:
        """Whether every text that goes on with these ids ends with ``word``.

        Decoders treat the first token of a text differently, and some put a space after the last
        token of a word but not after other tokens.
        """
        return all(self._text(token_ids, before).endswith(word) for before in self._texts_before)

    def _text(self, token_ids: tuple[int, ...], after: tuple[int, ...] = ()) -> str:
        """What ``token_ids`` show, special tokens included, where they follow ``after``."""
        detokenizer = self.detokenizer(skip_special_tokens=False)
        detokenizer.feed(after)
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
        """The ids of each text; a tokenizer of the library releases the interpreter's lock."""
        if self._backend is None:
            for text in texts:
                _check_unicode(text, "messages")
            how = {"add_special_tokens": add_special_tokens, "verbose": False}
            return [self.hf.encode(text, **how) for text in texts]
        # "Fast" computes no offsets.
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    @property
    def chat_template(self) -> str | None:
        """The source of the model's chat template; of several templates, all of them."""
        template = self.hf.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: ChatOptions = _PLAIN_CHAT,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt for ``messages`` by the model's own chat template, for ``encode_chat``.

        The template spells all special tokens. Where a message spells one, ``GUARD`` is inside.
        Raises ``InvalidRequest`` on ``messages`` if there is no template or the template refuses
        them, and on ``chat_template_kwargs`` for names that are not variables of a template.
        """
        if not self.hf.chat_template:
            raise InvalidRequest("messages", "this model has no chat template; send text_input")
        # Arguments of ``apply_chat_template`` could set another template.
        if wrong := sorted(self._template_arguments & options.variables.keys()):
            problem = f"{wrong[0]} cannot be set; name variables of the chat template"
            raise InvalidRequest("chat_template_kwargs", problem)
        by_assistant, everywhere = self._chat_guards
        further: dict[str, Any] = {}
        for name, value in options.variables.items():
            further[name] = everywhere.guard("chat_template_kwargs", value)
        if options.continue_final_message:
            further["continue_final_message"] = True
        further["add_generation_prompt"] = options.add_generation_prompt
        _check_messages(messages, everywhere.tokens)
        if any("tool_calls" in message for message in messages):
            form, takes_one_call = self._call_form
            if takes_one_call:
                messages = list(_one_call_a_turn(messages))
            messages = list(_calls_in_form(messages, form))
        if "<|channel|>analysis" in (self.chat_template or ""):
            messages = [_with_thinking(message) for message in messages]
        conversation = []
        for message in messages:
            guard = by_assistant if message["role"] == "assistant" else everywhere
            guarded = dict(message)
            for key, value in message.items():
                if key != "role":
                    guarded[key] = guard.guard("messages", value)
            if isinstance(parts := guarded.get("content"), list):
                guarded["content"] = guard.guard_parts(parts)
            conversation.append(guarded)
        known_tools = None if tools is None else everywhere.guard("tools", list(tools))
        if known_tools and ".description" in (self.chat_template or ""):
            known_tools = [_with_description(tool) for tool in known_tools]
        try:
            return self._written_by_template(conversation, known_tools, further)
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
        for conversation, functions in conversations:
            try:
                self._written_by_template(conversation, functions, {})
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

    def _written_by_template(
        self, conversation: list[Any], tools: Any, further: Mapping[str, Any]
    ) -> str:
        from transformers.utils import chat_template_utils

        render = getattr(chat_template_utils, "render_jinja_template", None)
        has_null = any(message.get("content", "") is None for message in conversation)
        if render is None or not has_null:
            hf = self.hf
            return str(hf.apply_chat_template(conversation, tools=tools, tokenize=False, **further))
        # The same but for what newer releases drop: null, which a template looks for.
        ((prompt,), _) = render(
            [conversation],
            tools=tools,
            chat_template=self.hf.get_chat_template(None, tools),
            **{**self.hf.special_tokens_map, **further},
        )
        return str(prompt)

    @cached_property
    def _template_arguments(self) -> set[str]:
        """The names that ``apply_chat_template`` takes for itself."""
        return {"messages", *inspect.signature(self.hf.apply_chat_template).parameters}

    @cached_property
    def _call_form(self) -> tuple[tuple[bool, bool], bool]:
        """The first of ``_CALL_FORMS`` in which the template shows a call, and whether it then
        shows no two calls of one turn."""
        for form in _CALL_FORMS:
            if self._shows(1, form):
                return form, not self._shows(2, form)
        return _CALL_FORMS[0], False

    def _shows(self, count: int, form: tuple[bool, bool]) -> bool:
        """Whether the template shows so many calls of one turn, in this form."""
        names = [f"probe_name{index}" for index in range(count)]
        calls = {name: {"probe_key": "probe_value"} for name in names}
        probe = [{"role": "user", "content": "a"}, *_calls_and_results(calls)]
        function = {"name": names[0], "description": "a", "parameters": {}}
        tools = [{"type": "function", "function": function}]
        with suppress(Exception):  # a template is a program: it may raise anything
            prompt = self._written_by_template(list(_calls_in_form(probe, form)), tools, {})
            # Arguments are shown neither escaped nor in Python's spelling.
            is_altered = '\\"probe_key' in prompt or "'probe_key'" in prompt
            return all(text in prompt for text in (*names, "probe_value")) and not is_altered
        return False

    @cached_property
    def _chat_guards(self) -> tuple[ChatGuard, ChatGuard]:
        """For an assistant's own messages, and for all other texts.

        The first knows the tokens that never stand for text. The second also knows those of the
        other added tokens that the template writes, but does not look for in a message, as some do
        for ``</think>``.
        """
        added, template = self.hf.added_tokens_decoder.values(), str(self.hf.chat_template)
        visible = [token for token in added if token.content.strip()]
        special = {token.content for token in visible if token.special}
        further = {token.content for token in visible if _written_by(template, token.content)}
        # What the tokenizer does to a text before it looks for these tokens.
        normalizer, normalize = getattr(self._backend, "normalizer", None), None
        if normalizer is not None and any(token.normalized for token in added):
            normalize = normalizer.normalize_str
            # DeepSeek's is a sequence of none, which would cost a pass over every message.
            if json.loads(normalizer.__getstate__()).get("normalizers") == []:
                normalize = None
        return ChatGuard(special, normalize), ChatGuard(special | further, normalize)

    def call_ids(self, tools: Sequence[Any]) -> tuple[int, ...]:
        """How the chat template writes a call of each of ``tools``, with usual values; none where
        the template, or the tools, do not allow it."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        with suppress(InvalidRequest, AttributeError, KeyError, TypeError):  # tools are not checked
            for tool in tools:
                function = tool["function"]
                fields = (function.get("parameters") or {}).get("properties") or {}
                arguments = {name: _usual_value(schema) for name, schema in fields.items()}
                messages += _calls_and_results({function["name"]: arguments})
            chat = self.render_chat(messages, ChatOptions(add_generation_prompt=False))
            return tuple(self.encode_chat(chat))
        return ()

    def encode_chat(self, prompt: str) -> PromptIds:
        """The ids of what ``render_chat`` made; no text of a message becomes a control token."""
        _check_unicode(prompt, "messages")
        first, *more = prompt.split(GUARD)
        ids = self.encode(first, add_special_tokens=False, field="messages")
        if not more:
            return ids
        # These stand in the middle of a text, where no space is put before a text.
        encode = self._encode_all if self._fast is None else self._fast.encode
        known: dict[str, tuple[int, ...]] = {}
        for before in ("\n", "a", "."):
            anchor = tuple(self._encode(before, False, "messages"))
            missing = [text for text in set(more) if text not in known]
            anchored = encode([before + text for text in missing], False)
            for text, text_ids in zip(missing, map(tuple, anchored), strict=True):
                if text_ids[: len(anchor)] == anchor:  # else the border fell inside a token
                    known[text] = text_ids[len(anchor) :]
        if wrong := next((text for text in more if text not in known), None):
            problem = f"spell a control token before {wrong[:20]!r}, which cannot be told from text"
            raise InvalidRequest("messages", problem)
        return tuple(itertools.chain(ids, *(known[text] for text in more)))

    # --- ids to text ---

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids`` as they stand; ids outside the table have none."""
        known = [token_id for token_id in token_ids if self.token(token_id) is not None]
        text = self.hf.decode(
            known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def detokenizer(self, skip_special_tokens: bool = True, markers: str = "") -> Detokenizer:
        """Make a detokenizer for one sequence.

        Special tokens whose text is in ``markers`` are in the text, also where others are not.
        """
        if not skip_special_tokens or not markers:
            return self._make[skip_special_tokens]()
        if markers not in self._make_keeping:
            kept = frozenset(
                token_id
                for token_id in self.special_ids
                if (text := self.token(token_id)) is not None and text in markers
            )
            keeping = choose_detokenizer(KeepingVocabulary(self, kept), True)
            self._make_keeping[markers] = keeping if kept else self._make[True]
        return self._make_keeping[markers]()

    # --- the table ---

    def token(self, token_id: int) -> str | None:
        """The token as the table spells it; ``None`` for an id that is not in the table."""
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
        """The decoder as tokenizer.json describes it, if the tokenizer has one."""
        decoder = getattr(self._backend, "decoder", None)
        return None if decoder is None else json.loads(decoder.__getstate__())

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two tokenizers exactly if every id means the same token in both."""
        digest = hashlib.sha256()
        for token_id, token in sorted(self._tokens.items()):
            digest.update(b"%d %d " % (token_id, len(token)) + token.encode("utf-8", "replace"))
        return digest.hexdigest()


def _packed(ids: list[int]) -> array[int]:
    """``ids`` as an array; a long list is emptied.

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
    """Raises ``InvalidRequest`` for half a surrogate pair, which JSON can spell."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, half_character(error)) from None


# --- loading --------------------------------------------------------------------------------


def load_tokenizer(directory: str | Path, *, hides_torch: bool = True) -> Tokenizer:
    """Load a Hugging Face tokenizer directory, from this disk alone; it is read, never run.

    ``hides_torch``: have ``transformers`` work for the rest of this process as if there were no
    torch, which takes seconds and memory. Not for a process that runs a user's code, nor while
    another thread imports torch. Raises ``TokenizerError``.
    """
    path = Path(directory)
    if not path.is_dir():
        raise TokenizerError(f"{path}: no such directory; give the model's tokenizer directory")
    check_tokenizer(path)
    eos, logits = generation_eos(path), config_vocab_size(path)
    # transformers 5 has no setting for this, and asks "is there torch?" once, at its own import;
    # ``None`` in ``sys.modules`` is Python's way to say that a module is not to be found. Models
    # would need torch imported before the first tokenizer, while
    # ``transformers.generation.logits_process`` works either way.
    hides_torch = hides_torch and not sys.modules.keys() & {"torch", "transformers"}
    try:
        if hides_torch:
            os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "no PyTorch found"
            sys.modules["torch"] = None  # type: ignore[assignment]
        try:
            from transformers import AutoTokenizer

            hf = AutoTokenizer.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=False
            )
        finally:
            if hides_torch:
                del sys.modules["torch"]
        tokenizer = Tokenizer(hf, eos, logits)
    except Exception as error:  # the libraries raise anything, also for a missing file
        problem = f"cannot be loaded as a tokenizer ({one_line(error)})"
        mend = "copy tokenizer.json and tokenizer_config.json of the model into it"
        raise TokenizerError(f"{path}: {problem}; {mend}") from error
    if tokenizer.chat_template:
        costs = problem_of(tokenizer.try_chat_template)
        if costs is not None:
            mend = "correct chat_template.jinja, or chat_template in tokenizer_config.json"
            raise TokenizerError(f"{path}: its chat template {costs}; {mend}")
    return tokenizer
