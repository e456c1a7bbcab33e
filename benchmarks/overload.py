"""How soon callers of port 8000 are told that the server is full, and what the others notice.

A `trtllm-bls serve` on this machine, with ``--running`` places and ``--queued`` more that wait,
gets ``--clients`` requests for generate_stream at once, each on a connection of its own, from
another process. Printed are percentiles of the time from the start of ``connect`` to the first byte
of a refusal (429 or 503), and to the first token of an answer. Before them come one client, and a
full house: as many clients as places, where nobody is refused. Any other status is an error.

examples:
  python benchmarks/overload.py --http 8000 --clients 1000,2000
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import select
import socket
import sys
import time
from collections import defaultdict
from multiprocessing.connection import Connection

from bench.arguments import numbers, parser_of
from bench.load import post
from bench.report import print_conditions

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


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--http", type=int, metavar="PORT", default=8000, help="the server's; default 8000")
    add("--clients", type=numbers, default=[1000, 2000], help="default 1000,2000")
    add("--running", type=int, default=64, help="the server's --max-streams; default 64")
    add("--queued", type=int, default=256, help="requests that wait there; default 256")
    add("--tokens", type=int, default=64, help="of each answer; default 64")
    add("--chat-bytes", type=int, default=2000, help="of each prompt; default 2000")
    options = parser.parse_args()
    needed = max(options.clients) + options.running + options.queued + 100
    raise_open_files(needed, "ask with fewer --clients")
    prompt = ("Hi there " * 2**17)[: options.chat_bytes]
    fields = {"stream": True, "max_tokens": options.tokens, "text_input": prompt}
    request = post("/v2/models/tensorrt_llm_bls/generate_stream", fields)
    print_conditions(options, f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} descriptors")
    context = multiprocessing.get_context("fork")
    failed = False
    for clients in (1, options.running + options.queued, *options.clients):
        results, child = context.Pipe()
        before = os.getloadavg()[0]
        arguments = (child, options.http, clients, request)
        caller = context.Process(target=load, args=arguments, daemon=True)
        caller.start()
        by_status: dict[int, list[float]] = defaultdict(list)
        for status, seconds in results.recv():
            by_status[status].append(seconds)
        caller.join()
        time.sleep(10)  # the server notices that its callers have left
        print(f"{clients} clients, load {before:.1f} before, {os.getloadavg()[0]:.1f} after")
        for status, seconds in sorted(by_status.items()):
            what = "first token" if status == 200 else "told"
            print(f"  {status}: {len(seconds):5}  {what} {percentiles(seconds)}", flush=True)
        failed |= not by_status.keys() <= {200, 429, 503}
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
