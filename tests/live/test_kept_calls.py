"""Calls that wait for their next request must not keep a server from ending."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from tests.helpers.waiting import run_async
from tests.helpers.watched import end_of
from tests.live.conftest import echo_settings
from trtllm_bls.engines.triton_model import GrpcEngine
from trtllm_bls.operate.tritonserver import TritonServer
from trtllm_bls.types import EngineRequest


@pytest.mark.slow
def test_an_engines_server_ends_in_order_while_callers_keep_calls(tmp_path: Path) -> None:
    """Triton waits for every open call; the orchestrator may be on another machine, and stay up."""

    async def ask_and_stay(server: TritonServer) -> bool:
        engine = GrpcEngine(server.grpc_url, "tensorrt_llm", vocab_size=4096)

        async def one(number: int) -> None:
            request = EngineRequest(request_id=f"r{number}", input_ids=(5, 6, 7), max_tokens=3)
            async with aclosing(engine.generate(request)) as chunks:
                assert [chunk.final async for chunk in chunks][-1]

        await engine.capacity()
        await asyncio.gather(*(one(number) for number in range(4)))
        server.request_stop()
        forced = await asyncio.to_thread(end_of, server)
        await engine.close()
        return forced

    with TritonServer(echo_settings(tmp_path)) as server:
        assert not run_async(ask_and_stay(server))
