"""Codex and Claude Code, as their makers publish them, finish a task of three steps.

The server is ``trtllm-bls serve``, its chat template is the model family's own, and its engine is a
script that writes calls as the family does. What counts is the file that a tool has edited.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ports import unused_ports
from tests.helpers.published import AGENTS, npm_install, templates_of_llama_cpp
from tests.helpers.served import Served
from tests.helpers.server_settings import ROOT
from tests.helpers.small_tokenizers import directory
from tests.models.test_chat_templates import tokenizer_of
from trtllm_bls.text.chat_formats import TOOL_FORMATS
from trtllm_bls.text.tokenizer import load_tokenizer

MODEL = "model"  # its directory's name
REPORT = "I listed the files and edited notes.txt."
TASK = "List the files, write edited in place of first in notes.txt, and say what you did."
FAMILIES = {
    "qwen3_coder": "Qwen3-Coder",
    "harmony": "openai-gpt-oss-120b",
    "llama3_json": "meta-llama-Llama-3.3-70B-Instruct",
}
CODEX = """
model = "{model}"
model_provider = "bls"
model_context_window = 65536
web_search = "disabled"
check_for_update_on_startup = false
[model_providers.bls]
name = "trtllm-bls"
base_url = "{url}/v1"
env_key = "BLS_API_KEY"
wire_api = "responses"
stream_max_retries = 1
[analytics]
enabled = false
[otel]
exporter = "none"
[features]
plugins = false
apps = false
"""

pytestmark = [pytest.mark.live, pytest.mark.slow]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Where the programs are, and the template of each family."""
    folder = tmp_path_factory.mktemp("npm")
    npm_install(folder, *AGENTS, scripts=True)
    found = templates_of_llama_cpp(tmp_path_factory.mktemp("templates"))
    return folder / "node_modules" / ".bin", {key: found[name] for key, name in FAMILIES.items()}


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest,
    packages: tuple[Path, dict[str, str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    family = request.param
    scratch = tmp_path_factory.mktemp("agents")
    model = scratch / "model"
    # The marks of Qwen3-Coder's calls are text to a tokenizer, those of the others special tokens.
    if TOOL_FORMATS[family].special:
        hf = tokenizer_of(packages[1][family]).hf
    else:
        hf = load_tokenizer(directory("byte-level")).hf
    hf.chat_template = packages[1][family]
    hf.save_pretrained(model)
    shutil.copytree(ROOT / "models", scratch / "models")
    shutil.rmtree(scratch / "models" / "tensorrt_llm" / "1")
    shutil.copytree(
        ROOT / "tests" / "live" / "agents" / "1", scratch / "models" / "tensorrt_llm" / "1"
    )
    port = str(*unused_ports(1))
    more = ("--set", f"tensorrt_llm.family={family}", "--openai-port", port)
    more += ("--set", f"tensorrt_llm.tokenizer_dir={model}", "--model", str(model))
    running = Served(scratch / "models", *more)
    try:
        yield running
    finally:
        running.process.terminate()
        assert running.end()[0] == 0


def folder_of_work(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    (work / "notes.txt").write_text("first line\n")
    return work


def run(command: list[str], work: Path, **environment: str) -> str:
    """The program's output; it sees nothing of this process's environment."""
    environment |= {"PATH": os.environ["PATH"], "HOME": str(work.parent), "TERM": "dumb"}
    done = subprocess.run(
        command,
        env=environment,
        cwd=work,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_codex_edits_the_file(
    served: Served, packages: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    """Over the Responses API."""
    work, home = folder_of_work(tmp_path), tmp_path / "codex"
    home.mkdir()
    url = served.urls["OpenAI"].removesuffix("/v1")
    (home / "config.toml").write_text(CODEX.format(model=MODEL, url=url))
    command = [str(packages[0] / "codex"), "exec", "--json", "--ephemeral"]
    command += ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK]
    told = run(command, work, CODEX_HOME=str(home), BLS_API_KEY="any")
    events: list[dict[str, Any]] = [json.loads(line) for line in told.splitlines() if line]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    ran = [item["command"] for item in items if item["type"] == "command_execution"]
    listed, edited = ran
    assert "ls #" in listed and "sed -i" in edited
    assert items[-1]["text"] == REPORT and events[-1]["type"] == "turn.completed"
    assert (work / "notes.txt").read_text() == "edited line\n"


def test_claude_code_edits_the_file(
    served: Served, packages: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    """Over the Messages API."""
    work = folder_of_work(tmp_path)
    command = [str(packages[0] / "claude"), "-p", TASK, "--output-format", "json"]
    told = run(
        [*command, "--allowedTools", "Bash"],
        work,
        ANTHROPIC_BASE_URL=served.urls["OpenAI"].removesuffix("/v1"),
        ANTHROPIC_AUTH_TOKEN="any",
        ANTHROPIC_MODEL=MODEL,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_ATTRIBUTION_HEADER="0",
        CLAUDE_CODE_MAX_RETRIES="1",
        DISABLE_AUTOUPDATER="1",
    )
    result = json.loads(told)
    assert (result["is_error"], result["num_turns"], result["result"]) == (False, 3, REPORT)
    assert (work / "notes.txt").read_text() == "edited line\n"
