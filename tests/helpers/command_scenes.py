"""Runs of the terminal clients: their words, what the server says, what becomes of it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np

from tests.helpers.fake_grpc_server import (
    Abort,
    Fail,
    FakeGrpcServer,
    Hold,
    Say,
    Script,
    Until,
    inputs_of,
    text,
    tokens,
)
from tests.helpers.threaded_server import serving_in_a_thread

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "assets" / "demo"
SCENE_S = 100  # a client lasts below a second, on a busy machine some
T = TypeVar("T")


@dataclass(frozen=True)
class Scene:
    """A command line against a script; ``{url}`` is the server's address."""

    program: str
    arguments: tuple[str, ...]
    script: Script = ()
    stdin: str = ""
    interrupted: bool = False  # Ctrl-C once the first line of output is there
    redirected: str = ""  # in the shell's words
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What a scene left behind."""

    code: int
    out: str
    err: str
    inputs: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[list[str]] = field(default_factory=list)
    cancels: int = 0


def text_scene(*arguments: str, script: Script = (), **more: Any) -> Scene:
    return Scene("streaming_client.py", ("-u", "{url}", *arguments), script, **more)


def token_scene(*arguments: str, script: Script = (), **more: Any) -> Scene:
    return Scene("inflight_batcher_llm_client.py", ("-u", "{url}", *arguments), script, **more)


HELLO = [
    text("Hel"),
    text("lo", finish_reason="length", num_input_tokens=np.int32(1), num_output_tokens=np.int32(2)),
    Say(final=True),
]
HINDI = [text("नमस्ते 😀", final=True)]
DISK_FULL = ">/dev/full"
LATIN_1 = {"PYTHONIOENCODING": "latin-1"}


def full_once() -> Script:
    answers = iter([[Fail("UNAVAILABLE: too many requests"), Say(final=True)], HELLO])
    return lambda _: next(answers)


def stopped_by_request() -> Script:
    stopped = asyncio.Event()

    def script(request: Any) -> list[Say | Until]:
        if "stop" in inputs_of(request):
            stopped.set()
            answered = asyncio.Event()  # after the request that it stops has its answer
            asyncio.get_running_loop().call_later(0.5, answered.set)
            return [Until(answered), Say(final=True)]
        return [tokens(5), Until(stopped), tokens(6, final=True)]

    return script


def scenes(files: Path) -> dict[str, Scene]:
    """Every scene by name. The files that some of them read are written to `files`."""
    prompt = files / "prompt.csv"
    prompt.write_text("1,2,3\n")
    expected = files / "expected.csv"
    expected.write_text("1,2,3,5,6\n")
    ids = ("--input-tokens-csv", str(prompt))
    np.save(files / "model.lora_weights.npy", np.ones((1, 2), np.float32))
    np.save(files / "model.lora_config.npy", np.array([[1, 0, 8]], np.int64))
    np.save(files / "tables.npy", np.arange(8, dtype=np.float32).reshape(2, 2, 2))
    marked, marked_ids = files / "marked.txt", files / "marked.csv"
    marked.write_text("\ufeffHi", encoding="utf-8")
    marked_ids.write_text("\ufeff1,2,3\n", encoding="utf-8")
    check = (*ids, "-S", "-c", "--output-tokens-csv", str(expected))
    return {
        "text": text_scene("Hi", "-o", "2", script=HELLO),
        "json from stdin": text_scene("--json", "-q", "--top-k", "3", script=HELLO, stdin="Hi\n"),
        "chat": text_scene(
            *("Hi", "--system", "Be brief.", "--stop-words", "a,b", "--stop-words", "\n"),
            script=HELLO,
        ),
        "error in mid-stream": text_scene("Hi", script=[text("Hel"), Fail("INTERNAL: broken")]),
        "nobody there": Scene("streaming_client.py", ("Hi", "-u", "127.0.0.1:1")),
        "ids, nobody there": Scene(
            "inflight_batcher_llm_client.py", (*ids, "-u", "127.0.0.1:1"), ()
        ),
        "tokenizer": token_scene("--tokenizer-dir", str(DEMO / "target"), script=[Say(final=True)]),
        "retries": text_scene("Hi", "--retries", "1", script=full_once()),
        "http port": Scene("streaming_client.py", ("Hi", "-u", "{http}")),
        "deadline": text_scene(
            *("Hi", "-t", "60"),
            script=[text("Hel"), Abort(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")],
        ),
        "stopped at once": text_scene("Hi", "--stop-after-ms", "0", script=[Hold()]),
        "interrupted": text_scene(
            *("Hi", "--json"), script=[text("Hel"), Hold()], interrupted=True
        ),
        "tokens": token_scene(
            *check, "--request-output-len", "2", script=[tokens(5), tokens(6), tokens(final=True)]
        ),
        "other tokens": token_scene(*check, script=[tokens(5, 7, final=True)]),
        "whole": token_scene(
            *(*ids, "--requested-outputs", "output_ids"),
            script=[tokens(1, 2, 3, 5, final=True)],
        ),
        "everything": token_scene(
            *(*ids, "--draft-tokens-csv", str(prompt), "--lora-path", str(files)),
            *("--lora-task-id", "7", "--lookahead-config", "[4,3,2]", "--return-log-probs"),
            *("--prompt-embedding-table-path", str(files / "tables.npy"), "--prompt-task-id", "1"),
            *("--prompt-table-extra-id", "9", "--vocab-size", "3", "-n", "2", "--top-k", "5"),
            *("--exclude-input-in-output", "--set", "min_tokens=1", "-C", "gzip"),
            script=[
                tokens(5, sequence_index=np.int32(0), cum_log_probs=np.float32([-1.5])),
                tokens(6, sequence_index=np.int32(1), final=True),
            ],
        ),
        "ran on": token_scene(
            *(*ids, "-S", "--request-output-len", "2", "--stop-after-ms", "60000"),
            script=[tokens(5, 6, final=True)],
        ),
        "stop request": token_scene(
            *ids, "-S", "--stop-after-ms", "50", script=stopped_by_request()
        ),
        "cancellation": token_scene(
            *ids, "-S", "--stop-after-ms", "1", "--request-cancellation", script=[Hold()]
        ),
        "latin-1": text_scene("Hi", script=HINDI, env=LATIN_1),
        "latin-1 json": text_scene("Hi", "--json", script=HINDI, env=LATIN_1),
        "latin-1 argument": text_scene("caf\udce9"),
        "latin-1 stop word": text_scene("Hi", "--stop-words", "caf\udce9"),
        "no stdin": text_scene(redirected="<&-"),
        "unreadable stdin": text_scene(redirected="0>/dev/null"),
        "disk full": text_scene("Hi", script=[text("Hel"), Hold()], redirected=DISK_FULL),
        "disk full, json": text_scene(
            *("Hi", "--json"), script=[text("Hel"), Hold()], redirected=DISK_FULL
        ),
        "disk full, ids": token_scene(*ids, "-S", script=[tokens(5), Hold()], redirected=DISK_FULL),
        "byte order mark": text_scene(script=HELLO, stdin="\ufeffHi"),
        "byte order mark, file": text_scene("-f", str(marked), script=HELLO),
        "byte order mark, ids": token_scene(
            *("--input-tokens-csv", str(marked_ids)), script=[tokens(5, final=True)]
        ),
        "unknown model": token_scene(
            *ids, "--model-name", "x", script=[Fail("Request for unknown model: 'x' is not found")]
        ),
    }


@contextmanager
def an_http_server() -> Iterator[str]:
    """The address of the standard library's, which knows nothing of gRPC."""
    silent = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    with serving_in_a_thread(silent) as server:
        yield f"127.0.0.1:{server.server_port}"


async def play(scene: Scene) -> Outcome:
    with an_http_server() as http:
        async with FakeGrpcServer(scene.script) as server:
            process = await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", f'exec "$@" {scene.redirected}', "sh", sys.executable),
                str(ROOT / "client" / scene.program),
                *(a.replace("{url}", server.url).replace("{http}", http) for a in scene.arguments),
                env={**os.environ, "PYTHONPATH": str(ROOT), **scene.env},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            assert process.stdout is not None
            first = b""
            try:
                if scene.interrupted:
                    first = await _within("the first line", process.stdout.readline())
                    process.send_signal(signal.SIGINT)
                out, err = await _within("the end", process.communicate(scene.stdin.encode()))
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            if scene.interrupted or (scene.redirected == DISK_FULL and server.asked):
                await _within("the cancellation", server.cancelled.wait())
            inputs = [inputs_of(request) for request in server.asked]
            outputs = [[output.name for output in request.outputs] for request in server.asked]
    code = process.returncode
    assert code is not None
    return Outcome(code, (first + out).decode(), err.decode(), inputs, outputs, server.cancels)


async def _within(what: str, awaited: Coroutine[Any, Any, T]) -> T:
    try:
        return await asyncio.wait_for(awaited, SCENE_S)
    except asyncio.TimeoutError as late:
        raise AssertionError(f"waited {SCENE_S} s for {what} of the client") from late
