"""Routes of stored responses: ``/v1/responses/ID`` and the paths below it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from trtllm_bls.openai.api_errors import ApiError, invalid
from trtllm_bls.openai.exchange import JsonResponse, tenant_of
from trtllm_bls.openai.stored import StoredResponses

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class StoredRoutes:
    """Routes that read ``store``; with ``None`` every response is missing."""

    store: StoredResponses | None

    async def response(self, request: Request) -> Response:
        """Answer ``GET`` and ``DELETE`` of a response."""
        if request.query_params.get("stream") == "true":
            raise invalid("stream", "is not supported by this server", "unsupported_parameter")
        if request.method == "DELETE":
            await self._read(request, StoredResponses.delete)
            response_id = request.path_params["id"]
            return JsonResponse({"id": response_id, "object": "response", "deleted": True})
        return JsonResponse(await self._read(request, StoredResponses.body))

    async def input_items(self, request: Request) -> Response:
        """Answer with a page of the items that a response was made from, the newest first."""
        items = await self._read(request, StoredResponses.input)
        query = request.query_params
        limit = query.get("limit", "20")
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit) <= 100):
            raise invalid("limit", "must be a number from 1 to 100")
        if query.get("order", "desc") == "desc":
            items = items[::-1]
        start = 0
        ids = [item["id"] for item in items]
        if query.get("after") in ids:
            start = ids.index(query["after"]) + 1
        end = start + int(limit)
        page_ids = ids[start:end] or [None]
        return JsonResponse(
            {
                "object": "list",
                "data": items[start:end],
                "first_id": page_ids[0],
                "last_id": page_ids[-1],
                "has_more": end < len(items),
            }
        )

    async def cancel(self, request: Request) -> Response:
        """Refuse: a response is stored once it has ended."""
        await self._read(request, StoredResponses.body)
        raise ApiError(400, "Cannot cancel a synchronous response.")

    async def _read(
        self, request: Request, method: Callable[[StoredResponses, str, str], _Value | None]
    ) -> _Value:
        """Return the result of ``method`` for the response in the path. Raises ``ApiError``."""
        response_id = request.path_params["id"]
        value = None
        if self.store is not None:
            value = await asyncio.to_thread(
                method, self.store, tenant_of(request.scope), response_id
            )
        if not value:
            raise ApiError(404, f"Response with id '{response_id[:200]}' not found.")
        return value
