"""From a text request's words to everything an engine needs in token ids.

Used by the orchestrator and by preprocessing, so both make the same prompt of the same request.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from trtllm_bls.errors import InvalidRequest
from trtllm_bls.messages import TextRequest, TokenIds
from trtllm_bls.stopping import checked_stops
from trtllm_bls.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, tokenised.

    ``stop_sequences`` are the stop words' ids, one entry per word (empty if the tokenizer makes
    none of it); ``engine_stops`` is what the engine is given: those it may act on, and every end
    id but the first, since it takes only one.
    """

    ids: TokenIds
    end_ids: TokenIds
    pad_id: int | None
    stop_sequences: tuple[TokenIds, ...]
    engine_stops: tuple[TokenIds, ...]
    bad_sequences: tuple[TokenIds, ...]
    embedding_bias: tuple[tuple[int, float], ...]

    @property
    def end_id(self) -> int:
        """The engine's end id; -1 = never end by itself."""
        return self.end_ids[0] if self.end_ids else -1


class PromptMaker:
    """Tokenises requests; ``add_special_tokens`` applies where a request does not say."""

    def __init__(self, tokenizer: Tokenizer, add_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._add_special_tokens = add_special_tokens

    def make(self, request: TextRequest) -> Prompt:
        """Raises ``InvalidRequest`` naming the field."""
        checked_stops(request.stop_words)  # before any of them costs time
        encode = self._tokenizer.encode_word
        end_ids = self.end_ids(request)
        stops = tuple(encode(word) for word in request.stop_words)
        # An engine would act on stop words before min_tokens; then only the text matcher does.
        engine_stops = () if request.sampling.min_tokens else tuple(ids for ids in stops if ids)
        return Prompt(
            ids=self._ids(request),
            end_ids=end_ids,
            pad_id=self._tokenizer.pad_id if request.pad_id is None else request.pad_id,
            stop_sequences=stops,
            engine_stops=(*engine_stops, *((token,) for token in end_ids[1:])),
            bad_sequences=tuple(
                ids for word in request.bad_words for ids in self._tokenizer.word_variants(word)
            ),
            embedding_bias=tuple(
                (token, weight) for word, weight in request.embedding_bias for token in encode(word)
            ),
        )

    def end_ids(self, request: TextRequest) -> TokenIds:
        """The request's end id if it names one (-1 = none), else all of the model's."""
        if request.end_id is None:
            return self._tokenizer.end_ids
        return () if request.end_id < 0 else (request.end_id,)

    def _ids(self, request: TextRequest) -> TokenIds:
        if (request.text is None) == (request.messages is None):
            raise InvalidRequest("text_input", "send either text_input or messages, exactly one")
        add_special = request.add_special_tokens
        if add_special is None:
            add_special = self._add_special_tokens
        field = "text_input" if request.messages is None else "messages"
        if request.messages is not None:
            text = self._tokenizer.render_chat(_conversation(request.messages))
            add_special = False  # the template writes them
        else:
            text = request.text or ""
        if not text:
            raise InvalidRequest(field, "is empty; send at least one character")
        ids = self._tokenizer.encode(text, add_special_tokens=add_special, field=field)
        if not ids:
            raise InvalidRequest(field, "the tokenizer makes no token of it")
        return ids


def _conversation(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            "messages",
            f'not JSON ({error}); send [{{"role": "user", "content": "..."}}]',
        ) from None
