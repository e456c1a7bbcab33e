"""A user's own model around a language model: what ``StreamingModel`` promises."""

from __future__ import annotations

import asyncio
import gc
import runpy
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from doubles.scripted import Script
from doubles.trtllm_service import Behaviour, EchoEngine
from tests.helpers.scripted_services import service_in_a_thread
from tests.helpers.server_settings import DEMO, ROOT
from tests.helpers.waiting import eventually, until
from trtllm_bls.configure.new import command as new
from trtllm_bls.configure.new import config_of
from trtllm_bls.engines.triton.grpc import OtherModels, as_array
from trtllm_bls.errors import EngineError, TrtllmBlsError
from trtllm_bls.parameters.model_config import read_config, values_of
from trtllm_bls.pipeline import InvalidRequest, Request, Response, StreamingModel, Tensor, connect
from trtllm_bls.services.testing import serving
from trtllm_bls.tokenizer import load_tokenizer


class Upper(StreamingModel):
    """Says what the language model says, in capitals."""

    inputs = (Tensor("prompt", "STRING", required=True),)
    outputs = (Tensor("text", "STRING"), Tensor("count", "INT32"))

    async def load(self, deployment: Any) -> None:
        self.llm = deployment.llm()

    async def answer(self, request: Request, response: Response) -> None:
        async for step in self.llm.text(request.text("prompt"), temperature=0.5):
            if step.text:
                await response.send({"text": step.text.upper(), "count": len(step.ids)})


def test_each_step_is_a_response() -> None:
    with serving(Upper, llm=["a", "b"]) as model:
        ask = model.ask(prompt="hello").wait()
    assert ask.said("text") == [[b"A"], [b"B"]]
    assert [response["count"].dtype for response in ask.responses] == [np.int32] * 2
    assert ask.error is None
    (request,) = model.llm.requests
    assert (request.text, request.sampling.temperature) == ("hello", 0.5)


def test_a_request_is_counted_with_its_tokens_and_its_reason() -> None:
    with serving(Short, llm=["a", "b", "c"]) as model:
        model.ask(prompt="hello").wait()
    lines = [line for _, line in model.triton.lines if "request id=" in line]
    assert len(lines) == 1
    for part in ("outcome=success", "reason=length", "prompt_tokens=1", "completion_tokens=2"):
        assert part in lines[0]


class Short(StreamingModel):
    """Two tokens."""

    inputs, outputs = Upper.inputs, (Tensor("sound", "FP32", (-1,)),)

    async def load(self, deployment: Any) -> None:
        self.llm = deployment.llm()

    async def answer(self, request: Request, response: Response) -> None:
        steps = [step async for step in self.llm.text(request.text("prompt"), max_tokens=2)]
        await response.send({"sound": [len(step.text) for step in steps]})


def test_the_tokens_of_all_answers_are_counted() -> None:
    """Those of their prompts, too."""

    class Twice(Short):
        async def answer(self, request: Request, response: Response) -> None:
            for _ in range(2):
                async for _ in self.llm.text(request.text("prompt"), max_tokens=2):
                    pass
            await response.send({"sound": [0.0]})

    with serving(Twice, llm=["a", "b", "c"]) as model:
        model.ask(prompt="hello").wait()
    (line,) = [line for _, line in model.triton.lines if "request id=" in line]
    assert "prompt_tokens=2" in line and "completion_tokens=4" in line


def test_only_outputs_that_were_asked_for_are_sent() -> None:
    with serving(Upper, llm=["a"]) as model:
        ask = model.ask(prompt="hello", outputs=["count"]).wait()
    assert [sorted(response) for response in ask.responses] == [["count"]]


def test_a_mistake_is_the_callers_error() -> None:
    with serving(Upper) as model:
        ask = model.ask(prompt=["a", "b"]).wait()
        with pytest.raises(AssertionError, match="refuse the request: \\['prompt'\\]"):
            model.ask()
        with pytest.raises(AssertionError, match="'promt'"):
            model.ask(prompt="a", promt="b")
    assert ask.error is not None
    assert ask.error.code() == "INVALID_ARG"
    assert ask.error.message() == "INVALID_ARG: prompt: 2 texts; send one"


def test_the_engines_error_follows_what_came_before_it() -> None:
    with serving(Upper, llm=["a", EngineError("lost")]) as model:
        ask = model.ask(prompt="hello").wait()
    assert ask.said("text") == [[b"A"]]
    assert ask.error is not None and ask.error.message() == "INTERNAL: lost"


def test_a_caller_that_leaves_ends_the_engines_work() -> None:
    with serving(Upper, llm=["a", None]) as model:
        ask = model.ask(prompt="hello").wait(responses=1)
        assert model.llm.live == 1
        ask.leave()
        ask.wait()
        until(lambda: model.llm.live == 0)


def test_the_time_limit_ends_the_engines_work() -> None:
    with serving(Upper, llm=["a", None], request_timeout_seconds=0.05) as model:
        ask = model.ask(prompt="hello").wait()
        assert ask.error is not None and "the time limit of 0.05 s is over" in ask.error.message()
        until(lambda: model.llm.live == 0)


class Leaves(Upper):
    """Reads one step and leaves the answer as it is."""

    async def answer(self, request: Request, response: Response) -> None:
        async for step in self.llm.generate([1, 2], max_tokens=5, stop_token_ids=(7,)):
            await response.send({"text": step.text})
            break


def test_an_answer_that_is_left_ends_with_its_request() -> None:
    with serving(Leaves, llm=["a", None]) as model:
        model.ask(prompt="hello").wait()
        until(lambda: model.llm.live == 0)
    (request,) = model.llm.requests
    assert (request.prompt_ids, request.max_tokens, request.stop_token_ids) == ((1, 2), 5, (7,))
    assert request.request_id.startswith("request-")


class Others(Upper):
    """Calls other models, several at once."""

    async def answer(self, request: Request, response: Response) -> None:
        one, two = await asyncio.gather(
            request.infer("double", {"x": np.array([1, 2])}),
            request.infer("double", {"x": [3]}),
        )
        await response.send({"count": one["y"].sum() + two["y"].sum()})
        async for part in request.stream("letters", {"word": "ab"}):
            await response.send({"text": part["letter"]})


def test_other_models_are_called() -> None:
    models = {
        "double": lambda inputs: {"y": inputs["x"] * 2},
        "letters": lambda inputs: [{"letter": letter} for letter in str(inputs["word"])],
    }
    with serving(Others, models=models) as model:
        ask = model.ask(prompt="x").wait()
    assert ask.said("count") == [[12]]
    assert ask.said("text") == [[b"a"], [b"b"]]


def group_of(error: Exception) -> BaseException:
    """What a task group raises, also in Python 3.10, which has none."""
    group = RuntimeError("unhandled errors in a TaskGroup")
    group.exceptions = (error,)  # type: ignore[attr-defined]
    return group


async def cancelled() -> None:
    task = asyncio.create_task(asyncio.sleep(10))
    task.cancel()
    await task


async def raised(error: BaseException) -> None:
    raise error


async def sent_twice(response: Response) -> None:
    await response.send({"count": 1}, final=True)
    await response.send({"count": 2})


class Wrong(Upper):
    """Makes the mistake that the request names."""

    async def answer(self, request: Request, response: Response) -> None:
        mistakes: dict[str, Callable[[], Any]] = {
            "undeclared": lambda: response.send({"sound": 1}),
            "option": lambda: self.llm.text("x", tempreature=1),
            "value": lambda: self.llm.text("x", max_tokens=-1),
            "no number": lambda: self.llm.text("x", temperature="hot"),
            "own timeout": lambda: asyncio.wait_for(asyncio.Event().wait(), 0.01),
            "own cancel": cancelled,
            "exit": lambda: raised(SystemExit()),
            "group": lambda: raised(group_of(EngineError("lost"))),
            "wide": lambda: response.send({"count": [1, 2, 3]}),
            "large": lambda: response.send({"count": 2**40}),
            "fraction": lambda: response.send({"count": 1.5}),
            "word": lambda: response.send({"count": "five"}),
            "nothing": lambda: response.send({"text": None}),
            "number": lambda: response.send({"text": 5}),
            "absent": lambda: request["absent"],
            "unknown": lambda: request.infer("nobody", {}),
            "twice": lambda: sent_twice(response),
        }
        await mistakes[request.text("prompt")]()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("undeclared", "INTERNAL: output sound is not declared by this model"),
        ("option", "INTERNAL: tempreature is no option of a language model"),
        ("value", "INVALID_ARG: max_tokens: -1 is not allowed; it must be at least 1"),
        ("no number", "INVALID_ARG: temperature: 'hot' is not a number"),
        ("own timeout", "INTERNAL: unexpected TimeoutError"),
        ("own cancel", "INTERNAL: unexpected RuntimeError"),
        ("exit", "INTERNAL: unexpected RuntimeError"),
        ("group", "INTERNAL: lost"),
        ("wide", "INTERNAL: output count: shape [3], declared [1]"),
        ("large", "INTERNAL: output count: 1099511627776 is not INT32"),
        ("fraction", "INTERNAL: output count: 1.5 is not INT32"),
        ("word", "INTERNAL: output count: 'five' is not INT32"),
        ("nothing", "INTERNAL: text: holds objects"),
        ("number", "INTERNAL: output text: 5 is not STRING"),
        ("absent", "INVALID_ARG: absent: is missing"),
        ("unknown", "INTERNAL: nobody: Request for unknown model"),
        ("twice", "INTERNAL: nothing can follow the last response"),
    ],
)
def test_errors_name_what_is_wrong(what: str, message: str) -> None:
    with serving(Wrong) as model:
        ask = model.ask(prompt=what).wait()
    if what == "twice":  # the response has ended; the log tells
        assert [ask.said("count"), ask.error] == [[[1]], None]
    else:
        assert ask.error is not None and ask.error.message().startswith(message)


def test_requests_beyond_the_places_wait_and_beyond_that_are_refused() -> None:
    with serving(
        Upper, llm=[None], max_running_requests=1, max_queued_requests=1, max_streams=1
    ) as model:
        running, waiting = model.ask(prompt="1"), model.ask(prompt="2")
        until(lambda: model.llm.live == 1)
        refused = model.ask(prompt="3").wait()
        assert refused.error is not None and refused.error.code() == "UNAVAILABLE"
        running.leave()
        running.wait()
        until(lambda: len(model.llm.requests) == 2)
        waiting.leave()


class Fails(Upper):
    async def load(self, deployment: Any) -> None:
        raise InvalidRequest("weights", "are missing")


def test_a_load_that_fails_leaves_no_threads() -> None:
    with pytest.raises(InvalidRequest, match="weights: are missing"), serving(Fails):
        pass


@pytest.mark.parametrize(
    ("pieces", "texts", "error"),
    [
        (["a"], [[b"A"]], None),
        (["a", "b"], [], "INTERNAL: this model is not decoupled and answers once per request"),
        ([], [], "INTERNAL: this model is not decoupled and has not answered"),
        (["a", EngineError("lost")], [], "INTERNAL: lost"),
    ],
)
def test_a_model_that_is_not_decoupled_answers_once(
    pieces: Any, texts: Any, error: str | None
) -> None:
    with serving(Upper, llm=pieces, decoupled=False) as model:
        ask = model.ask(prompt="hello").wait()
    assert ask.said("text") == texts
    assert (ask.error and ask.error.message()) == error


async def test_any_program_connects_to_an_engine() -> None:
    """Also outside Triton, with the answer of the engine and its ending."""
    target = load_tokenizer(DEMO / "target")
    engine = EchoEngine(Script(vocab_size=target.model_vocab_size), {})
    behaviour = Behaviour(eos_id=target.eos_id or 0, vocab_size=target.vocab_size)
    with service_in_a_thread(engine, behaviour) as (service, url):
        async with connect(f"trtllm://{url}", tokenizer=DEMO / "target") as llm:
            steps = [step async for step in llm.text("the fox runs", max_tokens=50)]
            assert "".join(step.text for step in steps) == "the fox runs"
            assert steps[-1].finish_reason == "end_id"
            ids = [token for step in steps for token in step.ids]
            assert ids[-3:] == [*target.encode("the fox runs", False)]
            assert steps[-1].completion_tokens == len(ids)
            async with llm.chat([{"role": "user", "content": "the fox " * 500}]) as left:
                await anext(left)
            await eventually(lambda: service.live == 0)


def test_a_new_model_passes_its_own_test_and_keeps_what_was_configured(tmp_path: Path) -> None:
    made, run = tmp_path / "models" / "mine", CliRunner().invoke
    arguments = [str(made), "--input", "prompt:STRING", "--output", "text:STRING"]
    assert run(new, arguments).exit_code == 0
    runpy.run_path(str(made / "test_mine.py"))["test_it_says_what_the_language_model_says"]()
    config, model = made / "config.pbtxt", made / "1" / "model.py"
    config.write_text(config.read_text().replace('"tensorrt_llm"', '"another"'))
    text = model.read_text().replace("outputs = (", 'outputs = (Tensor("score", "FP32"), ')
    model.write_text(text)
    assert run(new, [str(made)]).exit_code == 0
    written = read_config(config)
    assert [output.name for output in written.output] == ["score", "text"]
    assert values_of(written)["tensorrt_llm_model_name"] == "another"
    assert model.read_text() == text
    copy = made.rename(made.with_name("copy"))
    assert run(new, [str(copy)]).exit_code == 0
    assert read_config(copy / "config.pbtxt").name == "copy"
    (copy / "1" / "model.py").write_text("")
    refused = run(new, [str(copy)])
    assert str(refused.exception).endswith("model.py: has no class TritonPythonModel")


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("prompt", "'prompt' is not NAME:TYPE[DIMS]"),
        ("prompt:TEXT", "'prompt:TEXT' is not NAME:TYPE[DIMS]"),
        ("prompt:FP32[a]", "'prompt:FP32[a]' is not NAME:TYPE[DIMS]"),
        ("a:FP32 --input a:BOOL", "two inputs, or two outputs, have one name"),
    ],
)
def test_a_tensor_that_is_none_is_refused(tmp_path: Path, option: str, error: str) -> None:
    result = CliRunner().invoke(new, [str(tmp_path / "mine"), "--input", *option.split()])
    assert str(result.exception).startswith(error)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["speech", "retrieval", "guard"])
def test_the_examples_are_short_and_their_configurations_current(name: str) -> None:
    model = ROOT / "examples" / name / "1" / "model.py"
    assert len(model.read_text().splitlines()) <= 60
    assert config_of(model, {}) == (model.parents[1] / "config.pbtxt").read_text()


class Careless(Upper):
    """Leaves a call of another model behind when the other one fails."""

    async def answer(self, request: Request, response: Response) -> None:
        await asyncio.gather(request.infer("slow", {}), request.infer("wrong", {}))


async def test_calls_that_are_left_behind_end_with_the_request() -> None:
    ended = threading.Event()

    class Models(OtherModels):
        def __init__(self) -> None:
            pass

        async def infer(self, model: str, *_: Any) -> Any:
            if model == "wrong":
                raise EngineError("wrong: no such model")
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        async def close(self) -> None:
            pass

    with serving(Careless) as model:
        model.model.other_models = Models()
        ask = model.ask(prompt="x").wait()
        assert ask.error is not None and ask.error.message() == "INTERNAL: wrong: no such model"
        assert ended.wait(20)


def test_values_become_tensors() -> None:
    assert as_array("x", 3).tolist() == [3]
    assert as_array("x", "é").tolist() == ["é".encode()]
    assert as_array("x", [["a", b"b"]]).tolist() == [[b"a", b"b"]]
    with pytest.raises(TrtllmBlsError, match="x: holds objects"):
        as_array("x", [{}])


@pytest.mark.parametrize(
    ("pieces", "parameters"),
    [
        (["a"], {}),
        (["a", EngineError("lost")], {}),
        (["a", None], {"request_timeout_seconds": 0.05}),
        (["a", None], {"leaves": True}),
    ],
)
def test_a_request_leaves_nothing_to_the_garbage_collector(
    pieces: Any, parameters: dict[str, Any]
) -> None:
    """However it ends: collections are rare, and one pauses every stream."""
    seen: list[weakref.ref[Request]] = []

    class Seen(Upper):
        async def answer(self, request: Request, response: Response) -> None:
            seen.append(weakref.ref(request))
            await super().answer(request, response)

    leaves = parameters.pop("leaves", False)
    gc.disable()
    try:
        with serving(Seen, llm=pieces, **parameters) as model:
            for _ in range(3):
                ask = model.ask(prompt="x").wait(responses=1)
                if leaves:
                    ask.leave()
                ask.wait()

            def gone() -> bool:
                for piece in pieces:  # a script raises the same object each time, with its frames
                    if isinstance(piece, EngineError):
                        piece.__traceback__ = None
                return len(seen) == 3 and not any(ref() for ref in seen)

            until(gone)
    finally:
        gc.enable()
