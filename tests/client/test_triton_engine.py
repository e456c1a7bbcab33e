"""Whose Triton an engine is in: as ``engine_transport`` says, and no other."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.helpers.children import Child
from tests.helpers.fake_engine_server import Triton
from tests.helpers.waiting import eventually
from trtllm_bls.configure.pbtxt import model_config
from trtllm_bls.engines.base import RenewedCapacity
from trtllm_bls.engines.own_port import is_own, listening_processes
from trtllm_bls.engines.triton_model import GrpcEngine
from trtllm_bls.errors import EngineError, EngineUnavailable
from trtllm_bls.types import EngineCapacity
from trtllm_bls.wire.contract import ENGINE

LISTEN = """
import socket, time
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    server.accept()
"""


@contextmanager
def foreign_port() -> Iterator[int]:
    """Another process listens at it."""
    with Child([sys.executable, "-c", LISTEN]) as foreign:
        yield int(foreign.output.next())


def engine_at(url: str, transport: str = "auto", name: str = "tensorrt_llm") -> GrpcEngine:
    own_server = transport == "auto"
    return GrpcEngine(url, name, vocab_size=50, stall_seconds=1, own_server=own_server)


async def test_a_model_is_asked_once_for_what_it_declares() -> None:
    """Also where two requests come at once."""
    async with Triton() as triton:
        engine = engine_at(triton.url)
        await engine.capacity()
        await asyncio.gather(engine.capacity(), engine.capacity())
        assert triton.config_asked == 1
        await engine.close()


@pytest.mark.parametrize("transport", ["auto", "grpc"])
async def test_without_a_port_requests_fail_until_there_is_one(transport: str) -> None:
    """Where the port was not named, the error tells how to name it."""
    engine = engine_at("127.0.0.1:1", transport)
    for _ in range(2):
        with pytest.raises(EngineUnavailable) as caught:
            await engine.capacity()
        assert ("engine_url" in str(caught.value)) is (transport == "auto")
    await engine.close()


def test_a_port_of_somebody_elses_server_is_known() -> None:
    """One that nobody listens at, or of another machine, is nobody's."""
    with foreign_port() as port:
        assert is_own(f"localhost:{port}") is False
        assert is_own(f"elsewhere.example:{port}") is None
    assert is_own(f"localhost:{port}") is None
    with socket.create_server(("127.0.0.1", 0)) as ours:
        assert is_own(f"127.0.0.1:{ours.getsockname()[1]}") is True


def test_a_child_with_the_socket_does_not_take_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process that Triton starts has all of Triton's sockets for a moment."""
    with socket.create_server(("127.0.0.1", 0)) as ours:
        url = f"127.0.0.1:{ours.getsockname()[1]}"
        with Child(["sleep", "60"], pass_fds=[ours.fileno()]) as child:
            assert listening_processes(url) <= {os.getpid(), child.pid}
            # Which of the two psutil names depends on their process ids.
            found = "trtllm_bls.engines.own_port.listening_processes"
            monkeypatch.setattr(found, lambda _: {child.pid})
            assert is_own(url) is True


async def test_auto_does_not_speak_to_somebody_elses_server() -> None:
    """With host networking another Triton may own the default port, and have the same models."""
    with foreign_port() as port:
        engine = engine_at(f"127.0.0.1:{port}")
        with pytest.raises(EngineUnavailable, match=r"another process .* set engine_url"):
            await engine.capacity()
        await engine.close()


async def test_the_owner_of_the_port_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking through all connections of the machine would hold up every stream at each refresh."""
    looked = list[str]()
    monkeypatch.setattr("trtllm_bls.engines.triton_model.is_own", looked.append)
    monkeypatch.setattr("trtllm_bls.engines.triton_model._REFRESH_SECONDS", 0)
    async with Triton() as triton:
        engine = engine_at(triton.url)

        async def has_asked_three_times() -> bool:
            # A capacity that is still being asked for is not asked for again.
            await engine.capacity()
            return triton.config_asked >= 3

        await eventually(has_asked_three_times)
        assert looked == [triton.url]
        await engine.close()


@pytest.mark.parametrize("transport", ["auto", "grpc"])
async def test_a_model_that_cannot_serve_us_is_an_error(transport: str) -> None:
    """It is not there; the port is not to blame."""
    async with Triton(config=model_config(ENGINE, {})) as triton:
        engine = engine_at(triton.url, transport, "misspelt")
        with pytest.raises(EngineError, match="misspelt") as caught:
            await engine.capacity()
        assert "engine_url" not in str(caught.value)
        await engine.close()


@pytest.mark.parametrize("transport", ["auto", "grpc"])
async def test_a_model_that_is_still_loading_is_unavailable(transport: str) -> None:
    """Until it has loaded."""
    async with Triton() as triton:
        triton.loading = True
        engine = engine_at(triton.url, transport)
        with pytest.raises(EngineUnavailable) as caught:
            await engine.capacity()
        assert "engine_url" not in str(caught.value)
        triton.loading = False
        assert (await engine.capacity()).max_sequence_tokens == 64
        await engine.close()


async def test_who_asks_as_the_capacity_comes_is_told_it() -> None:
    """Its turn of the event loop comes after the answer and before the callbacks of the answer."""
    late: list[asyncio.Task[EngineCapacity]] = []

    async def ask() -> EngineCapacity:
        late.append(asyncio.create_task(capacity.get()))
        return EngineCapacity(max_sequence_tokens=77)

    capacity = RenewedCapacity(ask, 30)
    told = [await capacity.get(), await late[0]]
    assert [each.max_sequence_tokens for each in told] == [77, 77]
    assert len(late) == 1  # the answer serves both


async def test_a_capacity_that_cannot_be_asked_is_asked_for_by_the_next_request() -> None:
    """Each request that waited is told why; an old answer serves until it is in doubt."""
    answers: list[EngineCapacity | EngineError] = [
        EngineError("lost"),
        EngineCapacity(max_sequence_tokens=1),
        EngineCapacity(max_sequence_tokens=2),
    ]

    async def ask() -> EngineCapacity:
        await asyncio.sleep(0)
        answer = answers.pop(0)
        if isinstance(answer, EngineError):
            raise answer
        return answer

    capacity = RenewedCapacity(ask, 30)
    failed = await asyncio.gather(capacity.get(), capacity.get(), return_exceptions=True)
    assert [str(each) for each in failed] == ["lost", "lost"]
    assert [(await capacity.get()).max_sequence_tokens for _ in range(2)] == [1, 1]
    capacity.doubt()
    assert (await capacity.get()).max_sequence_tokens == 2
