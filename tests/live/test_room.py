"""A server whose processes run out of file descriptors while they serve."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.helpers.server_settings import free_ports
from trtllm_bls.client import Client
from trtllm_bls.errors import ClientError
from trtllm_bls.launcher import TritonServer

pytestmark = pytest.mark.live
QUESTION = {"text_input": "Once upon a time", "max_tokens": 24}


@contextmanager
def without_descriptors(server: TritonServer) -> Iterator[None]:
    """No process of the server can open another file, socket or pipe."""
    assert server.process is not None
    before = {}
    for process in (server.process, *server.process.children()):
        before[process] = process.rlimit(psutil.RLIMIT_NOFILE)
        process.rlimit(psutil.RLIMIT_NOFILE, (0, before[process][1]))
    try:
        yield
    finally:
        for process, limit in before.items():
            process.rlimit(psutil.RLIMIT_NOFILE, limit)


def test_without_descriptors_what_runs_goes_on_and_later_all_is_well() -> None:
    """Clients that are connected are answered; one that connects gets its own error in its own
    time, and is served once there are descriptors again. No process ends."""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] > 0

    async def run(server: TritonServer) -> None:
        async with (
            Client(server.grpc_url) as connected,
            Client(
                server.grpc_url,
                keepalive_s=400,  # otherwise it would share the connection
            ) as newcomer,
        ):
            expected = (await connected.generate(**QUESTION)).text
            async with connected.stream(**QUESTION) as stream:
                text = (await anext(aiter(stream))).text
                with without_descriptors(server):
                    async for event in stream:
                        text += event.text
                    assert (await connected.generate(**QUESTION, deadline_s=60)).text == expected
                    with pytest.raises(ClientError):
                        await newcomer.generate(**QUESTION, deadline_s=2)
            assert text == expected
            assert (await newcomer.generate(**QUESTION, deadline_s=60)).text == expected

    with TritonServer(free_ports(threads=1)) as server:
        assert server.process is not None
        pids = {child.pid for child in server.process.children()}
        asyncio.run(run(server))
        assert {child.pid for child in server.process.children()} == pids
        assert server.process.is_running()
