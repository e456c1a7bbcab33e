"""Log-probabilities and logits: their shapes, and that they belong to the ids beside them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conformance.deployment import Deployment
from tests.conformance.engine_client import Engine
from tests.conformance.prompts import LENGTH, Story
from tests.conformance.test_tokens import BOTH

# TensorRT-LLM computes log-probabilities only where some sampling option is set.
LOG_PROBS = {"return_log_probs": True, "runtime_top_k": 1}


@BOTH
def test_log_probs_are_all_so_far(engine: Engine, story: Story, streaming: bool) -> None:
    """Each response has one number per token since the beginning; earlier ones never change."""
    answer = engine.ask(story.prompt, 6, streaming=streaming, **LOG_PROBS)
    assert answer.ids == story.tokens[:6]
    seen: list[float] = []
    told = 0
    for response in answer.responses:
        told += len(response.ids)
        so_far = response.outputs["output_log_probs"]
        assert so_far.shape == (1, 1, told)
        assert so_far[0, 0, : len(seen)].tolist() == seen
        seen = so_far[0, 0].tolist()
    assert told == 6
    assert max(seen) < 1e-3


@BOTH
def test_cum_log_probs_are_their_sum(engine: Engine, story: Story, streaming: bool) -> None:
    """Shape [1, 1], in every response."""
    # An engine may join the tokens that a late reader has not taken, but hardly sixty.
    responses = engine.ask(story.prompt, 60, streaming=streaming, **LOG_PROBS).responses
    assert len(responses) > streaming
    for response in responses:
        total = response.outputs["cum_log_probs"]
        assert total.shape == (1, 1)
        assert total[0, 0] == pytest.approx(response.outputs["output_log_probs"].sum(), abs=0.05)


def test_context_logits_have_a_row_per_prompt_token(
    engine: Engine, deployment: Deployment, story: Story, logits: None
) -> None:
    """[1, P, V], V at least the vocabulary; the last row chooses the first token."""
    asked = {"return_context_logits": True}
    for streaming in (False, True):
        answer = engine.ask(story.prompt, 3, streaming=streaming, **asked)
        all_rows = [
            response.outputs["context_logits"] for response in answer.responses if response.outputs
        ]
        rows = all_rows[0]
        assert all(np.array_equal(rows, again) for again in all_rows)  # on every response
        assert rows.ndim == 3
        assert rows.shape[:2] == (1, len(story.prompt))
        assert rows.shape[2] >= deployment.vocab_size
        assert int(rows[0, -1, : deployment.vocab_size].argmax()) == story.tokens[0]


def test_context_logits_tell_what_follows_each_prefix(
    engine: Engine, deployment: Deployment, story: Story, logits: None
) -> None:
    """With the answer as part of the prompt, its rows choose the answer's tokens."""
    before = len(story.prompt)
    whole = story.prompt + story.tokens
    rows = engine.ask(whole, 1, return_context_logits=True).last.outputs["context_logits"]
    best = rows[0, before - 1 : -1, : deployment.vocab_size].argmax(axis=-1)
    assert best.tolist() == story.tokens


def test_generation_logits_of_a_whole_answer(
    engine: Engine, deployment: Deployment, story: Story, logits: None
) -> None:
    """[1, 1, steps, V]; the first rows belong to the ids (more steps may be unfilled)."""
    answer = engine.ask(story.prompt, LENGTH, return_generation_logits=True)
    rows = answer.last.outputs["generation_logits"]
    assert rows.ndim == 4
    assert rows.shape[:2] == (1, 1)
    assert rows.shape[2] >= LENGTH
    assert rows[0, 0, :LENGTH, : deployment.vocab_size].argmax(axis=-1).tolist() == story.tokens


def test_generation_logits_of_streamed_pieces(
    engine: Engine, deployment: Deployment, story: Story, logits: None
) -> None:
    """[1, new steps, 1, V]: two axes are swapped, and only the new steps are there."""
    answer = engine.ask(story.prompt, LENGTH, streaming=True, return_generation_logits=True)
    best: list[int] = []
    for response in answer.responses:
        new = len(response.ids)
        if not new:  # the last response may have nothing to tell
            continue
        rows = response.outputs["generation_logits"]
        assert rows.ndim == 4
        assert rows.shape[0] == rows.shape[2] == 1
        assert rows.shape[1] >= new
        best += rows[0, :new, 0, : deployment.vocab_size].argmax(axis=-1).tolist()
    assert best == story.tokens


def test_the_first_steps_logits_are_the_last_prompt_tokens(
    engine: Engine, story: Story, logits: None
) -> None:
    """Asked for together, both outputs tell the same of the first generated token."""
    asked = {"return_generation_logits": True, "return_context_logits": True}
    outputs = engine.ask(story.prompt, 1, **asked).last.outputs
    first = outputs["generation_logits"][0, 0, 0]
    assert first == pytest.approx(outputs["context_logits"][0, -1], abs=0.25)
