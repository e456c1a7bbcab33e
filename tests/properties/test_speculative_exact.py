"""Speculation changes no token: the same answer as the target alone, wherever a round is cut."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from doubles.scripted_tokens import agreeing, hashed, reciting
from tests.helpers.scripted_pairs import GREEDY, VOCAB, hashed_pair, ids, pair, read, told
from tests.helpers.scripted_pairs import engine_request as ask
from tests.helpers.virtual_time import skipping_waits
from trtllm_bls.engines.base import join_chunks
from trtllm_bls.speculative.options import DraftSource
from trtllm_bls.types import EngineRequest, FinishReason, Sampling, Wants

LENGTHS = range(1, 13)
FIXED_OR_ADAPTIVE = (0, 1, 2, 3, 4, 5, 6, None)
END = 9
ANSWER = (3, 4, 5, 3, 4, 6, 7, 8)


@pytest.mark.parametrize("source", DraftSource)
@pytest.mark.parametrize("overlap", [False, True])
@skipping_waits
async def test_greedy_output_is_the_targets_own(source: DraftSource, overlap: bool) -> None:
    """For every draft length, fixed or adaptive, and every limit."""
    for count, limit in product(FIXED_OR_ADAPTIVE, LENGTHS):
        engines = hashed_pair()
        request = ask(max_tokens=limit, end_id=0 if limit % 3 == 0 else None)
        plain = await read(engines.target, request)
        engine = engines.speculative(num_draft_tokens=count, draft_source=source, overlap=overlap)
        assert told(await read(engine, request)) == told(plain), (count, limit)
        assert engines.live == (0, 0)


@pytest.mark.parametrize("wrong_at", [None, 0, 3, 5])
@pytest.mark.parametrize("kind", ["end", "stop", "long stop", "limit", "model's limit"])
@skipping_waits
async def test_an_end_falls_anywhere_inside_a_round(kind: str, wrong_at: int | None) -> None:
    """At every position, in rounds of every length, with drafts right or wrong before it.

    Also on a wire that never tells why a request ended.
    """
    guesses = tuple(1 if place == wrong_at else token for place, token in enumerate(ANSWER))
    for count, place in product((1, 2, 3, 8), range(1, 8)):
        tells = (count + place) % 2 == 0
        request, target = _ending(kind, place)
        known = reciting((*ANSWER[:place], END) if kind == "end" else ANSWER, 2, END)
        engines = pair(known, reciting(guesses, 2, END), tells_reason=tells, **target)
        plain_ids, plain_reason = told(await read(engines.target, request))
        said, reason = told(await read(engines.speculative(num_draft_tokens=count), request))
        assert (count, place, said) == (count, place, plain_ids)
        assert plain_reason is (_reason(kind) if tells else None)
        assert reason is _reason(kind)


def _ending(kind: str, place: int) -> tuple[EngineRequest, dict[str, int]]:
    request = ask((1, 2), max_tokens=8, end_id=END)
    if kind == "stop":
        return replace(request, stop_sequences=((ANSWER[place - 1],),)), {}
    if kind == "long stop":
        return replace(request, stop_sequences=((0, 0), ANSWER[max(0, place - 3) : place])), {}
    if kind == "limit":
        return replace(request, max_tokens=place), {}
    if kind == "model's limit":
        return request, {"max_sequence_tokens": 2 + place}
    return request, {}


def _reason(kind: str) -> FinishReason:
    if "stop" in kind:
        return FinishReason.STOP
    return FinishReason.LENGTH if "limit" in kind else FinishReason.END_ID


@pytest.mark.parametrize("source", DraftSource)
@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": replace(GREEDY, min_tokens=7)},
        {"sampling": replace(GREEDY, min_tokens=7), "stop_sequences": ((1,), (2,), (3,), (4,))},
        {"sampling": replace(GREEDY, repetition_penalty=1.5, frequency_penalty=0.3)},
        {"sampling": replace(GREEDY, presence_penalty=2.0)},
        {"bad_sequences": ((3,), (1, 2), (4, 5, 0))},
        {"embedding_bias": ((2, 1e5), (4, -1e5))},
    ],
)
@skipping_waits
async def test_fields_mean_over_all_rounds_what_they_say(
    source: DraftSource, fields: dict[str, object]
) -> None:
    """Minimum length, penalties, forbidden ids and bias do not start afresh in a round."""
    for count, start in product((1, 3, None), (0, 3)):
        engines = hashed_pair()
        request = ask((start, 1, 2, 3, 1, 2), max_tokens=14, end_id=0, **fields)
        plain = await read(engines.target, request)
        engine = engines.speculative(num_draft_tokens=count, draft_source=source)
        assert told(await read(engine, request)) == told(plain)


@pytest.mark.parametrize("tells", [True, False])
@skipping_waits
async def test_a_target_that_ends_after_every_step_is_not_taken_to_have_ended(tells: bool) -> None:
    """Engines built for external drafts do; one trial finds out, and all requests know."""
    plain = await read(hashed_pair().target, ask(max_tokens=9))
    engines = hashed_pair(one_step=True, tells_reason=tells)
    for _ in range(2):
        engine = engines.speculative(num_draft_tokens=0)
        await engine.capacity()
        assert told(await read(engine, ask(max_tokens=9))) == told(plain)
    probes = [request.request_id for request in engines.target.requests if request.max_tokens > 1]
    assert probes == ["scripted-steps"]


@skipping_waits
async def test_an_end_after_one_token_is_not_taken_for_such_a_target() -> None:
    """The same silence on the wire, and nothing more to come."""
    engines = pair(reciting((3,), 2, END), reciting((), 2, END), tells_reason=False)
    engine = engines.speculative(num_draft_tokens=0)
    assert told(await read(engine, ask((1, 2), end_id=END))) == ([3], FinishReason.END_ID)


@skipping_waits
async def test_a_target_that_ignores_drafts_is_still_believed() -> None:
    """It answers with plain tokens, more than a round could give; all of them are its own."""
    engines = pair(reciting(ANSWER, 2, END), reciting((1,) * 9, 2, END))
    inner = engines.target.generate
    engines.target.generate = lambda request: inner(  # type: ignore[method-assign]
        replace(request, draft=None)
    )
    engine = engines.speculative(num_draft_tokens=3)
    request = ask((1, 2), max_tokens=20, end_id=END)
    assert told(await read(engine, request)) == (list(ANSWER), FinishReason.END_ID)


@pytest.mark.parametrize("source", DraftSource)
@skipping_waits
async def test_figures_cover_every_token_of_every_round(source: DraftSource) -> None:
    """Log-probs, their sum, logits and metrics are the plain answer's; the prompt's logits once."""
    wants = Wants(log_probs=True, context_logits=True, generation_logits=True, perf_metrics=True)
    engines = pair(
        lambda context: [0.1 + 0.05 * (context[-1] == token) for token in range(VOCAB)],
        lambda context: context[-1],
    )
    request = ask(max_tokens=11, wants=wants, stop_sequences=((2,) * 9,))
    (plain,) = await read(engines.target, replace(request, streaming=False))
    engine = engines.speculative(num_draft_tokens=3, draft_source=source)
    chunks = await read(engine, request)
    log_probs = [value for chunk in chunks for value in chunk.log_probs or ()]
    assert (ids(chunks), log_probs) == (list(plain.token_ids), list(plain.log_probs or ()))
    assert len(log_probs) == 9  # the stop cuts a round in two
    assert chunks[-1].cum_log_prob == pytest.approx(sum(log_probs))
    logits = [chunk.generation_logits for chunk in chunks]
    assert plain.generation_logits is not None
    assert np.array_equal(np.concatenate(logits), plain.generation_logits)  # type: ignore[arg-type]
    assert [chunk.context_logits is not None for chunk in chunks].count(True) == 1
    assert chunks[0].context_logits is not None and len(chunks[0].context_logits) == 5
    metrics, stats = chunks[-1].metrics, engine.stats
    assert metrics is not None and metrics.total_draft_tokens == stats.drafted
    if source is DraftSource.MODEL:  # a plain stretch that is left early never tells its own
        assert metrics.kv_cache_alloc_new_blocks == len(engines.target.requests) - 1
    in_one_piece = replace(request, streaming=False)
    whole = join_chunks(await read(engines.speculative(num_draft_tokens=3), in_one_piece))
    assert (whole.token_ids, whole.log_probs) == (plain.token_ids, plain.log_probs)
    assert whole.context_logits is not None
    assert whole.cum_log_prob == pytest.approx(chunks[-1].cum_log_prob)
    assert np.array_equal(whole.generation_logits, plain.generation_logits)  # type: ignore[arg-type]


@skipping_waits
async def test_a_first_token_waits_for_no_draft_model() -> None:
    """The target is asked at once; the draft model only when that token is there."""
    engines = hashed_pair()
    stream = engines.speculative(num_draft_tokens=4).generate(ask())
    first = await anext(aiter(stream))
    assert (len(first.token_ids), len(engines.draft.requests)) == (1, 0)
    await stream.aclose()


@skipping_waits
async def test_rounds_go_on_while_their_chunks_wait_to_be_read() -> None:
    """A reader that is held up holds up neither engine, and finds all chunks at once."""
    engines = hashed_pair()
    stream = engines.speculative(num_draft_tokens=4).generate(ask())
    await stream.wait()
    assert len(stream.take()) == 1  # the first token
    for _ in range(200):
        await asyncio.sleep(0)
    assert len(stream.take()) > 1
    await stream.aclose()
    assert engines.draft.live == 0


@skipping_waits
async def test_an_ngram_may_come_with_the_first_request() -> None:
    """It costs nothing, so the first answer can already hold several tokens."""
    engines = pair(reciting((3, 4, 5), 7, END), reciting((), 7, END))
    engine = engines.speculative(draft_source=DraftSource.NGRAM, num_draft_tokens=2)
    request = ask((1, 2, 0, 3, 1, 2, 0), max_tokens=3)
    assert (await read(engine, request))[0].token_ids == (3, 4)


@skipping_waits
async def test_mixed_drafts_use_the_text_where_it_repeats_and_the_model_elsewhere() -> None:
    """Both sources in one answer; the draft model is not asked where an n-gram matched."""
    answer = (3, 4, 5, 6, 7, 8, 3, 4, 5, 6, 7, 8, 3, 4, 5, 6)
    engines = pair(reciting(answer, 2, END), reciting(answer, 2, END))
    engine = engines.speculative(draft_source=DraftSource.MIXED, num_draft_tokens=3)
    assert ids(await read(engine, ask((1, 2), max_tokens=16))) == list(answer)
    stats = engine.stats
    assert 0 < stats.ngram_drafted < stats.drafted
    assert stats.acceptance_rate == 1.0
    assert len(engines.draft.requests) < stats.rounds


@skipping_waits
async def test_a_right_guess_ahead_makes_the_next_draft_free() -> None:
    """With overlap and a perfect draft, every round after the first token finds its draft ready."""
    engines = hashed_pair(rate=1.0)
    engine = engines.speculative(num_draft_tokens=3, overlap=True)
    await read(engine, ask(max_tokens=40))
    assert engine.stats.overlap_wasted == 0
    assert engine.stats.overlap_used >= engine.stats.rounds - 1


@pytest.mark.parametrize("rate", [0.5, 0.9])
@skipping_waits
async def test_a_wrong_guess_ahead_is_never_verified(rate: float) -> None:
    """Every draft is what the draft model says after the true text, ahead or not."""
    engines = hashed_pair(rate)
    engine = engines.speculative(num_draft_tokens=2, overlap=True)
    await read(engine, ask(max_tokens=40))
    for request in engines.target.requests:
        text = list(request.input_ids)
        for token in request.draft.token_ids if request.draft else ():
            assert token == agreeing(hashed(6), rate, 6)(text)
            text.append(token)
    assert engine.stats.overlap_used and engine.stats.overlap_wasted


@skipping_waits
async def test_sampling_by_one_seed_repeats() -> None:
    """Round seeds derive from the caller's: the same seed gives the same answer again."""
    engines = pair(lambda _: [0.25] * 4, lambda _: 0, vocab_size=4)
    answers = []
    for seed in (5, 5, 6):
        request = ask((1,), max_tokens=30, sampling=Sampling(temperature=1.0, top_p=1.0, seed=seed))
        answers.append(ids(await read(engines.speculative(num_draft_tokens=2), request)))
    assert answers[0] == answers[1] != answers[2]
