"""How a pipeline's language model writes calls: by its chat template, or as its author says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.server_settings import DEMO
from tests.helpers.tool_tokenizer import tool_tokenizer
from trtllm_bls.errors import SettingsError
from trtllm_bls.operate import preparation
from trtllm_bls.operate.ports import Ports
from trtllm_bls.pipeline import Request, Response, StreamingModel, Tensor
from trtllm_bls.pipeline.streaming_model import PipelineParameters
from trtllm_bls.pipeline.testing import serving
from trtllm_bls.settings.command_options import ServeSettings
from trtllm_bls.settings.parameters import REASONING_PARSER, TOOL_PARSER, Parameters

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ASKED = [{"role": "user", "content": "Hi"}]
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PLAIN = str(DEMO / "target")  # whose template has no calls


class Calls(StreamingModel):
    """Says which tools its language model calls, and its text."""

    outputs = (Tensor("called", "STRING"), Tensor("text", "STRING"))
    opened: dict[str, Any]
    asked: dict[str, Any]

    async def load(self, deployment: Any) -> None:
        self.llm = deployment.llm(**self.opened)

    async def answer(self, request: Request, response: Response) -> None:
        (said,) = await self.llm.chat(ASKED, tools=[ADD], **self.asked).answers()
        called = " ".join(call.name for call in said.calls)
        await response.send({"called": called, "text": said.reasoning + said.text})


def calls(opened: dict[str, Any], asked: dict[str, Any] | None = None) -> type[Calls]:
    return type("Case", (Calls,), {"opened": opened, "asked": asked or {}})


@pytest.mark.parametrize(
    ("opened", "parameters"),
    [
        ({"tool_parser": "hermes"}, {"tokenizer_dir": PLAIN}),
        ({}, {"tokenizer_dir": PLAIN, "tool_parser": "hermes"}),
        ({"tokenizer": PLAIN, "tool_parser": "hermes"}, {}),
        ({"tool_parser": "hermes"}, {"tokenizer_dir": PLAIN, "tool_parser": "mistral"}),
        ({}, {"tool_parser": "hermes"}),  # without a tokenizer, as a test may be
        ({}, {"tokenizer_dir": tool_tokenizer()}),  # whose template has these calls
    ],
)
def test_calls_are_read_in_the_format_that_is_chosen_or_known(
    opened: dict[str, Any], parameters: dict[str, Any]
) -> None:
    with serving(calls(opened), llm=[HERMES], **parameters) as model:
        ask = model.ask().wait()
    assert ask.error is None, ask.error
    assert ask.said("called") == [[b"add"]]


@pytest.mark.parametrize(
    ("opened", "parameters"),
    [
        ({}, {"tokenizer_dir": PLAIN}),
        ({}, {}),
        # The parameter is that of the other tokenizer.
        ({"tokenizer": PLAIN}, {"tokenizer_dir": tool_tokenizer(), "tool_parser": "hermes"}),
    ],
)
def test_without_a_format_a_call_with_tools_is_refused_with_the_choice(
    opened: dict[str, Any], parameters: dict[str, Any]
) -> None:
    """The markup would come as text, and ``calls`` would stay empty."""
    with serving(calls(opened), llm=[HERMES], **parameters) as model:
        ask = model.ask().wait()
    assert ask.error is not None
    assert "tools: the chat template has none of the formats" in ask.error.message()
    assert "set the parameter tool_parser: none (calls are text), " in ask.error.message()
    assert "hermes" in ask.error.message()


@pytest.mark.parametrize(
    ("asked", "parser", "text"),
    [({}, "none", HERMES), ({"tool_choice": "none"}, "auto", HERMES)],
)
def test_a_format_is_not_needed_where_no_call_is_to_be_read(
    asked: dict[str, Any], parser: str, text: str
) -> None:
    with serving(calls({"tool_parser": parser}, asked), llm=[text], tokenizer_dir=PLAIN) as model:
        ask = model.ask().wait()
    assert ask.error is None, ask.error
    assert (ask.said("called"), ask.said("text")) == ([[b""]], [[text.encode()]])


def test_a_demanded_call_needs_no_format_since_a_guide_writes_it() -> None:
    written = ['[{"name": "add", "arguments": {}}]']
    demanded = calls({}, {"tool_choice": "required"})
    with serving(demanded, llm=written, tokenizer_dir=PLAIN) as model:
        assert model.ask().wait().said("called") == [[b"add"]]


@pytest.mark.parametrize("name", ["tool_parser", "reasoning_parser"])
def test_a_format_that_nobody_knows_fails_the_load(name: str) -> None:
    unknown = f"parameter {name} = 'nonsense': use one of: auto, none, "
    with pytest.raises(SettingsError, match=unknown), serving(calls({}), **{name: "nonsense"}):
        pass
    with pytest.raises(SettingsError, match=unknown), serving(calls({name: "nonsense"})):
        pass


def test_the_options_of_serve_reach_pipelines() -> None:
    """By the environment of the models, which configurations may override."""
    settings = ServeSettings(tool_parser="hermes", reasoning_parser="none")
    ports = Ports("127.0.0.1", "127.0.0.1", "127.0.0.1", 1, 2, 3)
    environment = preparation.server_environment(settings, ports, DEMO, {})
    assert (environment[TOOL_PARSER], environment[REASONING_PARSER]) == ("hermes", "none")
    arguments = {"model_config": '{"name": "m"}', "model_repository": "."}
    read = Parameters(arguments, environment).read(PipelineParameters)
    assert (read.tool_parser, read.reasoning_parser) == ("hermes", "none")
    default = preparation.server_environment(ServeSettings(), ports, DEMO, {})
    assert TOOL_PARSER not in default and REASONING_PARSER not in default
