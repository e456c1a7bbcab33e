"""Which way a request takes through a target and what may draft for it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from doubles.scripted import Fault, ScriptedEngine
from tests.helpers.scripted_pairs import GREEDY, Pair, hashed_pair, ids, read, told
from tests.helpers.scripted_pairs import engine_request as ask
from tests.helpers.virtual_time import run_skipping_waits as run
from tests.helpers.virtual_time import skipping_waits
from trtllm_bls.engines.base import Engine
from trtllm_bls.engines.routing import RoutingEngine
from trtllm_bls.errors import (
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    Unsupported,
)
from trtllm_bls.speculative.options import DraftSource, SpeculationOptions
from trtllm_bls.types import (
    Draft,
    EngineCapacity,
    EngineChunk,
    EngineRequest,
    Sampling,
    SpeculationRequest,
    SpeculationStats,
)

OPTIONS = SpeculationOptions(draft_source=DraftSource.NGRAM)
# What speculation cannot keep, by the name under which it is refused.
CANNOT: dict[str, Any] = {
    "num_return_sequences": {"num_return_sequences": 2},
    "beam_width": {"sampling": Sampling(beam_width=2)},
    "runtime_top_p_decay": {"sampling": Sampling(top_p=0.5, top_p_decay=0.5)},
    "runtime_top_p_min": {"sampling": Sampling(top_p=0.5, top_p_min=0.5)},
    "draft_input_ids": {"draft": Draft(token_ids=(1,))},
}


def asking(number: int | None = None, source: str | None = None, **more: Any) -> EngineRequest:
    wish = SpeculationRequest(num_draft_tokens=number, draft_source=source)
    return ask(speculation=wish, **more)


def chosen(
    request: EngineRequest, *, by_default: bool = False, draft: bool = False, **options: Any
) -> SpeculationOptions | None:
    return replace(OPTIONS, **options).for_request(
        request, by_default=by_default, has_draft_model=draft
    )


# --- what a request gets --------------------------------------------------------------------------


def test_plain_unless_asked() -> None:
    """A deployment that is silent about drafts decodes plainly; 0 and off do everywhere."""
    assert chosen(asking()) is None
    assert chosen(asking(), by_default=True) == OPTIONS
    for request in (asking(0), asking(source="off"), asking(0, "ngram"), asking(3, "off")):
        assert chosen(request) is None
        assert chosen(request, by_default=True) is None


def test_a_number_of_drafts_is_kept() -> None:
    """The caller's goes before the deployment's, which goes before as many as pay off."""
    for number in (3, 30):
        options = chosen(asking(number), by_default=True, num_draft_tokens=5)
        assert options is not None and options.num_draft_tokens == number
    options = chosen(asking(), by_default=True, num_draft_tokens=5)
    assert options is not None and options.num_draft_tokens == 5


@pytest.mark.parametrize(("draft", "source"), [(True, "model"), (False, "ngram")])
def test_where_drafts_come_from_if_nobody_says(draft: bool, source: str) -> None:
    """From the draft model if there is one; the caller's word and the deployment's go before."""
    options = chosen(asking(3), draft=draft)
    assert options is not None and options.draft_source.value == source
    options = chosen(asking(3), draft=draft, by_default=True)
    assert options is not None and options.draft_source is DraftSource.NGRAM
    options = chosen(asking(source="mixed"), draft=draft)
    assert options is not None and options.draft_source is DraftSource.MIXED


def test_draft_logits_are_used_where_either_side_wants_them() -> None:
    """The deployment may ask for all, a caller for itself."""
    wish = replace(asking(3), speculation=SpeculationRequest(draft_source="model"))
    using = replace(wish, speculation=replace(wish.speculation, use_draft_logits=True))
    for request, deployed in ((using, False), (wish, True)):
        options = chosen(request, use_draft_logits=deployed)
        assert options is not None and options.use_draft_logits
    options = chosen(wish)
    assert options is not None and not options.use_draft_logits


def test_an_unknown_source_is_named() -> None:
    """The value and what may be sent instead."""
    problem = "draft_source: 'oracle' is unknown; send one of: off, model, ngram, mixed"
    with pytest.raises(InvalidRequest, match=problem):
        chosen(asking(source="oracle"))


def test_a_negative_number_of_drafts_is_refused() -> None:
    """Also where no tensor's bounds were checked, as in a call by a pipeline."""
    with pytest.raises(InvalidRequest, match="num_draft_tokens: -1 is below 0"):
        chosen(asking(-1))


@pytest.mark.parametrize("field", CANNOT)
def test_a_default_never_refuses_what_was_asked_for_is_refused_by_name(field: str) -> None:
    """What speculation cannot keep runs plainly under a default."""
    assert chosen(asking(**CANNOT[field]), by_default=True) is None
    assert chosen(asking(0, **CANNOT[field])) is None
    for request in (asking(2, **CANNOT[field]), asking(source="ngram", **CANNOT[field])):
        with pytest.raises(Unsupported) as caught:
            chosen(request, by_default=True)
        assert caught.value.field == field


# --- over engines ---------------------------------------------------------------------------------


class Routed:
    """A routing engine over a pair, and what it told of its requests' ends."""

    def __init__(self, engines: Pair, draft: Engine | None = None, **more: Any) -> None:
        self.ended: list[SpeculationStats] = []
        self.engine = RoutingEngine(
            engines.target, draft, on_end=self.ended.append, shared=engines.shared, **more
        )

    async def read(self, request: EngineRequest) -> list[EngineChunk]:
        await self.engine.capacity()
        return await read(self.engine, request)


def plain_answer(request: EngineRequest) -> Any:
    return told(run(read(hashed_pair().target, request)))


def test_a_plain_request_goes_straight_to_the_target() -> None:
    """As it is, once; the draft gets nothing of it, and nothing is counted."""
    engines = hashed_pair()
    routed = Routed(engines, engines.draft)
    assert told(run(routed.read(asking()))) == plain_answer(ask())
    assert engines.target.requests == [asking()]
    assert (engines.draft.requests, routed.ended) == ([], [])


def test_a_request_that_asks_is_speculated() -> None:
    """The same answer, with drafts of the length that it asked for; counted once."""
    engines = hashed_pair(rate=1.0)
    routed = Routed(engines, engines.draft)
    assert told(run(routed.read(asking(3)))) == plain_answer(ask())
    drafts = [len(asked.draft.token_ids) for asked in engines.target.requests if asked.draft]
    assert drafts and max(drafts) == 3
    (stats,) = routed.ended
    assert (stats.rounds, stats.drafted) == (len(drafts), sum(drafts))


def test_what_cannot_be_speculated_is_refused_before_any_engine_works() -> None:
    """When the stream is asked for, so that no stream has to be ended."""
    engines = hashed_pair()
    routed = Routed(engines, engines.draft)
    for request in (asking(2, num_return_sequences=2), asking(source="oracle")):
        with pytest.raises(InvalidRequest):
            routed.engine.generate(request)
    assert (engines.target.requests, engines.draft.requests, routed.ended) == ([], [], [])


def test_a_prompt_that_is_too_long_is_refused_in_the_targets_own_words() -> None:
    """With no room for an answer, the target is still asked for a token, so it names the prompt."""
    engines = hashed_pair(max_sequence_tokens=4)
    for request in (asking(), asking(2)):
        with pytest.raises(InvalidRequest, match="at most 3 are allowed") as refusal:
            run(Routed(engines, engines.draft).read(request))
        assert refusal.value.field == "input_ids"


def test_a_full_target_refuses_a_new_request_at_once() -> None:
    """Only an answer that has begun waits for room."""
    engines = hashed_pair()
    routed = Routed(engines, engines.draft)
    engines.target.fault = Fault(error=Overloaded("full"))
    with pytest.raises(Overloaded, match="full"):
        run(routed.read(asking(2)))
    assert len(engines.target.requests) == 1


@pytest.mark.parametrize("missing", [True, False])
def test_a_draft_model_that_is_not_there_fails_no_request(
    missing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Not deployed at all, or unreachable: the answer is the target's; the log says why."""
    engines = hashed_pair()
    engines.draft.fault = Fault(error=EngineUnavailable("draft: gone"), capacity=True)
    routed = Routed(engines, None if missing else engines.draft)
    with caplog.at_level(logging.WARNING, "trtllm_bls.speculation"):
        for _ in range(2):
            assert told(run(routed.read(asking(2, "model")))) == plain_answer(ask())
    assert [stats.rounds for stats in routed.ended] == [0, 0]
    assert engines.draft.requests == []
    assert ("draft: gone" in caplog.text) is not missing


@skipping_waits
async def test_the_end_of_a_speculating_request_is_told_once_however_it_ends() -> None:
    """Well, by an error or by its reader; never for plain requests."""
    engines = hashed_pair()
    routed = Routed(engines, engines.draft)
    await routed.read(asking(2))
    await routed.read(asking())
    assert len(routed.ended) == 1
    async with aclosing(routed.engine.generate(asking(2, max_tokens=90))) as stream:
        await stream.wait()
    await stream.aclose()
    assert len(routed.ended) == 2
    so_far = len(engines.target.requests)
    engines.target.fault = Fault(error=EngineError("broken"), after_requests=so_far + 2)
    with pytest.raises(EngineError, match="broken"):
        await routed.read(asking(2))
    assert len(routed.ended) == 3
    assert (engines.live, engines.shared.in_flight) == ((0, 0), 0)


async def test_closing_closes_both_engines() -> None:
    """A request after that is told so."""
    engines = hashed_pair()
    await RoutingEngine(engines.target, engines.draft).close()
    for engine in (engines.target, engines.draft):
        with pytest.raises(EngineUnavailable):
            await read(engine, ask())


# --- a target that ends every request after one step ----------------------------------------------


class TellsOneStep(ScriptedEngine):
    """As the configuration of an engine that was built for external drafts does."""

    async def capacity(self) -> EngineCapacity:
        return replace(await super().capacity(), one_step=True)


def one_step_pair() -> Pair:
    engines = hashed_pair(one_step=True)
    engines.target = TellsOneStep(engines.target._rule, engines.target.script)
    return engines


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("number", [None, 0])
def test_a_one_step_target_is_asked_for_token_after_token(
    streaming: bool, number: int | None
) -> None:
    """A plain request has its whole answer, and is not counted as speculation."""
    engines = one_step_pair()
    routed = Routed(engines, engines.draft)
    request = asking(number, streaming=streaming, end_id=3, max_tokens=30)
    expected = plain_answer(ask(streaming=streaming, end_id=3, max_tokens=30))
    assert told(run(routed.read(request))) == expected
    assert len(engines.target.requests) >= len(expected[0]) > 1
    assert (engines.draft.requests, routed.ended) == ([], [])
    assert engines.live == (0, 0)


def test_a_one_step_target_is_speculated_as_any_other() -> None:
    """That is what it was built for."""
    engines = one_step_pair()
    routed = Routed(engines, engines.draft)
    assert told(run(routed.read(asking(3)))) == plain_answer(ask())
    assert routed.ended[0].rounds > 0


def test_a_one_step_target_verifies_a_callers_own_draft() -> None:
    """In one request, as it came."""
    engines = one_step_pair()
    routed = Routed(engines)
    request = ask(draft=Draft(token_ids=(1, 2)))
    chunks = run(routed.read(request))
    assert engines.target.requests == [request] and 1 <= len(ids(chunks)) <= 3


class MayBeOneStep(ScriptedEngine):
    """An engine in the C++ backend, whose configuration does not say how it was built."""

    async def capacity(self) -> EngineCapacity:
        return replace(await super().capacity(), may_be_one_step=True)


def untold_pair(one_step: bool) -> Pair:
    engines = hashed_pair(one_step=one_step)
    engines.target = MayBeOneStep(engines.target._rule, engines.target.script)
    return engines


@pytest.mark.parametrize("one_step", [True, False])
@skipping_waits
async def test_an_engine_that_does_not_say_is_tried_once(one_step: bool) -> None:
    """Before the first plain requests are answered, however many there are."""
    engines = untold_pair(one_step)
    routed = Routed(engines)
    expected = told(await read(hashed_pair().target, ask(max_tokens=9)))
    answers = await asyncio.gather(*(routed.read(ask(max_tokens=9)) for _ in range(5)))
    assert [told(answer) for answer in answers] == [expected] * 5
    probes = [request for request in engines.target.requests if request.max_tokens == 2]
    assert len(probes) == 1 and probes[0].end_id is None
    assert engines.shared.one_step is one_step


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (EngineError("broken"), False),
        (InvalidRequest("input_ids", "0 is not welcome"), False),
        (Overloaded("full"), True),
        (EngineUnavailable("restarting"), True),
    ],
)
def test_an_engine_that_refuses_to_be_tried_is_used_as_it_is(error: Exception, again: bool) -> None:
    """Tried again only where it could not be reached or was full."""
    engines = untold_pair(one_step=False)
    routed = Routed(engines)
    engines.target.fault = Fault(error=error)
    run(routed.engine.capacity())
    engines.target.fault = None
    assert engines.shared.one_step is None
    assert told(run(routed.read(ask()))) == plain_answer(ask())
    assert engines.shared.one_step is (False if again else None)


@pytest.mark.parametrize("field", ["num_return_sequences", "beam_width", "runtime_top_p_decay"])
async def test_what_cannot_be_decoded_token_by_token_is_refused_by_name(field: str) -> None:
    """With the reason: speculation was not asked for."""
    engines = one_step_pair()
    routed = Routed(engines)
    await routed.engine.capacity()
    with pytest.raises(Unsupported) as caught:
        routed.engine.generate(ask(**{"sampling": GREEDY, **CANNOT[field]}))
    assert caught.value.field == field
    assert "gives one token per request" in str(caught.value)
    assert engines.target.requests == []


@skipping_waits
async def test_a_target_that_verifies_nothing_is_asked_plainly() -> None:
    """By default; a request that asks for drafts is told by name that there are none."""
    both = hashed_pair(max_draft_tokens=0)
    engine = RoutingEngine(both.target, both.draft, OPTIONS, by_default=True)
    await engine.capacity()
    plain = ids(await read(engine, asking()))
    assert plain == ids(await read(both.target, ask()))
    assert both.target.requests[0] == asking()
    assert not both.draft.requests
    for field, request in {
        "num_draft_tokens": asking(3),
        "draft_source": asking(source="ngram"),
    }.items():
        with pytest.raises(Unsupported, match=f"^{field}: .*verifies no drafts"):
            engine.generate(request)
    assert ids(await read(engine, asking(0))) == plain
