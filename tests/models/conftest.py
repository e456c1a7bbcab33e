"""Tokenizers that many tests only read."""

from __future__ import annotations

import pytest

from tests.helpers.loaded_tokenizers import loaded
from trtllm_bls.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def bytes_made() -> Tokenizer:
    return loaded("byte-level")


@pytest.fixture(scope="session")
def pieces_made() -> Tokenizer:
    return loaded("sentencepiece")
