"""``trtllm-bls prove`` on the embedded engine: a short run, as a stranger would start it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers.children import Child
from tests.helpers.server_settings import ROOT
from tests.helpers.ticking_models import TICKER, write_model
from tests.helpers.waiting import until, until_ended
from trtllm_bls.operate.prove import _PROOF_PROMPTS, Report, page, plot


@pytest.mark.slow
def test_a_report_tells_all_and_nothing_private(tmp_path: Path) -> None:
    """Every check passes; no prompt, key, path or name of the machine is in any file."""
    words = ["prove", "--out", str(tmp_path / "report"), "--seconds", "0.5"]
    environment = os.environ | {"OPENAI_API_KEY": "sk-secret"}
    run = subprocess.run(
        [sys.executable, "-m", "trtllm_bls.cli", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    files = {file.name: file.read_text() for file in (tmp_path / "report").iterdir()}
    assert sorted(files) == ["load.svg", "report.json", "report.md"]
    found = json.loads(files["report.json"])
    assert list(found["sections"]) == [
        *("doctor", "conformance", "text", "cancellation and stop", "speculation", "load")
    ]
    assert dict(found["sections"]["text"])["transformers, of the engine's ids"].startswith("8 of 8")
    assert [row["streams"] for row in found["load"]] == [1, 8, 32]
    assert all(row["tokens/s"] > 0 and row["CPU per token, µs"] > 0 for row in found["load"])
    private = [*_PROOF_PROMPTS, "sk-secret", str(ROOT), str(tmp_path), str(Path.home()) + "/"]
    for text in files.values():
        assert not [word for word in (*private, socket.gethostname()) if word in text]


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
@pytest.mark.parametrize("moment", ["starts", "serves"])
def test_its_server_ends_with_it(number: int, moment: str, tmp_path: Path) -> None:
    """Whatever ends it, and whenever: a server that ran on would hold the GPU."""
    write_model(tmp_path / "models", "ticker", TICKER)
    words = ["prove", "--out", str(tmp_path / "report"), "--model-repository"]
    command = [sys.executable, "-m", "trtllm_bls.cli", *words, str(tmp_path / "models")]
    with Child(command, "prove") as run:
        own = psutil.Process(run.pid)
        if moment == "serves":
            assert "[1/6] doctor" in run.errors.next()
        family = until(lambda: own.children(recursive=True))
        run.process.send_signal(number)
        run.end(120)
    until_ended(family)


def test_a_failed_check_is_the_pages(tmp_path: Path) -> None:
    """With rows of two servers, of which one has no processes here."""
    load = [
        {"server": "trtllm-bls", "streams": 1, "tokens/s": 10.0, "CPU per token, µs": 5},
        {"server": "beside", "streams": 1, "tokens/s": 20.0, "TTFT p50, ms": 3.0},
    ]
    report = Report({"python": "3"}, {"text": [("ensemble", "FAILED: 7 of 8 texts equal")]}, load)
    assert report.failed and not Report({}, {"text": [("a", "ok")]}).failed
    assert "| ensemble | FAILED: 7 of 8 texts equal |" in page(report)
    assert "| beside | 1 | 20.0 |  | 3.0 |" in page(report)
    assert plot(load).count("<rect") == 4 and 'width="300"' in plot(load)
