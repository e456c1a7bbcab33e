"""What the doctor finds, and configurations to spoil."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import text_format

from tests.models.configured import Demo
from trtllm_bls.operate import doctor  # whose checks are in the list then
from trtllm_bls.operate.checks import PYTHON
from trtllm_bls.operate.findings import Finding, Subject, examine


def findings(name: str, **subject: Any) -> list[Finding]:
    """What one check found, without what is as it should be."""
    checks = [each for each in doctor.CHECKS if each.name == name]
    assert checks, name
    return [finding for _, finding in examine(Subject(**subject), checks) if finding.level != "ok"]


def only(found: list[Finding]) -> Finding:
    assert len(found) == 1, found
    assert found[0].remedy
    return found[0]


def change(demo: Demo, model: str, **values: str | None) -> None:
    """Set parameters of a model that was written; ``None`` removes one."""
    config = demo.config(model)
    for key, value in values.items():
        if value is None:
            del config.parameters[key]
        else:
            config.parameters[key].string_value = value
    rewrite(demo, model, config)


def rewrite(demo: Demo, model: str, config: Any) -> None:
    (demo.out / model / "config.pbtxt").write_text(text_format.MessageToString(config))


def container(place: Path) -> Path:
    """A server with TensorRT-LLM's backend, as its containers have it; no file of it can run."""
    for backend in ("python", "tensorrtllm"):
        (place / "backends" / backend).mkdir(parents=True)
    stub = place / "python_backend_stubs" / PYTHON / "triton_python_backend_stub"
    for binary in (place / "bin" / "tritonserver", stub):
        binary.parent.mkdir(parents=True)
        binary.write_text("#!/bin/sh\n")
        binary.chmod(0o755)
    return place
