"""Load by Triton's perf_analyzer, a C++ program: what is measured is the server, not the client.

Its profile holds the time and the content of every response, so every answer is checked.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from bench.answers import Answer, Request
from bench.load import Load, Target

PATIENCE_S = 300
# It asks the server for statistics after the load, and now and then does not find a model's.
ATTEMPTS = 3
# Libraries that the program needs and the server's wheel has, under names of its own.
_LIBRARIES = {"libb64": "libb64.so.0d", "libcudart": "libcudart.so.12"}


class PerfAnalyzer:
    """``program`` asks Triton's models, and ``own`` all other servers, which it does not know."""

    def __init__(self, program: Path, scratch: Path, own: Load) -> None:
        self._program, self._own = program, own
        self._environment = dict(os.environ)
        wheel = importlib.util.find_spec("pytriton")
        if wheel is not None and wheel.origin is not None:
            links = scratch / "perf_analyzer_libraries"
            links.mkdir()
            for name, link in _LIBRARIES.items():
                for file in Path(wheel.origin).parents[1].glob(f"nvidia_pytriton.libs/{name}-*"):
                    (links / link).symlink_to(file)
            before = os.environ.get("LD_LIBRARY_PATH", "")
            self._environment["LD_LIBRARY_PATH"] = f"{links}:{before}" if before else str(links)
        asked = self._run(["--version"])
        printed = (asked.stderr + asked.stdout).strip().splitlines() or ["it prints nothing"]
        if "Perf Analyzer Version" not in printed[-1]:
            raise OSError(f"{program} does not run: {printed[0]}")
        self.name = f"{printed[-1]}; of servers that are not Triton's, {own.name}"

    def ask(self, target: Target, plan: list[list[Request]]) -> list[Answer]:
        """See ``Load.ask``; all streams have the same number of requests."""
        if target.api != "triton":
            return self._own.ask(target, plan)
        (url,), model, output = target.urls, target.model, target.output
        in_turn = [request for turn in zip(*plan, strict=True) for request in turn]
        with tempfile.TemporaryDirectory() as directory:
            data, profile = Path(directory) / "data.json", Path(directory) / "profile.json"
            data.write_text(json.dumps({"data": [_entry(request) for request in in_turn]}))
            options = {"-u": url, "-i": "grpc", "-m": model, "--input-data": str(data)}
            # A thread per stream takes every N-th entry, which is that stream's own.
            for option in ("--concurrency-range", "--max-threads"):
                options[option] = str(len(plan))
            options |= {"--request-count": str(len(in_turn)), "--profile-export-file": str(profile)}
            words = [word for option in options.items() for word in option]
            for _ in range(ATTEMPTS):
                ended = self._run(["--streaming", "--async", *words])
                if profile.exists():
                    break
            else:
                last = "\n".join((ended.stdout + ended.stderr).strip().splitlines()[-8:])
                raise OSError(f"perf_analyzer, {model}, ended with {ended.returncode}:\n{last}")
            (experiment,) = json.loads(profile.read_text())["experiments"]
        known = {_key(request.inputs): request for request in in_turn}
        answers = [_answer(entry, output, known) for entry in experiment["requests"]]
        if len(answers) != len(in_turn):
            raise OSError(f"perf_analyzer reports {len(answers)} of {len(in_turn)} requests")
        return answers

    def close(self) -> None:
        self._own.close()

    def _run(self, options: list[str]) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [str(self._program), *options],
                capture_output=True,
                text=True,
                env=self._environment,
                timeout=PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise OSError(f"perf_analyzer did not end within {PATIENCE_S} s") from None


def find(explicit: Path | None) -> Path | None:
    """The program: the one that was named, the PATH's, or what ``make bench`` has fetched."""
    fetched = Path(__file__).parents[2] / ".venv" / "perf_analyzer" / "bin" / "perf_analyzer"
    found = shutil.which("perf_analyzer")
    return explicit or (Path(found) if found else fetched if fetched.is_file() else None)


def _entry(request: Request) -> dict[str, Any]:
    return {
        name: {"content": values, "shape": [len(values)]} for name, values in request.inputs.items()
    }


def _key(inputs: dict[str, Any]) -> tuple[object, ...]:
    """Tells requests apart; the program writes lists of one as their value."""
    listed = {k: v if isinstance(v, list) else [v] for k, v in inputs.items()}
    prompt = listed.get("text_input") or listed["input_ids"]
    return *prompt, *(listed.get("max_tokens") or listed["request_output_len"])


def _answer(entry: dict[str, Any], output: str, known: dict[tuple[object, ...], Request]) -> Answer:
    parts = [_text(response.get(output, "")) for response in entry["response_outputs"]]
    request = known[_key(entry["request_inputs"])]
    answer = Answer(request, entry["timestamp"], entry["response_timestamps"], parts)
    # An output that did not come has any value in the profile.
    counts = [response.get("num_output_tokens", 0) for response in entry["response_outputs"]]
    if counts and 0 < counts[-1] <= int(str(request.inputs.get("max_tokens", [0])[0])):
        answer.counted = counts[-1]
    return answer.check()


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "".join(f"{token} " for token in (value if isinstance(value, list) else [value]))
