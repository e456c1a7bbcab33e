"""A user's own model around a language model: what ``StreamingModel`` promises."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import runpy
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from click.testing import CliRunner

from doubles.scripted import Script
from doubles.trtllm_service import Behaviour, EchoEngine
from tests.helpers.packages import needs
from tests.helpers.scripted_services import service_in_a_thread
from tests.helpers.server_settings import DEMO, ROOT
from tests.helpers.virtual_time import Clock
from tests.helpers.waiting import eventually, run_async, until
from trtllm_bls.configure.new import command as new
from trtllm_bls.configure.new import config_of
from trtllm_bls.errors import EngineError, EngineUnavailable, Overloaded, SettingsError
from trtllm_bls.pipeline import InvalidRequest, Request, Response, StreamingModel, Tensor, connect
from trtllm_bls.pipeline.other_models import OtherStream
from trtllm_bls.pipeline.testing import Called, Double, LoadedModel, load, serving
from trtllm_bls.settings.model_config import read_config, values_of
from trtllm_bls.text.tokenizer import load_tokenizer
from trtllm_bls.triton.request_server import Outbox
from trtllm_bls.wire.contract import NUMPY_TYPES


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


class Twice(StreamingModel):
    """Waits for two streams of another model at once."""

    outputs = (Tensor("text", "STRING"),)

    async def answer(self, request: Request, response: Response) -> None:
        streams = [request.stream("slow", {}) for _ in range(2)]
        await asyncio.gather(*(anext(stream) for stream in streams))


async def nothing(inputs: object) -> object:
    return await asyncio.Event().wait()


def test_who_leaves_while_a_request_is_closed_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit has ended it by then, and each of its streams is closed."""
    closing, released = threading.Event(), threading.Event()
    closed: list[OtherStream] = []

    async def close(stream: OtherStream) -> None:
        closing.set()
        while not released.is_set():
            await asyncio.sleep(0.01)
        await aclose(stream)
        closed.append(stream)

    aclose = OtherStream.aclose
    monkeypatch.setattr(OtherStream, "aclose", close)
    with serving(Twice, models={"slow": nothing}, request_timeout_seconds=0.05) as model:
        ask = model.ask()
        assert closing.wait(60)
        ask.leave()
        ask.wait()
        released.set()
        until(lambda: len(closed) == 2)
    (line,) = [line for _, line in model.triton.lines if "request id=" in line]
    assert "outcome=cancelled reason=deadline" in line


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
    class Any_(Upper):
        inputs = (Tensor("prompt", "STRING", (-1,), required=True),)

    with serving(Any_) as model:
        ask = model.ask(prompt=["a", "b"]).wait()
        with pytest.raises(AssertionError, match="refuse the request: prompt: is missing"):
            model.ask()
        with pytest.raises(AssertionError, match="promt: there is no such input; did you mean pro"):
            model.ask(promt="b")
        with pytest.raises(AssertionError, match="prompt: 5 is not STRING"):
            model.ask(prompt=5)
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
        "letters": lambda inputs: [{"letter": chr(each)} for each in inputs["word"][0]],
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


class PanicException(BaseException):
    """An end that is no ``Exception``, as PyO3 raises it for a panic in Rust."""


def base_group_of(error: BaseException) -> BaseException:
    """What a task group raises for it, also in Python 3.10."""
    group = PanicException("unhandled errors in a TaskGroup")
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


NO_OTHR = "othr: Request for unknown model: 'othr' is not found; name it in ``models``"


ONCE = "this model is not decoupled and"
REFUSED = "the language model refused the call"


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
            "panic": lambda: raised(PanicException("of a library in Rust")),
            "base group": lambda: raised(base_group_of(PanicException("one of several"))),
            "generator": lambda: raised(GeneratorExit()),
            "masked": lambda: response.send({"count": np.ma.masked_array([1], mask=[True])}),
            "group": lambda: raised(group_of(EngineError("lost"))),
            "wide": lambda: response.send({"count": [1, 2, 3]}),
            "large": lambda: response.send({"count": 2**40}),
            "fraction": lambda: response.send({"count": 1.5}),
            "word": lambda: response.send({"count": "five"}),
            "nothing": lambda: response.send({"text": None}),
            "number": lambda: response.send({"text": 5}),
            "absent": lambda: request["absent"],
            "unknown": lambda: request.infer("nobody", {}),
            "near option": lambda: self.llm.generate([1], temperture=1),
            "near extra": lambda: self.llm.text("a", extras={"lora_taskid": 1}),
            "near input": lambda: request["promt"],
            "near output": lambda: response.send({"cuont": 1}),
            "near model": lambda: request.infer("othr", {}),
            "near stream": lambda: anext(request.stream("othr", {})),
            "its input": lambda: request.infer("other", {"nubmer": 1}),
            "its output": lambda: request.infer("other", {"number": 1}, ["hlaf"]),
            "twice": lambda: sent_twice(response),
        }
        await mistakes[request.text("prompt")]()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("undeclared", "INTERNAL: output sound is not declared by this model"),
        ("near option", "INTERNAL: temperture is no option of a language model; did you mean temp"),
        (
            "near extra",
            f"INTERNAL: {REFUSED}: lora_taskid: is no input of an engine; did you",
        ),
        ("near input", "INVALID_ARG: promt: is missing; did you mean prompt?"),
        (
            "near output",
            "INTERNAL: output cuont is not declared by this model; did you mean count?",
        ),
        ("near model", f"INTERNAL: {NO_OTHR}; did you mean other?"),
        ("near stream", f"INTERNAL: {NO_OTHR}; did you mean other?"),
        ("its input", "INTERNAL: other: nubmer: there is no such input; did you mean number?"),
        ("its output", "INTERNAL: other: hlaf: there is no such output; did you mean half?"),
        ("option", "INTERNAL: tempreature is no option of a language model"),
        ("value", f"INTERNAL: {REFUSED}: max_tokens: -1 is not allowed; it must be at least 1"),
        ("no number", f"INTERNAL: {REFUSED}: temperature: 'hot' is not a number"),
        ("own timeout", "INTERNAL: a time limit in answer is over"),
        ("own cancel", "INTERNAL: unexpected RuntimeError"),
        ("exit", "INTERNAL: unexpected RuntimeError"),
        ("panic", "INTERNAL: unexpected PanicException"),
        ("base group", "INTERNAL: unexpected PanicException"),
        ("generator", "INTERNAL: unexpected GeneratorExit"),
        ("masked", "INTERNAL: output count: is a masked array; fill it first"),
        ("group", "INTERNAL: lost"),
        ("wide", "INTERNAL: output count: shape [3], declared [1]"),
        ("large", "INTERNAL: output count: 1099511627776 is not INT32"),
        ("fraction", "INTERNAL: output count: 1.5 is not INT32"),
        ("word", "INTERNAL: output count: 'five' is not INT32"),
        ("nothing", "INTERNAL: output text: holds a NoneType"),
        ("number", "INTERNAL: output text: 5 is not STRING"),
        ("absent", "INVALID_ARG: absent: is missing"),
        (
            "unknown",
            "INTERNAL: nobody: Request for unknown model: 'nobody' is not found; name it in",
        ),
        ("twice", "INTERNAL: nothing can follow the last response"),
    ],
)
def test_errors_name_what_is_wrong(what: str, message: str) -> None:
    half = Double(dict, inputs=[Tensor("number", "INT32")], outputs=[Tensor("half", "FP32")])
    with serving(Wrong, models={"other": half}) as model:
        ask = model.ask(prompt=what).wait()
    if what == "twice":  # the response has ended; the log tells
        assert [ask.said("count"), ask.error] == [[[1]], None]
        words = message.partition(": ")[2]
        assert any("outcome=failed" in line and words in line for _, line in model.triton.lines)
    else:
        assert ask.error is not None and ask.error.message().startswith(message)


ENDS = [
    PanicException("of a library in Rust"),
    base_group_of(PanicException("one of several")),
    GeneratorExit(),
    SystemExit(3),
    KeyboardInterrupt(),
    asyncio.CancelledError(),
    StopIteration(),
    StopAsyncIteration(),
    MemoryError(),
    RecursionError(),
    ValueError("a mistake"),
]


@pytest.mark.parametrize("error", ENDS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("deep", [False, True], ids=["raised", "in a task"])
def test_nothing_that_answer_raises_looks_like_an_end(error: BaseException, deep: bool) -> None:
    """The caller is told an error after what has been sent, and the log has the traceback."""

    class Raises(Upper):
        async def answer(self, request: Request, response: Response) -> None:
            await response.send({"count": 1})
            if deep:
                await asyncio.create_task(raised(error))
            raise error

    with serving(Raises, llm=["a"]) as model:
        ask = model.ask(prompt="x").wait()
        assert ask.said("count") == [[1]]
        assert ask.error is not None and ask.error.message().startswith("INTERNAL: unexpected ")
        # Another request is answered by the same event loop.
        assert model.ask(prompt="x").wait().error is not None
    assert any("Traceback" in line for _, line in model.triton.lines)


def test_an_optional_input_that_is_absent_is_no_misspelling() -> None:
    class Optional_(Upper):
        inputs = (Tensor("prompt", "STRING"),)

    with serving(Optional_) as model:
        ask = model.ask().wait()
    assert ask.error is not None and ask.error.message() == "INVALID_ARG: prompt: is missing"


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
        (
            ["a", "b"],
            [],
            "INTERNAL: this model is not decoupled and answers once per request [defect=1]",
        ),
        ([], [], "INTERNAL: this model is not decoupled and has not answered [defect=1]"),
        (["a", EngineError("lost")], [], "INTERNAL: lost"),
    ],
)
def test_a_model_that_is_not_decoupled_answers_once(
    pieces: Any, texts: Any, error: str | None
) -> None:
    with serving(Upper, llm=pieces, decoupled=False) as model:
        ask = model.ask(prompt="hello").wait()
    assert [response["text"].tolist() for response in ask.responses] == texts  # and no other
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


CONFIG = """# Mine: input { stays
name: "old"  # a name
input [ { name: "a]" data_type: TYPE_INT32 dims: [ 1 ] } , { name: "b" } ]
parameters { key: "input" value { string_value: "output {" } }  # kept
output {
  name: "gone"  # with its comment
}
output { name: "gone, too" }
# the end
max_queue_delay: 1
"""


def test_a_configuration_keeps_its_comments(tmp_path: Path) -> None:
    """Names, texts and comments that look like tensors are none."""
    made = tmp_path / "mine"
    CliRunner().invoke(new, [str(made)])
    (made / "config.pbtxt").write_text(CONFIG.replace("max_queue_delay: 1", "max_batch_size: 1"))
    assert CliRunner().invoke(new, [str(made)]).exit_code == 0
    text = (made / "config.pbtxt").read_text()
    for line in ("# Mine: input { stays\n", "  # a name\n", "  # kept\n", "# the end\n"):
        assert line in text
    assert "gone" not in text and "old" not in text
    config = read_config(made / "config.pbtxt")
    assert [tensor.name for tensor in (*config.input, *config.output)] == ["prompt", "text"]
    assert (config.name, config.max_batch_size) == ("mine", 1)
    assert values_of(config) == {"input": "output {"}
    assert CliRunner().invoke(new, [str(made)]).exit_code == 0
    assert (made / "config.pbtxt").read_text() == text


@pytest.mark.parametrize(
    "words",
    [
        *(["file/mine"], ["mine", "--input", "n:FP32"], ["m", "--output", "n:INT32"]),
        *(["m", "--input", "class:STRING"], ["m", "--input", "a-b:STRING"], ["a b"], ["ü"]),
        *(["m", "--output", "t:STRING", "--output", f"n:{bad}"] for bad in ("BF16", "INT8[0]")),
        *(["m", "--input", "t:STRING", "--input", f"{bad}:INT8"] for bad in ("id", "chat_request")),
        ["m", "--output", "t:STRING", "--output", "n:INT8", "--output", "n:FP32"],
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    error = CliRunner().invoke(new, words).exception
    assert isinstance(error, SettingsError) and "\n" not in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("dtype", [each for each in NUMPY_TYPES if each != "BF16"])
@pytest.mark.parametrize("dims", ["", "[-1]", "[2,-1]"])
def test_what_new_writes_passes_its_own_test(tmp_path: Path, dtype: str, dims: str) -> None:
    """With more inputs and outputs of any type and shape."""
    words = ["--input", "prompt:STRING", "--input", f"more:{dtype}{dims}"]
    words += ["--output", "text:STRING", "--output", f"more:{dtype}{dims}"]
    made = tmp_path / "mine"
    assert CliRunner().invoke(new, [str(made), *words]).exit_code == 0
    names = runpy.run_path(str(made / "test_mine.py"))
    names["test_it_says_what_the_language_model_says"]()


@needs("mypy")
def test_what_new_writes_is_typed(tmp_path: Path) -> None:
    """With tensors of every type, and beside a configuration that is there."""
    words = ["--input", "prompt:STRING", "--output", "text:STRING"]
    for number, dtype in enumerate(each for each in NUMPY_TYPES if each != "BF16"):
        for dims in ("", "[-1]"):
            name = f"t{number}_{len(dims)}:{dtype}{dims}"
            words += ["--input", name, "--output", name]
    files = list[str]()
    for name, more in (("every", words), ("plain", []), ("configured", [])):
        made = tmp_path / name
        made.mkdir()
        if name == "configured":
            (made / "config.pbtxt").write_text(CONFIG)
        assert CliRunner().invoke(new, [str(made), *more]).exit_code == 0
        moved = (made / "1" / "model.py").rename(made / f"{name}.py")  # mypy wants a name for each
        files += [str(moved), str(made / f"test_{name}.py")]
    command = [sys.executable, "-m", "mypy", "--strict", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "6 source files" in done.stdout, done.stdout


def test_a_model_is_named_as_its_directory_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by ``.``; and one that imports Triton's utilities is read."""
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert CliRunner().invoke(new, ["."]).exit_code == 0
    model = tmp_path / "mine" / "1" / "model.py"
    text = model.read_text()
    model.write_text("import triton_python_backend_utils as pb_utils\n\nE = pb_utils.Any\n" + text)
    assert CliRunner().invoke(new, ["."]).exit_code == 0
    assert read_config(tmp_path / "mine" / "config.pbtxt").name == "mine"
    assert load(model) is not None and "triton_python_backend_utils" not in sys.modules


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("prompt", "'prompt' is not NAME:TYPE[DIMS]"),
        ("prompt:TEXT", "'prompt:TEXT' is not NAME:TYPE[DIMS]"),
        ("prompt:FP32[a]", "'prompt:FP32[a]' is not NAME:TYPE[DIMS]"),
        ("prompt:BF16", "'prompt:BF16': Triton gives a Python model no BF16; use FP32"),
        ("a:FP32 --input a:BOOL", "two inputs, or two outputs, have one name"),
    ],
)
def test_a_tensor_that_is_none_is_refused(tmp_path: Path, option: str, error: str) -> None:
    result = CliRunner().invoke(new, [str(tmp_path / "mine"), "--input", *option.split()])
    assert str(result.exception).startswith(error)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["speech", "retrieval", "guard", "agent", "best_of_n", "cosy"])
def test_the_examples_are_short_and_their_configurations_current(name: str) -> None:
    model = ROOT / "examples" / name / "1" / "model.py"
    assert len(model.read_text().splitlines()) <= 70
    assert config_of(model, {}) == (model.parents[1] / "config.pbtxt").read_text()


class Careless(Upper):
    """Leaves a call of another model behind when the other one fails."""

    async def answer(self, request: Request, response: Response) -> None:
        await asyncio.gather(request.infer("slow", {}), request.infer("wrong", {}))


def test_calls_that_are_left_behind_end_with_the_request() -> None:
    ended = threading.Event()

    async def slow(inputs: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def wrong(inputs: Any) -> Any:
        await asyncio.sleep(0)
        raise EngineError("no such model")

    with serving(Careless, models={"slow": slow, "wrong": wrong}) as model:
        ask = model.ask(prompt="x").wait()
        assert ask.error is not None and ask.error.message() == "INTERNAL: wrong: no such model"
        assert ended.wait(20)
    assert left_behind(model) == ["1; their calls of models are ended"]


def left_behind(model: LoadedModel) -> list[str]:
    """What the log says of tasks that ``answer`` has left."""
    begin, mark = "[model] request-", ": answer left tasks behind: "
    return [
        line.partition(mark)[2]
        for level, line in model.triton.lines
        if mark in line and line.startswith(begin) and level == "warn"
    ]


@pytest.mark.parametrize("way", ["infer", "stream", "llm", "goes on"])
@pytest.mark.parametrize("fails", [False, True])
def test_tasks_that_answer_leaves_are_counted_and_their_calls_end(way: str, fails: bool) -> None:
    tasks: list[asyncio.Task[Any]] = []

    class Leaves_(Upper):
        async def call(self, request: Request) -> None:
            if way == "infer":
                await request.infer("slow", {})
            elif way == "stream":
                await anext(request.stream("slow", {}))
            elif way == "llm":
                await self.llm.text("a").answers()
            else:
                await request.infer("quick", {})
                await asyncio.Event().wait()

        async def answer(self, request: Request, response: Response) -> None:
            tasks.extend(asyncio.create_task(self.call(request)) for _ in range(3))
            tasks[0].cancel()  # which is over when ``answer`` returns
            calls = self.deployment.other_models.channel.calls  # type: ignore[attr-defined]
            llms = self.deployment._orchestrators
            await eventually(lambda: len(calls) == 2 or sum(each.live for each in llms) == 2)  # type: ignore[attr-defined]
            if fails:
                raise EngineError("lost")

        async def unload(self) -> None:
            if way != "goes on":  # the others have ended by their calls
                await asyncio.wait(tasks, timeout=20)
                assert all(task.done() for task in tasks)
            for task in tasks:
                task.cancel()

    async def slow(inputs: Any) -> Any:
        await asyncio.Event().wait()

    models = {"slow": slow, "quick": lambda inputs: {"y": 1}}
    with serving(Leaves_, llm=[None], models=models) as model:
        ask = model.ask(prompt="x").wait()
        assert (ask.error is not None) == fails
        until(lambda: left_behind(model))
    assert left_behind(model) == ["2; their calls of models are ended"]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("end", "rename it"),
        ("deployment", "rename it"),
        ("_close", "rename it"),
        ("finalize", "write `async def unload(self)`"),
        ("execute", "write `async def answer(self, request, response)`"),
    ],
)
@pytest.mark.parametrize("inherited", [False, True])
def test_no_name_of_an_author_replaces_what_the_base_needs(
    name: str, remedy: str, inherited: bool
) -> None:
    """A method ``end`` took the place of the one that calls ``unload``, without a word."""
    kinds = [type("Mixin", (), {name: print})] if inherited else []
    names = {} if inherited else {name: print}
    owner = "Mixin" if inherited else "Own"
    with pytest.raises(SettingsError) as raised:
        type("Own", (*kinds, StreamingModel), names)
    problem = f"{owner}.{name} replaces what StreamingModel needs; {remedy}"
    assert str(raised.value) == problem


def test_an_unload_that_fails_leaves_no_thread() -> None:
    """The engine and the reports are closed all the same."""

    class Fails(Upper):
        async def unload(self) -> None:
            raise ValueError("a user's own unload")

    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="own unload"), serving(Fails, llm=["a"]) as model:
        assert model.ask(prompt="x").wait().error is None
    until(
        lambda: set(threading.enumerate()) <= before
    )  # idle ones of an executor end by themselves


def test_a_stream_that_is_left_and_a_task_of_the_model_are_no_tasks_of_the_request() -> None:
    class Works(Upper):
        async def load(self, deployment: Any) -> None:
            await super().load(deployment)
            self.asked: asyncio.Queue[Any] = asyncio.Queue()
            self.worker = asyncio.create_task(self.work())

        async def work(self) -> None:
            while True:
                request, told = await self.asked.get()
                told.set_result(await request.infer("other", {"x": 1}))

        async def answer(self, request: Request, response: Response) -> None:
            told = asyncio.get_running_loop().create_future()
            self.asked.put_nowait((request, told))
            await told
            kept = self.llm.text("a")
            await anext(kept)
            await response.send({"text": "a"})

        async def unload(self) -> None:
            self.worker.cancel()

    with serving(Works, llm=["a", None], models={"other": lambda inputs: {"y": 1}}) as model:
        for _ in range(2):
            assert model.ask(prompt="x").wait().said("text") == [[b"a"]]
        until(lambda: model.llm.live == 0)
    assert left_behind(model) == []


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


class Asks(Upper):
    """Asks another model, whose types the test changes, and sends at the pace of playing."""

    inputs = (Tensor("prompt", "STRING", required=True),)
    outputs = (Tensor("count", "FP64"),)

    async def answer(self, request: Request, response: Response) -> None:
        if request.text("prompt") == "stream":
            parts = request.stream("other", {"x": 3}, timeout_s=20)
            async for part in parts:
                await response.send({"count": part["y"]})
            assert not request.streams, f"{parts} has ended and is kept"
        else:
            found = await request.infer("other", {"x": 3}, version="1", parameters={"a": 5})
            await response.send({"count": found["y"]})


@pytest.mark.parametrize("way", ["infer", "stream"])
def test_a_model_that_is_loaded_anew_is_asked_for_its_types_again(way: str) -> None:
    seen: list[Any] = []

    def other(*types: str) -> Double:
        def play(inputs: Any) -> Any:
            array = inputs["x"]
            if array.dtype != Tensor("x", types[0]).numpy_type:
                raise EngineError(f"inference input 'x' data-type is {array.dtype}")
            seen.append(array.dtype)
            return {"y": array}

        return Double(play, inputs=[Tensor("x", types[0])], outputs=[Tensor("y", types[0])])

    doubles = {"other": other("INT32")}
    with serving(Asks, models=doubles) as model:
        server: Any = model.model.deployment.other_models.channel
        for dtype in ("INT32", "FP32"):
            server.doubles["other"] = other(dtype)
            ask = model.ask(prompt=way).wait()
            assert ask.said("count") == [[3.0]] and ask.error is None
    assert seen == [np.int32, np.float32]
    asked = ("1", {"a": 5}) if way == "infer" else ("", {})  # ``timeout_s`` is no parameter
    assert (model.calls[0].version, model.calls[0].parameters) == asked


@pytest.mark.parametrize(
    ("decoupled", "raised", "message"),
    [
        (True, None, "INTERNAL: other: it is decoupled; use stream"),
        (None, Overloaded("full"), "UNAVAILABLE: other: full"),
        (None, InvalidRequest("x", "is odd"), "INTERNAL: other: x: is odd [defect=1]"),
    ],
)
def test_what_another_model_refuses_is_not_the_callers_mistake(
    decoupled: bool | None, raised: Exception | None, message: str
) -> None:
    def play(inputs: Any) -> Any:
        if raised:
            raise raised
        return {"y": 1}

    with serving(Asks, models={"other": Double(play, decoupled=decoupled)}) as model:
        ask = model.ask(prompt="x").wait()
    assert ask.error is not None and ask.error.message() == message


@pytest.mark.parametrize("error", [EngineError("broken"), EngineUnavailable("other: gone")])
def test_only_the_name_of_an_unknown_model_is_corrected(error: EngineError) -> None:
    class Fails_(Asks):
        async def load(self, deployment: Any) -> None:
            async def fetch(model: str, version: str) -> Any:
                raise error

            deployment.other_models._fetch = fetch
            unavailable = isinstance(error, EngineUnavailable)
            deployment.other_models.names = {"othr"} if unavailable else {"other", "othr"}

    with serving(Fails_) as model:
        ask = model.ask(prompt="x").wait()
    assert ask.error is not None and ask.error.message() == f"{error.status}: {error}"


def sent_after_the_end(model: LoadedModel) -> None:
    with pytest.raises(Exception, match="send after FINAL"):
        model.ask(prompt="x").wait().send(None, 1)


@pytest.mark.parametrize(
    ("breaks", "told"),
    [
        (sent_after_the_end, "send after FINAL"),
        (lambda model: setattr(model.llm, "live", 1), "1 answers of the language model still run"),
        (
            lambda model: model.calls.append(Called("other", {}, "1", "", {})),
            "calls of other models still run: .*other",
        ),
    ],
)
def test_serving_raises_at_its_end_what_was_broken(
    breaks: Callable[[LoadedModel], object], told: str
) -> None:
    with pytest.raises(AssertionError, match=told), serving(Upper, llm=["a"]) as model:
        breaks(model)


def test_a_call_ends_at_its_time_limit_and_with_its_stream() -> None:
    class Late(Asks):
        async def answer(self, request: Request, response: Response) -> None:
            calls = {
                "infer": lambda: request.infer("other", {"x": 3}, timeout_s=0.05),
                "stream": lambda: anext(request.stream("other", {"x": 3}, timeout_s=0.05)),
            }
            await calls[request.text("prompt")]()

    async def hangs(inputs: Any) -> Any:
        await asyncio.Event().wait()

    with serving(Late, models={"other": hangs}) as model:
        told = [model.ask(prompt=way).wait().error for way in ("infer", "stream")]
        until(lambda: all(call.over for call in model.calls))
    texts = [error.message() for error in told if error is not None]
    assert "did not answer in time" in texts[0] and "did not end within 0.05 s" in texts[1]


def test_a_response_that_is_played_waits_for_its_time() -> None:
    """The caller has at most 2 s in advance, and what is to come beyond."""
    sent: list[tuple[float, int]] = []

    class Call_:
        decoupled, outbox = True, Outbox()

        async def ready(self) -> None:
            pass

        def send(self, arrays: Any, final: bool) -> None:
            sent.append((clock.now, int(arrays["count"][0])))

    async def played() -> None:
        call: Any = Call_()
        response = Response(call, {"count": Tensor("count", "INT32")})
        for number in range(6):
            await response.send({"count": number}, seconds=1.0)

    clock = Clock(skips_waits=True)
    clock.run_until_complete(played())
    clock.close()
    assert sent == [(0.0, 0), (0.0, 1), (0.0, 2), (1.0, 3), (2.0, 4), (3.0, 5)]


@pytest.mark.parametrize(
    ("configured", "wrong"),
    [({"nearest": 5, "voice": "b"}, None), ({"nearest": "many"}, "nearest = 'many'")],
)
def test_a_pipelines_own_parameters_have_the_types_of_their_defaults(
    configured: dict[str, Any], wrong: str | None
) -> None:
    class Own(Upper):
        parameters: ClassVar[dict[str, Any]] = {"nearest": 2, "voice": "anna", "limit": 0.5}

    if wrong:
        with pytest.raises(SettingsError, match=wrong), serving(Own, **configured):
            pass
        return
    with serving(Own, llm=["a"], **configured) as model:
        assert model.model.deployment.parameters == {"nearest": 5, "voice": "b", "limit": 0.5}
    unknown = "parameter naerest is not declared by this model; did you mean nearest"
    with pytest.raises(AssertionError, match=unknown), serving(Own, naerest=1):
        pass
    with serving(Own, llm=["a"], **configured) as model:  # Triton loads it all the same
        model.model._config["parameters"]["naerest"] = {"string_value": "1"}
        model.model.make(None)
        assert any(unknown in line for _, line in model.triton.lines)


def test_rows_are_one_or_refused_at_load() -> None:
    class Shaped(Upper):
        async def answer(self, request: Request, response: Response) -> None:
            assert request["prompt"].shape == (1,)
            await super().answer(request, response)

    with serving(Shaped, llm=["a"], rows=True) as model:
        ask = model.ask(prompt=[["hello"]]).wait()
    assert [response["text"].tolist() for response in ask.responses] == [[[b"A"]]]
    config = json.dumps({"name": "m", "max_batch_size": 4, "parameters": {}})
    arguments = {"model_config": config, "model_name": "m", "model_repository": "."}
    with pytest.raises(SettingsError, match="max_batch_size: 4: a pipeline answers one row"):
        Upper().initialize(arguments, object())


def test_several_failures_of_a_group_are_told_by_their_own_words() -> None:
    class Group(Upper):
        async def answer(self, request: Request, response: Response) -> None:
            group: Any = group_of(EngineError("one"))
            group.exceptions = (*group.exceptions, InvalidRequest("two", "is wrong"))
            raise group

    with serving(Group) as model:
        ask = model.ask(prompt="x").wait()
    assert ask.error is not None and ask.error.message() == "INTERNAL: one; two: is wrong"


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        ([EngineUnavailable("gone")] * 2, "UNAVAILABLE: gone"),
        ([EngineError("lost"), KeyError("x")], "INTERNAL: unexpected KeyError; "),
    ],
)
def test_a_failure_of_a_group_keeps_its_kind(errors: list[Exception], message: str) -> None:
    class Group(Upper):
        async def answer(self, request: Request, response: Response) -> None:
            group: Any = group_of(errors[0])
            group.exceptions = tuple(errors)
            raise group

    with serving(Group) as model:
        ask = model.ask(prompt="x").wait()
    assert ask.error is not None and ask.error.message().startswith(message)


def test_a_model_is_done_when_its_last_request_is() -> None:
    """Its load is that of its requests: without a response they wait, with one they run."""
    with serving(Upper, llm=[["a", None], [None]]) as model:
        deployment = model.model.deployment
        running = model.ask(prompt="x").wait(responses=1)
        waiting = model.ask(prompt="x")
        until(lambda: deployment.load()[:2] == (1, 1))
        assert not deployment.handed_over
        for ask in (running, waiting):
            ask.leave()
            ask.wait()
        until(lambda: deployment.handed_over and deployment.load()[:2] == (0, 0))


def test_send_waits_until_triton_has_taken_earlier_responses() -> None:
    sent, taken = list[int](), threading.Event()

    class Sends(Upper):
        async def answer(self, request: Request, response: Response) -> None:
            for number in range(100):
                await response.send({"count": number})
                sent.append(number)

    with serving(Sends) as model:
        ask = model.triton.ask({"prompt": np.array([b"x"], object)}, "count")
        ask.on_send = lambda response: taken.wait(20)
        model.model.execute([ask])
        until(lambda: len(sent) > 0)
        assert model.model.deployment.load().running and len(sent) < 5
        taken.set()
        assert ask.wait().said("count") == [[number] for number in range(100)]


def test_the_line_of_a_request_has_its_trace() -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    with serving(Upper, llm=["a"]) as model:
        ask = model.triton.ask({"prompt": np.array([b"x"], object)}, "text")
        ask.sent_parameters = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
        model.model.execute([ask])
        ask.wait()
    (line,) = [line for _, line in model.triton.lines if "request id=" in line]
    assert f"trace_id={trace}" in line


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_a_type_that_a_python_model_cannot_have_is_refused_at_load(side: str) -> None:
    wrong = type("Wrong_", (Upper,), {side: (*getattr(Upper, side), Tensor("half", "BF16"))})
    with pytest.raises(SettingsError, match="half: Triton gives"), serving(wrong):
        pass


def test_several_mistakes_of_the_caller_are_the_callers() -> None:
    class Group(Upper):
        async def answer(self, request: Request, response: Response) -> None:
            group: Any = group_of(InvalidRequest("one", "is wrong"))
            group.exceptions = (*group.exceptions, InvalidRequest("two", "is wrong"))
            raise group

    with serving(Group) as model:
        ask = model.ask(prompt="x").wait()
    assert ask.error is not None
    assert ask.error.message() == "INVALID_ARG: one: is wrong; two: is wrong"


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_a_time_that_nobody_can_play_is_refused(seconds: float) -> None:
    """It would never end."""

    class Plays(Upper):
        async def answer(self, request: Request, response: Response) -> None:
            await response.send({"text": "a"}, seconds=seconds)

    with serving(Plays) as model:
        ask = model.ask(prompt="x").wait()
    assert ask.error is not None and "no time that a caller can play" in ask.error.message()


def test_an_option_of_a_call_that_does_not_exist_is_refused() -> None:
    """It would be a parameter of the request, which no model looks at."""

    class Asks(Upper):
        async def answer(self, request: Request, response: Response) -> None:
            wrong: Any = {"sequnce_id": 5}
            await request.infer("other", {"x": 4}, **wrong)

    with serving(Asks, models={"other": lambda inputs: {"y": inputs["x"]}}) as model:
        ask = model.ask(prompt="x").wait()
    assert ask.error is not None
    told = "sequnce_id is no option of a call; did you mean sequence_id?"
    assert told in ask.error.message()


async def raised_by_a_task(error: BaseException) -> None:
    """Which asyncio gives to the event loop, too, where it is no ``Exception``."""
    await asyncio.create_task(raised(error))


def of_no_exception(test: Any) -> Any:
    errors = [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()]
    of_errors = pytest.mark.parametrize("error", errors, ids=repr)
    return pytest.mark.parametrize("way", [raised, raised_by_a_task])(of_errors(test))


@of_no_exception
def test_what_load_raises_fails_the_load_alone(way: Any, error: BaseException) -> None:
    """The event loop goes on, or Triton would wait for ever, or lose the process without a word."""

    class Exits(Upper):
        async def load(self, deployment: Any) -> None:
            await way(error)

    with pytest.raises(RuntimeError) as told, serving(Exits, llm=["a"]):
        pass
    assert str(told.value) == f"model model: load raised {error!r}"


@of_no_exception
def test_a_warm_up_is_tried_again_until_it_succeeds(way: Any, error: BaseException) -> None:
    """Until then the model is not ready, and requests are refused with what is wrong."""
    works = threading.Event()

    class Warm(Upper):
        async def warm_up(self, deployment: Any) -> None:
            if not works.is_set():
                await way(error)

    with serving(Warm, llm=["a"]) as model:
        until(lambda: any("warm_up failed" in line for _, line in model.triton.lines))
        refused = model.ask(prompt="x").wait().error
        assert refused is not None and refused.message().startswith("UNAVAILABLE: model: its warm_")
        problems = run_async(model.model.deployment.engine_problems())
        assert problems["model"].startswith("model: its warm_up")
        works.set()
        until(lambda: model.ask(prompt="x").wait().error is None)
    lines = [line for _, line in model.triton.lines if "warm_up failed" in line]
    assert lines[0].startswith("[model] ") and type(error).__name__ in lines[0]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_a_task_of_a_request_that_exits_ends_its_request_alone(error: BaseException) -> None:
    class Exits(Upper):
        async def answer(self, request: Request, response: Response) -> None:
            if request.text("prompt") == "exit":
                await raised_by_a_task(error)
            await super().answer(request, response)

    with serving(Exits, llm=["a"]) as model:
        told = model.ask(prompt="exit").wait().error
        assert told is not None and told.message().startswith("INTERNAL: unexpected RuntimeError")
        assert model.ask(prompt="x").wait().said("text") == [[b"A"]]
    assert any(f"a task raised {error!r}" in line for _, line in model.triton.lines)


def test_a_warm_up_waits_for_a_server_that_is_not_ready() -> None:
    """It is tried once the other models are ready."""
    is_ready = threading.Event()

    class Warm(Upper):
        async def load(self, deployment: Any) -> None:
            await super().load(deployment)

            async def ready() -> None:
                if not is_ready.is_set():
                    raise EngineError("not ready")

            deployment.other_models.ready = ready

        async def warm_up(self, deployment: Any) -> None:
            assert is_ready.is_set()

    with serving(Warm, llm=["a"]) as model:
        until(lambda: any("warm_up failed" in line for _, line in model.triton.lines))
        is_ready.set()
        until(lambda: model.ask(prompt="x").wait().error is None)


def test_requests_wait_for_a_warm_up() -> None:
    """And one whose caller leaves meanwhile does not end it."""
    ready = threading.Event()

    class Warm(Asks):
        async def warm_up(self, deployment: Any) -> None:
            await eventually(ready.is_set)
            self.warm = (await deployment.infer("other", {"x": 4}))["y"]

        async def answer(self, request: Request, response: Response) -> None:
            await response.send({"count": self.warm})

    with serving(Warm, models={"other": lambda inputs: {"y": inputs["x"]}}) as model:
        leaves, waits = model.ask(prompt="x"), model.ask(prompt="x")
        leaves.leave()
        leaves.wait()
        assert not waits.responses and waits.error is None
        ready.set()
        assert waits.wait().said("count") == [[4.0]]
