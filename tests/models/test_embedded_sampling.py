"""From a row of logits to a token: each rule, its order, and what a seed promises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from doubles.sampling import TokenSampler, log_prob
from tests.helpers.embedded_steps import Steps, generated, prompt, request
from trtllm_bls.engines.embedded.sampling import TokenRules, choose, distribution, processed
from trtllm_bls.errors import EngineError
from trtllm_bls.types import Array, Draft, EngineRequest, Sampling

ROW = np.log(np.array([0.05, 0.4, 0.3, 0.2, 0.05], dtype=np.float32))  # best: 1, then 2, 3


def sampler(prompt: tuple[int, ...] = (0,), index: int = 0, **asked: Any) -> TokenRules:
    rules = {name: asked.pop(name) for name in list(asked) if name in Sampling.__annotations__}
    asked = {"sampling": Sampling(**rules), **asked}
    ask = EngineRequest(request_id="r", input_ids=prompt, max_tokens=99, **asked)
    return TokenRules(ask, index, len(ROW))


def tokens_of(row: Array, pickers: list[TokenRules]) -> list[int]:
    """The token that each of the sequences takes from the same row, all in one step."""
    logits = torch.from_numpy(row).expand(len(pickers), -1)
    rows = [picker.rows()[0] for picker in pickers]
    return [choice.checked().token for choice in choose(logits, rows, log_probs=False)]


def token_of(row: Array, picker: TokenRules) -> int:
    """The token that one sequence takes from a row."""
    return tokens_of(row, [picker])[0]


def scores_of(row: Array, picker: TokenRules) -> Array:
    """What the sequence's rules, but for the draw, make of a row."""
    (rules,) = picker.rows()
    assert rules is not None
    scores: Array = processed(torch.from_numpy(row)[None], [rules])[0].numpy()
    return scores


def shares(row: Array = ROW, draws: int = 4000, **asked: Any) -> list[float]:
    """How often each token is drawn, over many seeds."""
    counts = np.zeros(len(row))
    for token in tokens_of(row, [sampler(seed=seed, **asked) for seed in range(draws)]):
        counts[token] += 1
    return [float(share) for share in counts / draws]


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"top_k": 1},
        {"temperature": 0.0, "top_k": 4},
        {"temperature": 2.0},
        {"top_k": 0},
        {"top_p": 0.0},
    ],
)
def test_without_a_wish_to_sample_the_best_token_is_taken(rules: dict[str, Any]) -> None:
    """Neither top-k nor top-p given, top-k 1 and temperature 0 are greedy, whatever the seed."""
    assert set(tokens_of(ROW, [sampler(seed=seed, **rules) for seed in range(50)])) == {1}


def test_a_whole_top_p_samples_the_whole_distribution() -> None:
    """Every token comes up as often as its probability says."""
    assert shares(temperature=1.0, top_p=1.0) == pytest.approx(
        [0.05, 0.4, 0.3, 0.2, 0.05], abs=0.025
    )


def test_temperature_sharpens() -> None:
    """Dividing logits by one half squares the odds."""
    squares = np.exp(2 * ROW) / np.exp(2 * ROW).sum()
    assert shares(temperature=0.5, top_p=1.0) == pytest.approx(list(squares), abs=0.025)


def test_top_k_and_top_p_limit_one_after_the_other() -> None:
    """Top-p counts within what top-k left: 0.4 and 0.3 of 0.9 already hold 0.75."""
    assert shares(top_k=3, top_p=0.75) == pytest.approx([0, 4 / 7, 3 / 7, 0, 0], abs=0.025)


@pytest.mark.parametrize(("top_k", "top_p"), [(5, None), (None, 0.6), (20, 0.9)])
def test_the_limits_are_those_of_transformers(top_k: int | None, top_p: float | None) -> None:
    """The same tokens remain as after transformers' own warpers, and all of them come up."""
    scores = torch.randn(1, 40, generator=torch.Generator().manual_seed(3)) * 2
    kept = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    kept = TopPLogitsWarper(top_p)(None, kept) if top_p else kept
    pickers = [sampler(seed=seed, top_k=top_k, top_p=top_p) for seed in range(3000)]
    drawn = set(tokens_of(scores[0].numpy(), pickers))
    assert drawn == set(kept[0].isfinite().nonzero()[:, 0].tolist())


@pytest.mark.parametrize(("min_p", "top_p"), [(0.05, 1.0), (0.3, 1.0), (1.0, 1.0), (0.1, 0.6)])
def test_min_p_is_that_of_transformers(min_p: float, top_p: float) -> None:
    """After the temperature, and before top-p."""
    scores = torch.randn(1, 40, generator=torch.Generator().manual_seed(3)) * 2
    kept = TopPLogitsWarper(top_p)(None, MinPLogitsWarper(min_p)(None, scores / 0.8))
    rules = {"temperature": 0.8, "top_p": top_p, "min_p": min_p}
    row = scores[0].numpy()
    drawn = set(tokens_of(row, [sampler(seed=seed, **rules) for seed in range(3000)]))
    assert drawn == set(kept[0].isfinite().nonzero()[:, 0].tolist())


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_no_run_of_tokens_is_repeated(size: int) -> None:
    """What transformers bars is barred, however a text is split into prompt and answer."""
    chance = np.random.default_rng(size)
    barred = 0
    for length in range(1, 40):
        text = chance.integers(0, len(ROW), length).tolist()
        begun = int(chance.integers(1, length + 1))
        picker = sampler(tuple(text[:begun]), no_repeat_ngram_size=size)
        for token in text[begun:]:
            picker.push(token)
        row = torch.from_numpy(ROW)[None].clone()
        expected = NoRepeatNGramLogitsProcessor(size)(torch.tensor([text]), row)
        if not expected.isfinite().any():
            with pytest.raises(EngineError, match="no token"):
                token_of(ROW, picker)
            continue
        np.testing.assert_array_equal(scores_of(ROW, picker), expected[0].numpy())
        barred += int((~expected.isfinite()).sum())
    assert barred


def test_top_p_decays_down_to_its_floor_and_is_reset() -> None:
    """Each token multiplies top-p, never below the floor; the reset token restores it."""

    def choices(*said: int) -> set[int]:
        pickers = []
        for seed in range(300):
            rules = {"top_p": 0.8, "top_p_decay": 0.5, "top_p_min": 0.45, "top_p_reset_id": 4}
            picker = sampler(seed=seed, **rules)
            for token in said:
                picker.push(token)
            pickers.append(picker)
        return set(tokens_of(ROW, pickers))

    assert choices() == {1, 2, 3}
    assert choices(0) == {1, 2}  # 0.8 * 0.5, raised to 0.45
    assert choices(0, 4) == {1, 2, 3}


def test_penalties_count_prompt_and_generated_tokens_alike() -> None:
    """A text split into several requests is penalised like one that was not split."""
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    row = ROW + 2
    whole = sampler((0, 1), **penalties)
    for token in (1, 2):
        whole.push(token)
    split = sampler((0, 1, 1, 2), **penalties)
    expected = row.copy()
    for token, times in ((0, 1), (1, 2), (2, 1)):
        value = row[token] * 1.3 if row[token] < 0 else row[token] / 1.3
        expected[token] = value - 0.4 - 0.2 * times
    for picker in (whole, split):
        np.testing.assert_allclose(scores_of(row, picker), expected, rtol=1e-5)


def test_temperature_acts_before_penalties() -> None:
    """As in TensorRT-LLM, a presence penalty is not scaled by the temperature."""
    picker = sampler((1,), temperature=0.5, top_p=1.0, presence_penalty=1.0)
    assert scores_of(ROW, picker)[1] == pytest.approx(ROW[1] / 0.5 - 1)


def test_the_end_token_is_barred_until_enough_is_generated() -> None:
    """With ``min_tokens`` 2 the end token may come third at the earliest."""
    picker = sampler(end_id=1, min_tokens=2)
    said = []
    for _ in range(3):
        said.append(token_of(ROW, picker))
        picker.push(said[-1])
    assert said == [2, 2, 1]


def test_bad_sequences_are_never_completed() -> None:
    """One token is barred always, a longer sequence where its beginning stands, prompt included."""
    picker = sampler((3, 2), bad_sequences=((1,), (3, 2, 2)))
    assert token_of(ROW, picker) == 3
    picker.push(3)
    assert token_of(ROW, picker) == 2


def test_embedding_bias_is_added_before_anything_else() -> None:
    """A bias moves the choice; its place is before the temperature."""
    picker = sampler(embedding_bias=((4, 5.0),), temperature=0.5, top_k=1)
    assert token_of(ROW, picker) == 4
    assert scores_of(ROW, picker)[4] == pytest.approx((ROW[4] + 5) / 0.5)


def test_a_request_that_bars_every_token_is_an_error() -> None:
    """There is no token to choose, and none is made up."""
    with pytest.raises(EngineError, match="leave no token"):
        token_of(
            ROW,
            sampler(bad_sequences=tuple((t,) for t in range(5)), temperature=1.0, top_p=1.0),
        )


def test_tokens_without_probability_are_never_drawn() -> None:
    """Rounding at the ends of the distribution does not reach barred tokens."""
    row = np.array([-np.inf, 0, 0, -np.inf, -np.inf], dtype=np.float32)
    pickers = [sampler(seed=seed, temperature=1.0, top_p=1.0) for seed in range(200)]
    assert set(tokens_of(row, pickers)) == {1, 2}


def test_log_prob_is_of_the_models_own_distribution() -> None:
    """Before temperature, penalties and limits, and stable for large logits."""
    rules = sampler(temperature=0.3, bad_sequences=((2,),)).rows()
    (choice,) = choose(torch.from_numpy(ROW + 500)[None], rules, log_probs=True)
    assert choice.token == 1
    assert choice.log_prob == pytest.approx(np.log(0.4), abs=1e-4)


RULES = {
    "temperature": st.sampled_from([None, 0.0, 0.7, 1.3]),
    "top_k": st.sampled_from([None, 1, 3, 40]),
    "top_p": st.sampled_from([None, 0.0, 0.6, 0.95, 1.0]),
    "top_p_decay": st.sampled_from([None, 0.8]),
    "min_p": st.sampled_from([None, 0.1]),
    "repetition_penalty": st.sampled_from([None, 1.3]),
    "presence_penalty": st.sampled_from([None, 0.5]),
    "frequency_penalty": st.sampled_from([None, 0.3]),
    "no_repeat_ngram_size": st.sampled_from([None, 2]),
    "min_tokens": st.sampled_from([None, 2]),
    "seed": st.integers(0, 99),
}
REQUESTS = st.builds(
    EngineRequest,
    request_id=st.just("r"),
    max_tokens=st.just(9),
    input_ids=st.lists(st.integers(0, 39), min_size=1, max_size=6).map(tuple),
    sampling=st.builds(Sampling, **RULES),
    end_id=st.sampled_from([None, -1, 3]),
    bad_sequences=st.sampled_from([(), ((5,), (6, 7))]),
    embedding_bias=st.sampled_from([(), ((2, 3.0), (4, -8.0))]),
)


@given(st.lists(REQUESTS, min_size=1, max_size=5), st.integers(0, 9), st.booleans())
def test_rows_together_are_rows_one_by_one(
    requests: list[EngineRequest], start: int, by_logits: bool
) -> None:
    """Drafts, penalties, limits and draws of a batch are those of the plain rules in numpy."""
    chance = np.random.default_rng(start)
    logits, rows, expected = [], [], []
    for asked in requests:
        size = int(chance.integers(0, 4))
        raw = chance.normal(size=(size + 1, 40)).astype(np.float32) * 2
        guesses = chance.normal(size=(size, 40)).astype(np.float32) * 2 if by_logits else None
        ids = tuple(int(token) for token in chance.integers(0, 40, size))
        drafted = replace(asked, draft=Draft(token_ids=ids, logits=guesses))
        plain = TokenSampler(drafted, 0, 40)
        logits.append(raw)
        rows += TokenRules(drafted, 0, 40).rows(ids)
        for place, token in enumerate([*ids, None]):
            expected.append(plain.choose(raw[place], place))
            if token is not None:
                plain.push(token)
    joined = torch.from_numpy(np.concatenate(logits))
    choices = choose(joined, rows, log_probs=True)
    assert [choice.token for choice in choices] == expected
    for row, choice in zip(joined.numpy(), choices, strict=True):
        assert choice.log_prob == pytest.approx(log_prob(row, choice.token), abs=1e-4)


def test_a_nucleus_larger_than_the_sorted_candidates_is_whole() -> None:
    """On a CPU a part of the vocabulary is sorted first, which must not limit a flat row."""
    row = np.zeros(5000, dtype=np.float32)
    row[0] = 1
    sampling = Sampling(temperature=1.0, top_p=0.9)
    asked = EngineRequest(request_id="r", input_ids=(1,), max_tokens=1, sampling=sampling)
    (rules,) = TokenRules(asked, 0, len(row)).rows()
    assert rules is not None
    assert int((distribution(torch.from_numpy(row)[None], [rules]) > 0).sum()) == 5000


# --- what a seed promises ---------------------------------------------------------------------

SAMPLED = {"temperature": 1.2, "top_p": 1.0, "seed": 11}


def test_a_seed_gives_one_text_whatever_else_runs() -> None:
    """Alone, or in a batch with other requests that come and go: the same tokens."""
    alone = Steps().answer(request(prompt(12), 15, sampling=SAMPLED))
    busy = Steps(max_tokens_per_step=22)
    for n in (1, 2):
        busy.add(
            request(prompt(30, start=n), 9, sampling={"temperature": 1.0, "top_p": 1.0, "seed": n})
        )
    busy.step(2)
    asked = busy.add(request(prompt(12), 15, sampling=SAMPLED))
    busy.run()
    assert busy.text(asked) == alone
    assert alone != generated(prompt(12), 15)


def test_a_text_split_into_requests_is_the_text() -> None:
    """The number behind a token depends on its position, so rounds may use one seed."""
    whole = Steps().answer(request(prompt(12), 15, sampling=SAMPLED))
    ids = prompt(12)
    for part in (4, 1, 7, 3):
        ids += tuple(Steps().answer(request(ids, part, sampling=SAMPLED)))
    assert list(ids[12:]) == whole


def test_other_seeds_and_other_sequences_read_otherwise() -> None:
    """Sequences of one request, and requests of other seeds, are draws of their own."""
    steps = Steps()
    asked = steps.add(request(prompt(12), 15, sampling=SAMPLED, num_return_sequences=3))
    other = steps.add(request(prompt(12), 15, sampling=SAMPLED | {"seed": 12}))
    steps.run()
    texts = [tuple(steps.text(asked, n)) for n in range(3)] + [tuple(steps.text(other))]
    assert len(set(texts)) == 4


def test_an_absent_seed_is_seed_zero() -> None:
    """The contract's default: unseeded requests repeat themselves."""
    unseeded = Steps().answer(request(prompt(12), 9, sampling={"temperature": 1.0, "top_p": 1.0}))
    seeded = Steps().answer(
        request(prompt(12), 9, sampling={"temperature": 1.0, "top_p": 1.0, "seed": 0})
    )
    assert unseeded == seeded
