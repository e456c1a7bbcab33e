"""The program in front of Triton's HTTP port, over a Triton that is played."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

from tritonclient.grpc import service_pb2

from trtllm_bls.grpc_client import GrpcChannel
from trtllm_bls.http.triton import _Exchange


class Channel:
    """One call that is answered with ``messages`` as soon as it asks."""

    def __init__(self, *messages: bytes) -> None:
        self.messages, self.ended = messages, ""

    def open(self, method: str, on_messages: Any, on_end: Any) -> Channel:
        self.on_messages = on_messages
        return self

    def send(self, message: bytes) -> None:
        asyncio.get_running_loop().call_soon(self.on_messages, list(self.messages))

    def half_close(self) -> None:
        self.ended = "in order"

    def cancel(self) -> None:
        self.ended = "cancelled"


def test_a_response_that_cannot_be_written_is_an_error() -> None:
    """BF16 has no form in JSON. The caller must not wait for an answer that never comes."""
    reply = service_pb2.ModelStreamInferResponse()
    reply.infer_response.outputs.add(name="x", datatype="BF16", shape=[1])
    reply.infer_response.raw_output_contents.append(b"\0\0")
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def run(stream: bool) -> None:
        channel = Channel(reply.SerializeToString())
        answering = _Exchange().run(
            cast(GrpcChannel, channel), b"", asyncio.Event().wait, send, stream, None
        )
        await asyncio.wait_for(answering, 20)
        assert channel.ended == "in order"

    for stream in (False, True):
        sent.clear()
        asyncio.run(run(stream))
        assert sent[0]["status"] == 500
        body = b"".join(each.get("body", b"") for each in sent).removeprefix(b"data: ")
        assert "cannot be written as JSON" in json.loads(body)["error"]
