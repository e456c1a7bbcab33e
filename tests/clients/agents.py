"""Programs for the terminal, as their makers publish them, and the tasks that each has to do.

A task gets a folder to work in, the folder of the programs and the address of the API, and raises
what went wrong.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.model import MODEL

Task = Callable[[Path, Path, str], None]
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)


@dataclass(frozen=True)
class Agent:
    """A program of npm, and what it is asked to do."""

    name: str
    npm: str
    api: str
    tasks: tuple[Task, ...]


def run(work: Path, command: list[str], **environment: str) -> str:
    """The program's output; it sees nothing of this process's environment."""
    environment |= {
        "PATH": os.environ["PATH"],
        "HOME": str(work / "home"),
        "TERM": "dumb",
        "CI": "1",
    }
    done = subprocess.run(
        command,
        env=environment,
        cwd=work,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, (
        f"exit code {done.returncode}: {(done.stdout + done.stderr)[-500:]}"
    )
    return done.stdout


def call(name: str, **arguments: Any) -> str:
    return f"[[call {name} {json.dumps(arguments)}]]"


# --- Codex --------------------------------------------------------------------------------------

_CODEX = """
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


def codex(work: Path, bin_: Path, url: str, *words: str) -> list[dict[str, Any]]:
    home = work / "home" / "codex"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(_CODEX.format(model=MODEL, url=url))
    command = [str(bin_ / "codex"), "exec", *words]
    told = run(work, command, CODEX_HOME=str(home), BLS_API_KEY="any")
    return [json.loads(line) for line in told.splitlines() if line.startswith("{")]


_CODEX_OPTIONS = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")


def said(events: list[dict[str, Any]]) -> str:
    texts = [e["item"]["text"] for e in events if e.get("item", {}).get("type") == "agent_message"]
    assert events[-1]["type"] == "turn.completed" and texts, events[-1]
    return str(texts[-1])


def codex_edits(work: Path, bin_: Path, url: str) -> None:
    """writes a file with the shell."""
    task = call("exec_command", cmd="echo made > made.txt") + " [[say It is made.]]"
    assert said(codex(work, bin_, url, *_CODEX_OPTIONS, task)) == "It is made."
    assert (work / "made.txt").read_text() == "made\n"


def codex_sees(work: Path, bin_: Path, url: str) -> None:
    """looks at a picture, goes on, and resumes the conversation."""
    (work / "red.png").write_bytes(PIXEL)
    look = call("view_image", path=str(work / "red.png")) + " [[say I cannot see it.]]"
    assert said(codex(work, bin_, url, *_CODEX_OPTIONS, look)) == "I cannot see it."
    again = ("resume", "--last", *_CODEX_OPTIONS, "[[say I go on.]]")
    assert said(codex(work, bin_, url, *again)) == "I go on."


# --- Claude Code ----------------------------------------------------------------------------------


def claude(work: Path, bin_: Path, url: str, *words: str) -> dict[str, Any]:
    command = [str(bin_ / "claude"), "-p", *words, "--output-format", "json"]
    told = run(
        work,
        [*command, "--allowedTools", "Bash", "Read", "ToolSearch", "TodoWrite", "WebFetch"],
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_AUTH_TOKEN="any",
        ANTHROPIC_MODEL=MODEL,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_ATTRIBUTION_HEADER="0",
        CLAUDE_CODE_MAX_RETRIES="1",
        DISABLE_AUTOUPDATER="1",
    )
    result: dict[str, Any] = json.loads(told)
    assert not result["is_error"], result
    return result


def claude_edits(work: Path, bin_: Path, url: str) -> None:
    """writes a file with the shell."""
    task = call("Bash", command="echo made > made.txt", description="a step")
    assert claude(work, bin_, url, task + " [[say It is made.]]")["result"] == "It is made."
    assert (work / "made.txt").read_text() == "made\n"


def claude_sees(work: Path, bin_: Path, url: str) -> None:
    """looks at a picture, goes on, and resumes the conversation."""
    (work / "red.png").write_bytes(PIXEL)
    look = call("Read", file_path=str(work / "red.png")) + " [[say I cannot see it.]]"
    first = claude(work, bin_, url, look)
    assert (first["result"], first["num_turns"]) == ("I cannot see it.", 2)
    again = claude(work, bin_, url, "[[say I go on.]]", "--resume", first["session_id"])
    assert again["result"] == "I go on."


def claude_searches(work: Path, bin_: Path, url: str) -> None:
    """searches for tools, gets them, and resumes the conversation."""
    search = call("ToolSearch", query="select:WebFetch,NotebookEdit", max_results=3)
    first = claude(work, bin_, url, search + " [[say I found them.]]")
    assert (first["result"], first["num_turns"]) == ("I found them.", 2)
    again = claude(work, bin_, url, "[[say I go on.]]", "--resume", first["session_id"])
    assert again["result"] == "I go on."


# --- others ---------------------------------------------------------------------------------------


def opencode_edits(work: Path, bin_: Path, url: str) -> None:
    """writes a file with the shell."""
    model = {"name": MODEL, "limit": {"context": 65536, "output": 8192}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "bls", "models": {MODEL: model}}
    provider["options"] = {"baseURL": f"{url}/v1", "apiKey": "any"}
    settings = {"provider": {"bls": provider}, "model": f"bls/{MODEL}", "autoupdate": False}
    (work / "opencode.json").write_text(json.dumps(settings | {"permission": "allow"}))
    task = call("bash", command="echo made > made.txt", description="a step")
    told = run(work, [str(bin_ / "opencode"), "run", task + " [[say It is made.]]"])
    assert "It is made." in told and (work / "made.txt").read_text() == "made\n"


def qwen_edits(work: Path, bin_: Path, url: str) -> None:
    """writes a file with the shell."""
    task = call("run_shell_command", command="echo made > made.txt", is_background=False)
    told = run(
        work,
        [
            str(bin_ / "qwen"),
            "--yolo",
            "--auth-type",
            "openai",
            "-p",
            task + " [[say It is made.]]",
        ],
        OPENAI_API_KEY="any",
        OPENAI_BASE_URL=f"{url}/v1",
        OPENAI_MODEL=MODEL,
    )
    assert "It is made." in told and (work / "made.txt").read_text() == "made\n"


def pi_edits(work: Path, bin_: Path, url: str) -> None:
    """writes a file with the shell."""
    home = work / "home" / ".pi" / "agent"
    home.mkdir(parents=True)
    model = {"id": MODEL, "name": MODEL, "reasoning": False, "input": ["text"]}
    model |= {"contextWindow": 65536, "maxTokens": 8192}
    model["cost"] = {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}
    provider = {
        "baseUrl": f"{url}/v1",
        "apiKey": "any",
        "api": "openai-responses",
        "models": [model],
    }
    (home / "models.json").write_text(json.dumps({"providers": {"bls": provider}}))
    task = call("bash", command="echo made > made.txt") + " [[say It is made.]]"
    told = run(work, [str(bin_ / "pi"), "--provider", "bls", "--model", MODEL, "-p", task])
    assert "It is made." in told and (work / "made.txt").read_text() == "made\n"


def continue_edits(work: Path, bin_: Path, url: str) -> None:
    """writes a file with the shell."""
    model = {"name": "m", "provider": "openai", "model": MODEL, "apiBase": f"{url}/v1"}
    model |= {"apiKey": "any", "roles": ["chat"], "capabilities": ["tool_use"]}
    settings = {"name": "a", "version": "0.0.1", "schema": "v1", "models": [model]}
    (work / "config.yaml").write_text(json.dumps(settings))  # JSON is YAML
    task = call("Bash", command="echo made > made.txt") + " [[say It is made.]]"
    command = [str(bin_ / "cn"), "-p", "--auto", "--config", str(work / "config.yaml"), task]
    told = run(work, command, CONTINUE_GLOBAL_DIR=str(work / "home" / "continue"))
    assert "It is made." in told and (work / "made.txt").read_text() == "made\n"


AGENTS = (
    Agent("Codex", "@openai/codex", "responses", (codex_edits, codex_sees)),
    Agent(
        "Claude Code",
        "@anthropic-ai/claude-code",
        "messages",
        (claude_edits, claude_sees, claude_searches),
    ),
    Agent("opencode", "opencode-ai", "chat", (opencode_edits,)),
    Agent("qwen-code", "@qwen-code/qwen-code", "chat", (qwen_edits,)),
    Agent("Continue", "@continuedev/cli", "chat", (continue_edits,)),
    Agent("pi", "@mariozechner/pi-coding-agent", "responses", (pi_edits,)),
)
