"""Requests of the live tests: HTTP as curl would, gRPC through the package's client."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.error
import urllib.request
from typing import Any

from tests.helpers.waiting import run_async
from trtllm_bls.client import Client, Event, Result


def post(url: str, model: str, endpoint: str, **body: Any) -> tuple[int, str]:
    """Status and body of one POST to a generate endpoint."""
    request = urllib.request.Request(
        f"{url}/v2/models/{model}/{endpoint}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def generate(url: str, model: str = "tensorrt_llm_bls", **body: Any) -> dict[str, Any]:
    """The one JSON object of ``generate``."""
    answer: dict[str, Any] = json.loads(post(url, model, "generate", **body)[1])
    return answer


def generate_stream(url: str, model: str = "tensorrt_llm_bls", **body: Any) -> list[dict[str, Any]]:
    """All events of ``generate_stream``."""
    _, text = post(url, model, "generate_stream", stream=True, **body)
    return [json.loads(line[len("data: ") :]) for line in text.splitlines() if line]


def break_off(url: str, model: str = "tensorrt_llm_bls", **body: Any) -> None:
    """Leave ``generate_stream`` after its first event."""
    request = urllib.request.Request(
        f"{url}/v2/models/{model}/generate_stream",
        data=json.dumps(body | {"stream": True}).encode(),
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.readline().startswith(b"data: ")


def ask(url: str, model: str = "tensorrt_llm_bls", **fields: Any) -> Result:
    """One request over gRPC, collected."""
    return ask_all(url, [fields], model)[0]


def ask_all(url: str, requests: list[dict[str, Any]], model: str = "tensorrt_llm_bls") -> list[Any]:
    """All requests at once over one channel; a failed one is its exception."""

    async def run() -> list[Any]:
        async with Client(url) as client:
            return await asyncio.gather(
                *(client.generate(model, **fields) for fields in requests), return_exceptions=True
            )

    results = run_async(run())
    if len(requests) == 1 and isinstance(results[0], BaseException):
        raise results[0]
    return results


def events(result: Result) -> list[Event]:
    """The events of a result, in order."""
    return list(result.events)


def metric(url: str, name: str) -> float:
    """One number off ``/metrics``; 0 if nothing was counted yet."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        found = re.search(rf"^{name}(?:{{.*}})? (\S+)$", answer.read().decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0
