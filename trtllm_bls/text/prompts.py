"""Prompts: a text request in token ids, as an engine needs it.

The orchestrator and ``preprocessing`` share this, so that both make the same prompt of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np

from trtllm_bls.errors import InvalidRequest, PromptTooLong
from trtllm_bls.text.chat_formats import REASONING_TAGS, answer_markup, formats_of
from trtllm_bls.text.json_values import json_size
from trtllm_bls.text.stopping import check_words, checked_stops
from trtllm_bls.text.tokenizer import Tokenizer
from trtllm_bls.types import (
    NO_MARKUP,
    AnswerMarkup,
    EngineRequest,
    PromptIds,
    SpeculationRequest,
    TextRequest,
    TokenIds,
)

MAX_WORDS = 1024  # in bad_words, and in embedding_bias_words; stop_words: stopping.MAX_STOPS
MAX_WORD_CHARS = 256
MAX_PREDICTION_CHARS = 1 << 20  # far more than an answer has

_W = TypeVar("_W")

_LONG_REQUEST = 4096  # characters of a request whose tokenising takes milliseconds
_WORD_COST = 256  # characters of a prompt that cost as much as one word, however short it is


class Prompt(NamedTuple):
    """Tokenised prompt, as a request to an engine, and the ends of its answer.

    ``engine_request``: its ``stop_sequences`` are those below and every end id but the first, since
    an engine takes one end id alone; -1 if there is none. ``end_ids``: all of them.
    ``stop_sequences``: one entry per stop word, the ids at which the engine can stop; empty for a
    word that only the text can show. With ``min_tokens`` there are none, because TensorRT-LLM would
    stop at them before the minimum. There are none either if the answer may reason first, since
    stops do not apply to reasoning. ``markup``: a chat answer's. ``kept_ids``: end ids that are
    part of the output.
    """

    engine_request: EngineRequest
    end_ids: TokenIds
    stop_sequences: tuple[TokenIds, ...]
    markup: AnswerMarkup = NO_MARKUP
    kept_ids: TokenIds = ()


@dataclass(frozen=True)
class PromptMaker:
    """Tokenises requests; ``add_special_tokens`` and ``draft_source`` are their defaults.

    ``max_prompt_bytes`` limits the prompt that a chat template makes; ``None`` sets no limit. Safe
    to share between threads.
    """

    tokenizer: Tokenizer
    add_special_tokens: bool
    draft_source: str = "off"
    max_prompt_bytes: int | None = None

    def is_long(self, request: TextRequest) -> bool:
        """Return true if ``make`` takes so long that it should run on a thread, not on a loop."""
        biased_words = [word for word, _ in request.embedding_bias]
        words = (*request.stop_words, *request.bad_words, *biased_words)
        if len(words) * _WORD_COST >= _LONG_REQUEST:
            return True
        characters = sum(map(len, words)) + len(request.text or "") + len(request.prediction or "")
        if request.messages is not None:
            characters += json_size(request.messages, _LONG_REQUEST)
            characters += json_size(request.chat.tools, _LONG_REQUEST)
        return len(words) * _WORD_COST + characters >= _LONG_REQUEST

    def encode_ahead(self, requests: Iterable[TextRequest]) -> None:
        """Tokenise, as a batch, requests for ``make``, which follows soon; on any thread."""
        batches: dict[bool, list[TextRequest]] = {}
        for request in requests:
            adds_special_tokens = request.add_special_tokens
            if adds_special_tokens is None:
                adds_special_tokens = self.add_special_tokens
            if request.text and not self.is_long(request):
                batches.setdefault(adds_special_tokens, []).append(request)
        for adds_special_tokens, batch in batches.items():
            texts = [request.text or "" for request in batch]
            all_ids = self.tokenizer.encode_all(texts, adds_special_tokens)
            for request, ids in zip(batch, all_ids, strict=True):
                request.text_ids = ids

    def make(
        self,
        request: TextRequest,
        max_prompt_tokens: int | None = None,
        give_way: Callable[[], object] = lambda: None,
    ) -> Prompt:
        """Make the prompt of one request. Raises ``InvalidRequest`` naming the field.

        A prompt of more than ``max_prompt_tokens`` is refused. ``give_way`` is called after each
        word, so that other threads get the interpreter's lock.
        """
        tokenizer = self.tokenizer
        min_tokens = request.sampling.min_tokens

        def giving_way(words: Iterable[_W]) -> Iterator[_W]:
            for word in words:
                yield word
                give_way()

        end_ids = tokenizer.end_ids  # the model's own, unless the request names one
        if request.end_id is not None:
            end_ids = () if request.end_id < 0 else (request.end_id,)
        all_end_ids = tuple(dict.fromkeys((*end_ids, *request.stop_token_ids)))
        kept_ids: TokenIds = ()
        engine_end_id = next(iter(all_end_ids), -1)
        if request.include_stop and request.stop_token_ids:
            kept_ids = request.stop_token_ids
            # An engine does not show the end id of its request, so that must be none of those kept.
            engine_end_id = next(iter(end_ids), -1)
        if request.stop_words:
            checked_stops(request.stop_words)
        biased = [word for word, _ in request.embedding_bias]
        for field, words in (("bad_words", request.bad_words), ("embedding_bias_words", biased)):
            if words:
                check_words(field, words, MAX_WORDS, MAX_WORD_CHARS)
        stops: tuple[TokenIds, ...] = ()
        engine_stops: tuple[TokenIds, ...] = ()
        bad_sequences: tuple[TokenIds, ...] = ()
        bias = request.token_bias
        markup = request.markup or NO_MARKUP
        if request.markup is None and request.messages is not None and request.stop_words:
            markup = self._markup(request)
        if request.stop_words and not min_tokens and not markup.reasoning_end:
            stops = tuple(map(tokenizer.stop_ids, giving_way(request.stop_words)))
        if request.bad_words:
            variants = map(tokenizer.word_variants, giving_way(dict.fromkeys(request.bad_words)))
            bad_sequences = tuple(chain.from_iterable(variants))
        if request.embedding_bias:
            bias = (*self._word_bias(giving_way(request.embedding_bias)), *bias)
        if not min_tokens:
            single_stops = [(token,) for token in all_end_ids if token != engine_end_id]
            engine_stops = tuple(dict.fromkeys((*filter(None, stops), *single_stops)))
        ids = self._ids(request, max_prompt_tokens)
        extras = request.extras
        if request.prompt_table_extra_id is not None:
            # The id of the request's prompt table at each token that stands for a row of it.
            # TensorRT-LLM needs it to reuse KV blocks, since such a token alone does not tell one
            # table from another.
            table_ids = np.zeros(len(ids), dtype=np.uint64)
            is_row = np.asarray(ids) >= tokenizer.first_table_id
            table_ids[is_row] = request.prompt_table_extra_id
            extras = {**extras, "prompt_table_extra_ids": table_ids}
        speculation = request.speculation
        if request.prediction or request.chat.tools:
            speculation = self._speculation(request)
        engine_request = EngineRequest(
            request_id=request.request_id,
            input_ids=ids,
            max_tokens=request.max_tokens or 0,
            sampling=request.sampling,
            num_return_sequences=request.num_return_sequences,
            end_id=engine_end_id,
            pad_id=tokenizer.pad_id if request.pad_id is None else request.pad_id,
            stop_sequences=engine_stops,
            bad_sequences=bad_sequences,
            embedding_bias=bias,
            speculation=speculation,
            wants=request.wants,
            tenant=request.tenant,
            guide=request.guide,
            adapter=request.adapter,
            cache_salt=request.cache_salt,
            traceparent=request.traceparent,
            extras=extras,
        )
        return Prompt(engine_request, all_end_ids, stops, markup, kept_ids)

    def _speculation(self, request: TextRequest) -> SpeculationRequest:
        """Return the request's speculation with the texts to draft from. Raises ``InvalidRequest``.

        They are the prediction, and calls of the tools.
        """
        speculation = request.speculation
        if request.prediction:
            length = len(request.prediction)
            if length > MAX_PREDICTION_CHARS:
                problem = f"{length} characters; at most {MAX_PREDICTION_CHARS} are allowed"
                raise InvalidRequest("prediction", problem)
            prediction = self.tokenizer.encode(request.prediction, False, "prediction")
            speculation = replace(speculation, prediction=tuple(prediction))
        source = speculation.draft_source or self.draft_source
        if request.messages and request.chat.tools and source in ("ngram", "mixed"):
            calls = self.tokenizer.call_ids(request.chat.tools)
            speculation = replace(speculation, calls=calls)
        return speculation

    def _word_bias(self, words: Iterable[tuple[str, float]]) -> list[tuple[int, float]]:
        """Return the bias of each token of some words."""
        bias: list[tuple[int, float]] = []
        for word, number in words:
            for token in self.tokenizer.word_ids(word):
                bias.append((token, number))
        return bias

    def _markup(self, request: TextRequest) -> AnswerMarkup:
        """Return the markup of a chat's answer, by the chat template."""
        tokenizer = self.tokenizer
        tags = REASONING_TAGS.get(formats_of(tokenizer.chat_template)[1] or "")
        # Where the text leaves the tags out, nothing tells reasoning from the answer.
        is_hidden = tags is not None and request.skip_special_tokens is not False and tags.special
        if tags is None or is_hidden:
            return NO_MARKUP
        prompt_end = tokenizer.prompt_end(request.chat)
        if prompt_end.endswith(tags.end):
            return NO_MARKUP
        return answer_markup(None, tags, opened=prompt_end.endswith(tags.begin))

    def _check_rendered(self, text: str) -> None:
        """Raise ``InvalidRequest`` for more text than a prompt may have: a template repeats some.

        A character has at least one byte, and to count those of every prompt would cost more.
        """
        limit = self.max_prompt_bytes
        if limit is not None and len(text) > limit:
            problem = f"the chat template makes {len(text)} characters of them; at most {limit} are"
            parameter = "max_prompt_bytes"
            raise InvalidRequest(
                "messages", f"{problem} allowed (parameter {parameter})", parameter
            )

    def _ids(self, request: TextRequest, max_tokens: int | None) -> PromptIds:
        messages = request.messages
        tokenizer = self.tokenizer
        ids: PromptIds
        if request.prompt_ids is not None:
            field = "prompt_ids"
            ids = request.prompt_ids
            problem = "is empty; send at least one token"
        elif (request.text is None) == (messages is None):
            raise InvalidRequest("text_input", "send either text_input or messages, exactly one")
        else:
            field = "text_input"
            problem = "the tokenizer makes no token of it"
            text = request.text or ""
            if messages is not None:
                field = "messages"
                text = tokenizer.render_chat(messages, request.chat, request.chat.tools)
                self._check_rendered(text)
            if not text:
                raise InvalidRequest(field, "is empty; send at least one character")
            if messages is not None:
                ids = tokenizer.encode_chat(text)
            else:
                adds_special_tokens = request.add_special_tokens
                if adds_special_tokens is None:
                    adds_special_tokens = self.add_special_tokens
                ids = request.text_ids or tokenizer.encode(text, adds_special_tokens, field)
        if not ids:
            raise InvalidRequest(field, problem)
        if max_tokens is not None and len(ids) > max_tokens:
            raise PromptTooLong(field, len(ids), max_tokens)
        size = tokenizer.model_vocab_size
        table = request.extras.get("prompt_embedding_table")
        if table is not None:  # whose rows are ids, too
            size = max(size, tokenizer.first_table_id + len(table))
        for token in request.prompt_ids or ():
            if not 0 <= token < size:
                raise InvalidRequest(field, f"{token} is not a token id; they are 0 to {size - 1}")
        return ids
