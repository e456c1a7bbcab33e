"""One answer as it arrives, and its figures."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from trtllm_bls.client import Event


class Reply:
    """An answer so far, to a request for ``max_tokens``.

    Times are seconds of ``time.perf_counter()``. ``ended_here`` says why this side ended it, where
    the server did not.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.text = ""
        self.sent = time.perf_counter()
        self.arrivals: list[float] = []  # of responses with text
        self.finish_reason: str | None = None
        self.endings: dict[tuple[int, int], str] = {}  # by batch row and sequence
        self.ended_here: str | None = None
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None

    def add(self, event: Event) -> None:
        """Add a response. Some servers count the tokens of each response, others at the end."""
        self.text += event.text
        if any(event.texts):
            self.arrivals.append(event.received_at)
        if event.finish_reason:
            self.finish_reason = event.finish_reason
            stop = f" at {event.stop_reason!r}" if event.stop_reason else ""
            self.endings[event.batch_index, event.sequence_index] = event.finish_reason + stop
        if event.num_input_tokens is not None:
            self.prompt_tokens = event.num_input_tokens
        if event.num_output_tokens is not None:
            self.completion_tokens = (self.completion_tokens or 0) + event.num_output_tokens

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first text."""
        return self.arrivals[0] - self.sent if self.arrivals else None

    def figures(self) -> dict[str, Any]:
        """What there is to measure; ``None`` for what there is not.

        ``ended`` is the server's finish reason, of each sequence. ``num_output_tokens`` is ``None``
        where the server did not count. ``gap_p50_ms`` and ``gap_p99_ms`` are times between
        consecutive responses with text; a response may bring several tokens. ``tokens_per_s`` is
        from sending to the last text.
        """
        gaps = np.diff(self.arrivals) * 1000
        duration = self.arrivals[-1] - self.sent if self.arrivals else 0.0
        tokens = self.completion_tokens
        reasons = ", ".join(reason for _, reason in sorted(self.endings.items()))
        return {
            "ended": self.ended_here or reasons or "complete",
            "max_tokens": self.max_tokens,
            "num_input_tokens": self.prompt_tokens,
            "num_output_tokens": tokens,
            "responses": len(self.arrivals),
            "ttft_ms": None if self.ttft_s is None else self.ttft_s * 1000,
            "gap_p50_ms": float(np.percentile(gaps, 50)) if len(gaps) else None,
            "gap_p99_ms": float(np.percentile(gaps, 99)) if len(gaps) else None,
            "duration_ms": duration * 1000,
            "tokens_per_s": tokens / duration if tokens and duration > 0 else None,
        }

    def lines(self) -> list[str]:
        """The same, to be read."""
        found = self.figures()
        # Every text takes a token at least; an answer cut short comes without a count.
        tokens, count = self.completion_tokens, len(self.arrivals)
        came = f"at least {count}" if tokens is None else str(tokens)
        each = " in each answer" if (tokens or 0) > self.max_tokens else ""
        asked = "" if self.prompt_tokens is None else f", {self.prompt_tokens} in the prompt"
        lines = [
            f"ended: {found['ended']}",
            f"tokens: {came} of {self.max_tokens} asked for{each}{asked}",
            f"responses with text: {count} in {found['duration_ms'] / 1000:.2f} s",
        ]
        if count:
            lines.append(f"first text: {found['ttft_ms']:.1f} ms after sending")
        if count > 1:
            p50, p99 = found["gap_p50_ms"], found["gap_p99_ms"]
            lines.append(f"between responses: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
        if (speed := found["tokens_per_s"]) is not None:
            lines.append(f"speed: {speed:.1f} tokens/s from sending to the last text")
        return lines
