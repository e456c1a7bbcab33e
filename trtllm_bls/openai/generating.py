"""Routes that generate: one request from its body to its whole answer or stream."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from trtllm_bls.errors import InvalidRequest, Overloaded
from trtllm_bls.http.keys import salt_of
from trtllm_bls.http.limits import BodyReader, ClientGone, Refused, traceparent
from trtllm_bls.http.shares import NoShare, Share, Shares, holder_of
from trtllm_bls.openai.api_errors import ApiError, api_error, is_too_long
from trtllm_bls.openai.builder import PartsBuilder, ResponseBuilder
from trtllm_bls.openai.caller_fields import caller_fields
from trtllm_bls.openai.conversation import ChatModel
from trtllm_bls.openai.exchange import Reply, RunningRequests, run_all, tenant_of
from trtllm_bls.openai.health import Health
from trtllm_bls.openai.references import References
from trtllm_bls.openai.refusals import Refusals
from trtllm_bls.openai.responses import History, ResponsesRequest, is_stateful
from trtllm_bls.openai.schema import Generation, decode
from trtllm_bls.openai.served_models import ServedModels
from trtllm_bls.orchestrator.orchestrator import Orchestrator
from trtllm_bls.types import CacheSalt, CallerFields, FinishReason, TextChunk

_PING_S = 10.0


class Builder(Protocol):
    """A class that builds the response to one kind of request; raises ``ApiError``."""

    prompt_field: str

    def __call__(self, request: Any, model: ChatModel, /) -> ResponseBuilder: ...


class StatefulBuilder(Protocol):
    """A ``Builder`` for requests that may refer to earlier responses."""

    prompt_field: str

    def __call__(self, request: Any, model: ChatModel, history: History, /) -> ResponseBuilder: ...


@dataclass(frozen=True, kw_only=True)
class Services:
    """The objects that all routes that generate share.

    ``places``: shares of the sequences that may run or wait. ``share_kv_cache``: requests of
    different API keys may share the engine's KV cache. ``pipeline_headers``: the names of request
    headers that pipelines get.
    """

    orchestrator: Orchestrator
    models: ServedModels
    references: References
    refusals: Refusals
    running: RunningRequests
    health: Health
    bodies: BodyReader
    places: Shares
    share_kv_cache: bool
    pipeline_headers: frozenset[str]


class _GenerateRoute:
    """``POST`` of one kind of request, as an ASGI application."""

    def __init__(
        self, services: Services, request_type: type[Generation], prompt_field: str
    ) -> None:
        self._services = services
        self._request_type = request_type
        self._prompt_field = prompt_field

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = self._services
        reply = Reply(scope, send)
        response: ResponseBuilder | None = None
        share: Share | None = None
        try:
            try:
                services.places.note(holder_of(scope))
                # A full server refuses a request without reading it.
                services.orchestrator.admission.check_room()
                response = await self._read(scope, reply, receive)
                share = self._take_places(scope, response)
            except (InvalidRequest, Overloaded, Refused) as error:
                raise services.refusals.report(reply, error, self._prompt_field) from None
            with services.running.one(reply.request_id.decode()):
                await self._answer(scope, response, reply, receive)
            services.health.note_success()
        except ClientGone:
            if response is not None and reply.is_started:
                await services.references.keep(scope, response, "cancelled")
        except asyncio.CancelledError:
            shutdown = ApiError(503, "the server shuts down", code="shutting_down")
            await self._fail(scope, shutdown, response, reply)
        except Exception as error:
            api_problem = await self._error(error, response, reply)
            await self._fail(scope, api_problem, response, reply)
        finally:
            if share is not None:
                share.release()

    def _take_places(self, scope: Scope, response: ResponseBuilder) -> Share:
        """Return the request's share of all places. Raises ``Overloaded``."""
        sequences = sum(request.num_return_sequences for request in response.requests)
        try:
            # The orchestrator refuses more sequences than may ever run at once.
            return self._services.places.take(
                holder_of(scope), min(sequences, self._services.places.total)
            )
        except NoShare:
            raise self._services.orchestrator.admission.crowded() from None

    async def _read(self, scope: Scope, reply: Reply, receive: Receive) -> ResponseBuilder:
        """Read the request. The body is dropped on return, since a stream may be long."""
        bodies = self._services.bodies
        async with bodies.read(scope, receive) as body:
            request = await bodies.in_turn(len(body), decode, body, self._request_type)
            if is_stateful(request):  # stored responses are in files
                return await asyncio.to_thread(self._prepare, scope, reply, request)
            return await bodies.in_turn(len(body), self._prepare, scope, reply, request)

    def _prepare(self, scope: Scope, reply: Reply, request: Generation) -> ResponseBuilder:
        """Build the response, with text requests that the orchestrator can run."""
        services = self._services
        response = self._build(scope, request)
        if response.model in services.models.pipelines:
            self._add_caller(scope, request, response)
        services.models.add_adapter(response.model, response.requests)
        tenant = None
        if request.draft_memory is not False:
            tenant = scope.get("tenant")
        trace = traceparent(scope).decode() or None
        owner = ""
        if not services.share_kv_cache:
            owner = tenant_of(scope)
        for text in response.requests:
            # The log can be searched for a response's x-request-id. Clients may repeat theirs, so
            # the engine's id has a random part too.
            text.request_id = f"{reply.request_id.decode()}-{text.request_id[:8]}"
            text.api = response.object
            text.tenant = tenant
            text.traceparent = trace
            if request.cache_salt:  # an engine without salts refuses it
                salt = request.cache_salt
                if owner:
                    salt = salt_of(owner, salt)
                text.cache_salt = CacheSalt(salt)
            elif owner:
                text.cache_salt = CacheSalt(salt_of(owner), required=False)
        return response

    def _add_caller(self, scope: Scope, request: Generation, response: ResponseBuilder) -> None:
        """Add the fields that a pipeline reads of the caller. Raises ``ApiError``."""
        caller = caller_fields(request, scope, self._services.pipeline_headers)
        for text in response.requests:
            text.caller = replace(caller, session=text.caller.session)

    def _build(self, scope: Scope, request: Generation) -> ResponseBuilder:
        """Build the response. Raises ``ApiError``."""
        raise NotImplementedError

    async def _answer(
        self, scope: Scope, response: ResponseBuilder, reply: Reply, receive: Receive
    ) -> None:
        services = self._services
        is_late = False

        def on_chunk(index: int, chunk: TextChunk) -> None:
            nonlocal is_late
            services.running.responses += 1
            end = chunk.ending
            if end and end.finish_reason is FinishReason.TIMEOUT and not end.completion_tokens:
                is_late = True
            elif events := response.add(index, chunk):
                reply.put(events)

        pinging = None
        if response.stream and isinstance(response, PartsBuilder):
            pinging = asyncio.create_task(_ping(response, reply))
        try:
            pipeline = services.models.pipelines.get(response.model)
            await run_all(
                services.orchestrator,
                response.requests,
                on_chunk,
                reply,
                receive,
                response.count_prompt,
                pipeline.run if pipeline is not None else None,
            )
        finally:
            if pinging is not None:
                pinging.cancel()
        if is_late:
            raise ApiError(504, "the engine gave no token before the time limit", code="timeout")
        response.storage_failed = not await services.references.keep(scope, response)
        end = response.last_events if response.stream else response.whole
        if response.requests[0].wants.log_probs:
            # On the event loop, a whole answer's log-probabilities would hold up all streams.
            data = await asyncio.to_thread(end)
        else:
            data = end()
        if response.stream:
            await reply.events(data, end=True)
        else:
            await reply.json(data)

    async def _error(
        self, error: Exception, response: ResponseBuilder | None, reply: Reply
    ) -> ApiError:
        max_tokens = None
        if is_too_long(error):
            max_tokens = await self._services.models.max_tokens()
        guide_field = response.guide_field if response else ""
        request_id = reply.request_id.decode()
        return api_error(error, self._prompt_field, max_tokens, guide_field, request_id)

    async def _fail(
        self, scope: Scope, error: ApiError, response: ResponseBuilder | None, reply: Reply
    ) -> None:
        if response is not None and reply.is_started:  # the client knows the response's id
            await self._services.references.keep(scope, response, "failed", error)
        await reply.error(error, response)


class Generate(_GenerateRoute):
    """A route whose requests have their whole conversation."""

    def __init__(
        self, services: Services, request_type: type[Generation], builder: Builder
    ) -> None:
        super().__init__(services, request_type, builder.prompt_field)
        self._builder = builder

    def _build(self, scope: Scope, request: Generation) -> ResponseBuilder:
        return self._builder(request, self._services.models.resolve(request))


class GenerateStateful(_GenerateRoute):
    """A route whose requests may refer to earlier responses."""

    def __init__(
        self, services: Services, request_type: type[ResponsesRequest], builder: StatefulBuilder
    ) -> None:
        super().__init__(services, request_type, builder.prompt_field)
        self._builder = builder

    def _build(self, scope: Scope, request: Generation) -> ResponseBuilder:
        assert isinstance(request, ResponsesRequest)
        history = self._services.references.resolve(request, scope)
        model = self._services.models.resolve(request)
        response = self._builder(request, model, history)
        if model.is_pipeline:
            session = self._services.references.session_of(request, scope, history)
            for text in response.requests:
                text.caller = CallerFields(session=session or response.id)
        return response


async def _ping(response: PartsBuilder, reply: Reply) -> None:
    """Send pings while a stream has no other events, so that its client sees the server work."""
    while True:
        num_puts = reply.num_puts
        await asyncio.sleep(_PING_S)
        if reply.num_puts == num_puts:
            reply.put(response.ping())
