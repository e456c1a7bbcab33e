"""How long drafts are: fed with numbers first, then over engines in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import repeat

import pytest

from doubles.scripted import Script, ScriptedEngine
from doubles.scripted_tokens import Rule, agreeing, hashed
from tests.helpers.scripted_pairs import VOCAB, Pair, ids, pair, read
from tests.helpers.scripted_pairs import engine_request as ask
from tests.helpers.virtual_time import run_skipping_waits as run
from tests.helpers.virtual_time import skipping_waits
from trtllm_bls.engines.base import Engine, join_chunks
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.speculative.learned import (
    EARLY_INTERVAL,
    EARLY_PAUSE,
    PAUSE_TOKENS,
    PROBE,
    DraftLength,
    RunningTimes,
    SpeculationShared,
)
from trtllm_bls.speculative.ngrams import Acceptance
from trtllm_bls.speculative.options import DraftSource, SpeculationOptions
from trtllm_bls.types import EngineChunk, EngineRequest
from trtllm_bls.wire.contract import BLS


def times(*samples: tuple[int, float], proportional: bool = False) -> RunningTimes:
    watched = RunningTimes(proportional=proportional)
    for length, seconds in samples:
        watched.add(length, seconds)
    return watched


def costs(
    draft: float, verify: float, overhead: float = 0.0, plain: float | None = None
) -> SpeculationShared:
    """What is known once each has been measured."""
    shared = SpeculationShared()
    shared.draft_times.add(1, draft)
    shared.verify_times.add(1, verify)
    shared.overhead_times.add(0, overhead)
    if plain is not None:
        shared.plain_times.add(0, plain)
    return shared


# --- the numbers ------------------------------------------------------------------------------


def test_times_are_a_line_through_medians() -> None:
    """One hiccup does not move it; one length seen is flat, or through zero if proportional."""
    assert times().at(3) is None
    assert times((4, 0.2)).at(8) == pytest.approx(0.2)
    assert times((4, 0.2), proportional=True).at(8) == pytest.approx(0.4)
    assert times((2, 0.3), (6, 0.7), (6, 0.7), (6, 99.0)).at(4) == pytest.approx(0.5)
    assert times((2, 0.5), (4, 0.1)).at(2) == times((2, 0.5), (4, 0.1)).at(4)  # never falling


def best(known: SpeculationShared, rate: float, most: int) -> int:
    """The best length of a draft model's draft."""
    return known.best_length(repeat(rate), most, by_model=True)[0]


def test_old_times_are_forgotten() -> None:
    """When a load goes, its times go with it."""
    watched = times(*[(1, 9.0)] * 50, *[(1, 1.0)] * 8)
    assert watched.at(1) == pytest.approx(1.0)


def test_acceptance_counts_only_what_was_tried() -> None:
    """After a refused token the rest of the draft was never looked at."""
    rate = Acceptance()
    for _ in range(200):
        rate.add(num_drafted=8, num_accepted=1)  # one right, one wrong, six unseen
    assert rate.rate == pytest.approx(0.5, abs=0.02)
    for _ in range(40):
        rate.add(num_drafted=4, num_accepted=4)
    assert rate.rate > 0.95


@pytest.mark.parametrize(
    ("rate", "overhead", "length"), [(0.6, 0.0, 3), (0.8, 0.0, 6), (0.9, 0.0, 10), (0.8, 0.1, 6)]
)
def test_the_best_length_is_the_formulas(rate: float, overhead: float, length: int) -> None:
    """A draft step costs a tenth of a verification; the known optima come out."""
    assert abs(best(costs(0.1, 1.0, overhead), rate, 16) - length) <= 1


def test_no_draft_pays_when_plain_decoding_is_faster() -> None:
    """A hopeless rate, a slow draft, or a dear round: decode plainly."""
    assert best(costs(0.1, 1.0), 0.05, 8) == 0
    assert best(costs(0.9, 1.0), 0.7, 8) == 0
    assert best(costs(0.1, 1.0, overhead=5.0, plain=1.0), 0.7, 8) == 0
    assert best(costs(0.1, 1.0, overhead=0.0, plain=1.0), 0.7, 8) > 0


def test_an_ngram_costs_no_drafting() -> None:
    """So it is as long as allowed, also where a model's draft would not pay."""
    assert costs(9.0, 1.0, overhead=0.1).best_length(repeat(0.5), 7)[0] == 7


def test_an_ngram_has_to_gain_more_than_the_draft_model() -> None:
    """By a tenth, as over plain decoding; here it gives two tokens a second at the most."""
    known = costs(9.0, 1.0)
    assert known.best_length(repeat(0.5), 7, rival_speed=1.7)[0] == 7
    assert known.best_length(repeat(0.5), 7, rival_speed=1.9)[0] == 0


def test_each_token_of_a_draft_has_its_own_chance() -> None:
    """It ends before the token that costs more than it may bring; a small gain is no reason to
    begin one."""
    known = costs(9.0, 1.0)
    known.verify_times.add(2, 1.1)
    assert known.best_length((0.9, 0.9, 0.05, 0.9, 0.9), 5)[0] == 2
    assert known.best_length((0.15, 0.1), 2)[0] == 0


def test_the_load_table_is_read_upwards() -> None:
    """Up to so many requests, so many tokens; none above the last row."""
    shared, lengths = SpeculationShared(), []
    one = pacer(shared)
    for shared.in_flight in (1, 4, 5, 8, 9, 16, 17, 32, 33):
        lengths.append(one.limit())
    assert lengths == [32, 32, 4, 4, 2, 2, 1, 1, 0]


# --- one request's pace -----------------------------------------------------------------------


def pacer(shared: SpeculationShared | None = None, **options: object) -> DraftLength:
    return DraftLength(SpeculationOptions(**options), shared or SpeculationShared())  # type: ignore[arg-type]


def dear_drafts() -> SpeculationShared:
    """Drafting costs as much as verifying: it pays only if nearly everything is accepted."""
    shared = SpeculationShared()
    shared.draft_times.add(1, 0.8)
    shared.verify_times.add(1, 1.0)
    return shared


def test_a_fixed_length_is_kept_whatever_the_load() -> None:
    """Within what fits; a length below zero is refused by the wire's name."""
    shared = SpeculationShared(in_flight=1000)
    assert pacer(shared, num_draft_tokens=5).length(10, 99) == 5
    assert pacer(shared, num_draft_tokens=5).length(10, 3) == 3
    assert pacer(shared, num_draft_tokens=0).ceiling == 0
    with pytest.raises(InvalidRequest, match="num_draft_tokens"):
        BLS.input_named["num_draft_tokens"].check(-1)


def test_drafts_shorten_with_load_and_come_back() -> None:
    """As requests grow in number speculation steps aside; as they leave it returns."""
    shared = SpeculationShared()
    one, lengths = pacer(shared), []
    for in_flight in (1, 6, 12, 20, 64, 6, 1):
        shared.in_flight = in_flight
        lengths.append(one.limit())
    assert lengths == [32, 4, 2, 1, 0, 4, 32]


def test_a_rest_is_ended_by_a_probe_and_doubles_while_it_fails() -> None:
    """Low acceptance: plain decoding for a while, two tokens tried, then longer."""
    one, generated, rests = pacer(dear_drafts()), 5, []
    for _ in range(5):
        assert one.length(generated, 99) == 0
        rests.append(one.paused_until - generated)
        assert one.length(one.paused_until - 1, 99) == 0
        generated = one.paused_until
        assert one.length(generated, 99) == PROBE
        one.add_round(PROBE, 0, generated)
    assert rests == [
        EARLY_PAUSE,
        PAUSE_TOKENS.shortest,
        128,
        PAUSE_TOKENS.longest,
        PAUSE_TOKENS.longest,
    ]


def test_the_first_rest_is_short_for_one_request_in_so_many() -> None:
    """Answers that end before the others would try again are known by it."""
    shared, rests = dear_drafts(), []
    for _ in range(EARLY_INTERVAL + 1):
        one = pacer(shared)
        assert one.length(5, 99) == 0
        rests.append(one.paused_until - 5)
    assert rests == [EARLY_PAUSE, *[PAUSE_TOKENS.shortest] * (EARLY_INTERVAL - 1), EARLY_PAUSE]


@pytest.mark.parametrize("streams", [2, 128])
@skipping_waits
async def test_speculation_that_does_not_pay_costs_little(streams: int) -> None:
    """On by default with a draft model that is never right: at most 1 % of the time per token, for
    engines of 20 ms and 2 ms a step, 1.5 ms away, once that is known."""
    rule = hashed(1000)
    target, draft = (
        Distant(played, Script(vocab_size=1000, step_seconds=step))
        for played, step in ((rule, 0.020), (agreeing(rule, 0.0, 1000), 0.002))
    )
    engines = Pair(target, draft, SpeculationShared())
    took = []
    for engine in (engines.speculative(), target, engines.speculative()):
        loop, tokens = asyncio.get_running_loop(), 200 if streams == 2 else 24
        begun = loop.time()
        requests = [ask((1, 2, 3 + n), tokens) for n in range(streams)]
        await asyncio.gather(*(read(engine, request) for request in requests))
        took.append(loop.time() - begun)
    _, plain, useless = took
    assert useless <= 1.01 * plain


class Distant(ScriptedEngine):
    """Each request takes 1.5 ms to arrive."""

    async def _chunks(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        await asyncio.sleep(0.0015)
        async with aclosing(super()._chunks(request)) as chunks:
            async for chunk in chunks:
                yield chunk


def test_acceptance_that_comes_back_ends_the_rests() -> None:
    """Enough right probes make drafting pay again, at once and without rest."""
    one, generated = pacer(dear_drafts()), 0
    assert one.length(generated, 99) == 0
    for _ in range(20):
        generated = max(generated + 1, one.paused_until)
        one.add_round(8, 8, generated)
    assert one.length(generated + 1, 99) > PROBE


def test_a_new_request_begins_with_what_others_learned() -> None:
    """The prior of its acceptance is the last requests' own."""
    shared = dear_drafts()
    for _ in range(60):
        pacer(shared).add_round(4, 4, 10)
    assert pacer(shared).length(0, 99) > 0


# --- over engines, in virtual time ------------------------------------------------------------


def timed(rule: Rule, guess: Rule, **target: object) -> Pair:
    """A target of 20 ms and a draft of 2 ms a step."""
    draft = Script(vocab_size=VOCAB, step_seconds=0.002)
    return pair(rule, guess, draft, step_seconds=0.02, **target)


async def seconds(engine: Engine, tokens: int) -> float:
    begun = asyncio.get_running_loop().time()
    assert len(ids(await read(engine, ask(max_tokens=tokens)))) == tokens
    return asyncio.get_running_loop().time() - begun


@pytest.mark.parametrize("rate", [0.6, 0.8, 0.9])
@skipping_waits
async def test_adaptive_drafts_are_nearly_as_fast_as_the_best_fixed_length(rate: float) -> None:
    """Within five percent, cold start included, and near what the formula allows."""
    rule = hashed(VOCAB)
    plain = 0.02 * 250
    fixed = []
    for count in (2, 3, 6, 10):
        engines = timed(rule, agreeing(rule, rate, VOCAB))
        fixed.append(plain / await seconds(engines.speculative(num_draft_tokens=count), 250))
    engines = timed(rule, agreeing(rule, rate, VOCAB))
    adaptive = plain / await seconds(engines.speculative(), 250)
    best = max((1 - rate ** (k + 1)) / (1 - rate) / (0.1 * k + 1) for k in range(1, 13))
    assert adaptive >= 0.95 * max(fixed)
    assert max(fixed) >= 0.9 * best


@skipping_waits
async def test_ngrams_are_not_drafted_where_the_draft_model_gains_more() -> None:
    """In a text in which every token has stood before, mostly with something else after it, and
    from the first answer on."""
    hashes = hashed(VOCAB)

    def rule(context: Sequence[int]) -> int | Sequence[float]:
        return hashes([*context, len(context)])

    took = {}
    for source in (DraftSource.MODEL, DraftSource.MIXED):
        engines = timed(rule, agreeing(rule, 0.9, VOCAB))
        took[source] = await seconds(engines.speculative(draft_source=source), 500)
    assert took[DraftSource.MIXED] <= 1.05 * took[DraftSource.MODEL]


@skipping_waits
async def test_a_useless_draft_costs_next_to_nothing() -> None:
    """Nothing is ever accepted: a few probes, then the target's own speed; from the first answer
    of a process on."""
    rule = hashed(VOCAB)
    engines = timed(rule, agreeing(rule, 0.0, VOCAB))
    assert await seconds(engines.speculative(), 100) <= 1.02 * 0.02 * 100
    assert engines.target.cancelled == []  # a rest ends by itself, which keeps its cache


def test_a_crowd_on_a_full_target_is_served_as_without_speculation() -> None:
    """64 requests, steps of 32 rows: at most three percent slower; no draft is asked."""
    rule = hashed(VOCAB)

    async def crowd(speculative: bool) -> float:
        engines = timed(rule, rule, batch_limit=32)
        took = [
            seconds(engines.speculative() if speculative else engines.target, 12) for _ in range(64)
        ]
        return max(await asyncio.gather(*took))

    assert run(crowd(True)) <= 1.03 * run(crowd(False))


@skipping_waits
async def test_drafting_begins_within_a_stream_when_the_crowd_has_gone() -> None:
    """A plain stretch is left half-way, and no token is lost or said twice."""
    rule = hashed(VOCAB)
    engines = timed(rule, rule)
    engine = engines.speculative()
    engines.shared.in_flight = 99
    said: list[int] = []
    async with aclosing(engine.generate(ask(max_tokens=40))) as stream:
        async for chunk in stream:
            said += chunk.token_ids
            if len(said) == 10:
                assert chunk.speculation is not None and chunk.speculation.rounds == 0
                engines.shared.in_flight = 1
    assert engine.stats.rounds > 0
    assert said == ids(await read(engines.target, ask(max_tokens=40)))


@skipping_waits
async def test_a_request_that_does_not_stream_begins_to_draft_when_the_crowd_has_gone() -> None:
    """Its plain tokens are streamed to here, so that they can be left half-way."""
    rule = hashed(VOCAB)
    engines = timed(rule, rule)
    engine, shared = engines.speculative(), engines.shared
    shared.in_flight = 99
    asyncio.get_running_loop().call_later(0.5, setattr, shared, "in_flight", 1)
    chunks = await read(engine, ask(max_tokens=150, streaming=False))
    assert len(join_chunks(chunks).token_ids) == 150 and engine.stats.rounds > 0


def test_overlap_gains_where_it_saves_more_than_it_slows() -> None:
    """What it saves: the draft's time, as often as all guesses and the next one are right."""

    def gains(rate: float, beside: float) -> bool | None:
        known = costs(draft=0.002, verify=0.02)
        known.overlapped_times.add(4, beside)
        return known.overlap_gains(rate, 4)

    assert gains(0.9, 0.02)  # a device of its own: it is free
    assert gains(0.9, 0.024)  # 0.59 * 8 ms against 4 ms
    assert not gains(0.9, 0.025)
    assert not gains(0.5, 0.021)
    assert costs(draft=0.002, verify=0.02).overlap_gains(0.9, 4) is None


@pytest.mark.parametrize(("beside", "share"), [(0.02, 15 / 16), (0.04, 1 / 16)])
def test_overlap_is_measured_and_then_chosen(beside: float, share: float) -> None:
    """One turn in two at first, one turn in sixteen the other way for ever after."""
    shared = SpeculationShared()
    paced = pacer(shared, overlap=None)
    learning = [paced.overlaps(4) for _ in range(8)]
    assert learning == [False, True] * 4
    shared.draft_times.add(4, 0.008)
    shared.verify_times.add(4, 0.02)
    shared.overlapped_times.add(4, beside)
    shared.in_flight = 4  # the most beside which a draft model works on
    turns = [paced.overlaps(4) for _ in range(160)]
    assert sum(turns) / len(turns) == pytest.approx(share)
    shared.in_flight = 5
    assert not any(paced.overlaps(4) for _ in range(32))


@skipping_waits
async def test_overlap_is_chosen_by_itself_where_the_draft_has_a_device_of_its_own() -> None:
    """All but the turns that learn find their draft ready."""
    rule = hashed(VOCAB)
    engines = timed(rule, rule)
    took = {
        overlap: await seconds(engines.speculative(num_draft_tokens=4, overlap=overlap), 401)
        for overlap in (False, True, None)
    }
    assert took[True] < took[None] < took[False]
    assert took[None] - took[True] < 0.25 * (took[False] - took[True])


@skipping_waits
async def test_overlap_hides_the_drafting_of_a_good_draft() -> None:
    """With a perfect draft and time to spare, every round takes one verification."""
    rule = hashed(VOCAB)
    engines = timed(rule, rule)
    took = await seconds(engines.speculative(num_draft_tokens=4, overlap=True), 101)
    assert took == pytest.approx(0.02 * (1 + 100 / 5), rel=0.02)
