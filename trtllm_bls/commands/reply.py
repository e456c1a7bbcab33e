"""One answer as it arrives, and its figures."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from trtllm_bls.client import Event


class Reply:
    """An answer so far. Times are seconds of ``time.perf_counter()``."""

    def __init__(self) -> None:
        self.text = ""
        self.sent = time.perf_counter()
        self.arrivals: list[float] = []  # of responses with text
        self.finish_reason: str | None = None
        self.endings: dict[tuple[int, int], str] = {}  # by batch row and sequence
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

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first text, per second."""
        seconds = self.arrivals[-1] - self.arrivals[0] if self.arrivals else 0.0
        if not self.completion_tokens or seconds <= 0:
            return None
        return (self.completion_tokens - 1) / seconds


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Times in milliseconds unless named otherwise; ``None`` where there is nothing to measure.

    ``ended`` is the server's finish reason if it gave one.
    ``num_output_tokens`` is ``None`` when the
    server did not count. ``gap_p50_ms`` and ``gap_p99_ms`` are times between consecutive responses
    with text; a response may bring several tokens.
    """

    ended: str
    max_tokens: int
    num_input_tokens: int | None
    num_output_tokens: int | None
    responses: int
    ttft_ms: float | None
    gap_p50_ms: float | None
    gap_p99_ms: float | None
    duration_ms: float
    tokens_per_s: float | None

    def lines(self) -> tuple[str, ...]:
        # Every text takes a token at least; an answer cut short comes without a count.
        counted = self.num_output_tokens
        came = f"at least {self.responses}" if counted is None else str(counted)
        each = " in each answer" if (counted or 0) > self.max_tokens else ""
        asked = "" if self.num_input_tokens is None else f", {self.num_input_tokens} in the prompt"
        lines = [
            f"ended: {self.ended}",
            f"tokens: {came} of {self.max_tokens} asked for{each}{asked}",
            f"responses with text: {self.responses} in {self.duration_ms / 1000:.2f} s",
        ]
        if self.ttft_ms is not None:
            lines.append(f"first text: {self.ttft_ms:.1f} ms after sending")
        if self.gap_p50_ms is not None:
            lines.append(
                f"between responses: p50 {self.gap_p50_ms:.1f} ms, p99 {self.gap_p99_ms:.1f} ms"
            )
        if self.tokens_per_s is not None:
            lines.append(f"speed: {self.tokens_per_s:.1f} tokens/s from sending to the last text")
        return tuple(lines)


def summarise(reply: Reply, max_tokens: int, ended: str | None = None) -> Summary:
    """``ended`` overrides the server's reasons."""
    arrivals, tokens = reply.arrivals, reply.completion_tokens
    gaps = np.diff(arrivals) * 1000
    duration = arrivals[-1] - reply.sent if arrivals else 0.0
    reasons = ", ".join(reason for _, reason in sorted(reply.endings.items()))
    return Summary(
        ended=ended or reasons or "complete",
        max_tokens=max_tokens,
        num_input_tokens=reply.prompt_tokens,
        num_output_tokens=tokens,
        responses=len(arrivals),
        ttft_ms=(arrivals[0] - reply.sent) * 1000 if arrivals else None,
        gap_p50_ms=float(np.percentile(gaps, 50)) if len(gaps) else None,
        gap_p99_ms=float(np.percentile(gaps, 99)) if len(gaps) else None,
        duration_ms=duration * 1000,
        tokens_per_s=tokens / duration if tokens and duration > 0 else None,
    )
