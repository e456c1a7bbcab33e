"""Drafts from texts: they save passes, and change no token."""

from __future__ import annotations

import random

import pytest

from doubles.scripted import Script, ScriptedEngine
from doubles.scripted_tokens import reciting
from tests.helpers.scripted_pairs import engine_request as ask
from tests.helpers.scripted_pairs import hashed_pair, ids, pair, read, told
from tests.helpers.virtual_time import skipping_waits
from trtllm_bls.engines.routing import RoutingEngine
from trtllm_bls.errors import Unsupported
from trtllm_bls.speculative.learned import SpeculationShared
from trtllm_bls.speculative.ngrams import NgramAcceptance, NgramDrafts, NgramIndex
from trtllm_bls.speculative.options import DraftSource
from trtllm_bls.types import EngineRequest, Guide, Sampling, SpeculationRequest, SpeculationStats

TEXT = tuple(range(10, 90))
PROMPT, END = (1, 2, 3), 9


def free_rounds() -> SpeculationShared:
    """A drafted token costs a hundredth of a pass."""
    shared = SpeculationShared()
    shared.plain_times.add(0, 1.0)
    shared.verify_times.add(0, 1.0)
    shared.verify_times.add(10, 1.1)
    return shared


def drafts_from(
    text: list[int] | tuple[int, ...],
    written: list[int],
    acceptance: NgramAcceptance | None = None,
) -> NgramDrafts:
    """Drafts for what is ``written``, from ``text``, which may be the same."""
    index = NgramIndex(text, DraftSource.NGRAM, len(text))
    learned = {} if acceptance is None else acceptance
    return NgramDrafts(written, [index], learned, free_rounds().best_length)


def proposed(ids: list[int], count: int) -> tuple[int, ...]:
    """The whole of a draft of fixed length from ``ids`` themselves."""
    found = drafts_from(ids, ids).propose(count, fixed=True)
    return () if found is None else found[1]


def passes(
    prediction: tuple[int, ...],
    answer: tuple[int, ...],
    acceptance: NgramAcceptance | None = None,
) -> int:
    """Passes of a target that writes ``answer``, with drafts of up to 16 tokens of what is
    predicted."""
    written: list[int] = [*PROMPT]
    drafts = drafts_from(prediction, written, acceptance)
    left, count = list(answer), 0
    while left:
        _, guesses = drafts.propose(16) or (None, ())
        accepted = 0
        for guess, token in zip(guesses, left[:-1], strict=False):
            if guess != token:
                break
            accepted += 1
        written += left[: accepted + 1]
        del left[: accepted + 1]
        count += 1
    return count


def test_the_latest_of_the_longest_matches_is_repeated() -> None:
    """Two places share three tokens with the tail; the one that shares more is followed."""
    assert proposed([1, 2, 3, 4, 9, 2, 3, 4, 8, 1, 2, 3, 4], 2) == (9, 2)
    assert proposed([2, 3, 4, 9, 2, 3, 4, 8, 2, 3, 4], 2) == (8, 2)


def test_a_fixed_length_takes_three_tokens_that_match() -> None:
    """One is enough only where a round has to pay."""
    short = [1, 2, 3, 9, 2, 3]
    assert proposed(short, 4) == ()
    assert drafts_from(short, short).propose(4) is not None
    for text, count in (([1, 2, 3], 4), ([], 4), ([1, 2, 3, 1, 2, 3], 0)):
        assert proposed(text, count) == ()


def test_a_repeating_text_is_drafted_at_full_length() -> None:
    """The match reaches the end, so the proposal goes round."""
    assert proposed([5, 6, 5, 6, 5, 6], 5) == (5, 6, 5, 6, 5)


def test_drafts_see_what_is_added() -> None:
    """The index is of the living sequence, each place once."""
    ids = [1, 2, 3, 4, 5]
    drafts = drafts_from(ids, ids)
    assert drafts.propose(2, fixed=True) is None
    ids += [1, 2, 3]
    assert drafts.propose(2, fixed=True) == (DraftSource.NGRAM, (4, 5))
    ids += [4]
    assert drafts.propose(2, fixed=True) == (DraftSource.NGRAM, (5, 1))


def test_a_long_text_is_indexed_in_parts() -> None:
    """Each proposal does a part, so that no round waits for the whole."""
    text = list(range(20_000))
    drafts = drafts_from(text, [19_000, 19_001, 19_002])
    found = [drafts.propose(1, fixed=True) for _ in range(5)]
    assert found == [None] * 4 + [(DraftSource.NGRAM, (19_003,))]


def test_the_places_are_those_that_a_search_finds() -> None:
    """Against the plain definition, over texts of few words."""
    rng = random.Random(5)
    for _ in range(300):
        text = [rng.randrange(6) for _ in range(rng.randrange(3, 60))]
        index = NgramIndex(text, DraftSource.NGRAM, len(text))
        index.extend()
        for order in (1, 3):
            tail = [rng.randrange(6) for _ in range(order)]
            there = [end for end in range(order, len(text)) if text[end - order : end] == tail]
            assert index.places(tail, order) == there[::-1][:16]


def test_what_is_never_right_is_not_drafted_for_long() -> None:
    """Nor is it forgotten between requests; what is right again is seen without drafting."""
    acceptance: NgramAcceptance = {}
    rng = random.Random(7)
    useless = [tuple(rng.randrange(40) for _ in range(400)) for _ in range(2)]
    first, second = (passes(useless[0], useless[1], acceptance) for _ in range(2))
    written: list[int] = [*PROMPT, *useless[1]]
    assert second >= 0.95 * len(useless[1])
    assert first >= 0.9 * len(useless[1])
    assert drafts_from(useless[0], written, acceptance).propose(16) is None
    text = tuple(rng.randrange(40) for _ in range(400))
    assert passes(text, text, acceptance) < 60


@pytest.mark.parametrize(
    ("answer", "most"),
    [
        (TEXT, 7),
        ((*TEXT[:30], 5, *TEXT[31:]), 8),
        ((*TEXT[:30], 5, 6, 7, *TEXT[31:]), 11),
        ((*TEXT[:30], *TEXT[33:]), 8),
        ((*TEXT[:30], *TEXT[70:]), 8),
        ((*TEXT[40:], *TEXT[:40]), 13),
        ((5, 6, *TEXT), 9),
        ((5, *TEXT[1:]), 9),
    ],
    ids=[
        *("same", "word replaced", "words put in", "words left out", "paragraph left out"),
        *("halves exchanged", "preface", "first word replaced"),
    ],
)
def test_an_edit_is_followed(answer: tuple[int, ...], most: int) -> None:
    """A text of 80 tokens takes 6 passes of 17 at best; an edit costs a few more. So it is once
    drafts are known to be right."""
    acceptance: NgramAcceptance = {}
    passes(TEXT, TEXT, acceptance)
    assert passes(TEXT, answer, acceptance) <= most


def edited(answer: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    """Like ``answer``, with some tokens replaced, left out or put in."""
    text: list[int] = []
    for token in answer:
        kind = rng.random()
        text += (token,) if kind < 0.8 else (rng.randrange(6),) * rng.randrange(3)
    return tuple(text)


@skipping_waits
async def test_the_answer_is_the_targets_own() -> None:
    """Greedy or sampled by position, with any prediction, of any length."""
    rng = random.Random(3)
    for case in range(60):
        engines = hashed_pair()
        request = ask(max_tokens=rng.randrange(1, 60), end_id=0 if case % 3 == 0 else None)
        plain = await read(engines.target, request)
        asked = SpeculationRequest(
            prediction=edited(tuple(ids(plain)), rng),
            draft_source=rng.choice((None, "prediction", "ngram", "mixed")),
            num_draft_tokens=rng.choice((None, 3)),
        )
        engine = engines.speculative()
        drafted = await read(
            engine,
            ask(request.input_ids, request.max_tokens, end_id=request.end_id, speculation=asked),
        )
        assert told(drafted) == told(plain)
        assert engines.live == (0, 0)


def reciter(**sizes: int) -> ScriptedEngine:
    """A target that writes ``TEXT``."""
    script = Script(vocab_size=100, step_seconds=0.01, **sizes)
    return ScriptedEngine(reciting(TEXT, len(PROMPT), END), script)


def predicting(**fields: object) -> EngineRequest:
    speculation = SpeculationRequest(prediction=fields.pop("prediction", TEXT))  # type: ignore[arg-type]
    return ask(PROMPT, 80, end_id=END, speculation=speculation, **fields)


@skipping_waits
async def test_a_deployment_without_drafts_uses_a_prediction() -> None:
    """No draft model and no default are needed; the counts tell what came of it."""
    target = reciter()
    chunks = await read(RoutingEngine(target), predicting())
    counts = chunks[-1].speculation
    assert ids(chunks) == list(TEXT)
    assert isinstance(counts, SpeculationStats)
    assert counts.predicted == counts.drafted >= counts.predicted_accepted == counts.accepted
    assert counts.accepted > 60
    assert len(target.requests) < 14


@skipping_waits
async def test_a_useless_prediction_leaves_one_plain_request() -> None:
    """Nothing of it is ever verified."""
    target = reciter()
    chunks = await read(RoutingEngine(target), predicting(prediction=(5, 6, 7) * 20))
    assert ids(chunks) == list(TEXT) and len(target.requests) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"num_return_sequences": 2},
        {"sampling": Sampling(top_p=0.5, top_p_decay=0.9)},
        {"guide": Guide("json_schema", "{}")},
    ],
)
def test_a_prediction_is_no_demand(fields: dict[str, object]) -> None:
    """Where speculation cannot be, it is ignored; a demand beside it is still refused."""
    target = reciter()
    engine = RoutingEngine(target)
    with_demand = SpeculationRequest(prediction=TEXT, num_draft_tokens=3)
    with pytest.raises(Unsupported):
        engine.generate(ask(PROMPT, 8, speculation=with_demand, **fields))
    engine.generate(predicting(**fields))


@skipping_waits
async def test_it_can_be_switched_off() -> None:
    """``num_draft_tokens`` 0 and ``draft_source`` off hold for predictions too."""
    for off in ({"num_draft_tokens": 0}, {"draft_source": "off"}):
        target = reciter()
        asked = SpeculationRequest(prediction=TEXT, **off)  # type: ignore[arg-type]
        chunks = await read(RoutingEngine(target), ask(PROMPT, 80, speculation=asked))
        assert chunks[-1].speculation is None and len(target.requests) == 1


@skipping_waits
async def test_after_the_prediction_other_sources_go_on() -> None:
    """The deployment's draft model writes what the prediction has not."""
    rule = reciting(TEXT, len(PROMPT), END)
    engines = pair(rule, rule, vocab_size=100)
    request = predicting(prediction=TEXT[:40])
    chunks = await read(engines.speculative(), request)
    counts = chunks[-1].speculation
    assert ids(chunks) == list(TEXT) and counts is not None
    assert 0 < counts.predicted_accepted < counts.accepted
