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
from trtllm_bls.openai.openai_command import DECLARED, given_parameters, read_parameters
from trtllm_bls.openai.schema import CompletionRequest
from trtllm_bls.orchestrator.deployment import Deployment
from trtllm_bls.orchestrator.log_lines import log_to_stderr
from trtllm_bls.settings.command_options import deprecated, options_of
from trtllm_bls.settings.parameters import BlsParameters
from trtllm_bls.types import EngineRequest

# Where Dynamo's runtime listens: for requests, for answers (in a front end), for events.
_LISTENS = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST")
_MOST_TOKENS = 1024  # of an answer, where neither the request nor the engine tells
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
    for variable in _LISTENS:  # read when the runtime starts
        os.environ.setdefault(variable, options["host"])
    try:
        import dynamo.llm  # noqa: F401
    except ModuleNotFoundError as error:
        raise SettingsError(f"{error.name} is not installed; pip install ai-dynamo") from error
    parameters = read_parameters(None, given_parameters(context, options))
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
    served = runtime.endpoint(endpoint)
    backend = Deployment(parameters, model_name=name)
    app = create_app(backend, ApiSettings(model_names=(name,), status_dir=parameters.status_dir))

    handle = partial(_token_events, backend) if tokens else partial(_events, app)
    # A signal takes the worker out of discovery, and ends it once running requests have ended.
    install_signal_handlers(loop, runtime, [served])
    async with app.router.lifespan_context(app):
        await register_model(
            ModelInput.Tokens if tokens else ModelInput.Text,
            ModelType.Chat | ModelType.Completions,
            served,
            str(parameters.tokenizer_dir),
            name,
            worker_type=WorkerType.Aggregated,
        )
        await served.serve_endpoint(handle, graceful_shutdown=True)


async def _events(app: ASGIApp, request: dict[str, Any], context: Any) -> AsyncGenerator[Any, None]:
    """The events of ``app``'s answer. Dynamo joins them where one piece was asked for."""
    options = request.get("stream_options") if request.get("stream") else {"include_usage": True}
    asked = msgspec.json.encode(request | {"stream": True, "stream_options": options})
    headers = [(b"content-type", b"application/json"), (b"x-request-id", context.id().encode())]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/chat/completions" if "messages" in request else "/v1/completions",
        "query_string": b"",
        "headers": headers,
    }
    parts: list[Message] = [{"type": "http.request", "body": asked}]

    async def receive() -> Message:
        if not parts:
            await context.async_killed_or_stopped()
        return parts.pop() if parts else {"type": "http.disconnect"}

    status = 200
    async for message in _produced(partial(app, scope, receive)):
        status = message.get("status", status)
        for event in message.get("body", b"").split(b"\n\n"):
            found = event.removeprefix(b"data: ")
            if found and found != b"[DONE]":
                told = msgspec.json.decode(found)
                if "error" in told:  # of a stream that has begun, the event alone tells it
                    failed = ApiError(status if status >= 400 else 500, told["error"]["message"])
                    raise _error(failed)
                yield told


async def _token_events(
    backend: Deployment, request: dict[str, Any], context: Any
) -> AsyncGenerator[Any, None]:
    """The chunks of the engine's answer, as Dynamo's front end reads them."""

    async def answer(put: Callable[[Any], Awaitable[None]]) -> None:
        async with aclosing(backend.engine.generate(asked)) as stream:
            async for chunk in stream:
                await put(chunk)

    try:
        asked = await _engine_request(backend, request, context.id())
        async for chunk in _produced(answer, context):
            told = {"index": 0, "token_ids": list(chunk.token_ids)}
            if chunk.final:
                told["finish_reason"] = chunk.finish_reason.value.replace("end_id", "eos")
            yield told
    except (ApiError, TrtllmBlsError) as error:
        raise _error(api_error(error, "prompt", None)) from error


async def _engine_request(backend: Deployment, asked: dict[str, Any], id_: str) -> EngineRequest:
    """Raises ``ApiError`` and ``TrtllmBlsError``."""
    stops = asked.get("stop_conditions") or {}
    sampling, output = asked.get("sampling_options") or {}, asked.get("output_options") or {}
    others = [
        key for key in sampling.keys() - _DYNAMO_SAMPLING if sampling[key] not in (None, False, 1)
    ]
    if others or output.get("logprobs") is not None:
        raise invalid([*others, "logprobs"][0], "is only served by a worker without --tokens")
    known = {key: sampling[key] for key in sampling.keys() & _DYNAMO_SAMPLING}
    known |= {"model": "", "prompt": "", "min_tokens": stops.get("min_tokens")}
    ids = tuple(asked["token_ids"])
    longest = (await backend.engine.capacity()).max_sequence_tokens
    ends = () if stops.get("ignore_eos") else stops.get("stop_token_ids_hidden") or ()
    return EngineRequest(
        request_id=id_,
        input_ids=ids,
        max_tokens=stops.get("max_tokens") or (longest - len(ids) if longest else _MOST_TOKENS),
        sampling=sampling_of(msgspec.convert(known, CompletionRequest)),
        end_id=-1 if stops.get("ignore_eos") else backend.tokenizer.eos_id,
        stop_sequences=tuple((each,) for each in ends),
    )


async def _produced(
    produce: Callable[..., Awaitable[None]], context: Any = None
) -> AsyncGenerator[Any, None]:
    """What ``produce`` puts, until it returns, fails, or ``context`` tells that the client left."""
    queue: asyncio.Queue[Any] = asyncio.Queue()
    producing = asyncio.ensure_future(produce(queue.put))
    producing.add_done_callback(queue.put_nowait)
    left = context.async_killed_or_stopped() if context else None
    if left is not None:
        left.add_done_callback(lambda _: producing.cancel())
    try:
        while (item := await queue.get()) is not producing:
            yield item
        if not producing.cancelled():
            producing.result()
    finally:
        producing.cancel()
        if left is not None:
            left.cancel()


def _error(error: ApiError) -> Any:
    """The exception that Dynamo answers with the same status; it keeps the message of a 400."""
    from dynamo.llm.exceptions import HttpError, InvalidArgument

    if error.status == 429 or error.status >= 500:
        return HttpError(error.status, error.message)
    return InvalidArgument(error.message)
