"""In-flight batching: which sequences run, and what each step computes for them.

One ``step`` is one forward pass over all running sequences: the next token of each, drafts to be
verified, and as much of waiting prompts as fits. Sequences join and leave between any two steps.
What happens goes to ``events``; delivering them is the engine's business. Single-threaded: only
the engine's thread may call it.
"""

from __future__ import annotations

import collections
import logging
import math

from trtllm_bls.engines.embedded.attention import Segment
from trtllm_bls.engines.embedded.runner import Runner
from trtllm_bls.engines.embedded.sequence import Sequence
from trtllm_bls.engines.embedded.settings import EmbeddedSettings
from trtllm_bls.engines.embedded.slots import SlotTable
from trtllm_bls.engines.embedded.submission import Event, Submission
from trtllm_bls.errors import EngineError
from trtllm_bls.messages import Array, FinishReason

_log = logging.getLogger(__name__)

# Rows of a draft round or of a chat's next turn: cheap enough to pass a long prompt in the queue.
_SHORT = 64


class Batcher:
    """``events`` holds what happened since they were last taken, in order."""

    def __init__(self, runner: Runner, settings: EmbeddedSettings, length: int) -> None:
        self.events: list[tuple[Submission, Event]] = []
        self.num_computed_tokens = 0  # rows of all forward passes so far
        self._runner = runner
        self._max_rows = settings.max_tokens_per_step
        self._slots = SlotTable(settings.max_batch, length)
        self._waiting: collections.deque[Sequence] = collections.deque()
        self._running: list[Sequence] = []  # in order of arrival

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._running)

    @property
    def num_present(self) -> int:
        """Sequences that wait or run."""
        return len(self._waiting) + len(self._running)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue it; it starts in order of arrival, as soon as a slot is free."""
        self._waiting.append(sequence)

    def step(self) -> None:
        """One forward pass. Never raises for what a request or the model did wrong."""
        self._drop_cancelled()
        self._admit()
        planned = self._plan()
        if not planned:
            return
        # Single tokens first and by slot: so they meet their slots without being gathered.
        planned.sort(key=lambda item: (len(item[1].tokens) > 1, item[1].slot))
        segments = [segment for _, segment in planned]
        try:
            logits = self._runner.forward(segments)
            highest, best = (part.tolist() for part in logits.max(dim=-1))
        except Exception as error:
            _log.exception("a step of %d rows failed", sum(len(s.tokens) for s in segments))
            for sequence, _ in planned:
                self._fail(sequence, f"the engine's step failed: {type(error).__name__}")
            return
        self.num_computed_tokens += sum(len(segment.tokens) for segment in segments)
        host = logits.cpu().numpy() if any(s.needs_rows for s, _ in planned) else None
        first = 0
        for sequence, segment in planned:
            kept = slice(first, first + segment.keep)
            first += segment.keep
            if not all(map(math.isfinite, highest[kept])):
                self._poisoned(sequence)
                continue
            self._slots.write(segment.slot, segment.start, segment.tokens)
            rows = host[kept] if host is not None and sequence.needs_rows else None
            self._go_on(sequence, segment.end, best[kept], rows)

    def fail_all(self, problem: str) -> None:
        """End everything with an ``EngineError``."""
        for sequence in [*self._running, *self._waiting]:
            self._fail(sequence, problem)
        self._waiting.clear()

    def _drop_cancelled(self) -> None:
        for sequence in [s for s in self._running if s.owner.cancelled]:
            self._leave(sequence, FinishReason.CANCELLED)
        if any(sequence.owner.cancelled for sequence in self._waiting):
            for sequence in [s for s in self._waiting if s.owner.cancelled]:
                self._waiting.remove(sequence)
                self._leave(sequence, FinishReason.CANCELLED)

    def _admit(self) -> None:
        passed: list[Sequence] = []
        while self._waiting and self._slots.has_free:
            sequence = self._waiting.popleft()
            if sequence.waits:
                passed.append(sequence)
                continue
            reuse = not sequence.request.wants.context_logits
            claim = self._slots.claim(sequence.tokens, reuse=reuse)
            if claim.copy_from is not None:
                self._runner.cache.copy(claim.copy_from, claim.slot, claim.reused)
            sequence.start(claim.slot, claim.reused)
            self._running.append(sequence)
        self._waiting.extendleft(reversed(passed))

    def _plan(self) -> list[tuple[Sequence, Segment]]:
        """This step's segment of each sequence that gets one.

        Single tokens always; then short segments, up to half of what is left while long prompts
        wait; then prompts in order of arrival, of which the last may be cut.
        """
        sizes = [(s, len(s.pending) + len(s.draft)) for s in self._running]
        single = [s for s, rows in sizes if rows == 1]
        short = [(s, rows) for s, rows in sizes if 1 < rows <= _SHORT]
        long = [s for s, rows in sizes if rows > _SHORT]
        planned = [(sequence, self._segment(sequence, 1)) for sequence in single]
        left = self._max_rows - len(single)
        reserve = left // 2 if long else 0
        behind: list[Sequence] = []
        for sequence, rows in short:
            if rows > left - reserve:
                behind.append(sequence)
                continue
            planned.append((sequence, self._segment(sequence, rows)))
            left -= rows
        for sequence in [*long, *behind]:
            segment = self._segment(sequence, left)
            if segment.tokens:
                planned.append((sequence, segment))
                left -= len(segment.tokens)
        return planned

    def _segment(self, sequence: Sequence, most: int) -> Segment:
        """The next rows of a sequence: all that is pending with its draft, or a piece without."""
        assert sequence.slot is not None
        pending = sequence.pending
        whole = len(pending) + len(sequence.draft) <= most
        tokens = [*pending, *sequence.draft] if whole else pending[: min(most, len(pending) - 1)]
        keep = 1 + len(sequence.draft) if whole else 1  # one row at least, to see NaN early
        if sequence.request.wants.context_logits and sequence.reads_prompt:
            keep = len(tokens)
        return Segment(sequence.slot, sequence.computed, tokens, keep)

    def _poisoned(self, sequence: Sequence) -> None:
        """The slot's keys and values are no better than its logits."""
        assert sequence.slot is not None
        self._runner.cache.scrub(sequence.slot)
        self._slots.forget(sequence.slot)
        self._fail(sequence, "the model gave logits that are not finite")

    def _go_on(self, sequence: Sequence, end: int, best: list[int], rows: Array | None) -> None:
        """Let the sequence choose its tokens, and report what is new."""
        try:
            sequence.computed_to(end, best, rows)
        except EngineError as error:
            self._fail(sequence, str(error))
            return
        except Exception as error:
            _log.exception("choosing a token failed")
            self._fail(sequence, f"choosing a token failed: {type(error).__name__}")
            return
        if sequence.finish:
            self._leave(sequence, sequence.finish)
        else:
            self._report(sequence)

    def _fail(self, sequence: Sequence, problem: str) -> None:
        self.events.append((sequence.owner, EngineError(problem)))
        sequence.owner.cancel()  # the other sequences of the request end with it
        self._free(sequence)

    def _leave(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish = reason
        self._free(sequence)
        self._report(sequence)

    def _free(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            self._slots.release(sequence.slot)
            self._running.remove(sequence)
            sequence.slot = None

    def _report(self, sequence: Sequence) -> None:
        chunk = sequence.chunk()
        if chunk is not None:
            self.events.append((sequence.owner, chunk))
