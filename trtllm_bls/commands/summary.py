"""Figures of one answer, from what arrived and when. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from trtllm_bls.client.events import Event


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Times in milliseconds unless named otherwise; ``None`` where there is nothing to measure.

    ``ended`` is the server's word where it gave one. ``num_output_tokens`` is ``None`` when the
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
        """For people."""
        # Every text takes a token at least; an answer cut short comes without a count.
        counted = self.num_output_tokens
        came = f"at least {self.responses}" if counted is None else str(counted)
        asked = "" if self.num_input_tokens is None else f", {self.num_input_tokens} in the prompt"
        lines = [
            f"ended: {self.ended}",
            f"tokens: {came} of {self.max_tokens} asked for{asked}",
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


def summarise(
    events: Sequence[Event], started_at: float, max_tokens: int, ended: str | None = None
) -> Summary:
    """``started_at`` is when the request was sent; ``ended`` overrides the server's reasons."""
    arrivals = [event.received_at for event in events if any(event.texts)]
    gaps = np.diff(arrivals) * 1000
    tokens = _total(event.num_output_tokens for event in events)
    duration = (arrivals[-1] - started_at) if arrivals else 0.0
    return Summary(
        ended=ended or endings(events),
        max_tokens=max_tokens,
        num_input_tokens=_last(event.num_input_tokens for event in events),
        num_output_tokens=tokens,
        responses=len(arrivals),
        ttft_ms=(arrivals[0] - started_at) * 1000 if arrivals else None,
        gap_p50_ms=float(np.percentile(gaps, 50)) if len(gaps) else None,
        gap_p99_ms=float(np.percentile(gaps, 99)) if len(gaps) else None,
        duration_ms=duration * 1000,
        tokens_per_s=tokens / duration if tokens and duration > 0 else None,
    )


def endings(events: Sequence[Event]) -> str:
    """Why each sequence ended, in the server's words; several are listed in their order."""
    reasons = {
        (event.batch_index, event.sequence_index): _reason(event)
        for event in events
        if event.finish_reason
    }
    return ", ".join(reason for _, reason in sorted(reasons.items())) or "complete"


def _reason(event: Event) -> str:
    return str(event.finish_reason) + (f" at {event.stop_reason!r}" if event.stop_reason else "")


def _total(counts: Iterable[int | None]) -> int | None:
    # Some servers count each response, others the whole sequence on its last one; both add up.
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _last(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return known[-1] if known else None
