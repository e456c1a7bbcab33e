"""The ASGI application: its routes, their middleware, and the lifespan of shared objects.

Each group of routes is an object of a module of its own: ``generating``, ``stored_routes``,
``counting``, ``served_models``, ``health`` and ``metrics_route``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from trtllm_bls import __version__
from trtllm_bls.garbage import collect_rarely
from trtllm_bls.http.keys import key_of
from trtllm_bls.http.limits import BodyReader, BrowserGuard, ClientGone, Refused, header
from trtllm_bls.http.shares import Shares
from trtllm_bls.openai.api_errors import ApiError, api_error
from trtllm_bls.openai.api_settings import ApiSettings
from trtllm_bls.openai.chat import ChatResponse
from trtllm_bls.openai.completions import CompletionResponse
from trtllm_bls.openai.counting import CountingRoutes
from trtllm_bls.openai.document import docs_answer, document, overview, page
from trtllm_bls.openai.exchange import JsonResponse, RunningRequests
from trtllm_bls.openai.face_routes import EmbeddingsRoute, RerankRoute, SpeechRoute
from trtllm_bls.openai.generating import Generate, GenerateStateful, Services
from trtllm_bls.openai.health import Health, HealthRoute
from trtllm_bls.openai.messages import MessagesRequest, MessagesResponse
from trtllm_bls.openai.metrics_route import MetricsRoute
from trtllm_bls.openai.references import References
from trtllm_bls.openai.refusals import Refusals
from trtllm_bls.openai.responses import (
    CompactRequest,
    CompactResponse,
    ResponsesRequest,
    ResponsesResponse,
)
from trtllm_bls.openai.schema import ChatCompletionRequest, CompletionRequest
from trtllm_bls.openai.served_models import ServedModels
from trtllm_bls.openai.sockets import PATH, ResponsesSocket, denying
from trtllm_bls.openai.stored_routes import StoredRoutes
from trtllm_bls.orchestrator.deployment import Deployment
from trtllm_bls.orchestrator.lifecycle import Lifecycle
from trtllm_bls.settings.faces import CHAT, EMBED, FACES, RERANK, SPEAK

_PATHS_BEHIND_KEYS = ("/v1", "/tokenize", "/detokenize")


def create_app(backend: Deployment, settings: ApiSettings) -> Starlette:
    """Return the application, which closes ``backend`` when it ends. Raises ``SettingsError``."""
    orchestrator = backend.orchestrator
    models = ServedModels(backend, settings)
    references = References(settings)
    kinds = {
        "/v1/chat/completions": ChatResponse.object,
        "/v1/completions": CompletionResponse.object,
        PATH: ResponsesResponse.object,
        "/v1/responses/compact": CompactResponse.object,
        "/v1/messages": MessagesResponse.object,
        **{face.path: face.capability for face in FACES if face is not CHAT},
    }
    refusals = Refusals(orchestrator, kinds)
    running = RunningRequests()
    bodies = BodyReader(settings.max_body_bytes, seconds=settings.body_s)
    health = Health(orchestrator, next(iter(backend.tokenizer.end_ids), 0))
    services = Services(
        orchestrator=orchestrator,
        models=models,
        references=references,
        refusals=refusals,
        running=running,
        health=health,
        bodies=bodies,
        places=Shares(orchestrator.admission.total),
        share_kv_cache=settings.share_kv_cache,
        pipeline_headers=frozenset(settings.pipeline_headers),
    )
    responses = GenerateStateful(services, ResponsesRequest, ResponsesResponse)
    compact = GenerateStateful(services, CompactRequest, CompactResponse)
    socket = ResponsesSocket(
        responses, refusals.answer, references.last_responses, settings.allowed_origins
    )
    stored = StoredRoutes(references.store)
    counting = CountingRoutes(orchestrator, backend.tokenizer, models, references, bodies)
    health_route = HealthRoute(backend, running, health, settings.status_dir)
    metrics = MetricsRoute(backend, settings)

    async def version(request: Request) -> Response:
        return JsonResponse({"version": __version__})

    async def openapi(request: Request) -> Response:
        return JsonResponse(document(models.names))

    async def docs(request: Request) -> Response:
        return docs_answer(models.names)

    async def version_1(request: Request) -> Response:
        return JsonResponse(overview(models.names))

    post = partial(Route, methods=["POST"])
    routes = [
        post("/v1/chat/completions", Generate(services, ChatCompletionRequest, ChatResponse)),
        post("/v1/completions", Generate(services, CompletionRequest, CompletionResponse)),
        post(PATH, responses),
        WebSocketRoute(PATH, socket),
        post("/v1/responses/input_tokens", counting.responses_input),
        post("/v1/responses/compact", compact),
        Route("/v1/responses/{id}", stored.response, methods=["GET", "DELETE"]),
        Route("/v1/responses/{id}/input_items", stored.input_items),
        post("/v1/responses/{id}/cancel", stored.cancel),
        post("/v1/messages", Generate(services, MessagesRequest, MessagesResponse)),
        post("/v1/messages/count_tokens", counting.messages),
        post(EMBED.path, EmbeddingsRoute(services)),
        post(SPEAK.path, SpeechRoute(services)),
        post(RERANK.path, RerankRoute(services)),
        post("/tokenize", counting.tokenize),
        post("/detokenize", counting.detokenize),
        Route("/version", version),
        Route("/", page),
        Route("/docs", docs),
        Route("/v1", version_1),
        Route("/v1/models", models.list),
        Route("/v1/models/{name:path}", models.get),
        Route("/health", health_route.get),
        Route("/health/ready", health_route.get),
        Route("/metrics", metrics.get),
        Route("/openapi.json", openapi),
    ]
    app = Starlette(
        routes=routes,
        middleware=_middleware(settings, refusals),
        exception_handlers=dict.fromkeys((HTTPException, Refused, ClientGone, Exception), _failure),
        lifespan=partial(_lifespan, backend, settings.status_dir, running, references, metrics),
    )
    app.router.redirect_slashes = False
    return app


def _middleware(settings: ApiSettings, refusals: Refusals) -> list[Middleware]:
    """Return the middleware in front of the routes, the outermost first."""
    middleware: list[Middleware] = []
    if settings.allowed_origins:  # outermost, as a browser sends its preflight without a key
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "request-id", "retry-after", "www-authenticate"],
            )
        )
    if settings.allowed_hosts is not None:
        middleware.append(
            Middleware(
                BrowserGuard, settings.allowed_hosts, settings.allowed_origins, refusals.answer
            )
        )
    if settings.keys:
        middleware.append(Middleware(_Keys, settings.keys, refusals))
    return middleware


@asynccontextmanager
async def _lifespan(
    backend: Deployment,
    status_dir: str,
    running: RunningRequests,
    references: References,
    metrics: MetricsRoute,
    app: Starlette,
) -> AsyncIterator[None]:
    collect_rarely()
    loop = asyncio.get_running_loop()
    backend.start(loop)
    running.loop = loop
    lifecycle: Lifecycle | None = None
    if status_dir:
        lifecycle = Lifecycle(running, backend, status_dir, is_first=False)
    sharing = asyncio.create_task(metrics.share())
    try:
        yield
    finally:
        sharing.cancel()
        if lifecycle is not None:
            await asyncio.to_thread(lifecycle.close)
        await backend.close()
        await references.close()


@dataclass(frozen=True)
class _Keys:
    """Middleware that passes requests for ``_PATHS_BEHIND_KEYS`` only with one of ``keys``."""

    app: ASGIApp
    keys: tuple[bytes, ...]
    refusals: Refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not scope["path"].startswith(_PATHS_BEHIND_KEYS):
            await self.app(scope, receive, send)
            return
        credentials = header(scope, b"authorization") or b"Bearer " + header(scope, b"x-api-key")
        if key := key_of(self.keys, credentials):
            scope["tenant"] = key.hex()  # a copy would keep what ``Reply`` removes from it
            await self.app(scope, receive, send)
            return
        message = "no valid API key; send Authorization: Bearer KEY, or x-api-key: KEY"
        challenge = {"www-authenticate": "Bearer"}
        error = ApiError(401, message, code="invalid_api_key", headers=challenge)
        if scope["type"] == "websocket":
            send = denying(send)
        await self.refusals.answer(scope, send, error)


async def _failure(request: Request, error: Exception) -> Response:
    """Answer a request whose route raised ``error``, or that has no route."""
    if isinstance(error, ClientGone):
        return Response()
    if not isinstance(error, HTTPException):
        return JsonResponse(api_error(error, "prompt", None))
    headers = error.headers or {}
    path = request.scope["path"]
    if error.status_code == 404:
        message = f"unknown URL: {request.method} {path}"
        return JsonResponse(ApiError(404, message, headers, code="unknown_url"))
    message = error.detail
    if error.status_code == 405:
        message = f"{path} does not take {request.method}"
    return JsonResponse(ApiError(error.status_code, message, headers))
