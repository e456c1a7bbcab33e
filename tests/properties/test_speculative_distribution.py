"""Sampled answers keep the target's distribution, inside rounds and across their borders.

Every test draws with fixed seeds and compares pairs of neighbouring tokens with the target's own
table by chi-square: a seed that repeats, a wrong residual or a soft draft shows there at once.
"""

from __future__ import annotations

import numpy as np
import pytest

from doubles.scripted import Script
from doubles.scripted_tokens import table
from tests.helpers.scripted_pairs import Pair, RedrawingEngine, ids, pair, read
from tests.helpers.scripted_pairs import engine_request as ask
from tests.helpers.virtual_time import run_skipping_waits as run
from tests.helpers.virtual_time import skipping_waits
from trtllm_bls.speculative.learned import SpeculationShared
from trtllm_bls.speculative.options import DraftSource
from trtllm_bls.types import Sampling

TARGET = ((0.5, 0.3, 0.2), (0.1, 0.6, 0.3), (0.3, 0.3, 0.4))
GUESS = ((0.2, 0.6, 0.2), (0.4, 0.3, 0.3), (0.1, 0.2, 0.7))
ANSWERS, TOKENS = 80, 16
P_001_AT_6_DEGREES = 22.46  # three rows of a table with two free shares each
P_001_AT_3_DEGREES = 16.27  # four lengths of an answer
END = 2


async def chi_square(sampling: Sampling | None, **options: object) -> float:
    """Distance of the drawn pairs from ``TARGET``, over all answers."""
    counts = np.zeros((3, 3))
    engines = pair(table(TARGET), table(GUESS), Script(vocab_size=3), vocab_size=3)
    for seed in range(ANSWERS):
        drawn = Sampling(temperature=1.0, top_p=1.0, seed=seed) if sampling is None else sampling
        request = ask((0, 1, 2, 1, 0), max_tokens=TOKENS, sampling=drawn)
        answer = [0, *ids(await read(engines.speculative(**options), request))]
        assert len(answer) == TOKENS + 1
        np.add.at(counts, (answer[:-1], answer[1:]), 1)
    expected = counts.sum(axis=1, keepdims=True) * np.asarray(TARGET)
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "options",
    [
        {"num_draft_tokens": 1, "overlap": True},
        {"num_draft_tokens": 3},
        {"num_draft_tokens": 2, "draft_source": DraftSource.NGRAM},
        {"num_draft_tokens": 2, "use_draft_logits": True, "overlap": True},
        {"use_draft_logits": True, "draft_source": DraftSource.MIXED, "overlap": True},
    ],
    ids=str,
)
def test_pairs_of_tokens_are_distributed_as_the_target_says(options: dict[str, object]) -> None:
    """By id and by logits, from a model, from the text, and drafted ahead."""
    assert run(chi_square(None, **options)) < P_001_AT_6_DEGREES


@skipping_waits
async def test_without_a_seed_no_round_repeats_another() -> None:
    """The engine's own default would draw the same numbers in every round."""
    engines = pair(lambda _: [0.5, 0.5], lambda _: 0, vocab_size=2)
    request = ask((0,), max_tokens=80, sampling=Sampling(temperature=1.0, top_p=1.0))
    answer = ids(await read(engines.speculative(num_draft_tokens=1), request))
    seeds = [request.sampling.seed for request in engines.target.requests]
    assert None not in seeds and len(set(seeds)) == len(seeds)
    assert set(answer) == {0, 1}


@skipping_waits
async def test_the_draft_decodes_greedily_unless_its_logits_are_used() -> None:
    """Its likeliest token is accepted most often; but logits must belong to the tokens drawn."""
    for by_logits in (False, True):
        engines = pair(table(TARGET), table(GUESS), Script(vocab_size=3), vocab_size=3)
        sampling = Sampling(temperature=0.9, top_p=0.95, seed=3)
        engine = engines.speculative(num_draft_tokens=2, use_draft_logits=by_logits, overlap=True)
        await read(engine, ask((0,), max_tokens=60, sampling=sampling))
        assert engine.stats.overlap_used > 0
        asked = engines.draft.requests[0]
        drawn = (asked.sampling.temperature, asked.sampling.top_k, asked.sampling.top_p)
        assert drawn == ((0.9, None, 0.95) if by_logits else (None, 1, None))
        assert asked.wants.generation_logits is by_logits
        drafts = [
            (each.input_ids[-1], each.draft) for each in engines.target.requests if each.draft
        ]
        assert len(drafts) > 1
        for before, draft in drafts:
            assert (draft.logits is not None) == by_logits
            if draft.logits is not None:
                believed = [GUESS[token] for token in (before, *draft.token_ids[:-1])]
                assert np.exp(draft.logits) == pytest.approx(np.asarray(believed))


@pytest.mark.parametrize("ends", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(
    "options",
    [
        {"num_draft_tokens": 2, "use_draft_logits": True},
        {"num_draft_tokens": 3, "use_draft_logits": True, "overlap": True},
        {"use_draft_logits": True, "draft_source": DraftSource.MIXED},
        {"num_draft_tokens": 2},
    ],
    ids=str,
)
@skipping_waits
async def test_answers_are_as_long_as_plain_ones(options: dict[str, object], ends: float) -> None:
    """The target ends after each token with probability 1/2, whatever the draft model believes."""
    engines = pair(
        lambda _: (0.3, 0.2, 0.5),
        lambda _: ((1 - ends) / 2, (1 - ends) / 2, ends),
        Script(vocab_size=3),
        vocab_size=3,
        tells_reason=False,
    )
    found = []
    for seed in range(300):
        sampling = Sampling(temperature=1.0, top_p=1.0, seed=seed)
        request = ask((0, 1, 0, 1, 0), max_tokens=40, sampling=sampling, end_id=END)
        found.append(len(ids(await read(engines.speculative(**options), request))))
    counts = np.bincount(np.minimum(found, 3), minlength=4)
    expected = len(found) * np.array([1 / 2, 1 / 4, 1 / 8, 1 / 8])
    assert ((counts - expected) ** 2 / expected).sum() < P_001_AT_3_DEGREES


@skipping_waits
async def test_a_rejected_token_that_is_drawn_again_ends_no_answer() -> None:
    """On runtimes that draw from the whole distribution after a rejection, as some do."""
    script = Script(vocab_size=3, tells_reason=False)
    target = RedrawingEngine(table(TARGET), script)
    draft = pair(table(TARGET), table(GUESS), script).draft
    engines = Pair(target, draft, SpeculationShared())
    for seed in range(ANSWERS):
        sampling = Sampling(temperature=1.0, top_p=1.0, seed=seed)
        request = ask((0,), max_tokens=TOKENS, sampling=sampling)
        engine = engines.speculative(num_draft_tokens=3, use_draft_logits=True)
        assert len(ids(await read(engine, request))) == TOKENS
    assert target.redrawn > 0
