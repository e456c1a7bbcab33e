"""Drafts change how fast a text comes, never which text, and never its distribution."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.embedded_steps import NO_LOOP, VOCAB, Steps, generated, prompt, request
from tests.helpers.tiers import budget
from trtllm_bls.engines.base import QueuedChunks
from trtllm_bls.engines.embedded.batching import Sequence, Submission
from trtllm_bls.engines.embedded.sampling import TokenRules, choose
from trtllm_bls.types import (
    Array,
    Draft,
    EngineCapacity,
    EngineChunk,
    EngineRequest,
    FinishReason,
    Sampling,
    Wants,
)

IDS = prompt(14)
TRUTH = generated(IDS, 20)
WRONG = (TRUTH[2] + 1) % 90


def verified(draft: tuple[int, ...], **asked: Any) -> tuple[list[int], EngineChunk]:
    """The tokens of one verification, and its last chunk."""
    steps = Steps()
    asked.setdefault("max_tokens", len(draft) + 1)
    ask = request(IDS, draft=Draft(token_ids=draft), wants=Wants(perf_metrics=True), **asked)
    submission = steps.add(ask)
    rows = steps.run()
    assert rows == len(IDS) + len(draft)  # prompt and draft in one pass, and nothing after it
    return steps.text(submission), steps.chunks(submission)[-1]


@pytest.mark.parametrize(
    ("draft", "tokens"),
    [
        (TRUTH[:4], TRUTH[:5]),
        ([*TRUTH[:2], WRONG, TRUTH[3]], TRUTH[:3]),
        ([WRONG, *TRUTH[1:4]], TRUTH[:1]),
    ],
)
def test_the_accepted_beginning_and_one_token_more(draft: list[int], tokens: list[int]) -> None:
    """However much of the draft is right, what comes is the beginning of the greedy text."""
    text, last = verified(tuple(draft))
    assert text == tokens
    assert last.finish_reason is FinishReason.LENGTH
    assert last.metrics is not None
    assert last.metrics.total_draft_tokens == 4
    assert last.metrics.total_accepted_draft_tokens == len(tokens) - 1


def test_verification_ends_at_the_end_token() -> None:
    """An end token inside the draft ends the text, and is not part of it."""
    text, last = verified(tuple(TRUTH[:4]), end_id=TRUTH[2])
    assert (text, last.finish_reason) == (TRUTH[:2], FinishReason.END_ID)


def test_verification_ends_at_a_stop_sequence() -> None:
    """A stop sequence inside the draft is part of the text, what follows it is not."""
    text, last = verified(tuple(TRUTH[:4]), stop_sequences=(tuple(TRUTH[1:3]),))
    assert (text, last.finish_reason) == (TRUTH[:3], FinishReason.STOP)


def test_verification_keeps_to_the_token_budget() -> None:
    """A draft longer than ``max_tokens`` does not stretch it."""
    text, last = verified(tuple(TRUTH[:4]), max_tokens=2)
    assert (text, last.finish_reason) == (TRUTH[:2], FinishReason.LENGTH)


def test_a_draft_that_would_not_fit_the_longest_sequence_is_cut() -> None:
    """The slot's last tokens are verified, and no more."""
    steps = Steps(length=len(IDS) + 3)
    assert steps.answer(request(IDS, 9, draft=Draft(token_ids=tuple(TRUTH[:6])))) == TRUTH[:3]


@pytest.mark.parametrize("hits", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"temperature": 1.3, "top_p": 1.0, "seed": 4},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
    ],
)
def test_rounds_of_drafts_give_the_plain_text(hits: float, rules: dict[str, Any]) -> None:
    """Right, mixed and wrong drafts: token for token what plain decoding says, sampled or not."""
    steps = Steps()
    plain = steps.answer(request(IDS, 20, sampling=rules))
    luck = np.random.default_rng(0)
    ids = IDS
    computed = steps.batcher.num_computed_tokens
    while len(ids) < len(IDS) + 20:
        done = len(ids) - len(IDS)
        draft = tuple(
            token if luck.random() < hits else (token + 1) % 90 for token in plain[done : done + 3]
        )
        more = {"draft": Draft(token_ids=draft)} if draft else {}
        room = min(len(draft) + 1, 20 - done)
        ids += tuple(steps.answer(request(ids, room, sampling=rules, **more)))
    assert list(ids[len(IDS) :]) == plain
    # Rejected rows were taken back, accepted ones were not computed again.
    rounds = 20 if hits == 0 else 5
    if hits in (0.0, 1.0):
        assert steps.batcher.num_computed_tokens - computed <= rounds * 5


def test_a_verification_does_not_disturb_a_plain_stream() -> None:
    """Plain requests on the same engine run to their full length beside it."""
    steps = Steps()
    plain = steps.add(request(prompt(5), 20))
    steps.step(2)
    draft = steps.add(request(IDS, 5, draft=Draft(token_ids=tuple(TRUTH[:4]))))
    steps.run()
    assert steps.text(plain) == generated(prompt(5), 20)
    assert steps.text(draft) == TRUTH[:5]


def test_greedy_verification_by_logits_is_greedy() -> None:
    """With top-k 1 both distributions are certain: equal tokens pass, others are corrected."""
    logits = np.random.default_rng(1).normal(size=(3, VOCAB)).astype(np.float32)
    for place, token in enumerate([*TRUTH[:2], WRONG]):
        logits[place, token] = 50
    draft = Draft(token_ids=(*TRUTH[:2], WRONG), logits=logits)
    text = Steps().answer(request(IDS, 4, draft=draft, sampling={"top_k": 1}))
    assert text == TRUTH[:3]


# --- the distribution, against exact tables ----------------------------------------------------

SIZE = 4
TARGET = np.array(
    [[0.1, 0.5, 0.3, 0.1], [0.42, 0.1, 0.1, 0.38], [0.2, 0.3, 0.4, 0.1], [0.6, 0.1, 0.2, 0.1]]
)
GUESS = np.array(
    [[0.4, 0.1, 0.3, 0.2], [0.1, 0.5, 0.3, 0.1], [0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]
)
START, TOKENS = 0, 4
TEXTS = budget(600, 2000)


def rows(table: Array, before: int, tokens: tuple[int, ...]) -> Array:
    """Logits after ``before`` and after each of ``tokens``; a text looks back one token only."""
    return np.log(table[[before, *tokens]]).astype(np.float32)


def guessed(ids: tuple[int, ...], sampling: Sampling, count: int) -> tuple[int, ...]:
    """What a draft model says with the same seed."""
    ask = EngineRequest(request_id="d", input_ids=ids, max_tokens=count, sampling=sampling)
    rules = TokenRules(ask, 0, SIZE)
    text = ids
    for _ in range(count):
        logits = torch.from_numpy(rows(GUESS, text[-1], ()))
        (choice,) = choose(logits, rules.rows(), log_probs=False)
        text += (choice.token,)
        rules.push(choice.token)
    return text[len(ids) :]


def speculated(count: int, by_logits: bool, sampling: Sampling) -> tuple[int, ...]:
    """A text of ``TOKENS`` tokens in rounds of ``count`` drafts, all rounds with one seed."""
    ids: tuple[int, ...] = (START,)
    while len(ids) <= TOKENS:
        draft = guessed(ids, sampling, count)
        logits = rows(GUESS, ids[-1], draft[:-1]) if by_logits else None
        ask = EngineRequest(
            request_id="t",
            input_ids=ids,
            max_tokens=count + 1,
            sampling=sampling,
            draft=Draft(token_ids=draft, logits=logits),
        )
        capacity = EngineCapacity(vocab_size=SIZE, max_sequence_tokens=64)
        sequence = Sequence(ask, 0, capacity, Submission(1, QueuedChunks(), NO_LOOP))
        sequence.start(0, 0)
        target = torch.from_numpy(rows(TARGET, ids[-1], draft))
        segment = sequence.segment(64)
        choices = choose(target, sequence.token_rows(segment), log_probs=False)
        sequence.computed_to(segment.end, choices, None)
        ids = tuple(sequence.tokens)
    return ids[1 : 1 + TOKENS]


def limited(table: Array, top_k: int | None) -> Array:
    """The table after top-k, exactly."""
    edge = np.sort(table, axis=1)[:, -(top_k or SIZE)][:, None]
    kept = np.where(table >= edge, table, 0)
    return kept / kept.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("by_logits", "count", "top_k"),
    [(True, 1, None), pytest.param(True, 3, 2, marks=pytest.mark.slow), (False, 2, None)],
)
def test_pairs_of_tokens_across_rounds_follow_the_target(
    by_logits: bool, count: int, top_k: int | None
) -> None:
    """Chi-square on neighbouring tokens, most pairs across two rounds that share their seed."""
    counts = np.zeros((TOKENS - 1, SIZE, SIZE))
    for seed in range(TEXTS):
        sampling = Sampling(temperature=1.0, top_k=top_k, top_p=1.0, seed=seed)
        text = speculated(count, by_logits, sampling)
        for place, (left, right) in enumerate(itertools.pairwise(text)):
            counts[place, left, right] += 1
    exact = limited(TARGET, top_k)
    first = exact[START]
    for place in range(TOKENS - 1):
        expected = TEXTS * first[:, None] * exact
        possible = expected > 0
        assert counts[place][~possible].sum() == 0
        distance = ((counts[place] - expected) ** 2)[possible] / expected[possible]
        assert distance.sum() < 45  # 15 degrees of freedom: one in ten thousand; seeds are fixed
        first = first @ exact


def test_a_threshold_accepts_by_ratio_alone() -> None:
    """From the threshold on the draft is taken; below it the correction comes from p minus q."""
    target, guess = np.log([[0.6, 0.2, 0.2]]), np.log([[0.2, 0.2, 0.6]])

    def answers(drafted: int, threshold: float) -> set[int]:
        ids = set()
        for seed in range(40):
            sampling = Sampling(temperature=1.0, top_p=1.0, seed=seed)
            draft = Draft(token_ids=(drafted,), logits=guess, acceptance_threshold=threshold)
            ask = EngineRequest(
                request_id="t", input_ids=(0,), max_tokens=2, sampling=sampling, draft=draft
            )
            rows = TokenRules(ask, 0, 3).rows(draft.token_ids)
            logits = torch.from_numpy(target).float().expand(2, -1)
            ids.add(choose(logits, rows, log_probs=False)[0].token)
        return ids

    assert answers(2, threshold=0.3) == {2}
    assert answers(2, threshold=0.4) == {0}
