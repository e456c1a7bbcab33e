"""The small tokenizers and the demo's, loaded once; copies to change; one that counts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.helpers.small_tokenizers import MAKERS, directory
from trtllm_bls.text.detokenizer import Detokenizer
from trtllm_bls.text.tokenizer import Tokenizer, load_tokenizer

DEMO = Path(__file__).parents[2] / "assets" / "demo" / "target"
FAMILIES = (*MAKERS, "demo")


@cache
def loaded(family: str) -> Tokenizer:
    return load_tokenizer(DEMO if family == "demo" else directory(family))


def copied(tmp_path: Path, family: str = "byte-level", **files: Any) -> Path:
    """A directory to change: ``files`` are further JSON files by their stem."""
    path = tmp_path / "tokenizer"
    shutil.copytree(directory(family), path)
    for stem, content in files.items():
        (path / f"{stem}.json").write_text(json.dumps(content))
    return path


class Counted:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, tokenizer: Tokenizer, decoder: dict[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self.decoder = decoder
        self.vocab_size = tokenizer.vocab_size
        self.added_ids = tokenizer.added_ids
        self.special_ids = tokenizer.special_ids
        self.token = tokenizer.token
        self.encode_word = tokenizer.encode_word
        self.decoded = self.calls = 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        self.decoded += len(token_ids)
        self.calls += 1
        return self._tokenizer.decode(token_ids, skip_special_tokens)


def stream(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    """What each id brings, then the flush."""
    return [*(detokenizer.feed((token_id,)) for token_id in token_ids), detokenizer.flush()]
