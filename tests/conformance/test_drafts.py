"""Draft tokens: guesses of another model, verified in one pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conformance.deployment import Deployment
from tests.conformance.engine_client import Answer, Array, Engine, Ids
from tests.conformance.prompts import LENGTH, Story, scattered

# Draws with a distribution that both sides can limit in the same way.
DRAW: dict[str, Any] = {"runtime_top_k": 8, "temperature": 1.0}
SURE = 1000.0  # a draft's logit that leaves the draft model no other choice


def verify(verifier: Engine, prompt: Ids, draft: Ids, **more: Any) -> Answer:
    """As one round of speculation asks: the draft and the token after it."""
    return verifier.ask(prompt, len(draft) + 1, draft_input_ids=draft, **more)


def wrong(deployment: Deployment, token: int) -> int:
    """Another token."""
    return (token + 1) % deployment.vocab_size


@pytest.mark.parametrize("count", [1, 4])
def test_a_right_draft_is_accepted_with_one_token_more(
    verifier: Engine, story: Story, count: int
) -> None:
    """k right tokens give k + 1."""
    assert verify(verifier, story.prompt, story.tokens[:count]).ids == story.tokens[: count + 1]


@pytest.mark.parametrize("right", [0, 1, 3])
def test_a_draft_is_accepted_up_to_its_first_mistake(
    verifier: Engine, deployment: Deployment, story: Story, right: int
) -> None:
    """The right ones, then the model's own; what is right behind the mistake counts nothing."""
    draft = story.tokens[:5]
    draft[right] = wrong(deployment, draft[right])
    assert verify(verifier, story.prompt, draft).ids == story.tokens[: right + 1]


def test_streaming_a_verification_changes_nothing(
    verifier: Engine, deployment: Deployment, story: Story
) -> None:
    """The same ids, however they are cut into responses."""
    draft = [*story.tokens[:2], wrong(deployment, story.tokens[2])]
    assert verify(verifier, story.prompt, draft, streaming=True).ids == story.tokens[:3]


@pytest.mark.parametrize("at", [0, 2, 4])
def test_an_end_within_a_draft_ends_it(verifier: Engine, story: Story, at: int) -> None:
    """At the end token, drafted or following the draft, only what was before it is the answer."""
    answer = verify(verifier, story.prompt, story.tokens[:4], end_id=story.tokens[at])
    assert answer.ids == story.tokens[:at]
    assert answer.last.final


def test_rounds_of_verification_are_plain_decoding(
    verifier: Engine, deployment: Deployment, story: Story
) -> None:
    """Good, bad and mixed drafts in turn: round by round the greedy answer comes out."""
    told: Ids = []
    for mistake in (3, 0, 1, 3, 2, 0, 3, 3, 3, 3):
        draft = story.tokens[len(told) : len(told) + 3]
        if mistake < len(draft):
            draft[mistake] = wrong(deployment, draft[mistake])
        if not draft:
            break
        told += verify(verifier, story.prompt + told, draft).ids
    assert told[:LENGTH] == story.tokens


def test_a_whole_answer_with_drafts_may_start_with_the_prompt(
    verifier: Engine, story: Story
) -> None:
    """exclude_input_in_output means the same with drafts."""
    verifier.needs("exclude_input_in_output")
    answer = verify(verifier, story.prompt, story.tokens[:2], exclude_input_in_output=False)
    assert answer.last.ids == story.prompt + story.tokens[:3]
    assert len(answer.responses) == 1


def test_the_longest_draft_is_taken_and_a_longer_one_refused(
    verifier: Engine, deployment: Deployment, story: Story
) -> None:
    """max_draft_len is what the engine was built for."""
    most = deployment.max_draft_len
    longest = (story.tokens * most)[:most]
    longest[0] = wrong(deployment, longest[0])
    assert verify(verifier, story.prompt, longest).ids == story.tokens[:1]
    assert verify(verifier, story.prompt, [*longest, longest[0]]).error


def test_drafted_tokens_are_counted(verifier: Engine, deployment: Deployment, story: Story) -> None:
    """Of four drafted the two before the mistake were accepted."""
    verifier.needs("return_perf_metrics", "total_accepted_draft_tokens")
    draft = [*story.tokens[:2], wrong(deployment, story.tokens[2]), story.tokens[3]]
    last = verify(verifier, story.prompt, draft, return_perf_metrics=True).last
    assert last.number("total_draft_tokens") == 4
    assert last.number("total_accepted_draft_tokens") == 2
    assert last.number("acceptance_rate") == pytest.approx(0.5)


def test_verified_tokens_have_their_logits(
    verifier: Engine, deployment: Deployment, story: Story, logits: None
) -> None:
    """The first rows are those of the tokens that came back."""
    draft = [*story.tokens[:2], wrong(deployment, story.tokens[2])]
    answer = verify(verifier, story.prompt, draft, return_generation_logits=True)
    rows = answer.last.outputs["generation_logits"][0, 0, :3, : deployment.vocab_size]
    assert rows.argmax(axis=-1).tolist() == answer.ids == story.tokens[:3]


def test_verified_tokens_that_stream_have_their_logits_too(
    verifier: Engine, deployment: Deployment, story: Story, logits: None
) -> None:
    """[1, new steps, 1, V], here perhaps with several steps in one response."""
    answer = verify(
        verifier, story.prompt, story.tokens[:3], streaming=True, return_generation_logits=True
    )
    best: Ids = []
    for response in answer.responses:
        new = len(response.ids)
        if new:
            rows = response.outputs["generation_logits"]
            assert (rows.shape[0], rows.shape[2]) == (1, 1)
            best += rows[0, :new, 0, : deployment.vocab_size].argmax(axis=-1).tolist()
    assert best == answer.ids == story.tokens[:4]


def drafted(engine: Engine, prompt: Ids, count: int) -> tuple[Ids, Array]:
    """Tokens that the model itself draws, and its logits for them, [count, V]."""
    seed = {engine.spelling("seed", "random_seed"): 9}
    answer = engine.ask(prompt, count, return_generation_logits=True, **DRAW, **seed)
    return answer.ids, answer.last.outputs["generation_logits"][0, 0, :count].copy()


def unlikely(deployment: Deployment, row: Array) -> tuple[int, Array]:
    """The token that the model would choose last, and logits of a draft model sure of it."""
    token = int(row[: deployment.vocab_size].argmin())
    sure = np.zeros_like(row)
    sure[token] = SURE
    return token, sure


def judged(verifier: Engine) -> dict[str, Any]:
    """Where a threshold can be given no chance is involved: half of the draft's probability."""
    given = "draft_acceptance_threshold" in verifier.types
    return DRAW | ({"draft_acceptance_threshold": 0.5} if given else {})


@pytest.mark.parametrize("right", [0, 1, 3])
def test_logits_decide_which_drafts_are_accepted(
    engine: Engine, verifier: Engine, deployment: Deployment, logits: None, right: int
) -> None:
    """Drafts as likely to the target as to the draft model are accepted, impossible ones not.

    After a accepted drafts comes one token of the target's own, not the one it rejected.
    """
    verifier.needs("draft_logits")
    prompt = scattered(deployment.vocab_size, 80)
    ids, rows = drafted(engine, prompt, 3)
    rejected = None
    if right < len(ids):
        rejected, rows[right] = unlikely(deployment, rows[right])
        ids[right] = rejected
    answer = verify(verifier, prompt, ids, draft_logits=rows, **judged(verifier))
    assert answer.ids[:right] == ids[:right]
    assert len(answer.ids) == right + 1
    assert answer.ids[right] != rejected


def test_a_certain_draft_is_accepted_whatever_threshold_is_drawn(
    engine: Engine, verifier: Engine, story: Story, logits: None
) -> None:
    """With top-k 1 both models are certain, and no drawn threshold is above certainty."""
    verifier.needs("draft_logits")
    asked = {"return_generation_logits": True}
    rows = engine.ask(story.prompt, 3, **asked).last.outputs["generation_logits"][0, 0, :3]
    draft = story.tokens[:3]
    answer = verify(verifier, story.prompt, draft, draft_logits=rows, runtime_top_k=1)
    assert answer.ids == story.tokens[:4]
