"""``/v1/completions``: from prompts, as text or token ids, to text requests and their text."""

from __future__ import annotations

import uuid
from typing import Any

from trtllm_bls.openai.constraints import ChatFormats, guided_decoding
from trtllm_bls.openai.errors import invalid
from trtllm_bls.openai.logprobs import CompletionLogprobs, TokenScores
from trtllm_bls.openai.responses import Head, ResponseBuilder, shared_fields, well_ended
from trtllm_bls.openai.schema import CompletionRequest
from trtllm_bls.tokenizer import Tokenizer
from trtllm_bls.types import TextChunk, TextRequest, Wants

_DEFAULT_TOKENS = 16  # as OpenAI's
_MOST_PROMPTS, _MOST_CHOICES, _MOST_TOKENS = 256, 1024, 2**20


class CompletionResponse(ResponseBuilder):
    """Builds the response to a ``CompletionRequest``; raises ``ApiError`` where it cannot."""

    object = chunk_object = "text_completion"
    prompt_field = "prompt"
    id_prefix = "cmpl-"

    def __init__(
        self,
        request: CompletionRequest,
        head: Head,
        tokenizer: Tokenizer,
        formats: ChatFormats | None = None,
    ) -> None:
        if request.best_of is not None and request.best_of > (request.n or 1):
            raise invalid("best_of", "above n is not supported; send n", "unsupported_parameter")
        prompts = _prompts(request.prompt)
        if len(prompts) * (request.n or 1) > _MOST_CHOICES:
            problem = f"{len(prompts)} prompts with {request.n} choices each; at most"
            raise invalid("n", f"{problem} {_MOST_CHOICES} choices are allowed in all")
        scored = request.logprobs is not None
        if request.max_tokens == 0 and not request.echo:
            raise invalid("max_tokens", "0 is only allowed with echo, which answers the prompt")
        guide = guided_decoding(request)
        shared = {
            **shared_fields(request, tokenizer.model_vocab_size),
            "max_tokens": _DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens,
            "echo": bool(request.echo),
            "add_special_tokens": request.add_special_tokens,
            "wants": Wants(
                log_probs=scored,
                top_log_probs=request.logprobs or 0,
                context_logits=scored and bool(request.echo),
            ),
            "return_tokens": scored,
            "extras": guide.extras if guide else {},
        }
        requests = [
            TextRequest(request_id=uuid.uuid4().hex, **prompt, **shared) for prompt in prompts
        ]
        super().__init__(request, head, requests)
        if guide is not None:
            self.guide_field = guide.field
        self._scores = TokenScores(tokenizer, request.logprobs or 0) if scored else None
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def _events(self, index: int, chunk: TextChunk) -> bytes:
        if ending := well_ended(chunk):
            fields = self._choice(index, chunk) | self._finish(index, ending)
            return self._frames.choice(index, **fields)
        if self._scores is not None and chunk.tokens:
            fields = self._choice(index, chunk)
            return self._frames.choice(index, **fields, finish_reason=None)
        return self._frames.text(index, chunk.text) if chunk.text else b""

    def _choice(self, index: int, chunk: TextChunk) -> dict[str, Any]:
        return {"text": chunk.text, "logprobs": self._scored(index, chunk)}

    def _scored(self, index: int, chunk: TextChunk) -> dict[str, Any] | None:
        if self._scores is None:
            return None
        found = self._logprobs.setdefault(index, CompletionLogprobs())
        return found.next(self._scores.of(chunk))


def _prompts(prompt: str | list[Any]) -> list[dict[str, Any]]:
    """The fields of each prompt's ``TextRequest``: of a string, strings, ids, or lists of ids."""
    if isinstance(prompt, str):
        return [{"text": prompt}]
    if not prompt:
        raise invalid("prompt", "is empty; send at least one prompt")
    if isinstance(prompt[0], int):
        return [{"prompt_ids": _ids("prompt", prompt)}]
    if len(prompt) > _MOST_PROMPTS:
        raise invalid("prompt", f"{len(prompt)} prompts; at most {_MOST_PROMPTS} are allowed")
    if all(isinstance(each, str) for each in prompt):
        return [{"text": each} for each in prompt]
    if all(isinstance(each, list) for each in prompt):
        return [{"prompt_ids": _ids(f"prompt[{n}]", each)} for n, each in enumerate(prompt)]
    raise invalid("prompt", "must be a string, a list of strings, token ids, or lists of those")


def _ids(field: str, ids: list[Any]) -> tuple[int, ...]:
    if len(ids) > _MOST_TOKENS:
        raise invalid(field, f"{len(ids)} token ids; at most {_MOST_TOKENS} are allowed")
    if not all(type(each) is int for each in ids):
        raise invalid(field, "token ids must be whole numbers")
    return tuple(ids)
