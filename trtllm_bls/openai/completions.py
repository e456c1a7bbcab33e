"""``/v1/completions``: prompts, as text or token ids, to text requests and back to text."""

from __future__ import annotations

import uuid
from typing import Any

from trtllm_bls.openai.answers import Answer, shared_fields, well_ended
from trtllm_bls.openai.constraints import ChatFormats, guide_of
from trtllm_bls.openai.errors import invalid
from trtllm_bls.openai.frames import Head
from trtllm_bls.openai.logprobs import CompletionLogprobs, TokenScores
from trtllm_bls.openai.schema import CompletionRequest
from trtllm_bls.tokenizer import Tokenizer
from trtllm_bls.types import TextChunk, TextRequest, Wants

_DEFAULT_TOKENS = 16  # as OpenAI's
_MOST_PROMPTS, _MOST_CHOICES, _MOST_TOKENS = 256, 1024, 2**20


class CompletionAnswer(Answer):
    """The answer to a ``CompletionRequest``. Raises ``ApiError`` for one that cannot be served."""

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
        guide = guide_of(request)
        shared = {
            **shared_fields(request, tokenizer.model_vocab_size),
            "max_tokens": request.max_tokens or _DEFAULT_TOKENS,
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
        self._scores = TokenScores(tokenizer, request.logprobs or 0) if scored else None
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def _events(self, choice: int, chunk: TextChunk) -> bytes:
        if ending := well_ended(chunk):
            fields = self._choice(choice, chunk) | self._finish(choice, ending)
            return self._frames.choice(choice, **fields)
        if self._scores is not None and chunk.tokens:
            fields = self._choice(choice, chunk)
            return self._frames.choice(choice, **fields, finish_reason=None)
        return self._frames.text(choice, chunk.text) if chunk.text else b""

    def _choice(self, choice: int, chunk: TextChunk) -> dict[str, Any]:
        return {"text": chunk.text, "logprobs": self._scored(choice, chunk)}

    def _scored(self, choice: int, chunk: TextChunk) -> dict[str, Any] | None:
        if self._scores is None:
            return None
        found = self._logprobs.setdefault(choice, CompletionLogprobs())
        return found.next(self._scores.of(chunk))


def _prompts(prompt: str | list[Any]) -> list[dict[str, Any]]:
    """One string, several, the ids of one, or of several; as fields of ``TextRequest``."""
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
