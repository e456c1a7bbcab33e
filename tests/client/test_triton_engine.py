"""Which way an engine is reached: gRPC where there is a server, BLS where there is none."""

from __future__ import annotations

import pytest

from tests.helpers.fake_engine_server import Triton, run
from trtllm_bls.contract import ENGINE
from trtllm_bls.contract.pbtxt import model_config
from trtllm_bls.engines.triton import Route, TritonModel
from trtllm_bls.errors import (
    EngineError,
    EngineUnavailable,
)


def route(url: str, transport: str = "auto") -> Route:
    return Route(
        transport=transport,
        url=url,
        pb_utils=None,
        vocab_size=50,
        max_streams=2,
        stall_seconds=1,
    )


@pytest.mark.parametrize(
    ("transport", "kind"), [("auto", "GrpcEngine"), ("grpc", "GrpcEngine"), ("bls", "BlsEngine")]
)
def test_a_reachable_server_is_spoken_to_over_grpc_unless_told_otherwise(
    transport: str, kind: str
) -> None:
    """Opened once, at the first request."""

    async def dialogue() -> None:
        async with Triton() as triton:
            model = TritonModel("tensorrt_llm", route(triton.url, transport))
            engine = await model.engine()
            assert type(engine).__name__ == kind and engine is await model.engine()
            assert (await engine.limits()).max_sequence_tokens == 64
            await model.close()

    run(dialogue())


def test_without_a_port_only_auto_and_bls_go_on() -> None:
    """grpc was asked for, so its absence is an error; the next request tries again."""

    async def dialogue() -> None:
        for transport in ("auto", "bls"):
            model = TritonModel("tensorrt_llm", route("127.0.0.1:1", transport))
            assert type(await model.engine()).__name__ == "BlsEngine"
            await model.close()
        model = TritonModel("tensorrt_llm", route("127.0.0.1:1", "grpc"))
        for _ in range(2):
            with pytest.raises(EngineUnavailable):
                await model.engine()

    run(dialogue())


@pytest.mark.parametrize("transport", ["auto", "grpc", "bls"])
@pytest.mark.parametrize("name", ["tensorrt_llm", "misspelt"])
def test_a_model_that_cannot_serve_us_is_an_error_on_any_transport(
    name: str, transport: str
) -> None:
    """Not decoupled, or not there: another way to reach it would not help."""
    config = model_config(ENGINE, {})
    config.model_transaction_policy.decoupled = False

    async def dialogue() -> None:
        async with Triton(config=config) as triton:
            model = TritonModel(name, route(triton.url, transport))
            with pytest.raises(EngineError, match=r"decoupled|misspelt"):
                await model.engine()

    run(dialogue())


@pytest.mark.parametrize("transport", ["auto", "grpc", "bls"])
def test_a_model_that_is_still_loading_decides_nothing(transport: str) -> None:
    """The server is there, so the transport is chosen once the model tells what it declares."""

    async def dialogue() -> None:
        async with Triton() as triton:
            triton.loading = True
            model = TritonModel("tensorrt_llm", route(triton.url, transport))
            with pytest.raises(EngineUnavailable, match="no available versions"):
                await model.engine()
            triton.loading = False
            assert (await (await model.engine()).limits()).max_sequence_tokens == 64
            await model.close()

    run(dialogue())
