"""The conversations that requests of the Responses API refer to, kept for later ones."""

from __future__ import annotations

import asyncio
import logging

from starlette.types import Scope

from trtllm_bls.openai.api_errors import ApiError
from trtllm_bls.openai.api_settings import ApiSettings
from trtllm_bls.openai.builder import ResponseBuilder
from trtllm_bls.openai.exchange import tenant_of
from trtllm_bls.openai.responses import History, ResponsesRequest, resolve_references
from trtllm_bls.openai.sockets import SOCKET, LastResponses
from trtllm_bls.openai.stored import PrivateDirectory, StoredResponses

log = logging.getLogger(__name__)
# With ``--lost-items sentence`` this stands for an item that is no longer stored.
_LOST_ITEM = {
    "type": "message",
    "role": "assistant",
    "content": "[This part of the conversation is no longer stored.]",
}


class References:
    """The stored responses, and the last response of each WebSocket.

    ``store`` is ``None`` without ``--store-bytes``. Raises ``SettingsError`` for a directory
    that cannot be used.
    """

    def __init__(self, settings: ApiSettings) -> None:
        self.store: StoredResponses | None = None
        self.last_responses = LastResponses(settings.max_body_bytes)
        self._replaces_lost = settings.lost_items == "sentence"
        self._private: PrivateDirectory | None = None
        if not settings.store_bytes:
            return
        directory = settings.store_dir
        if directory is None:
            self._private = PrivateDirectory()
            directory = self._private.path
        self.store = StoredResponses(
            directory,
            max_bytes=settings.store_bytes,
            max_s=settings.store_hours * 3600,
            max_chain_bytes=settings.max_body_bytes,
        )

    def resolve(self, request: ResponsesRequest, scope: Scope) -> History:
        """Put stored items in the place of ``request``'s references, and return its history.

        Waits for the disk. Raises ``ApiError``.
        """
        socket = scope.get(SOCKET, "")
        items, session = self.last_responses.take(socket, request.previous_response_id or "")
        substitute = _LOST_ITEM if self._replaces_lost else None
        items = resolve_references(request, tenant_of(scope), self.store, substitute, items)
        return History(
            items=tuple(items),
            can_store=self.store is not None,
            keeps_conversation=bool(socket),
            session=session,
        )

    def session_of(self, request: ResponsesRequest, scope: Scope, history: History) -> str | None:
        """Return the session of the request's conversation; None: the request is its first.

        The session is the client's id of the conversation, or the id of its first response. Waits
        for the disk.
        """
        if isinstance(request.conversation, str):
            return request.conversation
        if request.conversation is not None:
            return request.conversation.id
        previous = request.previous_response_id
        if history.session is not None or previous is None or self.store is None:
            return history.session or previous
        return self.store.first(tenant_of(scope), previous)

    async def keep(
        self,
        scope: Scope,
        response: ResponseBuilder,
        status: str = "",
        error: ApiError | None = None,
    ) -> bool:
        """Store the response, if it is to be stored; false if that failed.

        ``status``: the status of a response that failed or was cancelled.
        """
        socket = scope.get(SOCKET)
        if socket is not None and not status:
            session = response.requests[0].caller.session
            self.last_responses.keep(socket, response.id, response.conversation, session)
        if self.store is None:
            return True
        stored = response.stored(status, error)
        if stored is None:
            return True
        try:
            await asyncio.to_thread(self.store.save, tenant_of(scope), stored)
        except ApiError as problem:  # the client has its answer all the same
            log.warning("%s is not stored: %s", stored.id, problem.message)
            return False
        return True

    async def close(self) -> None:
        """Close the store, and remove the directory that only this process used."""
        if self.store is not None:
            await asyncio.to_thread(self.store.close)
        if self._private is not None:
            self._private.close()
