"""How many files and functions one plain streamed request goes through, for a reader to follow."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np

import trtllm_bls
from tests.helpers.fake_engine_server import Say, Triton
from tests.helpers.scripted_text import PROMPT, tokenizer
from tests.helpers.small_tokenizers import directory
from tests.helpers.waiting import join, until
from trtllm_bls.orchestrator.deployment import Deployment
from trtllm_bls.pipeline.testing import Ask, FakeTriton
from trtllm_bls.settings.parameters import BlsParameters, Parameters
from trtllm_bls.triton.request_server import RequestServer
from trtllm_bls.triton.text_service import TextService

MOST_FILES = 16
MOST_FUNCTIONS = 120  # comprehensions and lambdas are part of others
PACKAGE = Path(trtllm_bls.__file__).parent
FAKE = PACKAGE / "pipeline" / "testing.py"  # plays Triton


class Recorder:
    """The package's functions that any thread calls while it is ``on``, as place and name."""

    def __init__(self) -> None:
        self.on = False
        self.functions: set[tuple[str, str]] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if self.on and path.is_relative_to(PACKAGE) and path != FAKE and not name.startswith("<"):
            place = f"{path.relative_to(PACKAGE)}:{frame.f_code.co_firstlineno}"
            self.functions.add((place, name))


@contextmanager
def traced_threads(recorder: Recorder) -> Iterator[None]:
    """Threads that start within are traced."""
    before = threading.gettrace()
    threading.settrace(recorder)
    try:
        yield
    finally:
        threading.settrace(before)  # type: ignore[arg-type]


@contextmanager
def traced_here(recorder: Recorder) -> Iterator[None]:
    """This thread, which plays Triton's, is traced."""
    before = sys.gettrace()
    sys.settrace(recorder)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def engine_server() -> Iterator[tuple[str, Callable[[bool], object]]]:
    """The address of a server that answers with "It's fun", token by token, and what holds its
    last response or lets it leave."""
    loop, may_end = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    steps = [Say((token,)) for token in tokenizer().encode_word("It's fun")]

    async def start() -> Triton:
        return await Triton(*steps, may_end, Say((), final=True)).__aenter__()

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    try:
        yield (
            server.url,
            lambda held: loop.call_soon_threadsafe(may_end.clear if held else may_end.set),
        )
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        join(thread)
        loop.close()


def parameters(url: str) -> BlsParameters:
    values = {
        "tokenizer_dir": str(directory("byte-level")),
        "engine_transport": "grpc",
        "engine_url": url,
    }
    given = {key: {"string_value": value} for key, value in values.items()}
    config = {"name": "tensorrt_llm_bls", "parameters": given}
    arguments = {"model_config": json.dumps(config), "model_repository": "."}
    return Parameters(arguments).read(BlsParameters)


def request(triton: FakeTriton) -> Ask:
    inputs = {
        "text_input": np.array([[PROMPT.encode()]], np.object_),
        "max_tokens": np.array([[100]], np.int32),
        "stream": np.array([[True]]),
    }
    return triton.ask(inputs, "text_output", "finish_reason")


def test_a_plain_streamed_request_goes_through_few_files_and_functions() -> None:
    """A reader can follow all of them; what a request does not use is not executed for it."""
    triton, recorder = FakeTriton(), Recorder()
    with engine_server() as (url, hold):
        deployment = Deployment(parameters(url))
        service = TextService(deployment.orchestrator)
        with traced_threads(recorder):
            server = RequestServer(triton, service.handle)
        for recorder.on in (False, True):  # the first one opens connections and fills caches
            hold(True)
            ask = request(triton)
            with traced_here(recorder):
                server.accept([ask])
            if recorder.on:  # whether the caller has left is asked of every request that runs
                until(lambda: {"gone", "_ask"} <= {name for _, name in recorder.functions})
            hold(False)
            ask.wait()
            until(lambda: not server.running)
        recorder.on = False
        server.close(deployment.close)
    assert b"".join(text for (text,) in ask.said("text_output")) == b"It's fun"
    files = sorted({place.partition(":")[0] for place, _ in recorder.functions})
    assert len(files) <= MOST_FILES, (
        f"{len(files)} files execute code for a plain streamed request, at most {MOST_FILES} "
        "should; join two, or prepare at load what needs no request:\n" + "\n".join(files)
    )
    # A server sends frames of its own, such as pings, when it likes.
    functions = [one for one in recorder.functions if one[1] != "_receive_other"]
    found = sorted(map(" ".join, functions))
    assert len(found) <= MOST_FUNCTIONS, f"{len(found)} functions:\n" + "\n".join(found)
