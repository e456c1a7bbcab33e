"""Nothing that is generated is stale: ``make generate`` would change no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trtllm_bls.configure.pbtxt import generated, main

ROOT = Path(__file__).parents[2]
FILES = generated()


def comparable(path: str, text: str) -> Any:
    """A configuration is compared as Triton reads it: protobuf's releases differ in spaces."""
    if not path.endswith(".pbtxt"):
        return text
    first, _, _ = text.partition("\n")
    return first, text_format.Parse(text, model_config_pb2.ModelConfig())


@pytest.mark.parametrize("path", FILES)
def test_a_generated_file_is_what_its_declarations_say(path: str) -> None:
    """Nobody edits the file, or a declaration without ``make generate``."""
    text = (ROOT / path).read_text(encoding="utf-8")
    assert comparable(path, text) == comparable(path, FILES[path])


def test_every_file_that_says_it_is_generated_is_among_them() -> None:
    """A file that nothing writes any longer would go stale unnoticed."""
    marked = {
        str(path.relative_to(ROOT))
        for pattern in ("docs/*.md", "models/*/config.pbtxt", "deploy/**/*.yaml")
        for path in ROOT.glob(pattern)
        if "make generate" in path.read_text(encoding="utf-8")
    }
    assert marked == FILES.keys()


def test_generating_writes_stale_files_alone(tmp_path: Path) -> None:
    """And says which."""
    assert set(main(tmp_path)) == FILES.keys()
    assert main(tmp_path) == []
