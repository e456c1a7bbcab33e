"""A real server under requests of every wrong form, with a steady user beside them.

    python -m tests.reliability.fuzz [--cases 20000] [--seed 1] [--only 1234]

After each case the next request must work and every process must be the one it was. Prints what
was found, how long the steady user waited at most, and how memory went.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
from hypothesis import HealthCheck, Phase, given, seed, settings
from tritonclient.grpc import service_pb2, service_pb2_grpc

from doubles.speaking import SpeakingEngine
from tests.helpers.openai_server import MODEL, ScriptedBackend
from tests.helpers.openai_server import serving as serving_api
from tests.helpers.scripted_text import tokenizer_with_tools
from tests.helpers.triton_front import in_front_of
from tests.helpers.waiting import join
from tests.live.conftest import echo_settings
from tests.reliability.fuzz_cases import LAST_PING, TEXT, Case, base_fields, cases, packed
from tests.reliability.processes import memory_mb, named
from trtllm_bls.errors import defects
from trtllm_bls.openai.sockets import PATH
from trtllm_bls.operate.tritonserver import TritonServer
from trtllm_bls.settings.command_options import Override
from trtllm_bls.wire.contract import BLS, MODELS

PATIENCE_S = 30.0  # a case without an end by then hangs; answers end after LIMIT_S
LIMIT_S = 5
MAX_ERROR = 2_200  # characters; our own are cut at 2,000 and say so
_STATUSES = (
    "INVALID_ARG:",
    "UNSUPPORTED:",
    "UNAVAILABLE:",
    "INTERNAL:",
    "CANCELLED:",
    "NOT_FOUND:",
)
MAX_MB = 1500.0  # of any process, however many cases
LONGEST_WAIT_S = 10.0  # of the steady user, on a machine that does little else
GONE = "the server is gone"
_OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
_LIMITS = (
    Override("tensorrt_llm_bls", "request_timeout_seconds", str(LIMIT_S)),
    Override("tensorrt_llm_bls", "max_timeout_seconds", str(LIMIT_S)),
    Override("tensorrt_llm_bls", "max_output_tokens", "500"),
    Override("tensorrt_llm", "step_ms", "1"),
    Override("tensorrt_llm", "max_sequence_tokens", "5000"),
)


_UPGRADE = (
    f"GET {PATH} HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    "sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
).encode()


@contextmanager
def serving() -> Iterator[TritonServer]:
    """All five models, with an engine that says the prompt back."""
    with tempfile.TemporaryDirectory() as scratch:
        plain = echo_settings(Path(scratch), ensemble=True)
        kept = tuple(each for each in plain.overrides if each.parameter != "step_ms")
        changed = {**plain.__dict__, "overrides": (*kept, *_LIMITS), "openai_port": 0}
        with TritonServer(type(plain)(**changed)) as server:
            yield server


def valid(model: str, **more: Any) -> Any:
    """A message that the model answers."""
    row = next(each for each in MODELS if each.name == model)
    message = service_pb2.ModelInferRequest(model_name=model, id="steady")
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, array in (base_fields(row) | more).items():
        dtype = row.input_named[name].dtype
        datatype = "BYTES" if dtype == "STRING" else dtype
        message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        message.raw_input_contents.append(packed(array))
    return message


def text_of(replies: list[Any]) -> str:
    """What a text model has said."""
    parts = []
    for reply in replies:
        names = [output.name for output in reply.infer_response.outputs]
        raw = dict(zip(names, reply.infer_response.raw_output_contents, strict=True))
        parts.append(raw.get("text_output", b"")[4:].decode())
    return "".join(parts)


class SteadyUser(threading.Thread):
    """Streams one answer after the other; ``waits`` are the seconds between responses."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.waits: list[float] = []
        self.longest, self.longest_case, self.case = 0.0, -1, -1
        self.wrong: list[str] = []
        self._url, self._ending = url, threading.Event()
        words = " ".join(f"w{number}" for number in range(40))
        more = {"text_input": words, "max_tokens": 200, "stream": True}
        self._expected = words
        self._message = valid(
            BLS.name,
            text_input=np.array([[more["text_input"]]], object),
            max_tokens=np.array([[200]], np.int32),
            stream=np.array([[True]]),
        )

    def run(self) -> None:
        with grpc.insecure_channel(self._url) as channel:
            ask = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer
            while not self._ending.is_set():
                try:
                    self._stream(ask)
                except grpc.RpcError as error:
                    self.wrong.append(f"case {self.case}: {error.code()}: {error.details()}")
                    self._ending.wait(1)

    def _stream(self, ask: Any) -> None:
        begin = time.monotonic()
        replies, last = [], begin
        for reply in ask(iter([self._message]), timeout=4 * PATIENCE_S):
            now = time.monotonic()
            self._waited(now - last)
            last = now
            replies.append(reply)
        errors = [reply.error_message for reply in replies if reply.error_message]
        text = text_of(replies)
        if time.monotonic() > begin + LIMIT_S and self._expected.startswith(text):
            return  # On a machine that stood still the time limit has ended it.
        if errors or text != self._expected:
            self.wrong.append(f"case {self.case}: {errors or text!r}")

    def _waited(self, seconds: float) -> None:
        self.waits.append(seconds)
        if seconds > self.longest:
            self.longest, self.longest_case = seconds, self.case

    def close(self) -> None:
        self._ending.set()
        join(self, 5 * PATIENCE_S)


class Fuzzer:
    """Sends cases to one server; ``findings`` are broken promises with the case's number."""

    def __init__(self, server: TritonServer) -> None:
        self.findings: list[tuple[int, str, Case | None]] = []
        self.answers: Counter[str] = Counter()
        self.memory: list[tuple[int, dict[str, float]]] = []
        self.slowest: list[tuple[float, int, Case]] = []
        self.steady = SteadyUser(server.grpc_url)
        self._server, self._url = server, server.grpc_url
        self._prefix = server.region_prefix
        self._processes = named(server)
        self._number = -1
        self._channel = grpc.insecure_channel(server.grpc_url, options=_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._in_front = ExitStack()
        self._front = self._in_front.enter_context(in_front_of(server.grpc_url, server.http_url))
        defects.clear()
        tokenizer = tokenizer_with_tools()
        engine = SpeakingEngine(tokenizer, lambda prompt: "Hi.")
        backend = ScriptedBackend(engine, tokenizer)
        self._api = self._in_front.enter_context(serving_api(engine, backend))
        self._http = http.client.HTTPConnection("127.0.0.1", self._front.port, timeout=PATIENCE_S)
        self.steady.start()

    def run(self, count: int, first_seed: int, only: int | None = None) -> None:
        """``count`` cases; of the same seed always the same, with one version of hypothesis."""

        @seed(first_seed)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(cases())
        def each(case: Case) -> None:
            self._number += 1
            if only in (None, self._number):
                self.check(case)

        each()
        self.close()

    def check(self, case: Case) -> None:
        """One case and what must hold after it; nothing once the server is gone."""
        if self.findings and self.findings[-1][1] == GONE:
            return
        self.steady.case = self._number
        began = time.monotonic()
        self._front.forwarded.clear()
        connections = {
            "frames": self._connect,
            "http": self._send_bytes,
            "socket": self._open_socket,
        }
        send = connections.get(case.endpoint, self._post)
        problem = self._send(case) if case.over_grpc else send(case)
        if defects:
            problem = f"a defect: {defects.popleft()}"
        took = time.monotonic() - began
        self.slowest = sorted([*self.slowest, (took, self._number, case)], key=lambda x: -x[0])[:5]
        problem = problem or self._next_request(case)
        if problem or self._number % 50 == 0:
            problem = self._changed() or problem
        if self._number % 500 == 0:
            self.memory.append((self._number, memory_mb(self._processes)))
            print(f"{self._number} cases, {len(self.findings)} findings", flush=True)
        if problem:
            self.findings.append((self._number, problem, case))
            print(f"case {self._number}: {problem}\n{case!r}", flush=True)

    def close(self) -> None:
        self.steady.close()
        self._channel.close()
        self._http.close()
        self._in_front.close()
        self.memory.append((self._number, memory_mb(self._processes)))
        if self.steady.wrong:
            self.findings.append((-1, f"the steady user: {self.steady.wrong[:5]}", None))
        if (problem := self._changed()) and problem != GONE:
            self.findings.append((-1, problem, None))

    def _changed(self) -> str | None:
        try:
            now = named(self._server)
        except (psutil.NoSuchProcess, TypeError):
            return GONE
        return None if now == self._processes else f"processes: {self._processes} became {now}"

    def _send(self, case: Case) -> str | None:
        try:
            if case.endpoint == "unary":
                self._stub.ModelInfer(case.message, timeout=PATIENCE_S)
                replies = []
            else:
                call = self._stub.ModelStreamInfer(iter([case.message]), timeout=PATIENCE_S)
                replies = list(call)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"no end within {PATIENCE_S:g} s"
            self.answers[f"gRPC {error.code().name}"] += 1
            return self._unclear(error.details())
        errors = [reply.error_message for reply in replies if reply.error_message]
        self.answers["gRPC error" if errors else "gRPC answer"] += 1
        if case.endpoint == "stream" and not replies:
            return "a stream without any response"
        return next(filter(None, map(self._unclear, errors)), None)

    def _post(self, case: Case) -> str | None:
        headers = {"Content-Type": case.content_type}
        if case.header_length is not None:
            headers["Inference-Header-Content-Length"] = case.header_length
        try:
            path = f"/v2/models/{case.model}/{case.endpoint}"
            self._http.request("POST", path, case.body, headers)
            answer = self._http.getresponse()
            status, body = answer.status, answer.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            self._http.close()
            if isinstance(error, TimeoutError):
                return f"no end within {PATIENCE_S:g} s"
            return f"HTTP broke: {type(error).__name__}: {error}"
        self.answers[f"HTTP {status}"] += 1
        if status == 500:
            return f"status 500: {body[:300]}"
        refused = status != 200 or '"error"' in body[:200]
        return self._unclear(body.strip()) if refused else None

    def _connect(self, case: Case) -> str | None:
        """The bytes of a connection: the server reads them to the last, or closes it."""
        host, _, port = self._url.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as raw:
            got = b""
            try:
                raw.sendall(case.body)
                raw.shutdown(socket.SHUT_WR)
                while LAST_PING not in got[-100_000:] and (part := raw.recv(65536)):
                    got += part
            except TimeoutError:
                return f"no end within {PATIENCE_S:g} s"
            except OSError:
                self.answers["HTTP/2 broken off"] += 1
                return None
        self.answers["HTTP/2 read" if LAST_PING in got else "HTTP/2 closed"] += 1
        return None

    def _send_bytes(self, case: Case) -> str | None:
        """A connection to port 8000: it ends, and no answer on it is a defect."""
        received = self._received("127.0.0.1", self._front.port, b"", case.body)
        if received is None:
            return f"no end within {PATIENCE_S:g} s"
        self.answers["HTTP connection answered" if received else "HTTP connection closed"] += 1
        return "status 500 on a connection" if b"HTTP/1.1 500" in received else None

    def _open_socket(self, case: Case) -> str | None:
        """A WebSocket: it ends, and the next request of the API is answered."""
        received = self._received(self._api.host, self._api.port, _UPGRADE, case.body)
        if received is None:
            return f"no end within {PATIENCE_S:g} s"
        self.answers["WebSocket"] += 1
        body = json.dumps({"model": MODEL, "input": "Hi", "store": False}).encode()
        connection = http.client.HTTPConnection(self._api.host, self._api.port, timeout=PATIENCE_S)
        try:
            connection.request("POST", PATH, body, {"Content-Type": "application/json"})
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            return f"the API does not answer: {type(error).__name__}: {error}"
        finally:
            connection.close()
        return None if status == 200 else f"the API answered {status}"

    def _received(self, host: str, port: int, first: bytes, flow: bytes) -> bytes | None:
        """What a server sends on a connection until it ends; ``None`` if it never does."""
        with socket.create_connection((host, port), timeout=PATIENCE_S) as raw:
            received = b""
            try:
                raw.sendall(first + flow)
                raw.shutdown(socket.SHUT_WR)
                while part := raw.recv(65536):
                    received = (received + part)[-100_000:]
            except TimeoutError:
                return None
            except OSError:
                self.answers["connection reset"] += 1
            return received

    def _unclear(self, problem: str) -> str | None:
        """Why an error's text is not what a caller may see; ``None`` if it is."""
        shown = problem[:300]
        ours = any(status in problem for status in _STATUSES)
        self.answers["refused by a model" if ours else "refused by Triton"] += 1
        if self._prefix in problem:
            return f"an error names a shared-memory region: {shown}"
        if "INTERNAL: unexpected" in problem:
            return f"a defect: {shown}"
        if "Traceback" in problem or "site-packages" in problem:
            return f"an error with a traceback: {shown}"
        # Triton's own errors repeat the request's id and names as they were sent.
        if ours and ("\n" in problem.strip() or len(problem) > MAX_ERROR):
            return f"an error of {len(problem)} characters, {problem.count(chr(10))} lines: {shown}"
        return None if problem else "an empty error"

    def _next_request(self, case: Case) -> str | None:
        """The model that was asked, and the text model, answer as ever."""
        for model in {case.model, BLS.name}:
            try:
                call = self._stub.ModelStreamInfer(iter([valid(model)]), timeout=PATIENCE_S)
                replies = list(call)
            except grpc.RpcError as error:
                return f"the next request to {model} failed: {error.code()}: {error.details()}"
            errors = [reply.error_message for reply in replies if reply.error_message]
            if errors or (model == BLS.name and text_of(replies) != TEXT):
                return f"the next request to {model}: {errors or text_of(replies)!r}"
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="send just the case of this number")
    given_options = parser.parse_args()
    began = time.monotonic()
    with serving() as server:
        fuzzer = Fuzzer(server)
        fuzzer.run(given_options.cases, given_options.seed, given_options.only)
    minutes = (time.monotonic() - began) / 60
    print(
        f"\n{given_options.cases} cases in {minutes:.0f} minutes, {len(fuzzer.findings)} findings"
    )
    print("answers:", dict(fuzzer.answers.most_common()))
    for took, number, case in fuzzer.slowest:
        print(f"slowest: {took:.1f} s, case {number}: {str(case)[:150]!r}")
    waits = np.array(fuzzer.steady.waits)
    print(
        f"the steady user's waits: p99 {np.percentile(waits, 99) * 1000:.0f} ms, longest "
        f"{fuzzer.steady.longest:.1f} s at case {fuzzer.steady.longest_case}, of {len(waits)}"
    )
    for number, sizes in fuzzer.memory:
        print(f"MB after {number}:", {name: round(size) for name, size in sizes.items()})
    last = max(fuzzer.memory[-1][1].values(), default=0.0)
    longest = fuzzer.steady.longest
    problem = f"{len(fuzzer.findings)} findings, {last:.0f} MB, a wait of {longest:.1f} s"
    sys.exit(problem if _failed(fuzzer, last) else 0)


def _failed(fuzzer: Fuzzer, largest_mb: float) -> bool:
    is_slow = fuzzer.steady.longest >= LONGEST_WAIT_S
    return bool(fuzzer.findings) or largest_mb > MAX_MB or is_slow


if __name__ == "__main__":
    main()
