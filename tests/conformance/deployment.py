"""Which deployment the suite is pointed at: its options, and what they say about the engine.

Without a URL that is this session's own server. Everything that cannot be asked over the wire
(vocabulary, draft length, whether logits are gathered) is an option.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """``vocab_size`` without padding; lengths in tokens; 0 = not known or not there."""

    url: str = ""
    model: str = "tensorrt_llm"
    verifier: str = ""
    vocab_size: int = 0
    max_draft_len: int = 0
    max_sequence: int = 0
    slots: int = 8
    no_logits: bool = False
    engines: str = "embedded,trtllm"


_HELP = {
    "url": "host:port of a server's gRPC endpoint; absent: a server of this session's own",
    "model": "the model to test",
    "verifier": "the model that takes drafts, if it is another one with the same weights",
    "vocab_size": "ids 0 to this minus 1 are tokens; needed with a URL",
    "max_draft_len": "draft tokens that the verifier takes; 0: what its parameter says, or none",
    "max_sequence": "longest prompt and completion together; 0: what the model parameter says",
    "slots": "requests that the engine runs at once (its max_batch_size)",
    "no_logits": "the engine was built without gathering logits",
    "engines": "without a URL: which of this machine, of embedded, cpp-RELEASE, trtllm, llm_api",
}


def add_options(parser: pytest.Parser) -> None:
    """One option per field of ``Deployment``, with its default."""
    group = parser.getgroup("conformance", "the tensorrt_llm model that tests/conformance tests")
    for field in fields(Deployment):
        option, default = _option(field.name), field.default
        how: dict[str, Any] = {"type": type(default)}
        if isinstance(default, bool):
            how = {"action": "store_true"}
        group.addoption(option, default=default, help=_HELP[field.name], **how)


def read_options(config: pytest.Config) -> Deployment:
    """What the options say; ends the run where a URL came without a vocabulary."""
    given = {
        # The options exist only when pytest was started on this directory.
        field.name: config.getoption(_option(field.name), field.default)
        for field in fields(Deployment)
    }
    deployment = Deployment(**given)
    if deployment.url and not deployment.vocab_size:
        pytest.exit(f"{_option('url')} needs {_option('vocab_size')}", returncode=4)
    return deployment


def filled_in(asked: Deployment, parameters: Mapping[str, str]) -> Deployment:
    """With the lengths that ``trtllm-bls configure`` writes into the model's parameters."""

    def known(key: str) -> int:
        value = parameters.get(key, "")
        return int(value) if value.isdigit() else 0

    return replace(
        asked,
        max_draft_len=asked.max_draft_len or known("max_draft_len"),
        max_sequence=asked.max_sequence or known("max_sequence_tokens"),
    )


def of_our_own(asked: Deployment, url: str, checkpoint: Path, slots: int) -> Deployment:
    """The embedded engine with ``checkpoint``, whose sizes are in its configuration."""
    config = json.loads((checkpoint / "config.json").read_text())
    return replace(
        asked,
        url=url,
        vocab_size=config["vocab_size"],
        max_sequence=config["max_position_embeddings"],
        slots=slots,
    )


def _option(field: str) -> str:
    return f"--conformance-{field.replace('_', '-')}"
