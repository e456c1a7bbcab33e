"""The ASGI application: routes, who may use them, and each request from body to response."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from trtllm_bls import __version__
from trtllm_bls.errors import InvalidRequest, Overloaded, SettingsError, TrtllmBlsError
from trtllm_bls.http.keys import key_of
from trtllm_bls.http.limits import (
    RETRY,
    BodyReader,
    BrowserGuard,
    ClientGone,
    ConnectionLimits,
    Refused,
    header,
    traceparent,
)
from trtllm_bls.openai.api_errors import ApiError, api_error, invalid, is_too_long
from trtllm_bls.openai.builder import PartsBuilder, ResponseBuilder
from trtllm_bls.openai.chat import ChatResponse
from trtllm_bls.openai.completions import CompletionResponse
from trtllm_bls.openai.content import ContentReader
from trtllm_bls.openai.conversation import ChatFormats, ChatModel
from trtllm_bls.openai.document import document, page
from trtllm_bls.openai.exchange import PromptSink, Reply, RunningRequests, run_all
from trtllm_bls.openai.exposition import Samples, SharedSamples, samples, triton_metrics, written
from trtllm_bls.openai.messages import CountTokensRequest, MessagesRequest, MessagesResponse
from trtllm_bls.openai.responses import (
    CompactRequest,
    CompactResponse,
    ResponsesRequest,
    ResponsesResponse,
    is_stateful,
    with_references,
)
from trtllm_bls.openai.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    TokenizeRequest,
    decode,
)
from trtllm_bls.openai.sockets import PATH, SOCKET, LastResponses, ResponsesSocket, denying
from trtllm_bls.openai.stored import PrivateDirectory, StoredResponses
from trtllm_bls.orchestrator.deployment import SHUTTING_DOWN, Deployment
from trtllm_bls.orchestrator.lifecycle import Lifecycle
from trtllm_bls.orchestrator.orchestrator import Orchestrator
from trtllm_bls.orchestrator.reports import (
    ENGINE_SEQUENCES,
    UNREADABLE_ARGUMENTS,
    UNREADABLE_CONTENT,
    unreported_id,
)
from trtllm_bls.orchestrator.status import StatusDirectory, common_problem, engines_up
from trtllm_bls.types import (
    Adapter,
    CacheSalt,
    Ending,
    FinishReason,
    SpeculationRequest,
    TextChunk,
    TextRequest,
)

log = logging.getLogger(__name__)
_PING_S = 10.0
_BEHIND_KEYS = ("/v1", "/tokenize", "/detokenize")  # paths
# Of ``Health``.
_FRESH_S = 5.0  # an answer proves for this long that the engine works
_TRUSTED_S = 30.0  # for this long a probe is answered while the engine is asked again
_FAILED_S = 1.0  # for this long a failure is repeated without asking again
_LIMIT_S = 10.0  # for one token
# Stands for an item that is no longer stored.
_LOST = {
    "type": "message",
    "role": "assistant",
    "content": "[This part of the conversation is no longer stored.]",
}
# The header to blame for a status.
_REFUSED_FOR = {401: "authorization", 403: "origin", 415: "content-type", 421: "host"}


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """Settings of one server.

    ``model_names``: what requests may name, at least one; ``/v1/models`` lists them in this order.
    ``keys``: digests of the API keys (``openai.read_keys``). Without any, everybody may ask.
    ``max_body_bytes``, ``body_s``: size of a request's JSON, and seconds in which it has to come.
    ``allowed_hosts``: names by which clients reach a server that listens on this machine alone.
    ``None``: the server listens elsewhere too, and names and origins are not checked.
    ``allowed_origins``: web pages that may use the API from a browser (CORS).
    ``shared``: memory in which workers keep their samples for ``/metrics``; ``None``: there is one
    process.
    ``pipelines``: models of the Triton server that answer conversations by themselves.
    ``loras``: task ids of LoRA adapters by the names that requests give as ``model``; empty for one
    that the engine knows by its name.
    ``tool_parser``, ``reasoning_parser``: auto, none, or a name in ``text.chat_formats``.
    ``unreadable``: ``replace`` puts a sentence in the place of images and files, ``refuse`` refuses
    them.
    ``store_dir``: directory of stored responses, which all processes of a server share; ``None``:
    one of this process and its forks, removed at its end. ``store_bytes``, ``store_hours``: how
    much is stored, and for how long after its last use; 0 bytes: nothing. ``lost_items``:
    ``refuse`` a request that refers to what is lost, or put a ``sentence`` in its place.
    ``share_kv_cache``: requests of different keys may share the engine's KV cache, whose times tell
    what others have asked.
    ``status_dir``: directory of ``orchestrator.status``, over which the process is asked to drain;
    empty: there is none.
    ``triton_metrics``: where Triton tells its own metrics, which ``/metrics`` then has too.
    """

    model_names: tuple[str, ...] = ()
    keys: tuple[bytes, ...] = ()
    max_body_bytes: int = 4 * 2**20
    body_s: float = ConnectionLimits.body_s
    allowed_hosts: tuple[str, ...] | None = None
    allowed_origins: tuple[str, ...] = ()
    shared: SharedSamples | None = None
    loras: Mapping[str, str] = field(default_factory=dict)
    pipelines: tuple[str, ...] = ()
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    unreadable: str = "replace"
    store_dir: Path | None = None
    store_bytes: int = 256 * 2**20
    store_hours: float = 24
    lost_items: str = "refuse"
    share_kv_cache: bool = False
    status_dir: str = ""
    triton_metrics: str = ""


def create_app(backend: Deployment, settings: ApiSettings) -> Starlette:
    """The application, which closes ``backend`` when it ends."""
    api = _Api(backend, settings)
    post = partial(Route, methods=["POST"])
    responses = _Generate(api, ResponsesRequest, ResponsesResponse)
    socket = ResponsesSocket(responses, api.refuse, api.last, settings.allowed_origins)
    routes = [
        post("/v1/chat/completions", _Generate(api, ChatRequest, ChatResponse)),
        post("/v1/completions", _Generate(api, CompletionRequest, CompletionResponse)),
        post(PATH, responses),
        WebSocketRoute(PATH, socket),
        post("/v1/responses/input_tokens", api.count_input),
        post("/v1/responses/compact", _Generate(api, CompactRequest, CompactResponse)),
        Route("/v1/responses/{id}", api.stored_response, methods=["GET", "DELETE"]),
        Route("/v1/responses/{id}/input_items", api.stored_input),
        post("/v1/responses/{id}/cancel", api.cancel),
        post("/v1/messages", _Generate(api, MessagesRequest, MessagesResponse)),
        post("/v1/messages/count_tokens", api.count_messages),
        post("/tokenize", api.tokenize),
        post("/detokenize", api.detokenize),
        Route("/version", api.version),
        Route("/", page),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/health", api.health_of_engine),
        Route("/health/ready", api.health_of_engine),
        Route("/metrics", api.metrics),
        Route("/openapi.json", api.openapi),
    ]
    middleware = []
    if settings.allowed_origins:  # outermost: a browser sends its preflight without a key
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "request-id", "retry-after", "www-authenticate"],
            )
        )
    if (hosts := settings.allowed_hosts) is not None:
        middleware.append(Middleware(BrowserGuard, hosts, settings.allowed_origins, api.refuse))
    if settings.keys:
        middleware.append(Middleware(_Keys, api))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers=dict.fromkeys((HTTPException, Refused, ClientGone, Exception), _failed),
        lifespan=api.lifespan,
    )
    app.router.redirect_slashes = False
    return app


class Health:
    """Asks the engine for one token if no answer ended well lately; one question at a time."""

    def __init__(self, orchestrator: Orchestrator, token_id: int) -> None:
        self._orchestrator = orchestrator
        self._token_id = token_id
        self._proven_at = float("-inf")
        self._failed_at = float("-inf")
        self._problem: str | None = None
        self._check: asyncio.Task[None] | None = None

    def proven(self) -> None:
        """Note that an answer has ended well."""
        self._proven_at = asyncio.get_running_loop().time()
        self._problem = None

    async def problem(self) -> str | None:
        """What is wrong, in one line; ``None`` if nothing is."""
        now = asyncio.get_running_loop().time()
        if now - self._proven_at < _FRESH_S:
            return None
        if self._problem is not None and now - self._failed_at < _FAILED_S:
            return self._problem
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(self._ask())
        if self._problem is not None or now - self._proven_at > _TRUSTED_S:
            await asyncio.shield(self._check)
        return self._problem

    async def _ask(self) -> None:
        """Ask for one token after one token, without drafts; neither counted nor logged."""
        endings: list[Ending | None] = []
        request = TextRequest(
            request_id=unreported_id(),
            prompt_ids=(self._token_id,),
            max_tokens=1,
            speculation=SpeculationRequest(num_draft_tokens=0),
            timeout_s=_LIMIT_S,
        )
        sink = PromptSink(
            0, lambda _, chunk: endings.append(chunk.ending), partial(asyncio.sleep, 0)
        )
        try:
            with suppress(Overloaded):  # a full server works
                await self._orchestrator.run(request, sink)
        except TrtllmBlsError as error:
            self._problem = " ".join(str(error).split())
        else:
            if not any(end and end.finish_reason is FinishReason.TIMEOUT for end in endings):
                self.proven()
                return
            self._problem = f"the engine gave no token within {_LIMIT_S:g} s"
        self._failed_at = asyncio.get_running_loop().time()


class _Api:
    """What the routes share, and those that need no body."""

    def __init__(self, backend: Deployment, settings: ApiSettings) -> None:
        self.backend = backend
        self.settings = settings
        tokenizer, metrics = backend.tokenizer, backend.reports.metrics
        self.health = Health(backend.orchestrator, next(iter(tokenizer.end_ids), 0))
        identity = settings.model_names[0], backend.engine.name, __version__, tokenizer.fingerprint
        digest = hashlib.sha256("\n".join(identity).encode())
        fingerprint = f"fp_{digest.hexdigest()[:10]}"
        formats = ChatFormats.of(tokenizer, settings.tool_parser, settings.reasoning_parser)
        self._metrics = metrics
        reader = ContentReader(
            settings.unreadable == "refuse",
            lambda kind: metrics.record(UNREADABLE_CONTENT, (kind,), 1),
        )
        self.served = ChatModel(
            *(tokenizer, formats, fingerprint, reader),
            lambda name: metrics.record(UNREADABLE_ARGUMENTS, (name,), 1),
        )
        self.pipeline = ChatModel(tokenizer, ChatFormats(), fingerprint, reader, pipeline=True)
        self._created = int(time.time())
        self.names = (*settings.model_names, *settings.loras, *settings.pipelines)
        pipelines = settings.pipelines
        if twice := {*pipelines} & {*settings.model_names, *settings.loras}:
            problem = f"{min(twice)} is a pipeline of this server, too"
            raise SettingsError(f"--served-model-name: {problem}; choose another name")
        self.pipelines = backend.chat_pipelines(pipelines) if pipelines else {}
        self.requests = RunningRequests()
        self._private: PrivateDirectory | None = None
        self.store: StoredResponses | None = None
        if settings.store_bytes:
            if (directory := settings.store_dir) is None:
                self._private = PrivateDirectory()
                directory = self._private.path
            self.store = StoredResponses(
                directory,
                max_bytes=settings.store_bytes,
                max_s=settings.store_hours * 3600,
                max_chain_bytes=settings.max_body_bytes,
            )
        self.last = LastResponses(settings.max_body_bytes)
        self.bodies = BodyReader(settings.max_body_bytes, seconds=settings.body_s)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        # A full collection pauses every stream. Its thresholds are those of the Triton models
        # (triton/request_server.py).
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 50, 50)
        loop = asyncio.get_running_loop()
        self.backend.start(loop)
        self.requests.loop = loop
        lifecycle: Lifecycle | None = None
        if directory := self.settings.status_dir:
            lifecycle = Lifecycle(self.requests, self.backend, directory, first=False)
        sharing = asyncio.create_task(self._share_samples())
        try:
            yield
        finally:
            sharing.cancel()
            if lifecycle is not None:
                await asyncio.to_thread(lifecycle.close)
            await self.backend.close()
            if self.store is not None:
                await asyncio.to_thread(self.store.close)
            if self._private is not None:
                self._private.close()

    async def _share_samples(self) -> None:
        """Tell the other workers every second what this one has counted."""
        while self.settings.shared is not None:
            with suppress(OSError):  # no memory, perhaps for a while
                self.settings.shared.put(self._samples())
            await asyncio.sleep(1)

    def _samples(self) -> Samples:
        for engine, sequences in self.backend.engine_sequences().items():
            self._metrics.numbers[ENGINE_SEQUENCES, (engine,)] = sequences
        return samples(self._metrics, self.settings.model_names[0])

    async def refuse(self, scope: Scope, send: Send, cause: Refused) -> None:
        """Answer a request that did not get as far as its route."""
        reply = Reply(scope, send)
        await reply.error(self.refused(reply, cause))

    def refused(self, reply: Reply, cause: Exception, prompt: str = "") -> ApiError:
        """Count and log a request that is refused before it runs; the error to answer."""
        error = api_error(cause, prompt, None)
        if not isinstance(cause, Overloaded):
            field = error.param or _REFUSED_FOR.get(error.status, "body")
            limit = "max_body_bytes" if error.status == 413 else None
            cause = InvalidRequest(field, error.message.removeprefix(f"{field}: "), limit)
        self.backend.orchestrator.refused(reply.request_id.decode(), cause)
        return error

    async def longest(self) -> int | None:
        """Tokens of prompt and completion that the model takes, where that is known."""
        with suppress(TrtllmBlsError):
            capacity = await self.backend.engine.capacity()
            if longest := capacity.max_sequence_tokens or capacity.max_prompt_tokens:
                return longest
        if not (directory := self.settings.status_dir):
            return None
        return StatusDirectory(directory).longest(self.backend.engine.name)

    async def models(self, request: Request) -> Response:
        cards = [await self._card(name) for name in self.names]
        # What Anthropic's list has more.
        more = {"has_more": False, "first_id": self.names[0], "last_id": self.names[-1]}
        return _Reply({"object": "list", "data": cards, **more})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self.check_model(name)
        return _Reply(await self._card(name))

    async def _card(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "trtllm-bls",
            "parent": self.settings.model_names[0] if name in self.settings.loras else None,
            "max_model_len": await self.longest(),
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._created, timezone.utc).isoformat(),
        }

    async def health_of_engine(self, request: Request) -> Response:
        refusal, engines = self.requests.refusal, await self.backend.engine_problems()
        problem = str(refusal) if refusal else common_problem(engines)
        if (directory := self.settings.status_dir) and StatusDirectory(directory).leaving:
            problem = SHUTTING_DOWN
        problem = problem or await self.health.problem()
        if problem is not None:
            raise ApiError(503, problem, code="engine_unavailable", headers=RETRY)
        if not any(engines.values()):
            return _Reply({"status": "ok"})
        told = {name: ill or "ok" for name, ill in engines.items()}
        return _Reply({"status": "degraded", "engines": told})

    async def metrics(self, request: Request) -> Response:
        own = self._samples()
        if self.settings.shared is not None:
            own = self.settings.shared.put(own)
        text = written(own) + engines_up(await self.backend.engine_problems())
        if url := self.settings.triton_metrics:
            text += await asyncio.to_thread(triton_metrics, url)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        return _Reply(document(self.names))

    async def version(self, request: Request) -> Response:
        return _Reply({"version": __version__})

    async def tokenize(self, request: Request) -> Response:
        told = await self._in_thread(request, self._tokenized)
        return _Reply({**told, "max_model_len": await self.longest()})

    async def detokenize(self, request: Request) -> Response:
        return _Reply(await self._in_thread(request, self._detokenized))

    async def count_input(self, request: Request) -> Response:
        count = await self._count(request, ResponsesRequest, ResponsesResponse)
        return _Reply({**count, "object": "response.input_tokens"})

    async def count_messages(self, request: Request) -> Response:
        return _Reply(await self._count(request, CountTokensRequest, MessagesResponse))

    async def _count(
        self, request: Request, kind: type[Generation], builder: type[ResponseBuilder]
    ) -> dict[str, object]:
        owner = _owner(request.scope)

        def count(body: bytes) -> dict[str, object]:
            generation = decode(body, kind)
            referred = self.referred(generation, owner)
            text = self.response(builder, generation, **referred).requests[0]
            return {"input_tokens": len(self.backend.orchestrator.prompt_ids(text))}

        return await self._in_thread(request, count, builder.prompt_field)

    async def stored_response(self, request: Request) -> Response:
        if request.query_params.get("stream") == "true":
            raise invalid("stream", "is not supported by this server", "unsupported_parameter")
        own_id = request.path_params["id"]
        if request.method == "DELETE":
            await self._of_store(request, StoredResponses.delete)
            return _Reply({"id": own_id, "object": "response", "deleted": True})
        return _Reply(await self._of_store(request, StoredResponses.body))

    async def stored_input(self, request: Request) -> Response:
        items = await self._of_store(request, StoredResponses.input)
        query = request.query_params
        limit = query.get("limit", "20")
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit) <= 100):
            raise invalid("limit", "must be a number from 1 to 100")
        if query.get("order", "desc") == "desc":
            items = items[::-1]
        ids = [item["id"] for item in items]
        start = ids.index(query["after"]) + 1 if query.get("after") in ids else 0
        page = items[start : start + int(limit)]
        first_id, last_id = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        told = {"object": "list", "data": page, "first_id": first_id, "last_id": last_id}
        return _Reply({**told, "has_more": start + len(page) < len(items)})

    async def cancel(self, request: Request) -> Response:
        await self._of_store(request, StoredResponses.body)
        raise ApiError(400, "Cannot cancel a synchronous response.")

    async def _of_store(self, request: Request, method: Callable[..., Any]) -> Any:
        """What a method of the store says of the response that the path names."""
        own_id, owner = request.path_params["id"], _owner(request.scope)
        stored = self.store and await asyncio.to_thread(method, self.store, owner, own_id)
        if not stored:
            raise ApiError(404, f"Response with id '{own_id[:200]}' not found.")
        return stored

    def referred(self, request: Generation, owner: str, socket: str = "") -> dict[str, Any]:
        """What ``request`` refers to, as arguments of what builds its response.

        Waits for the disk. Raises ``ApiError``.
        """
        if not isinstance(request, ResponsesRequest):
            return {}
        lost = _LOST if self.settings.lost_items == "sentence" else None
        last = self.last.take(socket, request.previous_response_id or "")
        earlier = with_references(request, owner, self.store, lost, last)
        socketed = {"keeps": True} if socket else {}
        return {"earlier": earlier, "stores": self.store is not None, **socketed}

    async def keep(
        self,
        scope: Scope,
        response: ResponseBuilder,
        status: str = "",
        error: ApiError | None = None,
    ) -> None:
        """Store the response, if it is to be stored."""
        if not status and (socket := scope.get(SOCKET)) is not None:
            self.last.keep(socket, response.id, response.conversation)
        if self.store is not None and (stored := response.stored(status, error)):
            try:
                await asyncio.to_thread(self.store.save, _owner(scope), stored)
            except ApiError as problem:  # the client has its answer all the same
                log.warning("%s is not stored: %s", stored.id, problem.message)

    async def _in_thread(
        self, request: Request, read: Callable[[bytes], dict[str, object]], prompt: str = "prompt"
    ) -> dict[str, object]:
        """What ``read`` makes of the body; ``prompt`` is the field to blame for the prompt."""
        try:
            async with self.bodies.read(request.scope, request.receive) as body:
                return await asyncio.to_thread(read, body)
        except InvalidRequest as error:
            if prompt == "prompt" and error.field == "messages":
                prompt = "messages"
            raise api_error(error, prompt, None) from None

    def _tokenized(self, body: bytes) -> dict[str, object]:
        tokenizer, request = self.backend.tokenizer, decode(body, TokenizeRequest)
        self.check_model(request.model or self.names[0])
        if request.prompt is not None:
            text = TextRequest(
                request_id="",
                text=request.prompt,
                max_tokens=None,
                add_special_tokens=request.add_special_tokens,
            )
        elif request.messages:
            text = self.response(ChatResponse, request).requests[0]
        else:
            raise invalid("prompt", "is missing; send prompt or messages")
        ids = self.backend.orchestrator.prompt_ids(text)
        strings = (
            [tokenizer.token(token_id) for token_id in ids] if request.return_token_strs else None
        )
        return {"count": len(ids), "tokens": tuple(ids), "token_strs": strings}

    def _detokenized(self, body: bytes) -> dict[str, object]:
        request = decode(body, DetokenizeRequest)
        self.check_model(request.model or self.names[0])
        text = self.backend.tokenizer.decode(request.tokens, skip_special_tokens=False)
        return {"prompt": text}

    def check_model(self, name: str) -> None:
        """Raises ``ApiError`` for a model that this server does not have."""
        if name not in self.names:
            problem = f"The model {name[:200]!r} does not exist"
            raise ApiError(404, problem, param="model", code="model_not_found")

    def response(
        self, builder: type[ResponseBuilder], request: Generation, **referred: Any
    ) -> ResponseBuilder:
        """What builds the response to ``request``. Raises ``ApiError``."""
        if not request.model and not self.settings.loras:
            request.model = self.names[0]
        elif not request.model:
            raise invalid("model", f"is missing; send one of {', '.join(self.names)}"[:500])
        self.check_model(request.model)
        served = self.pipeline if request.model in self.pipelines else self.served
        response = builder(request, served, **referred)
        if (task_id := self.settings.loras.get(request.model)) is not None:
            adapter = Adapter(name=request.model)
            if task_id:
                adapter = Adapter(task_id=int(task_id))
            for text_request in response.requests:
                text_request.adapter = adapter
        return response


@dataclass(frozen=True)
class _Generate:
    """``POST`` of one kind of request, as an ASGI application."""

    _api: _Api
    _kind: type[Generation]
    _builder: type[ResponseBuilder]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        api, reply = self._api, Reply(scope, send)
        response: ResponseBuilder | None = None
        try:
            try:
                api.backend.orchestrator.admission.check_room()  # without reading the request
                response = await self._read(scope, reply, receive)
            except (InvalidRequest, Overloaded, Refused) as error:
                raise api.refused(reply, error, self._builder.prompt_field) from None
            with api.requests.one(reply.request_id.decode()):
                await self._answer(scope, response, reply, receive)
            api.health.proven()
        except ClientGone:
            if response is not None and reply.begun:
                await api.keep(scope, response, "cancelled")
        except asyncio.CancelledError:
            ends = ApiError(503, "the server shuts down", code="shutting_down")
            await self._fail(scope, ends, response, reply)
        except Exception as error:
            longest = await api.longest() if is_too_long(error) else None
            guide = response.guide_field if response else ""
            request_id = reply.request_id.decode()
            told = api_error(error, self._builder.prompt_field, longest, guide, request_id)
            await self._fail(scope, told, response, reply)

    async def _fail(
        self, scope: Scope, error: ApiError, response: ResponseBuilder | None, reply: Reply
    ) -> None:
        if response is not None and reply.begun:  # its client knows its id
            await self._api.keep(scope, response, "failed", error)
        await reply.error(error, response)

    async def _answer(
        self, scope: Scope, response: ResponseBuilder, reply: Reply, receive: Receive
    ) -> None:
        orchestrator = self._api.backend.orchestrator
        is_late = False

        def on_chunk(index: int, chunk: TextChunk) -> None:
            nonlocal is_late
            self._api.requests.responses += 1
            end = chunk.ending
            if end and end.finish_reason is FinishReason.TIMEOUT and not end.completion_tokens:
                is_late = True
            elif events := response.add(index, chunk):
                reply.put(events)

        pinging = None
        if response.stream and isinstance(response, PartsBuilder):
            pinging = asyncio.create_task(_ping(response, reply))
        try:
            pipeline = self._api.pipelines.get(response.model)
            await run_all(
                orchestrator,
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
        end = response.last_events if response.stream else response.whole
        # On the event loop, a whole answer's log-probabilities would hold up all streams.
        is_large = response.requests[0].wants.log_probs
        last = await asyncio.to_thread(end) if is_large else end()
        await self._api.keep(scope, response)
        await (reply.events(last, end=True) if response.stream else reply.json(last))

    async def _read(self, scope: Scope, reply: Reply, receive: Receive) -> ResponseBuilder:
        """What builds the response. The body is let go of on return, while a stream may be long."""
        async with self._api.bodies.read(scope, receive) as body:
            request = await self._api.bodies.in_turn(len(body), decode, body, self._kind)
            if is_stateful(request):  # what it refers to is in files
                return await asyncio.to_thread(self._builder_for, scope, reply, request)
            build = self._builder_for
            return await self._api.bodies.in_turn(len(body), build, scope, reply, request)

    def _builder_for(self, scope: Scope, reply: Reply, request: Generation) -> ResponseBuilder:
        referred = self._api.referred(request, _owner(scope), scope.get(SOCKET, ""))
        response = self._api.response(self._builder, request, **referred)
        tenant = None if request.draft_memory is False else scope.get("tenant")
        trace = traceparent(scope).decode() or None
        # The log can be searched for a response's x-request-id. Clients may repeat theirs, which an
        # engine must not see.
        owner = "" if self._api.settings.share_kv_cache else _owner(scope)
        for text in response.requests:
            text.request_id = f"{reply.request_id.decode()}-{text.request_id[:8]}"
            text.api, text.tenant, text.traceparent = response.object, tenant, trace
            if request.cache_salt:  # refused by an engine that has none
                salt = _salt(owner, request.cache_salt) if owner else request.cache_salt
                text.cache_salt = CacheSalt(salt)
            elif owner:
                text.cache_salt = CacheSalt(_salt(owner, ""), required=False)
        return response


def _salt(owner: str, cache_salt: str) -> str:
    """The salt of one key, which no other key has, and from which the key is not known."""
    return hashlib.sha256(f"{owner} {cache_salt}".encode()).hexdigest()


def _owner(scope: Scope) -> str:
    """Whose stored responses a request may use: those of its key."""
    return scope.get("tenant") or ""


async def _ping(response: PartsBuilder, reply: Reply) -> None:
    """Show a client that waits for a stream's next event that the server works."""
    while True:
        told = reply.num_puts
        await asyncio.sleep(_PING_S)
        if reply.num_puts == told:
            reply.put(response.ping())


@dataclass(frozen=True)
class _Keys:
    """Middleware that passes requests for ``_BEHIND_KEYS`` only with a key."""

    _app: ASGIApp
    _api: _Api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not scope["path"].startswith(_BEHIND_KEYS):
            await self._app(scope, receive, send)
            return
        credentials = header(scope, b"authorization") or b"Bearer " + header(scope, b"x-api-key")
        if key := key_of(self._api.settings.keys, credentials):
            scope["tenant"] = key.hex()  # a copy would keep what ``Reply`` removes from it
            await self._app(scope, receive, send)
            return
        message = "no valid API key; send Authorization: Bearer KEY, or x-api-key: KEY"
        challenge = {"www-authenticate": "Bearer"}
        error = ApiError(401, message, code="invalid_api_key", headers=challenge)
        is_socket = scope["type"] == "websocket"
        await self._api.refuse(scope, denying(send) if is_socket else send, error)


class _Reply(Response):
    """A ``Reply`` of JSON or of an ``ApiError``, for Starlette's routes."""

    def __init__(self, body: object) -> None:
        super().__init__()
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply, body = Reply(scope, send), self._body
        await (reply.error(body) if isinstance(body, ApiError) else reply.json(body))


async def _failed(request: Request, error: Exception) -> Response:
    """What Starlette answers where a route raised ``error``, or there is none."""
    if isinstance(error, ClientGone):
        return Response()
    if not isinstance(error, HTTPException):
        return _Reply(api_error(error, "prompt", None))
    status, message, code = error.status_code, error.detail, None
    path = request.scope["path"]
    if status == 404:
        message, code = f"unknown URL: {request.method} {path}", "unknown_url"
    elif status == 405:
        message = f"{path} does not take {request.method}"
    return _Reply(ApiError(status, message, code=code, headers=error.headers or {}))
