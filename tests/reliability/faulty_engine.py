"""An engine outside the server that goes wrong on purpose, and tells what it saw of each request.

``tensorrt_llm`` and ``tensorrt_llm_draft`` behind one real gRPC port, with a proxy before it whose
connections can be reset. Right answers are known, so that text can be compared exactly.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import grpc

from tests.helpers import fake_grpc_server as wire
from tests.helpers.fake_grpc_server import Step, inputs_of
from trtllm_bls.configure.pbtxt import model_config
from trtllm_bls.wire.contract import ENGINE

TARGET, DRAFT = ENGINE.name, "tensorrt_llm_draft"
HOLD = wire.Hold()
Spoil = Callable[[list[Step], int, random.Random], list[Step]]


@dataclass
class Seen:
    """One request as the engine saw it; ``end`` is ``None`` while it runs."""

    id: str
    model: str
    verifies: bool
    end: str | None = None  # answered or left


class FaultyEngine(wire.FakeGrpcServer):
    """``answers``: what is said after each prompt. ``plan`` may spoil the steps of a request."""

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]], end_id: int) -> None:
        super().__init__(())
        self.answers = {prompt: (*answer, end_id) for prompt, answer in answers.items()}
        self.plan: Callable[[Seen, list[Step]], list[Step]] = lambda seen, steps: steps
        self.seen: list[Seen] = []
        self.changed = asyncio.Event()  # a request has come or ended
        self.random = random.Random(1)
        self._end_id = end_id

    @property
    def running(self) -> list[Seen]:
        return [each for each in self.seen if each.end is None]

    async def until(self, condition: Callable[[], object], seconds: float = 20) -> None:
        """Return when what was seen meets the condition."""

        async def wait() -> None:
            while not condition():
                self.changed.clear()
                await self.changed.wait()

        try:
            await asyncio.wait_for(wait(), seconds)
        except asyncio.TimeoutError:
            raise AssertionError(f"waited {seconds} s in vain; seen: {self.seen}") from None

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        row = replace(ENGINE, name=request.name)
        parameters = {"exclude_input_in_output": "true", "max_sequence_tokens": "2048"}
        self.config = model_config(row, parameters)
        return await super().ModelConfig(request, context)

    async def ModelStreamInfer(self, requests: Any, context: Any) -> Any:
        async for request in requests:
            inputs = inputs_of(request)
            id = request.id.partition("/")[2]
            seen = Seen(id, request.model_name, "draft_input_ids" in inputs)
            self.seen.append(seen)
            self.changed.set()
            try:
                for step in self.plan(seen, self._steps(request.model_name, inputs)):
                    if isinstance(step, wire.HangUp):
                        return
                    async for response in self._play(step, request, context):
                        yield response
                seen.end = "answered"
            finally:
                seen.end = seen.end or "left"
                self.changed.set()

    def _steps(self, model: str, inputs: Mapping[str, Any]) -> list[Step]:
        ids, most = inputs["input_ids"][0], inputs["request_output_len"][0][0]
        if "draft_input_ids" in inputs:
            said: list[int] = []
            for guess in (*inputs["draft_input_ids"][0], None):
                said.append(self._next([*ids, *said]))
                if said[-1] != guess:
                    break
            return [wire.tokens(*self._before_end(said), final=True)]
        said = self._before_end([self._next(ids, ahead) for ahead in range(most)])
        if model == DRAFT:
            said = [token if self.random.random() < 0.8 else token ^ 1 for token in said]
        if inputs.get("streaming") != [[True]]:
            return [wire.tokens(*said, final=True)]
        steps: list[Step] = []
        while said:
            size = self.random.choice((1, 1, 1, 2, 4))
            steps.append(wire.tokens(*said[:size]))
            said = said[size:]
        return [*steps, wire.tokens(final=True)]

    def _next(self, context: Sequence[int], ahead: int = 0) -> int:
        known = [p for p in self.answers if tuple(context[: len(p)]) == p]
        prompt = max(known, key=len)
        place = len(context) - len(prompt) + ahead
        answer = self.answers[prompt]
        return answer[place] if place < len(answer) else self._end_id

    def _before_end(self, said: list[int]) -> list[int]:
        return said[: said.index(self._end_id)] if self._end_id in said else said


def _raw(place: int, content: bytes) -> Callable[[Any], object]:
    def damage(response: Any) -> None:
        response.raw_output_contents[place] = content

    return damage


DAMAGES: tuple[Callable[[Any], object], ...] = (
    _raw(0, b"\1\2\3"),
    _raw(0, struct.pack("<i", -7)),
    _raw(1, struct.pack("<i", -5)),
    _raw(1, struct.pack("<i", 2**31 - 1)),
    lambda response: response.ClearField("raw_output_contents"),
    lambda response: response.outputs.pop(),
    lambda response: setattr(response, "id", "of another"),
)
# Headers are read in a request's first response; while their number stays, those after it count
# for nothing.
HEADER_DAMAGES: tuple[Callable[[Any], object], ...] = (
    lambda response: setattr(response.outputs[0], "datatype", "FP32"),
    lambda response: setattr(response.outputs[0], "name", "nonsense"),
    lambda response: response.outputs[0].shape.__setitem__(2, 10**6),
)


def _no_end(steps: list[Step], cut: int, rng: random.Random) -> list[Step]:
    open_ended = [replace(step, final=False) for step in steps if isinstance(step, wire.Say)]
    return [*open_ended, HOLD]


def _malformed(steps: list[Step], cut: int, rng: random.Random) -> list[Step]:
    damages = DAMAGES if cut else (*DAMAGES, *HEADER_DAMAGES)
    return [*steps[:cut], replace(wire.tokens(5), damage=rng.choice(damages)), HOLD]


def _slow(steps: list[Step], cut: int, rng: random.Random) -> list[Step]:
    return [part for step in steps for part in (wire.Pause(rng.random() * 0.02), step)]


def _abort(steps: list[Step], cut: int, rng: random.Random) -> list[Step]:
    code = rng.choice((grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL))
    return [*steps[:cut], wire.Abort(code, "the engine gave up")]


FAULTS: Mapping[str, Spoil] = {
    "slow": _slow,
    "error": lambda steps, cut, rng: [*steps[:cut], wire.Fail("the engine's own error")],
    "abort": _abort,
    "hang_up": lambda steps, cut, rng: [*steps[:cut], wire.HangUp()],
    "silence": lambda steps, cut, rng: [*steps[:cut], HOLD],
    "no_end": _no_end,
    "malformed": _malformed,
}


class Proxy:
    """A TCP proxy before ``port``; ``reset`` breaks every connection through it."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.url = ""

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *failure: object) -> None:
        assert self._server
        self._server.close()
        self.reset()

    def reset(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        await asyncio.gather(self._copy(reader, back), self._copy(there, writer))

    async def _copy(self, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        self._writers.add(to)
        with suppress(OSError):
            while data := await source.read(65536):
                to.write(data)
                await to.drain()
        self._writers.discard(to)
        to.close()
