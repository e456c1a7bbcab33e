"""The async client: text or tokens in, events out, over one gRPC channel.

    async with Client("127.0.0.1:8001") as client:
        async with client.stream(text_input="Once upon", max_tokens=32) as stream:
            async for event in stream:
                print(event.text, end="")

``BLS`` and ``ENGINE`` are the models whose inputs the client knows.

Light to import: numpy, grpc and tritonclient. What prints is in ``trtllm_bls.commands``.
"""

from trtllm_bls.client.connection import Client, Tls
from trtllm_bls.client.events import Event, Result
from trtllm_bls.client.stream import Stream
from trtllm_bls.contract import BLS, ENGINE, Model

__all__ = ["BLS", "ENGINE", "Client", "Event", "Model", "Result", "Stream", "Tls"]
