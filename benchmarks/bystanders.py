"""What a client waits, and what a worker keeps, beside another client that spends its budgets.

One worker answers the OpenAI API and Triton's HTTP surface, over an engine that is a script and a
Triton that is played, so the figures are this package's own. For each row ``--clients`` threads of
another process send requests of one kind again and again, all with one API key; a bystander with
another key asks for one short completion after another. Printed are the bystander's waits, how
many of its requests were refused, and the worker's memory before and after. The exit code is 1
where a p99 is above ``--limit`` seconds.

examples:
  python benchmarks/bystanders.py --seconds 5
  python benchmarks/bystanders.py --rows pings,references
"""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import multiprocessing
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from threading import Thread

import psutil
import uvicorn
from bench.arguments import parser_of
from bench.report import print_conditions
from starlette.types import Receive, Scope, Send

from doubles.scripted import Script
from doubles.speaking import SpeakingEngine
from tests.helpers.openai_server import MODEL, ScriptedBackend
from tests.helpers.scripted_text import tokenizer_with_tools
from trtllm_bls.http.generate import TritonHttp
from trtllm_bls.http.limits import ConnectionLimits
from trtllm_bls.openai.api_settings import ApiSettings
from trtllm_bls.openai.app import create_app
from trtllm_bls.openai.sockets import PATH
from trtllm_bls.openai.workers import uvicorn_options

KEYS = ("attacker", "bystander")
MIB = 2**20
INFER = "/v2/models/m/infer"
RESPONSES = "/v1/responses"
CHAT = "/v1/chat/completions"
ANSWER = "word " * 100_000  # of the stored response that is referred to


# --- the worker -----------------------------------------------------------------------------------


async def play_triton(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request, as Triton's HTTP port does."""
    with suppress(OSError, asyncio.IncompleteReadError):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = head.partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length or 0))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()


def work(ready: Connection) -> None:
    """Serve until this process is killed; send the port once it listens."""
    tokenizer = tokenizer_with_tools()
    script = Script(vocab_size=tokenizer.vocab_size, max_sequence_tokens=2 * MIB)
    engine = SpeakingEngine(tokenizer, lambda prompt: ANSWER if "long" in prompt else "Hi.", script)
    digests = tuple(sha256(key.encode()).digest() for key in KEYS)
    settings = ApiSettings(model_names=(MODEL,), keys=digests)
    api = create_app(ScriptedBackend(engine, tokenizer), settings)
    triton: list[TritonHttp] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            played = await asyncio.start_server(play_triton, "127.0.0.1", 0)
            port = played.sockets[0].getsockname()[1]
            triton.append(TritonHttp("", f"http://127.0.0.1:{port}"))
        is_triton = scope["type"] == "http" and scope["path"].startswith("/v2")
        await (triton[0] if is_triton else api)(scope, receive, send)

    listening = socket.create_server(("127.0.0.1", 0))
    ready.send(listening.getsockname()[1])
    limits = ConnectionLimits(socket_path=PATH.encode())
    config = uvicorn.Config(app, loop="auto", **uvicorn_options(limits, exit_timeout=1))
    uvicorn.Server(config).run([listening])


# --- clients --------------------------------------------------------------------------------------


def post(port: int, key: str, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    """Send one request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    fields = {"content-type": "application/json", "authorization": f"Bearer {key}", **headers}
    try:
        connection.request("POST", path, body, fields)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()


def posting(path: str, body: bytes, **headers: str) -> Callable[[int], None]:
    """Send the same request again and again."""
    return lambda port: print_nothing(post(port, KEYS[0], path, body, **headers))


def print_nothing(answer: object) -> None:
    """Drop an answer."""


def flood(first: bytes, flow: bytes, reads: bool = True) -> Callable[[int], None]:
    """Send ``first`` and then ``flow``, as far as the server reads it."""

    def send(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as raw:
            raw.sendall(first)
            if reads:
                raw.recv(65536)
            raw.sendall(flow)
            while raw.recv(65536):
                pass

    return send


def unfinished(port: int) -> None:
    """Hold a body without its last byte until the server gives up."""
    size = 4 * MIB
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS[0]}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {size}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        raw.sendall(head.encode() + b" " * (size - 1))
        raw.recv(65536)


def references(port: int) -> None:
    """Store a long answer, and name it 800 times in each of many requests."""
    _, stored = post(port, KEYS[0], RESPONSES, as_json({"model": MODEL, "input": "long"}))
    items = json.loads(stored).get("output") or [{"id": "msg_none"}]
    mention = {"type": "item_reference", "id": items[-1]["id"]}
    body = as_json({"model": MODEL, "input": [mention] * 800})
    for _ in range(20):
        post(port, KEYS[0], RESPONSES, body)


def tensor(**fields: object) -> bytes:
    whole = {"name": "x", "datatype": "INT32", "shape": [1], "data": [5], **fields}
    return as_json({"inputs": [whole]})


def chat(**fields: object) -> bytes:
    return as_json({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields})


def frame(opcode: int, payload: bytes = b"", fin: bool = True) -> bytes:
    return bytes([opcode | 0x80 * fin, 0x80 | len(payload)]) + bytes(4) + payload


UPGRADE = (
    f"GET {RESPONSES} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS[0]}\r\n"
    "upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n"
    "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
).encode()
NUMBERS = list(range(10)) * 180_000
TEXTS = b"\0\0\0\0" * MIB
BINARY = {"data": None, "parameters": {"binary_data_size": len(TEXTS)}}
TEXT_HEAD = tensor(datatype="BYTES", shape=[MIB], **BINARY).replace(b'"data": null, ', b"")
ROWS: dict[str, Callable[[int], None]] = {
    "nothing": lambda port: time.sleep(0.1),
    "shapes": posting(INFER, tensor(shape=[2**63 - 1])),
    "numbers": posting(INFER, tensor(shape=[len(NUMBERS)], data=NUMBERS)),
    "texts": posting(
        INFER,
        TEXT_HEAD + TEXTS,
        **{"inference-header-content-length": str(len(TEXT_HEAD))},
    ),
    "pings": flood(UPGRADE, frame(9) * 400_000),
    "fragments": flood(UPGRADE, frame(1, fin=False) + frame(0, fin=False) * 400_000),
    "messages": flood(UPGRADE, frame(1, b"x") * 400_000),
    "references": references,
    "notes": posting(RESPONSES, as_json({"model": MODEL, "input": [{"type": "x" * 3_900_000}]})),
    "unfinished": unfinished,
    "pipelined": flood(b"GET /version HTTP/1.1\r\n\r\n", b"GET /version HTTP/1.1\r\n\r\n" * 20_000),
    "headers": flood(b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 11_000, reads=False),
    "lists": posting(CHAT, chat(further=[[]] * 99_000)),
    "members": posting(CHAT, chat(further=NUMBERS[:1_300_000])),
    "packed": posting(
        CHAT, gzip.compress(chat(user="x" * 3_900_000)), **{"content-encoding": "gzip"}
    ),
}


def attack(row: str, port: int, clients: int, stop: Event) -> None:
    """Send requests of one kind from so many threads until told to stop."""

    def send() -> None:
        while not stop.is_set():
            with suppress(OSError, http.client.HTTPException, ValueError):
                ROWS[row](port)

    for _ in range(clients):
        Thread(target=send, daemon=True).start()
    stop.wait()


def waits_of(port: int, seconds: float) -> tuple[list[float], int]:
    """The seconds that each of the bystander's requests took, and how many were refused."""
    body = as_json({"model": MODEL, "prompt": "Hi", "max_tokens": 4})
    waits: list[float] = []
    refused = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        status, _ = post(port, KEYS[1], "/v1/completions", body)
        waits.append(time.perf_counter() - began)
        refused += status != 200
    return sorted(waits), refused


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--rows", default=",".join(ROWS), help="names with commas between; default: all")
    add("--seconds", type=float, default=10, help="of each row; default 10")
    add("--clients", type=int, default=8, help="threads that send what costs; default 8")
    add("--limit", type=float, default=0.5, help="seconds of a p99; default 0.5")
    options = parser.parse_args()
    print_conditions(options, "plain sockets and http.client, one connection a request")
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.Process(target=work, args=(theirs,), daemon=True)
    worker.start()
    port = ours.recv()
    process = psutil.Process(worker.pid)
    post(port, KEYS[1], "/v1/completions", as_json({"model": MODEL, "prompt": "Hi"}))
    is_late = False
    print("| row | requests | p50, s | p99, s | longest, s | refused | MB before | after |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in options.rows.split(","):
        before = process.memory_info().rss / MIB
        stop = multiprocessing.Event()
        attacker = multiprocessing.Process(target=attack, args=(row, port, options.clients, stop))
        attacker.start()
        waits, refused = waits_of(port, options.seconds)
        stop.set()
        attacker.terminate()
        attacker.join()
        p99 = waits[int(0.99 * (len(waits) - 1))]
        is_late = is_late or p99 > options.limit
        after = process.memory_info().rss / MIB
        shown = f"{waits[len(waits) // 2]:.3f} | {p99:.3f} | {waits[-1]:.3f} | {refused}"
        print(f"| {row} | {len(waits)} | {shown} | {before:.0f} | {after:.0f} |", flush=True)
    worker.kill()
    worker.join()
    return int(is_late)


if __name__ == "__main__":
    sys.exit(main())
