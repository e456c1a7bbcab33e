"""A real tritonserver whose engine is a ``FaultyEngine`` in this process, and its client."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.server_settings import DEMO, ROOT, free_ports
from tests.reliability.faulty_engine import DRAFT, FaultyEngine, Proxy
from trtllm_bls.client import Client
from trtllm_bls.operate.tritonserver import TritonServer
from trtllm_bls.settings.command_options import Override
from trtllm_bls.text.tokenizer import load_tokenizer

MAX_RUNNING = 64
SENTENCES = (
    "The quick brown fox jumps over the lazy dog, and nobody minds.",
    "Once upon a time there was a small server that lost nothing at all.",
    "naïve café: 🙂👩‍👩‍👧 and 你好，世界, in one breath.",
    "def main() -> None:\n    return [1, 2, 3]\n",
    "Twenty tokens are a short story; this one has a few more than that, to be cut anywhere.",
)
TEXTS = {f"Tell me number {number}:": text for number, text in enumerate(SENTENCES)}


@dataclass
class World:
    """All the parts; ``expected`` are the right texts by prompt."""

    server: TritonServer
    engine: FaultyEngine
    proxy: Proxy
    client: Client


def faulty_engine() -> FaultyEngine:
    """One that knows the answers in ``TEXTS``."""
    tokenizer = load_tokenizer(DEMO / "target")
    assert tokenizer.eos_id is not None
    answers = {
        tokenizer.encode(prompt, add_special_tokens=True): tokenizer.encode_word(text)
        for prompt, text in TEXTS.items()
    }
    return FaultyEngine(answers, tokenizer.eos_id)


@asynccontextmanager
async def world(exit_timeout: int = 5, **parameters: str) -> AsyncIterator[World]:
    """Ready to be asked; ``parameters`` are those of ``tensorrt_llm_bls``."""
    with tempfile.TemporaryDirectory() as scratch:
        repository = Path(scratch) / "models"
        shutil.copytree(ROOT / "models" / "tensorrt_llm_bls", repository / "tensorrt_llm_bls")
        async with faulty_engine() as engine, Proxy(int(engine.url.rpartition(":")[2])) as proxy:
            values = {
                "engine_transport": "grpc",
                "engine_url": proxy.url,
                "tensorrt_llm_draft_model_name": DRAFT,
                "max_running_requests": str(MAX_RUNNING),
                **parameters,
            }
            settings = free_ports(
                model=DEMO / "target",
                model_repository=repository,
                exit_timeout=exit_timeout,
                openai_port=0,
                overrides=tuple(Override("tensorrt_llm_bls", *pair) for pair in values.items()),
            )
            server = TritonServer(settings)
            await asyncio.to_thread(server.start)
            try:
                async with Client(server.grpc_url) as client:
                    yield World(server, engine, proxy, client)
            finally:
                await asyncio.to_thread(server.stop)
