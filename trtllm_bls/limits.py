"""What one request may cost before any work is done for it.

The wire applies these to what has arrived, the orchestrator and the engine's service to what is
asked for. Each refusal names the field, its value, the limit and the parameter that sets it. What
the numbers mean is told where the parameters are (``parameters/limits.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_bls.errors import InvalidRequest

_LOGIT_BYTES = 4  # FP32


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Sizes are bytes, times seconds; ``None`` = no limit."""

    max_request_bytes: int = 64 * 2**20
    max_prompt_bytes: int = 2**20
    max_output_tokens: int | None = None
    max_logits_bytes: int = 256 * 2**20
    max_timeout_s: float | None = None

    def check_request_bytes(self, total: int) -> None:
        """Raises ``InvalidRequest`` where all inputs together are too large."""
        _check("inputs", total, "bytes", self.max_request_bytes, "max_request_bytes")

    def check_text_bytes(self, field: str, size: int) -> None:
        """The same for one text."""
        _check(field, size, "bytes", self.max_prompt_bytes, "max_prompt_bytes")

    def check_output_tokens(self, field: str, tokens: int) -> None:
        """The same for the tokens that a request may generate."""
        if self.max_output_tokens is not None:
            _check(field, tokens, "tokens", self.max_output_tokens, "max_output_tokens")

    def check_timeout(self, field: str, seconds: float) -> None:
        """The same for the time that a request gives itself."""
        if self.max_timeout_s is not None and seconds > self.max_timeout_s:
            raise InvalidRequest(
                field,
                f"{seconds:g} s is not allowed; at most {self.max_timeout_s:g} s are "
                "(parameter max_timeout_seconds)",
            )

    def check_logits(self, rows: int, vocab_size: int | None) -> None:
        """The same for so many rows of logits, of ``vocab_size`` each, in all responses."""
        if rows and vocab_size is not None:
            size = rows * vocab_size * _LOGIT_BYTES
            field, unit = "return_context_logits, return_generation_logits", "bytes of logits"
            _check(field, size, unit, self.max_logits_bytes, "max_logits_bytes")


def _check(field: str, value: int, unit: str, most: int, parameter: str) -> None:
    if value > most:
        problem = f"{value} {unit}; at most {most} are allowed (parameter {parameter})"
        raise InvalidRequest(field, problem)
