"""What users who stream wait beside requests that cost much, all of one `serve`.

    python -m tests.reliability.bystanders [--costly 45] [--seconds 30]

Four users stream chats from the OpenAI API. After a while so many clients send costly requests to
ports 8000 and 9000, each again as soon as it is answered. Prints the users' waits between two
events, alone and beside the others, and what the costly requests were answered.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import multiprocessing
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from tests.helpers.ports import unused_ports
from tests.helpers.served import Served
from tests.helpers.server_settings import DEMO
from tests.helpers.waiting import join
from tests.live.conftest import echo_repository

USERS = 4
JSON = {"Content-Type": "application/json"}
CHAT, GENERATE = "/v1/chat/completions", "/v2/models/tensorrt_llm_bls/generate"
MB = 2**20


def chat(content: str = "Hi", **more: Any) -> dict[str, Any]:
    return {"model": "target", "messages": [{"role": "user", "content": content}], **more}


def costly() -> list[tuple[str, str, bytes, dict[str, str]]]:
    """Port, path, body and headers of each kind."""
    word = "abcdefghi "
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(5000)}}
    many = [{"role": "user", "content": word * 4}] * 8192
    bodies: list[tuple[str, str, Any]] = [
        ("OpenAI", CHAT, chat(word * (MB // 11))),
        ("OpenAI", CHAT, {**chat(), "messages": many}),
        ("OpenAI", CHAT, chat(further=[[]] * 99_000)),
        ("OpenAI", CHAT, chat(guided_regex="a" * 250_000)),
        (
            "OpenAI",
            CHAT,
            chat(response_format={"type": "json_schema", "json_schema": {"schema": schema}}),
        ),
        (
            "OpenAI",
            "/v1/responses",
            {
                "model": "target",
                "input": [
                    {
                        "type": "function_call",
                        "call_id": "1",
                        "name": "f",
                        "arguments": "[" * 3 * MB,
                    }
                ],
            },
        ),
        ("HTTP", GENERATE, {"text_input": word * (MB // 11), "max_tokens": 8}),
        ("HTTP", GENERATE, {"text_input": "a", **{f"k{n}": n for n in range(200_000)}}),
        (
            "HTTP",
            "/v2/models/preprocessing/infer",
            {
                "inputs": [
                    {
                        "name": "QUERY",
                        "datatype": "BYTES",
                        "shape": [1, 1],
                        "data": [word * (MB // 11)],
                    }
                ]
                * 3
            },
        ),
    ]
    found = [(port, path, json.dumps(body).encode(), JSON) for port, path, body in bodies]
    found.append(("OpenAI", CHAT, b"[" * 4_000_000, JSON))
    packed = {**JSON, "Content-Encoding": "gzip"}
    return [*found, ("OpenAI", CHAT, gzip.compress(found[0][2]), packed)]


def connected(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)


def bystander(url: str, until: float, waits: Any) -> None:
    """Streams one answer after the other; notes when each event came, and after what time."""
    body = json.dumps(chat(" ".join(f"w{n}" for n in range(200)), stream=True, max_tokens=300))
    found: list[tuple[float, float, bool]] = []
    while time.time() < until:
        connection, last, is_first = connected(url), time.time(), True
        connection.request("POST", CHAT, body, JSON)
        answer = connection.getresponse()
        while line := answer.readline():
            if line.startswith(b"data: "):
                now = time.time()
                found.append((now, now - last, is_first))
                last, is_first = now, False
        connection.close()
    waits.put(found)


def attack(urls: dict[str, str], count: int, begin: float, until: float, answers: Any) -> None:
    """``count`` clients in one process."""
    kinds, told = costly(), Counter[str]()
    assert time.time() < begin, "the clients are not ready yet; give them more --seconds"
    time.sleep(begin - time.time())

    def send(number: int) -> None:
        port, path, body, headers = kinds[number % len(kinds)]
        while time.time() < until:
            connection = connected(urls[port])
            try:
                connection.request("POST", path, body, headers)
                answer = connection.getresponse()
                answer.read()
                told[str(answer.status)] += 1
            except (OSError, http.client.HTTPException) as error:
                told[type(error).__name__] += 1
            connection.close()

    threads = [
        threading.Thread(target=send, args=(number,), daemon=True) for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    answers.put(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--costly", type=int, default=45)
    parser.add_argument("--seconds", type=float, default=30)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        (port,) = unused_ports(1)
        words = ("--model", str(DEMO / "target"), "--openai-port", str(port))
        running = Served(echo_repository(Path(scratch), ensemble=True), *words)
        try:
            urls = {"OpenAI": f"http://127.0.0.1:{port}", "HTTP": running.urls["HTTP"]}
            begin = time.time() + options.seconds
            until = begin + options.seconds
            waits, answers = context.Queue(), context.Queue()
            arguments = (urls["OpenAI"], until, waits)
            users = [context.Process(target=bystander, args=arguments) for _ in range(USERS)]
            for user in users:
                user.start()
            attackers = context.Process(
                target=attack, args=(urls, options.costly, begin, until, answers)
            )
            attackers.start()
            found = [pair for _ in users for pair in waits.get(timeout=300)]
            print(
                f"{options.costly} costly requests at once, answered:",
                dict(answers.get(timeout=300)),
            )
        finally:
            running.process.terminate()
            running.process.wait()
    for name, begins, ends in (("alone", 0.0, begin), ("beside them", begin + 2, until + 300)):
        for kind, first in (("the first event", True), ("the next event", False)):
            part = [
                wait for at, wait, is_first in found if begins < at < ends and is_first == first
            ]
            p50, p99, most = np.percentile(part, [50, 99, 100]) * 1000
            waits_of = f"{name}, waits for {kind} ({len(part)})"
            print(f"{waits_of}: p50 {p50:.0f}, p99 {p99:.0f}, most {most:.0f} ms")


if __name__ == "__main__":
    sys.exit(main())
