"""Test model: ``tensorrt_llm`` played by a script that works as a coding agent's model does.

It lists the files, edits one and reports, in the model family's own format of calls. What it does
next it reads from the prompt, which has its commands so far.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from doubles.scripted import Script
from doubles.speaking import SpeakingEngine
from trtllm_bls.orchestrator.log_lines import log_to_triton
from trtllm_bls.settings.parameters import DIRECTORY, TEXT, Parameters
from trtllm_bls.text.tokenizer import load_tokenizer
from trtllm_bls.triton.engine_service import EngineService
from trtllm_bls.triton.request_server import RequestServer

STEPS = ("ls # step one", "sed -i s/first/edited/ notes.txt # step two")
REPORT = "I listed the files and edited notes.txt."
THOUGHT = "I have to look."


def qwen3_coder(tool: str, arguments: dict[str, str]) -> str:
    values = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"I go on.\n<tool_call>\n<function={tool}>\n{values}</function>\n</tool_call>"


def llama3_json(tool: str, arguments: dict[str, str]) -> str:
    return json.dumps({"name": tool, "parameters": arguments})


def harmony(tool: str, arguments: dict[str, str]) -> str:
    return (
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
        f"<|channel|>commentary to=functions.{tool} <|constrain|>json<|message|>"
        f"{json.dumps(arguments)}<|call|>"
    )


CALLS = {"qwen3_coder": qwen3_coder, "llama3_json": llama3_json, "harmony": harmony}


def answer(family: str, prompt: str) -> str:
    """The next call, or the report."""
    done = sum(step in prompt for step in STEPS)
    if done == len(STEPS):
        return f"<|channel|>final<|message|>{REPORT}" if family == "harmony" else REPORT
    if "exec_command" in prompt:  # Codex
        return CALLS[family]("exec_command", {"cmd": STEPS[done]})
    return CALLS[family]("Bash", {"command": STEPS[done], "description": "a step"})


@dataclass(frozen=True, kw_only=True)
class AgentParameters:
    family: str = TEXT.parameter("Whose calls it writes.", "qwen3_coder")
    tokenizer_dir: Path = DIRECTORY.parameter("Its tokenizer.", "")


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        log_to_triton(pb_utils, args["model_name"])
        asked = Parameters(args).read(AgentParameters)
        tokenizer = load_tokenizer(asked.tokenizer_dir)
        script = Script(vocab_size=tokenizer.model_vocab_size, max_sequence_tokens=200_000)
        self._engine = SpeakingEngine(
            tokenizer, lambda prompt: answer(asked.family, prompt), script
        )
        service = EngineService(self._engine, True)
        self._server = RequestServer(pb_utils, service.handle, senders=1)

    def execute(self, requests: list[Any]) -> None:
        self._server.accept(requests)

    def finalize(self) -> None:
        self._server.close(self._engine.close)
