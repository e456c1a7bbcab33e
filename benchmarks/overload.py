"""How soon callers of the OpenAI API are told that the server is full, and what the others notice.

    .venv/bin/python benchmarks/overload.py --clients 1000 2000

A server with ``--running`` places and ``--queued`` more that wait gets ``--clients`` requests at
once, each on a connection of its own, from another process. The server is uvicorn with this
package's event loop, the API, the orchestrator and an engine whose one timer gives every stream a
token at each step. Printed are percentiles of the time from the start of ``connect`` to the first
byte of a 429, and to the first token of an answer. The first row has as many clients as places: a
full house, in which nobody is refused. ``--chat-bytes`` is the size of each prompt.

``--http PORT`` asks Triton's HTTP API (``generate_stream``) of a ``trtllm-bls serve`` on
this machine instead. Give ``--running`` and ``--queued`` as that server has them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import select
import socket
import time
from collections import defaultdict
from contextlib import ExitStack
from multiprocessing.connection import Connection

from bench.stepping_api import serving_api

from trtllm_bls.settings.command_options import raise_open_files

SHARES = (0.5, 0.99, 1.0)


def load(results: Connection, port: int, clients: int, request: bytes) -> None:
    """Send the status that each client was told, and the seconds to that.

    Plain sockets under one epoll: a client on asyncio needs more CPU for a connection than the
    server does. Once a stream has begun it is left to the kernel's buffer until all are told.
    """
    poll, waiting, told = select.epoll(), {}, []
    for _ in range(clients):
        client = socket.socket()
        client.setblocking(False)
        began = time.perf_counter()
        client.connect_ex(("127.0.0.1", port))
        waiting[client.fileno()] = (client, began, bytearray())
        poll.register(client.fileno(), select.EPOLLOUT)
    kept = [client for client, _, _ in waiting.values()]
    while waiting:
        for number, events in poll.poll():
            client, began, got = waiting[number]
            try:
                if events & select.EPOLLOUT:
                    client.sendall(request)
                    poll.modify(number, select.EPOLLIN)
                    continue
                data = client.recv(65536)
            except OSError:
                data = b""
            got += data
            status = int(got[9:12] or -1)
            if not data or status != 200 or b"data: " in got:
                told.append((status, time.perf_counter() - began))
                poll.unregister(number)
                del waiting[number]
    for client in kept:
        client.close()
    results.send(told)


def percentiles(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    cuts = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in SHARES)
    return "p50 {:.2f} s, p99 {:.2f} s, max {:.2f} s".format(*cuts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 2000])
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--queued", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--chat-bytes", type=int, default=2000)
    parser.add_argument("--http", type=int, metavar="PORT")
    options = parser.parse_args()
    raise_open_files()
    prompt = ("Hi there " * 2**17)[: options.chat_bytes]
    path: str = "/v1/chat/completions"
    body: dict[str, object] = {"model": "m"}
    if options.http is None:
        body |= {"messages": [{"role": "user", "content": prompt}]}
    else:
        path, body = "/v2/models/tensorrt_llm_bls/generate_stream", {"text_input": prompt}
    text = json.dumps(body | {"stream": True, "max_tokens": options.tokens}).encode()
    head = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    request = (
        head % path.encode() + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(text) + text
    )
    print(
        f"{platform.python_implementation()} {platform.python_version()}, {os.cpu_count()} cores, "
        f"descriptors {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}; {options.running} places, "
        f"{options.queued} wait; {options.tokens} tokens, {options.step_ms:g} ms a step, "
        f"{len(text)} bytes"
    )
    context = multiprocessing.get_context("fork")
    with ExitStack() as stack:
        port = options.http
        if port is None:
            places = (options.running, options.queued)
            port, _ = stack.enter_context(serving_api(options.step_ms / 1000, places))
        for clients in (1, options.running + options.queued, *options.clients):
            results, child = context.Pipe()
            before = os.getloadavg()[0]
            caller = context.Process(target=load, args=(child, port, clients, request), daemon=True)
            caller.start()
            by_status: dict[int, list[float]] = defaultdict(list)
            for status, seconds in results.recv():
                by_status[status].append(seconds)
            caller.join()
            # The server notices that its callers have left.
            time.sleep(1 if options.http is None else 10)
            print(f"{clients} clients, load {before:.1f} before, {os.getloadavg()[0]:.1f} after")
            for status, seconds in sorted(by_status.items()):
                what = "first token" if status == 200 else "told"
                print(f"  {status}: {len(seconds):5}  {what} {percentiles(seconds)}", flush=True)


if __name__ == "__main__":
    main()
