"""From a text request to everything an engine needs in token ids.

The orchestrator and ``preprocessing`` share this, so that both make the same prompt of a request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from trtllm_bls.errors import InvalidRequest, PromptTooLong
from trtllm_bls.stopping import check_words, checked_stops
from trtllm_bls.tokenizer import Tokenizer
from trtllm_bls.types import Array, PromptIds, TextRequest, TokenIds

MAX_WORDS = 1024  # in bad_words, and in embedding_bias_words; stop_words: stopping.MAX_STOPS
MAX_WORD_CHARS = 256
MAX_PREDICTION_CHARS = 1 << 20  # far more than an answer has

_W = TypeVar("_W")

_LONG = 4096  # characters of a request from which on tokenising takes milliseconds
_WORD = 256  # a word costs as much as so many characters of a prompt, however short it is


@dataclass(kw_only=True)  # see EngineChunk
class Prompt:
    """One tokenised prompt, and the request's end ids and words in token ids.

    ``stop_sequences``: one entry per stop word, the ids at which the engine can stop; empty for a
    word that only the text can show. ``engine_stops``: what the engine is sent, which is these and
    every end id but the first, since it takes one end id alone. Both are empty with ``min_tokens``,
    because TensorRT-LLM would stop at them before the minimum. ``extras``: further engine inputs.
    ``prediction``: the ids of the text that the answer may resemble.
    """

    ids: PromptIds
    end_ids: TokenIds
    pad_id: int | None
    stop_sequences: tuple[TokenIds, ...]
    engine_stops: tuple[TokenIds, ...]
    bad_sequences: tuple[TokenIds, ...]
    embedding_bias: tuple[tuple[int, float], ...]
    extras: Mapping[str, Array]
    prediction: TokenIds = ()

    @property
    def end_id(self) -> int:
        """The engine's end id; -1 = never end by itself."""
        return self.end_ids[0] if self.end_ids else -1


class PromptMaker:
    """Tokenises requests; ``add_special_tokens`` applies where a request does not say.

    Safe to share between threads.
    """

    def __init__(self, tokenizer: Tokenizer, add_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._add_special_tokens = add_special_tokens

    def is_long(self, request: TextRequest) -> bool:
        """Whether ``make`` takes so long that it should run on a thread, not on an event loop."""
        biased = request.embedding_bias
        number = len(request.stop_words) + len(request.bad_words) + len(biased)
        if number * _WORD >= _LONG:
            return True
        words = (*request.stop_words, *request.bad_words, *(word for word, _ in biased))
        prompt = request.text or request.messages or ""
        tools = request.chat.tools or ""
        prediction = request.prediction or ""
        return (
            len(prompt) + len(tools) + len(prediction) + number * _WORD + sum(map(len, words))
            >= _LONG
        )

    def encode_ahead(self, requests: Iterable[TextRequest]) -> None:
        """Tokenise, as a batch, requests that ``make`` will soon be called for; on any thread."""
        short = [request for request in requests if request.text and not self.is_long(request)]
        for adds in (True, False):
            found = [request for request in short if self._adds_special(request) is adds]
            texts = [request.text or "" for request in found]
            for request, ids in zip(found, self._tokenizer.encode_all(texts, adds), strict=True):
                request.text_ids = ids

    def make(
        self,
        request: TextRequest,
        max_prompt_tokens: int | None = None,
        give_way: Callable[[], object] = lambda: None,
    ) -> Prompt:
        """The prompt of one request. Raises ``InvalidRequest`` naming the field.

        A prompt of more than ``max_prompt_tokens`` is refused. ``give_way`` is called after each
        word, so that other threads get the interpreter's lock.
        """
        tokenizer = self._tokenizer
        end_ids = tokenizer.end_ids  # the model's, unless the request names one; -1: none
        if request.end_id is not None:
            end_ids = () if request.end_id < 0 else (request.end_id,)
        if request.stop_token_ids:
            end_ids = tuple(dict.fromkeys((*end_ids, *request.stop_token_ids)))
        stops: tuple[TokenIds, ...] = ()
        bad_sequences: tuple[TokenIds, ...] = ()
        engine_stops: tuple[TokenIds, ...] = ()
        bias = request.token_bias
        if request.stop_words or request.bad_words or request.embedding_bias:
            stops, bad_sequences, bias = self._words(request, give_way)
        if (stops or len(end_ids) > 1) and not request.sampling.min_tokens:
            found = (*filter(None, stops), *((token,) for token in end_ids[1:]))
            engine_stops = tuple(dict.fromkeys(found))
        ids = self._ids(request, max_prompt_tokens)
        extras = request.extras
        if request.prompt_table_extra_id is not None:
            # The id of the request's prompt table at each token that stands for a row of it.
            # TensorRT-LLM asks for it where KV blocks are reused, since such a token alone does
            # not say of which table it is.
            first, table = tokenizer.first_table_id, request.prompt_table_extra_id
            rows = np.array([table if token >= first else 0 for token in ids], dtype=np.uint64)
            extras = {**extras, "prompt_table_extra_ids": rows}
        predicted: TokenIds = ()
        if request.prediction:
            if len(request.prediction) > MAX_PREDICTION_CHARS:
                number = f"{len(request.prediction)} characters"
                problem = f"{number}; at most {MAX_PREDICTION_CHARS} are allowed"
                raise InvalidRequest("prediction", problem)
            predicted = tuple(tokenizer.encode(request.prediction, False, "prediction"))
        return Prompt(
            ids=ids,
            end_ids=end_ids,
            pad_id=tokenizer.pad_id if request.pad_id is None else request.pad_id,
            stop_sequences=stops,
            engine_stops=engine_stops,
            bad_sequences=bad_sequences,
            embedding_bias=bias,
            extras=extras,
            prediction=predicted,
        )

    def _words(
        self, request: TextRequest, give_way: Callable[[], object]
    ) -> tuple[tuple[TokenIds, ...], tuple[TokenIds, ...], tuple[tuple[int, float], ...]]:
        """The ids of each stop word, the ids of bad words, and the biased tokens."""
        tokenizer, bias = self._tokenizer, request.embedding_bias
        if request.stop_words:
            checked_stops(request.stop_words)
        for field, words in (
            ("bad_words", request.bad_words),
            ("embedding_bias_words", [word for word, _ in bias]),
        ):
            if words:
                check_words(field, words, MAX_WORDS, MAX_WORD_CHARS)

        def each(words: Iterable[_W]) -> Iterator[_W]:
            for word in words:
                yield word
                give_way()

        stops = () if request.sampling.min_tokens else each(request.stop_words)
        bad_words = each(dict.fromkeys(request.bad_words))
        return (
            tuple(map(tokenizer.stop_ids, stops)),
            tuple(ids for word in bad_words for ids in tokenizer.word_variants(word)),
            (
                *(
                    (token, weight)
                    for word, weight in each(bias)
                    for token in tokenizer.word_ids(word)
                ),
                *request.token_bias,
            ),
        )

    def _adds_special(self, request: TextRequest) -> bool:
        asked = request.add_special_tokens
        return self._add_special_tokens if asked is None else asked

    def _ids(self, request: TextRequest, most: int | None) -> PromptIds:
        given, messages = request.prompt_ids, request.messages
        ids: PromptIds
        if given is not None:
            field, ids, nothing = "prompt_ids", given, "is empty; send at least one token"
        elif (request.text is None) == (messages is None):
            raise InvalidRequest("text_input", "send either text_input or messages, exactly one")
        else:
            field, nothing = "text_input", "the tokenizer makes no token of it"
            text = request.text or ""
            if messages is not None:
                field, tools = "messages", request.chat.tools
                text = self._tokenizer.render_chat(
                    _parsed(field, messages, '[{"role": "user", "content": "..."}]'),
                    request.chat,
                    None if tools is None else _parsed("tools", tools, "a list of functions"),
                )
            if not text:
                raise InvalidRequest(field, "is empty; send at least one character")
            if messages is not None:
                ids = self._tokenizer.encode_chat(text)
            else:
                ids = request.text_ids or self._tokenizer.encode(
                    text, self._adds_special(request), field
                )
        if not ids:
            raise InvalidRequest(field, nothing)
        if most is not None and len(ids) > most:
            takes = f"the model takes at most {most} so that one new token fits"
            raise PromptTooLong(field, f"{len(ids)} tokens; {takes}")
        size = self._tokenizer.model_vocab_size
        wrong = next((token for token in given or () if not 0 <= token < size), None)
        if wrong is not None:
            raise InvalidRequest(field, f"{wrong} is not a token id; they are 0 to {size - 1}")
        return ids


def _parsed(field: str, text: str, example: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"not JSON ({error}); send {example}") from None
