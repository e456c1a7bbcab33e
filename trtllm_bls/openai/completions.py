"""``/v1/completions``: from prompts, as text or token ids, to text requests and their text."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from trtllm_bls.http.budgets import MAX_PROMPTS, MAX_TOKENS
from trtllm_bls.openai.api_errors import invalid
from trtllm_bls.openai.builder import (
    ChoicesBuilder,
    CompletionLogprobs,
    Delta,
    TokenScores,
    well_ended,
)
from trtllm_bls.openai.conversation import ChatModel, form_demand, shared_fields
from trtllm_bls.openai.schema import CompletionRequest, checked
from trtllm_bls.types import TextChunk, TextRequest, Wants

_DEFAULT_MAX_TOKENS = 16  # OpenAI's default
_MAX_CHOICES = 1024
# The type of a list of prompts, by its first item.
_PROMPT_TEXTS: Any = Annotated[list[str], msgspec.Meta(max_length=MAX_PROMPTS)]
_PROMPT_IDS: Any = Annotated[list[int], msgspec.Meta(max_length=MAX_TOKENS)]
_PROMPT_FORMS: dict[type, Any] = {
    str: _PROMPT_TEXTS,
    int: _PROMPT_IDS,
    list: Annotated[list[_PROMPT_IDS], msgspec.Meta(max_length=MAX_PROMPTS)],
}


class CompletionResponse(ChoicesBuilder):
    """The response to a ``CompletionRequest``. Raises ``ApiError`` if it cannot be served."""

    object = "text_completion"
    chunk_object = "text_completion"
    prompt_field = "prompt"
    id_prefix = "cmpl-"

    def __init__(self, request: CompletionRequest, model: ChatModel) -> None:
        if request.best_of is not None and request.best_of > (request.n or 1):
            raise invalid("best_of", "above n is not supported; send n", "unsupported_parameter")
        prompts = _prompts(request.prompt)
        if len(prompts) * (request.n or 1) > _MAX_CHOICES:
            problem = f"{len(prompts)} prompts with {request.n} choices each; at most"
            raise invalid("n", f"{problem} {_MAX_CHOICES} choices are allowed in all")
        scored = request.logprobs is not None
        if request.max_tokens == 0 and not request.echo:
            raise invalid("max_tokens", "0 is only allowed with echo, which answers the prompt")
        guide = None
        guide_field = ""
        if form := form_demand(request):
            guide = form.guide
            guide_field = form.field
        max_tokens = request.max_tokens
        if max_tokens is None:
            max_tokens = _DEFAULT_MAX_TOKENS
        shared = {
            **shared_fields(request, model.tokenizer.model_vocab_size),
            "num_return_sequences": request.n or 1,
            "stop_words": request.stop_words,
            "max_tokens": max_tokens,
            "echo": bool(request.echo),
            "add_special_tokens": request.add_special_tokens,
            "wants": Wants(
                log_probs=scored,
                top_log_probs=request.logprobs or 0,
                context_logits=scored and bool(request.echo),
            ),
            "return_tokens": scored,
            "guide": guide,
        }
        requests: list[TextRequest] = []
        for prompt in prompts:
            requests.append(TextRequest(request_id=uuid.uuid4().hex, **prompt, **shared))
        super().__init__(request, model, requests, guide_field)
        self._scores: TokenScores | None = None
        if scored:
            self._scores = TokenScores(model.tokenizer, request.logprobs or 0)
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def _deltas(self, index: int, chunk: TextChunk) -> Iterator[Delta]:
        ending = well_ended(chunk)
        if ending is None and (self._scores is None or not chunk.tokens):
            if chunk.text:
                yield chunk.text
            return
        logprobs = None
        if self._scores is not None:
            choice_logprobs = self._logprobs.setdefault(index, CompletionLogprobs())
            logprobs = choice_logprobs.next(self._scores.of(chunk))
        finish: dict[str, Any] = {"finish_reason": None}
        if ending:
            finish = self._finish(index, ending)
        yield {"text": chunk.text, "logprobs": logprobs, **finish}

    def _folded(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        (choice,) = deltas  # one chunk, the choice's last one
        assert isinstance(choice, dict)
        return choice


def _prompts(prompt: str | list[Any]) -> list[dict[str, Any]]:
    """Return the fields of each prompt's ``TextRequest``.

    ``prompt`` is a text, a list of texts, token ids, or a list of lists of token ids.
    """
    if isinstance(prompt, str):
        return [{"text": prompt}]
    kind = None
    if prompt:
        kind = _PROMPT_FORMS.get(type(prompt[0]))
    if kind is None:
        raise invalid("prompt", "must be text, a list of texts, token ids, or a list of those")
    prompts = checked("prompt", prompt, kind)
    if kind is _PROMPT_IDS:
        return [{"prompt_ids": tuple(prompts)}]
    if kind is _PROMPT_TEXTS:
        return [{"text": text} for text in prompts]
    return [{"prompt_ids": tuple(ids)} for ids in prompts]
