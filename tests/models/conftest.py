"""Tokenizers that many tests only read, and where `configure` writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.loaded_tokenizers import loaded
from tests.helpers.small_tokenizers import directory
from tests.models.configured import BUILD, Demo, make_engine
from trtllm_bls.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def bytes_made() -> Tokenizer:
    return loaded("byte-level")


@pytest.fixture(scope="session")
def pieces_made() -> Tokenizer:
    return loaded("sentencepiece")


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    engine = make_engine(tmp_path / "engine", BUILD)
    return Demo(tmp_path / "repository", engine, directory("byte-level"))
