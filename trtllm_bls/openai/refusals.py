"""Requests that are refused before they run: counted, logged and answered."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import Scope, Send

from trtllm_bls.errors import InvalidRequest, Overloaded
from trtllm_bls.http.limits import Refused
from trtllm_bls.openai.api_errors import ApiError, api_error
from trtllm_bls.openai.exchange import Reply
from trtllm_bls.orchestrator.orchestrator import Orchestrator

# The header that a status complains about.
_STATUS_HEADERS = {401: "authorization", 403: "origin", 415: "content-type", 421: "host"}


class Refusals:
    """Reports of refused requests, in the form of the orchestrator's own refusals.

    ``kinds``: the kind of answer of each path, by which requests are counted.
    """

    def __init__(self, orchestrator: Orchestrator, kinds: Mapping[str, str]) -> None:
        self._orchestrator = orchestrator
        self._kinds = kinds

    async def answer(self, scope: Scope, send: Send, cause: Refused) -> None:
        """Answer a request that is refused before its route."""
        reply = Reply(scope, send)
        await reply.error(self.report(reply, cause))

    def report(self, reply: Reply, cause: Exception, prompt_field: str = "") -> ApiError:
        """Count and log a refused request, and return the error to answer."""
        error = api_error(cause, prompt_field, None)
        if not isinstance(cause, Overloaded):
            field = error.param or _STATUS_HEADERS.get(error.status, "body")
            limit = "max_body_bytes" if error.status == 413 else None
            cause = InvalidRequest(field, error.problem, limit)
        kind = self._kinds.get(reply.path)
        self._orchestrator.refused(reply.request_id.decode(), cause, kind)
        return error
