"""Routes that tokenise without generating: token counts, token ids and texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from trtllm_bls.errors import InvalidRequest
from trtllm_bls.http.limits import BodyReader
from trtllm_bls.openai.api_errors import api_error, invalid
from trtllm_bls.openai.chat import ChatResponse
from trtllm_bls.openai.exchange import JsonResponse
from trtllm_bls.openai.messages import CountTokensRequest, MessagesResponse
from trtllm_bls.openai.references import References
from trtllm_bls.openai.responses import ResponsesRequest, ResponsesResponse
from trtllm_bls.openai.schema import DetokenizeRequest, TokenizeRequest, decode
from trtllm_bls.openai.served_models import ServedModels
from trtllm_bls.orchestrator.orchestrator import Orchestrator
from trtllm_bls.text.tokenizer import Tokenizer
from trtllm_bls.types import TextRequest


@dataclass(frozen=True)
class CountingRoutes:
    """Routes that answer with token ids or their number, which a thread works out."""

    orchestrator: Orchestrator
    tokenizer: Tokenizer
    models: ServedModels
    references: References
    bodies: BodyReader

    async def tokenize(self, request: Request) -> Response:
        """Answer ``POST /tokenize``."""
        answer = await self._in_thread(request, self._tokenized)
        return JsonResponse({**answer, "max_model_len": await self.models.max_tokens()})

    async def detokenize(self, request: Request) -> Response:
        """Answer ``POST /detokenize``."""
        return JsonResponse(await self._in_thread(request, self._detokenized))

    async def responses_input(self, request: Request) -> Response:
        """Answer ``POST /v1/responses/input_tokens``."""

        def count(body: bytes) -> dict[str, object]:
            generation = decode(body, ResponsesRequest)
            history = self.references.resolve(generation, request.scope)
            model = self.models.resolve(generation).reading_text()
            return self._count(ResponsesResponse(generation, model, history).requests[0])

        count_of_input = await self._in_thread(request, count, ResponsesResponse.prompt_field)
        return JsonResponse({**count_of_input, "object": "response.input_tokens"})

    async def messages(self, request: Request) -> Response:
        """Answer ``POST /v1/messages/count_tokens``."""

        def count(body: bytes) -> dict[str, object]:
            generation = decode(body, CountTokensRequest)
            model = self.models.resolve(generation).reading_text()
            return self._count(MessagesResponse(generation, model).requests[0])

        return JsonResponse(await self._in_thread(request, count, MessagesResponse.prompt_field))

    def _count(self, request: TextRequest) -> dict[str, object]:
        return {"input_tokens": len(self.orchestrator.prompt_ids(request))}

    async def _in_thread(
        self, request: Request, answer: Callable[[bytes], dict[str, object]], prompt: str = "prompt"
    ) -> dict[str, object]:
        """Return ``answer(body)``. An error of the prompt names the field ``prompt``."""
        try:
            async with self.bodies.read(request.scope, request.receive) as body:
                return await asyncio.to_thread(answer, body)
        except InvalidRequest as error:
            if prompt == "prompt" and error.field == "messages":
                prompt = "messages"
            raise api_error(error, prompt, None) from None

    def _tokenized(self, body: bytes) -> dict[str, object]:
        request = decode(body, TokenizeRequest)
        self.models.check(request.model or self.models.names[0])
        if request.prompt is not None:
            text = TextRequest(
                request_id="",
                text=request.prompt,
                max_tokens=None,
                add_special_tokens=request.add_special_tokens,
            )
        elif request.messages:
            model = self.models.resolve(request).reading_text()
            text = ChatResponse(request, model).requests[0]
        else:
            raise invalid("prompt", "is missing; send prompt or messages")
        ids = self.orchestrator.prompt_ids(text)
        strings = None
        if request.return_token_strs:
            strings = [self.tokenizer.token(token_id) for token_id in ids]
        return {"count": len(ids), "tokens": tuple(ids), "token_strs": strings}

    def _detokenized(self, body: bytes) -> dict[str, object]:
        request = decode(body, DetokenizeRequest)
        self.models.check(request.model or self.models.names[0])
        text = self.tokenizer.decode(request.tokens, skip_special_tokens=False)
        return {"prompt": text}
