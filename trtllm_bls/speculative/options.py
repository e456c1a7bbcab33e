"""What a caller may choose about speculation, and what a caller is told afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trtllm_bls.errors import InvalidRequest

# In-flight requests -> longest draft, read as "up to so many requests"; none above the last row.
# The shape of TensorRT-LLM's draft_len_schedule and vLLM's table, at the small end of both:
# a verified token costs a batch row that a waiting request could have used.
LOAD_SCHEDULE = ((4, 16), (8, 4), (16, 2), (32, 1))


class DraftSource(str, Enum):
    """Where guesses come from; the value is what callers write."""

    MODEL = "model"
    NGRAM = "ngram"  # repeat what followed the same tokens earlier in this text
    MIXED = "mixed"  # n-gram where there is a match, the model elsewhere


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """How one request is speculated; times are seconds.

    ``num_draft_tokens`` absent means as many as pay off, none included; a number is kept whatever
    the load. ``max_draft_tokens`` is a ceiling beside the engine's own. ``overlap`` lets the draft
    model work while the target does: always, never, or (``None``) where that measures faster.
    ``min_match`` is the fewest tokens an n-gram must share.
    """

    num_draft_tokens: int | None = None
    use_draft_logits: bool = False
    draft_source: DraftSource = DraftSource.MODEL
    max_draft_tokens: int = 16
    draft_deadline_s: float = 0.5
    overlap: bool | None = False
    min_match: int = 3
    load_schedule: tuple[tuple[int, int], ...] = LOAD_SCHEDULE

    def __post_init__(self) -> None:
        if self.num_draft_tokens is not None and self.num_draft_tokens < 0:
            raise InvalidRequest("num_draft_tokens", f"{self.num_draft_tokens} is below 0")

    @property
    def uses_model(self) -> bool:
        return self.draft_source != DraftSource.NGRAM

    @property
    def uses_lookup(self) -> bool:
        return self.draft_source != DraftSource.MODEL


@dataclass
class SpeculationStats:
    """What speculation did, for one request or for all; counts of tokens unless named otherwise.

    ``rounds`` verified a draft; plain decoding between them is not counted. ``fallback`` says in
    one word why drafting was given up (error, deadline, vocabulary, malformed, refused).
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    ngram_drafted: int = 0
    ngram_accepted: int = 0
    draft_failures: int = 0
    overlap_used: int = 0  # drafts that were ready when their round began
    overlap_wasted: int = 0  # drafts thrown away because the guess before them was wrong
    fallback: str | None = None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted per drafted token; ``None`` when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    def add_round(self, source: DraftSource, drafted: int, accepted: int) -> None:
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        if source is DraftSource.NGRAM:
            self.ngram_drafted += drafted
            self.ngram_accepted += accepted

    def add_failure(self, why: str) -> None:
        self.draft_failures += 1
        self.fallback = why
