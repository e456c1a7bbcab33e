"""Raises each of many exceptions, half of them in a task, after half an answer."""

import asyncio
import builtins
import concurrent.futures
import inspect
import json
import queue
import socket
import ssl
import subprocess

from trtllm_bls import errors
from trtllm_bls.pipeline import StreamingModel, Tensor


class PanicException(BaseException):
    pass


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


class Odd(BaseException):
    def __init__(self):
        super().__init__(b"\xff", object())


def group_of(error):
    group = PanicException("several")
    group.exceptions = (error, PanicException("another"))
    return group


def instance_of(kind):
    for arguments in ((), ("text",), ("utf-8", b"x", 0, 1, "r"), ("utf-8", "x", 0, 1, "r")):
        try:
            return kind(*arguments)
        except TypeError:
            continue


# Every end that Python itself has, and those of libraries.
OWN = [kind for _, kind in sorted(vars(builtins).items()) if inspect.isclass(kind)]
OWN = [kind for kind in OWN if issubclass(kind, BaseException) and not issubclass(kind, Warning)]
ENDS = [end for end in (instance_of(kind) for kind in dict.fromkeys(OWN)) if end is not None]
FIRST = [
    PanicException("of a library in Rust"),
    Mute(),
    Odd(),
    group_of(ValueError("one")),
    group_of(PanicException("one")),
    group_of(SystemExit(1)),
    asyncio.CancelledError(),
    asyncio.InvalidStateError(),
    asyncio.QueueEmpty(),
    concurrent.futures.CancelledError(),
    queue.Full(),
    socket.gaierror(1, "no"),
    ssl.SSLError(1, "no"),
    subprocess.CalledProcessError(1, "x"),
    json.JSONDecodeError("no", "x", 0),
    errors.TrtllmBlsError("no"),
    errors.EngineError("no"),
    errors.EngineUnavailable("no"),
    errors.InvalidRequest("x", "no"),
    errors.Overloaded("no"),
    errors.Stopped("no"),
    errors.DeadlineExceeded("no"),
    errors.EngineRefusal("no"),
]
# All that are no ``Exception`` first: they are the ones that slip through.
ENDS = sorted([*FIRST, *ENDS], key=lambda end: isinstance(end, Exception))


class TritonPythonModel(StreamingModel):
    inputs = (Tensor("number", "INT32"),)
    outputs = (Tensor("said", "STRING"),)

    async def answer(self, request, response):
        await response.send({"said": "half"})
        await self.raise_end(int(request["number"][0]))

    async def chat(self, request):
        yield "half"
        await self.raise_end(int(request.messages[-1]["content"]))

    async def raise_end(self, number):
        error = ENDS[number]
        if number % 2:
            await asyncio.create_task(raise_later(error))
        raise error


async def raise_later(error):
    raise error
