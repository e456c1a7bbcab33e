"""A worker of NVIDIA's Dynamo, which answers OpenAI's requests from an engine.

Dynamo's front end listens to clients and passes their requests on as they are. Written for
``ai-dynamo`` 1.6.1, whose interfaces change with each release.

    python worker.py --engine trtllm://gpu-host:50051 --tokenizer-dir ./llama
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from dynamo.common.utils.graceful_shutdown import install_signal_handlers
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.llm.exceptions import HttpError, InvalidArgument
from dynamo.runtime import DistributedRuntime
from starlette.applications import Starlette

from trtllm_bls.openai import asgi_app


async def serve(options: argparse.Namespace) -> None:
    """Answer requests until SIGTERM, and those that run then to their end."""
    loop = asyncio.get_running_loop()
    discovery = os.environ.get("DYN_DISCOVERY_BACKEND", "etcd")
    runtime = DistributedRuntime(loop, discovery, os.environ.get("DYN_REQUEST_PLANE", "tcp"))
    endpoint = runtime.endpoint(options.endpoint)
    install_signal_handlers(loop, runtime, [endpoint])
    # Every other parameter of docs/parameters.md comes from its variable, TRTLLM_BLS_….
    app = asgi_app(engine=options.engine, tokenizer_dir=options.tokenizer_dir)

    async def answer(request: dict[str, Any], context: Any) -> AsyncGenerator[Any, None]:
        async for event in events(app, request, context):
            yield event

    async with app.router.lifespan_context(app):
        await register_model(
            ModelInput.Text,
            ModelType.Chat | ModelType.Completions,
            endpoint,
            str(options.tokenizer_dir),
            options.tokenizer_dir.name,
            worker_type=WorkerType.Aggregated,
        )
        await endpoint.serve_endpoint(answer, graceful_shutdown=True)


async def events(
    app: Starlette, request: dict[str, Any], context: Any
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events of the API's answer, which Dynamo joins for clients that do not stream.

    Closing the generator, and a client that leaves, end the engine's work.
    """
    body = {**request, "stream": True}
    if not request.get("stream"):
        body["stream_options"] = {"include_usage": True}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/chat/completions" if "messages" in request else "/v1/completions",
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"x-request-id", context.id().encode()),
        ],
    }
    requests = [{"type": "http.request", "body": json.dumps(body).encode()}]
    messages: asyncio.Queue[Any] = asyncio.Queue()

    async def receive() -> dict[str, Any]:
        if requests:
            return requests.pop()
        await context.async_killed_or_stopped()
        return {"type": "http.disconnect"}

    running = asyncio.ensure_future(app(scope, receive, messages.put))
    running.add_done_callback(lambda _: messages.put_nowait(None))
    status = 200
    try:
        while (message := await messages.get()) is not None:
            status = message.get("status", status)
            for line in message.get("body", b"").split(b"\n\n"):
                text = line.removeprefix(b"data: ")
                if text and text != b"[DONE]":
                    event = json.loads(text)
                    if "error" in event:
                        raise dynamo_error(status, event["error"]["message"])
                    yield event
        await running
    finally:
        running.cancel()


def dynamo_error(status: int, message: str) -> Exception:
    """Return the exception that Dynamo answers with the same status; it keeps a 400's message."""
    if status < 400:  # A stream that had begun fails in its last event.
        return HttpError(500, message)
    if status == 429 or status >= 500:
        return HttpError(status, message)
    return InvalidArgument(message)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", required=True, help="trtllm://HOST:PORT")
    parser.add_argument("--tokenizer-dir", required=True, type=Path, help="its name is the model's")
    parser.add_argument("--endpoint", default="dynamo.backend.generate")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at")
    options = parser.parse_args()
    # Dynamo's runtime reads where it listens when it starts: for requests, answers and events.
    for plane in ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST"):
        os.environ.setdefault(plane, options.host)
    asyncio.run(serve(options))
