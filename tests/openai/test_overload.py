"""More requests than places: who has none is told before the server works on the request, and one
large request does its long work beside the event loop."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from doubles.scripted import Fault
from tests.helpers.openai_server import MODEL, ScriptedBackend
from tests.helpers.scripted_text import PROMPT, saying
from tests.helpers.waiting import run_async, until
from tests.openai.conftest import SAYS, Connect
from tests.openai.test_refusals import ask, completion
from trtllm_bls.openai.completions import CompletionResponse
from trtllm_bls.openai.exchange import Reply, run_all
from trtllm_bls.orchestrator.orchestrator import Admission, Orchestrator
from trtllm_bls.text.prompts import PromptMaker
from trtllm_bls.types import TextRequest

COMPLETIONS = "/v1/completions"


def test_a_full_server_refuses_before_it_reads_a_request(connect: Connect) -> None:
    """Even a body that is no JSON is answered 429, and one that has not come yet."""
    engine = saying(SAYS)
    engine.fault = Fault(error=None)  # never answers
    backend = ScriptedBackend(engine, admission=Admission(1, 1, None))
    api, _ = connect(engine, backend=backend)
    callers = [socket.create_connection((api.host, api.port), timeout=60) for _ in range(3)]
    body = json.dumps(completion()).encode()
    head = "POST {} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += "content-length: {}\r\n\r\n"
    for caller in callers[:2]:
        caller.sendall(head.format(COMPLETIONS, len(body)).encode() + body)
    until(lambda: backend.admission is not None and backend.admission.room == 0)
    status, error, headers = ask(api, COMPLETIONS, b"no JSON")
    assert status == 429 and int(headers["retry-after"]) >= 1
    assert "max_queued_requests" in error["message"]
    callers[2].sendall(head.format(COMPLETIONS, 1000).encode())
    assert callers[2].recv(65536).startswith(b"HTTP/1.1 429 ")
    for caller in callers:
        caller.close()
    until(lambda: backend.admission is not None and backend.admission.room == 2)
    assert ask(api, COMPLETIONS, b"no JSON")[0] == 400


def test_more_sequences_than_may_ever_run_are_a_mistake_and_no_overload(connect: Connect) -> None:
    """To try again later would not help."""
    engine = saying(SAYS)
    api, _ = connect(engine, backend=ScriptedBackend(engine, admission=Admission(1, 1, None)))
    status, error, _ = ask(api, COMPLETIONS, completion(n=3))
    assert status == 400, error


def test_the_long_work_of_one_request_is_done_beside_the_loop(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of prompts is tokenised, and log-probabilities are written, in another thread."""
    at: dict[str, set[threading.Thread]] = {"loop": set(), "tokenised": set(), "written": set()}
    run, encode_ahead, whole = (
        Orchestrator.run,
        PromptMaker.encode_ahead,
        CompletionResponse.whole,
    )

    async def running(self: Orchestrator, *arguments: Any) -> None:
        at["loop"].add(threading.current_thread())
        await run(self, *arguments)

    def encoding(self: PromptMaker, requests: Iterable[TextRequest]) -> None:
        at["tokenised"].add(threading.current_thread())
        encode_ahead(self, requests)

    def writing(self: CompletionResponse) -> bytes:
        at["written"].add(threading.current_thread())
        return whole(self)

    monkeypatch.setattr(Orchestrator, "run", running)
    monkeypatch.setattr(PromptMaker, "encode_ahead", encoding)
    monkeypatch.setattr(CompletionResponse, "whole", writing)
    api, _ = connect()
    body = {"model": MODEL, "prompt": [PROMPT] * 3, "n": 2, "logprobs": 1, "max_tokens": 4}
    status, found, _ = ask(api, COMPLETIONS, body)
    assert status == 200
    assert [choice["index"] for choice in found["choices"]] == list(range(6))
    assert all(len(choice["logprobs"]["tokens"]) for choice in found["choices"])
    assert len(at["loop"]) == len(at["tokenised"]) == len(at["written"]) == 1
    assert not at["loop"] & (at["tokenised"] | at["written"])


def test_other_streams_have_a_turn_between_answers_that_arrive_together() -> None:
    """Reading a thousand choices with log-probabilities takes most of a second."""

    async def run() -> list[int]:
        backend, at, turn = ScriptedBackend(saying(SAYS)), list[int](), 0

        def count() -> None:
            nonlocal turn
            turn += 1
            loop.call_soon(count)

        async def ignored(message: Any) -> None:
            pass

        loop = asyncio.get_running_loop()
        asks = TextRequest(request_id="", text=PROMPT, max_tokens=4, num_return_sequences=2)
        requests = [replace(asks, request_id=str(index)) for index in range(8)]
        count()
        await run_all(
            backend.orchestrator,
            requests,
            lambda index, chunk: at.append(turn),
            Reply({"path": "", "http_version": "1.1", "headers": []}, ignored),
            asyncio.Event().wait,
        )
        await backend.close()
        return at

    at = run_async(run())
    assert len(at) == 16
    assert max(map(at.count, at)) <= 2  # the choices of one prompt
