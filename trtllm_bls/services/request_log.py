"""One line per request that is over, as ``key=value`` pairs (logfmt) or as JSON.

Callers choose ids, and errors quote their values: each value is cut, and escaped so that it can
neither end the line nor reach a terminal as a command.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from typing import Any

from trtllm_bls.request_stats import Outcome, RequestStats

# Characters of a value, as written, so that no line is too long for ``TritonLogHandler``.
_LONGEST, _LONGEST_PROMPT = 250, 900
_PLAIN = re.compile(r"[\w.:/@+-]+", re.ASCII)

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RequestLog:
    """Writes the lines; failures as warnings. ``prompts``: with what the caller sent."""

    as_json: bool = False
    prompts: bool = False

    def add(self, stats: RequestStats) -> None:
        """Write one request's line."""
        level = logging.WARNING if stats.outcome is Outcome.FAILED else logging.INFO
        log.log(level, "%s", self.line(stats))

    def line(self, stats: RequestStats) -> str:
        """The line; what a request does not have is left out."""
        found = {key: value for key, value in self._fields(stats).items() if value is not None}
        if self.as_json:
            return json.dumps(found)
        return "request " + " ".join(f"{key}={_logfmt(value)}" for key, value in found.items())

    def _fields(self, stats: RequestStats) -> dict[str, Any]:
        done = stats.speculation
        return {
            "id": _cut(stats.request_id, _LONGEST),
            "outcome": stats.outcome.value,
            "reason": stats.reason,
            "prompt_tokens": stats.prompt_tokens,
            "completion_tokens": stats.completion_tokens,
            "sequences": stats.sequences,
            "responses": stats.responses,
            "duration_ms": _ms(stats.duration_s),
            "queue_ms": _ms(stats.queue_s),
            "ttft_ms": _ms(stats.ttft_s),
            "inter_token_ms": _ms(stats.inter_token_s),
            "longest_gap_ms": _ms(stats.longest_gap_s),
            "rounds": done and done.rounds,
            "drafted": done and done.drafted,
            "accepted": done and done.accepted,
            "acceptance": round(done.accepted / done.drafted, 3) if done and done.drafted else None,
            "trace_id": stats.traceparent and stats.traceparent.split("-")[1],
            "error": _cut(stats.error, _LONGEST),
            "prompt": _cut(stats.prompt, _LONGEST_PROMPT) if self.prompts else None,
        }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


def _cut(text: str | None, most: int) -> str | None:
    if text is None:
        return None
    shown = text[:most]
    while len(json.dumps(shown)) > most:
        shown = shown[: len(shown) * 7 // 8]
    return shown if shown == text else shown + "..."


def _logfmt(value: Any) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
