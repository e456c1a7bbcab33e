"""Drafts from a text that the caller expects: they save passes, and change no token."""

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
from trtllm_bls.speculative.predicted_text import PredictedText
from trtllm_bls.types import EngineRequest, Sampling, SpeculationRequest, SpeculationStats

TEXT = tuple(range(10, 90))
PROMPT, END = (1, 2, 3), 9


def passes(prediction: tuple[int, ...], answer: tuple[int, ...], length: int = 16) -> int:
    """Passes of a target that writes ``answer``, each with a draft of what is predicted."""
    written: list[int] = [*PROMPT]
    text = PredictedText(written, prediction)
    left, count = list(answer), 0
    while left:
        accepted = 0
        for guess, token in zip(text.propose(length), left[:-1], strict=False):
            if guess != token:
                break
            accepted += 1
        written += left[: accepted + 1]
        del left[: accepted + 1]
        count += 1
    return count


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
    """A text of 80 tokens takes 6 passes of 17 at best; an edit costs a few more."""
    assert passes(TEXT, answer) <= most


def test_nothing_is_proposed_before_the_answer_begins_alike() -> None:
    """A useless prediction costs no round."""
    written = [*PROMPT]
    text = PredictedText(written, TEXT)
    assert text.propose(4) == ()
    written.append(5)
    assert text.propose(4) == ()
    written.append(TEXT[1])
    assert text.propose(4) == TEXT[2:6]


def test_the_end_of_the_prediction_proposes_nothing() -> None:
    """And a text that goes on finds no place in it."""
    written = [*PROMPT]
    text = PredictedText(written, TEXT[:5])
    written += TEXT[:5]
    assert text.propose(4) == ()
    written += (5, 6, 7)
    assert text.propose(4) == ()


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
        {"extras": {"guided_decoding_guide": b"{}"}},
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
