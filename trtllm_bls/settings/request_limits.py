"""Limits on the size of a request: ``RequestLimits``.

The wire checks the size of what has arrived; the orchestrator and the engine's service check what
is asked for. Each refusal names the field, its value, the limit and the parameter that sets it
(``parameters``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trtllm_bls.errors import InvalidRequest
from trtllm_bls.types import GUIDE_TEXT_INPUT, Guide

_LOGIT_BYTES = 4  # FP32
# A guide's text in quotes; the closing quote may be missing at the guide's end.
_QUOTED = re.compile(rb'"((?:[^"\\]|\\.)*)("?)', re.S)
# All bytes but the marks that make a guide's structure.
_NO_MARKS = bytes(set(range(256)) - set(b"[](){},|"))


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Sizes are bytes, times seconds; ``None`` = no limit."""

    max_request_bytes: int = 64 * 2**20
    max_prompt_bytes: int = 2**20
    max_output_tokens: int | None = None
    max_logits_bytes: int = 256 * 2**20
    max_timeout_seconds: float | None = None
    max_guide_bytes: int = 2**18
    max_guide_depth: int = 100
    max_guide_nodes: int = 50_000

    def check(self, limit: str, field: str, value: float | None, unit: str) -> None:
        """Raise ``InvalidRequest`` if ``value`` is above the field ``limit`` of this class."""
        maximum = getattr(self, limit)
        if maximum is not None and value is not None and value > maximum:
            problem = f"{value:.15g} {unit}; at most {maximum:.15g} are allowed"
            raise above_limit(field, problem, limit)

    def check_guide(self, guide: Guide | None) -> None:
        """Raise ``InvalidRequest`` if the grammar of guided decoding is too large or too deep.

        Compiling one costs an engine far more than reading it. Depth is that of its brackets,
        nodes are its brackets, commas and alternatives; those within quotes do not count.
        """
        if guide is None or not guide.text:
            return
        grammar = guide.text.encode()
        self.check("max_guide_bytes", GUIDE_TEXT_INPUT, len(grammar), "bytes")
        structure = _QUOTED.sub(_text_after_open_quote, grammar)
        marks = structure.translate(None, _NO_MARKS)
        depth = deepest = 0
        for mark in marks[: self.max_guide_nodes + 1]:
            depth += (mark in b"([{") - (mark in b")]}")
            deepest = max(deepest, depth)
        self.check("max_guide_depth", GUIDE_TEXT_INPUT, deepest, "levels")
        self.check("max_guide_nodes", GUIDE_TEXT_INPUT, len(marks), "nodes")

    def check_logits(self, rows: int, vocab_size: int | None) -> None:
        """Raise ``InvalidRequest`` for too many rows of logits, of ``vocab_size`` each.

        The rows of all responses count together.
        """
        size = rows * (vocab_size or 0) * _LOGIT_BYTES
        field = "return_context_logits, return_generation_logits"
        self.check("max_logits_bytes", field, size, "bytes of logits")


def _text_after_open_quote(quoted: re.Match[bytes]) -> bytes:
    """Drop a text in quotes, but keep what follows a quote that no other one closes."""
    if quoted[2]:
        return b""
    return quoted[1]


def above_limit(field: str, problem: str, parameter: str) -> InvalidRequest:
    """Make the refusal of a value that is above the limit which ``parameter`` sets."""
    return InvalidRequest(field, f"{problem} (parameter {parameter})", parameter)
