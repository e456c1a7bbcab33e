"""Prompts made of token ids alone, so that no tokenizer is needed.

On a GPU the last bits of a logit depend on who else is in the batch, and a near-tie between two
tokens may then end either way. That is no fault, so tests that compare greedy answers use
"stories": of some made-up prompts those whose greedy answer the model is surest of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.conformance.engine_client import Answer, Engine, Ids

LENGTH = 8  # tokens of a story's answer
DISTINCT = 6  # so many of its first tokens differ from each other
_CANDIDATES = 24
_STORIES = 4


@dataclass(frozen=True)
class Story:
    """A prompt and its greedy answer, which tests may cut at any of the ``DISTINCT`` first."""

    prompt: Ids
    tokens: Ids


def scattered(vocab_size: int, seed: int, length: int = 16) -> Ids:
    """Different ids from the middle of the vocabulary: special tokens are at its ends."""
    middle = np.arange(vocab_size // 8, vocab_size * 7 // 8)
    chosen = np.random.default_rng(seed).choice(middle, length, replace=False)
    return [int(token) for token in chosen]


def find_stories(engine: Engine, vocab_size: int, logits: bool) -> list[Story]:
    """Some stories, surest first; without logits nobody knows how sure they are."""
    prompts = [scattered(vocab_size, seed) for seed in range(_CANDIDATES // 2)]
    prompts += [prompt[:8] * 3 for prompt in prompts]  # most models go on with a pattern
    wanted = True if logits else None
    streams = [engine.start(prompt, LENGTH, return_generation_logits=wanted) for prompt in prompts]
    answers = [stream.answer() for stream in streams]
    order = sorted(range(len(prompts)), key=lambda at: -_margin(answers[at]))
    found = [Story(prompts[at], answers[at].ids) for at in order]
    found = [story for story in found if len(set(story.tokens[:DISTINCT])) == DISTINCT]
    assert len(found) >= _STORIES, "this model repeats itself too much to be tested with"
    return found[:_STORIES]


def _margin(answer: Answer) -> float:
    """How far the best token is from the second best, where that is least."""
    rows = answer.last.outputs.get("generation_logits")
    if rows is None:
        return 0.0
    best = np.partition(rows[0, 0, :LENGTH].astype(np.float32), -2, axis=-1)
    return float((best[:, -1] - best[:, -2]).min())


def words(*sequences: Sequence[int], columns: int = 0) -> list[Ids]:
    """Stop or bad sequences as the wire wants them, [2, N]: ids end to end, and end offsets."""
    ids = [token for sequence in sequences for token in sequence]
    ends = np.cumsum([len(sequence) for sequence in sequences]).tolist()
    width = max(len(ids), columns)
    return [ids + [0] * (width - len(ids)), ends + [-1] * (width - len(ends))]
