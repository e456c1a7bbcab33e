"""``trtllm-bls dynamo``: a worker of NVIDIA's Dynamo, whose front end listens to clients.

Deprecated: ``examples/dynamo`` shows a worker over public names, and this module goes with 0.7.0.

By default Dynamo passes OpenAI's requests on, and this package's API answers them in the worker.
With ``--tokens`` Dynamo's front end makes ids and text, and the worker is an engine alone: Dynamo
then routes by prefix and resumes the streams of a lost worker.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import click
import msgspec
from starlette.types import ASGIApp, Message

from trtllm_bls.errors import SettingsError, TrtllmBlsError
from trtllm_bls.openai.api_errors import ApiError, api_error, invalid
from trtllm_bls.openai.api_settings import ApiSettings
from trtllm_bls.openai.app import create_app
from trtllm_bls.openai.conversation import sampling as sampling_of
from trtllm_bls.openai.openai_command import DECLARED, command_line_parameters, read_parameters
from trtllm_bls.openai.schema import CompletionRequest
from trtllm_bls.orchestrator.deployment import Deployment
from trtllm_bls.orchestrator.log_lines import log_to_stderr
from trtllm_bls.settings.command_options import deprecated, options_of
from trtllm_bls.settings.parameters import BlsParameters
from trtllm_bls.types import EngineRequest

# Variables for the addresses at which Dynamo's runtime listens: for requests, for answers (in a
# front end), for events.
_LISTENS = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST")
_FALLBACK_MAX_TOKENS = 1024  # where neither the request nor the engine has a limit
_DYNAMO_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "seed"}
_DYNAMO_SAMPLING |= {"frequency_penalty", "presence_penalty", "repetition_penalty"}


@click.command()
@click.option("--endpoint", default="dynamo.backend.generate", show_default=True)
@click.option("--served-model-name", "name", help="Default: the name of the tokenizer's directory.")
@click.option("--tokens", is_flag=True, help="Dynamo's front end makes ids and text.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@options_of(BlsParameters, *DECLARED)
@click.pass_context
@deprecated("examples/dynamo/worker.py in the source tree takes its place")
def command(context: click.Context, /, **options: Any) -> None:
    """Answer requests of Dynamo's front end from an engine, until SIGTERM.

    Deprecated: examples/dynamo/worker.py in the source tree takes its place.

    Dynamo reads variables of its own, such as DYN_DISCOVERY_BACKEND. Those that say where it
    listens win over --host.

    \b
    Examples:
      trtllm-bls dynamo --engine trtllm://gpu-host:50051 --tokenizer-dir ./llama
      trtllm-bls dynamo --tokens --engine trtllm://gpu-host:50051 \\
        --tokenizer-dir ./llama
    """
    for variable in _LISTENS:  # the runtime reads them when it starts
        os.environ.setdefault(variable, options["host"])
    try:
        import dynamo.llm  # noqa: F401
    except ModuleNotFoundError as error:
        raise SettingsError(f"{error.name} is not installed; pip install ai-dynamo") from error
    parameters = read_parameters(None, command_line_parameters(context, options))
    name = options["name"] or parameters.tokenizer_dir.name
    asyncio.run(_serve(parameters, name, options["endpoint"], tokens=options["tokens"]))


async def _serve(parameters: BlsParameters, name: str, endpoint: str, *, tokens: bool) -> None:
    from dynamo.common.utils.graceful_shutdown import install_signal_handlers
    from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
    from dynamo.runtime import DistributedRuntime

    log_to_stderr("dynamo")
    loop = asyncio.get_running_loop()
    discovery = os.environ.get("DYN_DISCOVERY_BACKEND", "etcd")
    runtime = DistributedRuntime(loop, discovery, os.environ.get("DYN_REQUEST_PLANE", "tcp"))
    worker = runtime.endpoint(endpoint)
    backend = Deployment(parameters, model_name=name)
    app = create_app(backend, ApiSettings(model_names=(name,), status_dir=parameters.status_dir))

    handle: Callable[[dict[str, Any], Any], AsyncGenerator[Any, None]] = partial(_events, app)
    model_input = ModelInput.Text
    if tokens:
        handle = partial(_token_events, backend)
        model_input = ModelInput.Tokens
    # A signal takes the worker out of discovery, and ends it once running requests have ended.
    install_signal_handlers(loop, runtime, [worker])
    async with app.router.lifespan_context(app):
        await register_model(
            model_input,
            ModelType.Chat | ModelType.Completions,
            worker,
            str(parameters.tokenizer_dir),
            name,
            worker_type=WorkerType.Aggregated,
        )
        await worker.serve_endpoint(handle, graceful_shutdown=True)


async def _events(app: ASGIApp, request: dict[str, Any], context: Any) -> AsyncGenerator[Any, None]:
    """Yield the events of ``app``'s answer. Dynamo joins them for a request without a stream."""
    options: Any = {"include_usage": True}
    if request.get("stream"):
        options = request.get("stream_options")
    body = msgspec.json.encode(request | {"stream": True, "stream_options": options})
    headers = [(b"content-type", b"application/json"), (b"x-request-id", context.id().encode())]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/chat/completions" if "messages" in request else "/v1/completions",
        "query_string": b"",
        "headers": headers,
    }
    parts: list[Message] = [{"type": "http.request", "body": body}]

    async def receive() -> Message:
        if not parts:
            await context.async_killed_or_stopped()
            return {"type": "http.disconnect"}
        return parts.pop()

    status = 200
    async for message in _produced(partial(app, scope, receive)):
        status = message.get("status", status)
        for event in message.get("body", b"").split(b"\n\n"):
            data = event.removeprefix(b"data: ")
            if not data or data == b"[DONE]":
                continue
            fields = msgspec.json.decode(data)
            if "error" in fields:
                if status < 400:  # the stream had started before the error
                    status = 500
                raise _error(ApiError(status, fields["error"]["message"]))
            yield fields


async def _token_events(
    backend: Deployment, request: dict[str, Any], context: Any
) -> AsyncGenerator[Any, None]:
    """Yield the chunks of the engine's answer, as Dynamo's front end reads them."""

    async def answer(put: Callable[[Any], Awaitable[None]]) -> None:
        async with aclosing(backend.engine.generate(engine_request)) as stream:
            async for chunk in stream:
                await put(chunk)

    try:
        engine_request = await _engine_request(backend, request, context.id())
        async for chunk in _produced(answer, context):
            fields = {"index": 0, "token_ids": list(chunk.token_ids)}
            if chunk.final:
                fields["finish_reason"] = chunk.finish_reason.value.replace("end_id", "eos")
            yield fields
    except (ApiError, TrtllmBlsError) as error:
        raise _error(api_error(error, "prompt", None)) from error


async def _engine_request(
    backend: Deployment, request: dict[str, Any], request_id: str
) -> EngineRequest:
    """Return the engine request. Raises ``ApiError`` and ``TrtllmBlsError``."""
    stops = request.get("stop_conditions") or {}
    sampling = request.get("sampling_options") or {}
    output = request.get("output_options") or {}
    for key in sampling.keys() - _DYNAMO_SAMPLING:
        if sampling[key] not in (None, False, 1):
            raise invalid(key, "is only served by a worker without --tokens")
    if output.get("logprobs") is not None:
        raise invalid("logprobs", "is only served by a worker without --tokens")
    fields = {key: sampling[key] for key in sampling.keys() & _DYNAMO_SAMPLING}
    fields |= {"model": "", "prompt": "", "min_tokens": stops.get("min_tokens")}
    ids = tuple(request["token_ids"])
    capacity = await backend.engine.capacity()
    max_tokens = stops.get("max_tokens")
    if not max_tokens:
        max_tokens = _FALLBACK_MAX_TOKENS
        if capacity.max_sequence_tokens:
            max_tokens = capacity.max_sequence_tokens - len(ids)
    end_id = backend.tokenizer.eos_id
    stop_ids = stops.get("stop_token_ids_hidden") or ()
    if stops.get("ignore_eos"):
        end_id = -1
        stop_ids = ()
    return EngineRequest(
        request_id=request_id,
        input_ids=ids,
        max_tokens=max_tokens,
        sampling=sampling_of(msgspec.convert(fields, CompletionRequest)),
        end_id=end_id,
        stop_sequences=tuple((token_id,) for token_id in stop_ids),
    )


async def _produced(
    produce: Callable[..., Awaitable[None]], context: Any = None
) -> AsyncGenerator[Any, None]:
    """Yield the items that ``produce`` puts, until it ends or ``context``'s client disconnects."""
    queue: asyncio.Queue[Any] = asyncio.Queue()
    producing = asyncio.ensure_future(produce(queue.put))
    producing.add_done_callback(queue.put_nowait)
    disconnect = None
    if context:
        disconnect = context.async_killed_or_stopped()
        disconnect.add_done_callback(lambda _: producing.cancel())
    try:
        while (item := await queue.get()) is not producing:
            yield item
        if not producing.cancelled():
            producing.result()
    finally:
        producing.cancel()
        if disconnect is not None:
            disconnect.cancel()


def _error(error: ApiError) -> Any:
    """Return the exception that Dynamo answers with the same status and message."""
    from dynamo.llm.exceptions import HttpError, InvalidArgument

    if error.status == 429 or error.status >= 500:
        return HttpError(error.status, error.message)
    return InvalidArgument(error.message)
