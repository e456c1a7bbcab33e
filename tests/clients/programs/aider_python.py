"""aider, a program for the terminal: its model writes files in its answer."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from shared import BASE, MODEL, check

_TASK = "Make it. [[say made.txt\n```\nmade\n```]]"


@check("chat", "writes a file that it is told in the answer, whole and streamed")
def _edits() -> None:
    for how in ("--stream", "--no-stream"):
        with tempfile.TemporaryDirectory() as work:
            command = [str(Path(sys.executable).with_name("aider")), how, "--message", _TASK]
            command += ["--model", f"openai/{MODEL}", "--edit-format", "whole", "--yes-always"]
            command += ["--no-git", "--no-check-update", "--no-show-model-warnings", "made.txt"]
            keys = {"OPENAI_API_BASE": f"{BASE}/v1", "OPENAI_API_KEY": "any", "HOME": work}
            environment = {"PATH": os.environ["PATH"], "AIDER_ANALYTICS": "false", **keys}
            done = subprocess.run(
                command, cwd=work, env=environment, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stdout + done.stderr
            made = Path(work) / "made.txt"
            assert made.is_file() and made.read_text() == "made\n", done.stdout + done.stderr
