"""Programs that tests and benchmarks start, kill and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.children import Child
from tests.helpers.server_settings import ROOT

NOTICE_S = 4  # more than a router's looks at /health are apart


@dataclass
class Process:
    """A command that can be killed with all its processes, and started again."""

    words: list[str]
    status: Path | None = None  # by which it drains
    environment: dict[str, str] = field(default_factory=dict)
    child: Child = field(init=False)

    def start(self) -> None:
        environment = {**os.environ, **self.environment, "PYTHONPATH": str(ROOT)}
        self.child = Child(self.words, env=environment)

    def kill(self) -> None:
        """All of its processes at once: of a killed supervisor's, the workers would drain."""
        if self.child.process.returncode is None:  # afterwards another process may have its id
            with suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)
            self.child.end()

    def end(self) -> None:
        """As an orchestrator ends it: drained where it can be, then SIGTERM."""
        if self.status is not None:
            drain = [sys.executable, "-m", "trtllm_bls.cli", "drain", "--dir", str(self.status)]
            words = [*drain, "--notice", str(NOTICE_S), "--wait"]
            subprocess.run(words, check=True, capture_output=True, cwd=ROOT, timeout=240)
        self.child.terminate()
