"""Fills ``/dev/shm`` while a server serves; run in a mount namespace with one of its own."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.helpers.server_settings import free_ports
from trtllm_bls.client import Client
from trtllm_bls.errors import TrtllmBlsError
from trtllm_bls.operate.tritonserver import TritonServer

FILE = Path("/dev/shm/full")
LONG = {"text_input": "Once upon a time", "max_tokens": 300}
SHORT = {"text_input": "Once upon a time", "max_tokens": 8}
LARGE = {"text_input": "a b c d " * 125_000, "max_tokens": 4}  # more than the model takes


def fill() -> None:
    with suppress(OSError), FILE.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


async def text(client: Client, **fields: Any) -> str:
    """The answer, or the error that the server gave; another error is raised."""
    try:
        return (await client.generate(**fields, deadline_s=120)).text
    except TrtllmBlsError as error:
        if error.status in ("DEADLINE_EXCEEDED", "CANCELLED"):
            raise
        return str(error)


async def outcomes(url: str) -> dict[str, Any]:
    async with Client(url) as client:
        found: dict[str, Any] = {"expected": await text(client, **LONG)}
        found["short"] = await text(client, **SHORT)
        async with client.stream(**LONG) as stream:
            told = (await anext(aiter(stream))).text
            fill()
            found["small"] = [await text(client, **SHORT) for _ in range(4)]
            large = (text(client, **LARGE) for _ in range(8))
            found["large"] = await asyncio.gather(*large)
            async for event in stream:
                told += event.text
        FILE.unlink()
        return found | {
            "stream": told,
            "after": await text(client, **LONG),
            "large_after": await text(client, **LARGE),
        }


def main() -> None:
    with TritonServer(free_ports(threads=1)) as server:
        assert server.process is not None
        before = {child.pid for child in server.process.children()}
        found = asyncio.run(outcomes(server.grpc_url))
        found["same_processes"] = before == {child.pid for child in server.process.children()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
