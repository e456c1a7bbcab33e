"""Programs that tests and benchmarks start, kill and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.server_settings import ROOT

NOTICE_S = 4  # more than a router's looks at /health are apart


@dataclass
class Process:
    """A command that can be killed with all its processes, and started again."""

    words: list[str]
    log: Path
    status: Path | None = None  # by which it drains
    environment: dict[str, str] = field(default_factory=dict)
    running: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        environment = {**os.environ, **self.environment, "PYTHONPATH": str(ROOT)}
        with self.log.open("ab") as log:
            self.running = subprocess.Popen(
                self.words, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def kill(self) -> None:
        """All of its processes at once: of a killed supervisor's, the workers would drain."""
        if self.running.returncode is None:  # afterwards another process may have its id
            with suppress(ProcessLookupError):
                os.killpg(self.running.pid, signal.SIGKILL)
            self.running.wait(60)

    def end(self) -> None:
        """As an orchestrator ends it: drained where it can be, then SIGTERM."""
        if self.status is not None:
            drain = [sys.executable, "-m", "trtllm_bls.cli", "drain", "--dir", str(self.status)]
            words = [*drain, "--notice", str(NOTICE_S), "--wait"]
            subprocess.run(words, check=True, capture_output=True, cwd=ROOT, timeout=60)
        self.running.terminate()
        self.running.wait(60)
