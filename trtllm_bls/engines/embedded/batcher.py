"""In-flight batching: which sequences run, and what each step computes for them.

One ``step`` is one forward pass over all running sequences: the next token of each, drafts to be
verified, and as much of waiting prompts as fits. Sequences join and leave between any two steps.
What happens goes to ``events``; delivering them is the engine's business. Only the engine's thread
may call it; ``add`` and ``num_present`` may be called from any.
"""

from __future__ import annotations

import logging
import math

from trtllm_bls.engines.embedded.runner import Runner, Segment
from trtllm_bls.engines.embedded.sequence import Event, Sequence, Submission
from trtllm_bls.errors import EngineError, InvalidRequest
from trtllm_bls.types import Array, FinishReason

_log = logging.getLogger(__name__)

_SHORT = 64  # rows; a draft round or a chat's next turn: cheap enough to pass a long prompt


class Batcher:
    """``events``: what happened since they were last taken. ``max_rows`` is of one step."""

    def __init__(self, runner: Runner, max_rows: int) -> None:
        self.events: list[tuple[Submission, Event]] = []
        self.num_computed_tokens = 0  # rows of all forward passes so far
        self._runner, self._slots, self._max_rows = runner, runner.slots, max_rows
        self._waiting: list[Sequence] = []  # in order of arrival, like those that run
        self._running: list[Sequence] = []

    @property
    def num_present(self) -> int:
        """Sequences that wait or run."""
        return len(self._waiting) + len(self._running)

    def add(self, sequences: list[Sequence]) -> None:
        """Queue them; they start in order of arrival, as soon as a slot is free."""
        self._waiting.extend(sequences)

    def step(self) -> None:
        """One forward pass. Never raises for what a request or the model did wrong."""
        for sequence in [s for s in (*self._running, *self._waiting) if s.owner.cancelled]:
            sequence.finish = FinishReason.CANCELLED
            self._report(sequence)
        self._admit()
        # Single tokens come first, in the order of their slots. Rows and slots then line up, and
        # attention needs no gather.
        planned = sorted(self._plan(), key=lambda item: (len(item[1].tokens) > 1, item[1].slot))
        if not planned:
            return
        segments = [segment for _, segment in planned]
        num_rows = sum(len(segment.tokens) for segment in segments)
        try:
            logits = self._runner.forward(segments)
            highest, best = (part.tolist() for part in logits.max(dim=-1))
        except Exception as error:
            _log.exception("a step of %d rows failed", num_rows)
            for sequence, _ in planned:
                problem = f"the engine's step failed: {type(error).__name__}"
                self._fail(sequence, EngineError(problem))
            return
        self.num_computed_tokens += num_rows
        host = logits.cpu().numpy() if any(s.needs_rows for s, _ in planned) else None
        kept = slice(0, 0)
        for sequence, segment in planned:
            kept = slice(kept.stop, kept.stop + segment.keep)
            if all(map(math.isfinite, highest[kept])):
                rows = host[kept] if host is not None and sequence.needs_rows else None
                self._go_on(sequence, segment.end, best[kept], rows)
            else:
                self._slots.scrub(segment.slot)  # its keys and values are no better
                self._fail(sequence, EngineError("the model gave logits that are not finite"))

    def fail_all(self, problem: str) -> None:
        """End everything with an ``EngineError``."""
        for sequence in [*self._running, *self._waiting]:
            self._fail(sequence, EngineError(problem))

    def _admit(self) -> None:
        # The sequences of one request share its prompt: the first computes it, the others wait.
        read = {id(s.request) for s in self._running if s.reads_prompt}
        for sequence in self._waiting.copy():
            reuse = not sequence.request.wants.context_logits
            if not self._slots.free:
                break
            if reuse and id(sequence.request) in read:
                continue
            slot, reused = self._slots.claim(sequence.tokens, reuse=reuse)
            sequence.start(slot, reused)
            self._running.append(sequence)
            self._waiting.remove(sequence)
            if reused < len(sequence.tokens) - 1:
                read.add(id(sequence.request))

    def _plan(self) -> list[tuple[Sequence, Segment]]:
        """This step's segment of each sequence that gets one.

        Sequences that decode a single token always get it. Then those with few rows pass those with
        many, but half of the rows that are left stays for the latter. The oldest sequence may take
        all rows that are left, so that nobody starves.
        """
        planned = [(s, s.segment(1)) for s in self._running if s.num_rows == 1]
        several = [s for s in self._running if s.num_rows > 1]
        left = self._max_rows - len(planned)
        reserved = left // 2 if any(s.num_rows > _SHORT for s in several) else 0
        for sequence in sorted(several, key=lambda s: s.num_rows > _SHORT):
            passes = sequence.num_rows <= _SHORT and sequence is not several[0]
            segment = sequence.segment(max(left - reserved, 0) if passes else left)
            if segment.tokens:
                planned.append((sequence, segment))
                left -= len(segment.tokens)
        return planned

    def _go_on(self, sequence: Sequence, end: int, best: list[int], rows: Array | None) -> None:
        """Let the sequence choose its tokens, and report what is new."""
        try:
            sequence.computed_to(end, best, rows)
        except (EngineError, InvalidRequest) as error:
            self._fail(sequence, error)
        except Exception as error:
            _log.exception("choosing a token failed")
            problem = f"choosing a token failed: {type(error).__name__}"
            self._fail(sequence, EngineError(problem))
        else:
            self._report(sequence)

    def _fail(self, sequence: Sequence, error: EngineError | InvalidRequest) -> None:
        self.events.append((sequence.owner, error))
        sequence.owner.cancelled = True  # the other sequences of the request end with it
        self._free(sequence)

    def _report(self, sequence: Sequence) -> None:
        chunk = sequence.chunk()
        if chunk is not None:
            self.events.append((sequence.owner, chunk))
        if sequence.finish:
            self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._slots.release(sequence.slot)
            self._running.remove(sequence)
