"""The scripted engine keeps the seam's contract, so that tests which lean on it stand firm."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from doubles.scripted import Fault, Script, ScriptedEngine
from doubles.scripted_tokens import agreeing, hashed, reciting, table
from tests.helpers.waiting import run_async
from trtllm_bls.errors import EngineError, EngineUnavailable, InvalidRequest, Unsupported
from trtllm_bls.types import (
    Draft,
    EngineChunk,
    EngineRequest,
    FinishReason,
    Sampling,
    Wants,
)

END = 0
PROMPT = (7, 8)
ASK = EngineRequest(request_id="r", input_ids=PROMPT, max_tokens=10, end_id=END)
COIN = table([[0.0, 0.5, 0.5]] * 3)
SAMPLED = Sampling(temperature=1.0, top_p=1.0, seed=5)


def saying(*answer: int, **script: object) -> ScriptedEngine:
    return ScriptedEngine(reciting(answer, len(PROMPT), END), Script(vocab_size=50, **script))  # type: ignore[arg-type]


async def read(engine: ScriptedEngine, request: EngineRequest) -> list[EngineChunk]:
    async with aclosing(engine.generate(request)) as stream:
        return [chunk async for chunk in stream]


def ask(engine: ScriptedEngine, request: EngineRequest = ASK) -> list[EngineChunk]:
    return run_async(read(engine, request))


def ids(chunks: list[EngineChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def test_a_stream_ends_by_the_end_id_in_an_empty_final_chunk() -> None:
    """The end id is not part of the answer."""
    chunks = ask(saying(3, 4))
    assert [chunk.token_ids for chunk in chunks] == [(3,), (4,), ()]
    assert [chunk.final for chunk in chunks] == [False, False, True]
    assert chunks[-1].finish_reason is FinishReason.END_ID


def test_a_request_that_does_not_stream_is_answered_in_one_chunk() -> None:
    """All tokens, once, final."""
    (chunk,) = ask(saying(3, 4, 5), replace(ASK, streaming=False))
    assert (chunk.token_ids, chunk.final) == ((3, 4, 5), True)


@pytest.mark.parametrize(
    ("change", "said", "reason"),
    [
        ({"max_tokens": 2}, [3, 4], FinishReason.LENGTH),
        ({"stop_sequences": ((4, 5),)}, [3, 4, 5], FinishReason.STOP),
        ({"stop_sequences": ((8, 3),)}, [3, 4, 5, 6], FinishReason.END_ID),
        ({"bad_sequences": ((3, 4),)}, [3, 5, 5, 6], FinishReason.END_ID),
        ({"embedding_bias": ((9, 1e6),)}, [9] * 10, FinishReason.LENGTH),
        ({"sampling": Sampling(min_tokens=6)}, [3, 4, 5, 6, 1, 1], FinishReason.END_ID),
        (
            {"sampling": Sampling(min_tokens=3), "stop_sequences": ((3,), (5,))},
            [3, 4, 5],
            FinishReason.STOP,
        ),
    ],
)
def test_every_rule_on_tokens_is_kept(
    change: dict[str, object], said: list[int], reason: FinishReason
) -> None:
    """Limits, stops (of generated tokens only), forbidden ids, bias and minimum length."""
    chunks = ask(saying(3, 4, 5, 6), replace(ASK, **change))  # type: ignore[arg-type]
    assert (ids(chunks), chunks[-1].finish_reason) == (said, reason)


def test_penalties_count_prompt_and_answer_alike() -> None:
    """A strong penalty never says a token again, be it from the prompt."""
    engine = ScriptedEngine(lambda _: [0.0, 0.4, 0.3, 0.2, 0.1], Script(vocab_size=5))
    request = EngineRequest(
        request_id="r",
        input_ids=(2,),
        max_tokens=3,
        sampling=Sampling(top_k=1, presence_penalty=50.0),
    )
    assert ids(ask(engine, request)) == [1, 3, 4]


def test_the_sequence_ends_where_the_model_does() -> None:
    """Prompt and answer together never pass the longest sequence."""
    engine = saying(3, 4, 5, 6, max_sequence_tokens=4)
    chunks = ask(engine)
    assert (ids(chunks), chunks[-1].finish_reason) == ([3, 4], FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("draft", "emitted"),
    [
        ((3, 4), (3, 4, 5)),
        ((3, 9), (3, 4)),
        ((9,), (3,)),
        ((3, 4, 5, 6), (3, 4, 5, 6)),
        ((3, 4, 5, 6, END, 1), (3, 4, 5, 6)),
    ],
)
def test_a_draft_is_accepted_up_to_the_first_difference(
    draft: tuple[int, ...], emitted: tuple[int, ...]
) -> None:
    """The accepted prefix and one more token; none more where the end id comes next."""
    request = replace(ASK, draft=Draft(token_ids=draft), max_tokens=len(draft) + 1)
    chunks = ask(saying(3, 4, 5, 6), request)
    assert [chunk.token_ids for chunk in chunks] == [emitted]
    assert chunks[0].final


def test_a_stop_inside_an_accepted_draft_ends_it() -> None:
    """Nothing is accepted after the token that completes a stop sequence."""
    request = replace(ASK, draft=Draft(token_ids=(3, 4, 5)), stop_sequences=((4,),))
    (chunk,) = ask(saying(3, 4, 5, 6), request)
    assert (chunk.token_ids, chunk.finish_reason) == ((3, 4), FinishReason.STOP)


async def test_a_draft_by_logits_leaves_the_targets_distribution() -> None:
    """Whatever the draft believes, the first token is distributed as the target says."""
    target, drafted = [0.5, 0.3, 0.2], [0.1, 0.2, 0.7]
    engine = ScriptedEngine(lambda _: target, Script(vocab_size=3))
    rng = np.random.default_rng(1)
    counts = np.zeros(3)
    for seed in range(2000):
        guess = int(rng.choice(3, p=drafted))
        draft = Draft(token_ids=(guess,), logits=np.log([drafted]))
        sampling = Sampling(temperature=1.0, top_p=1.0, seed=seed)
        request = EngineRequest(
            request_id="r", input_ids=(0,), max_tokens=2, draft=draft, sampling=sampling
        )
        counts[(await read(engine, request))[0].token_ids[0]] += 1
    expected = np.asarray(target) * 2000
    assert ((counts - expected) ** 2 / expected).sum() < 13.8  # p = 0.001 at 2 degrees


def test_sampling_repeats_with_its_seed_and_only_with_it() -> None:
    """One seed, one answer; another seed or another sequence, another answer."""
    engine = ScriptedEngine(COIN, Script(vocab_size=3))
    request = EngineRequest(request_id="r", input_ids=(1,), max_tokens=40, sampling=SAMPLED)
    first, again = ids(ask(engine, request)), ids(ask(engine, request))
    other = ids(
        ask(engine, replace(request, sampling=Sampling(temperature=1.0, top_p=1.0, seed=6)))
    )
    assert first == again != other
    several = ask(engine, replace(request, num_return_sequences=2, streaming=False))
    assert several[0].token_ids == tuple(first) != several[1].token_ids
    assert [chunk.sequence_index for chunk in several] == [0, 1]


def test_limits_on_sampling_are_kept() -> None:
    """Top-k and top-p cut the tail: only the likeliest tokens are ever drawn."""
    engine = ScriptedEngine(lambda _: [0.1, 0.5, 0.4], Script(vocab_size=3))
    request = EngineRequest(request_id="r", input_ids=(1,), max_tokens=60)
    for sampling in (Sampling(top_k=2, seed=1), Sampling(top_p=0.8, seed=1)):
        assert set(ids(ask(engine, replace(request, sampling=sampling)))) == {1, 2}


def test_top_p_decays_with_every_token() -> None:
    """From the second token on, half of it leaves the likeliest one only."""
    engine = ScriptedEngine(lambda _: [0.1, 0.5, 0.4], Script(vocab_size=3))
    request = EngineRequest(request_id="r", input_ids=(1,), max_tokens=6)
    first = set()
    for seed in range(20):
        sampling = Sampling(top_p=0.95, top_p_decay=0.5, seed=seed)
        text = ids(ask(engine, replace(request, sampling=sampling)))
        first.add(text[0])
        assert text[1:] == [1] * 5
    assert first == {0, 1, 2}


def test_asked_figures_belong_to_the_tokens_of_their_chunk() -> None:
    """Log-probs, logits and metrics come when asked for, the prompt's logits once."""
    wants = Wants(log_probs=True, context_logits=True, generation_logits=True, perf_metrics=True)
    first, second, last = ask(saying(3, 4), replace(ASK, wants=wants))
    assert first.log_probs == (0.0,)
    assert first.context_logits is not None and first.context_logits.shape == (2, 50)
    assert second.context_logits is None and second.generation_logits is not None
    assert second.generation_logits.argmax(axis=-1).tolist() == [4]
    assert last.generation_logits is not None and last.generation_logits.shape == (0, 50)
    assert last.metrics is not None and first.metrics is not None


def test_it_plays_engines_that_end_after_one_step_or_give_no_reason() -> None:
    """As engines built for external drafts do, and as Triton's wire does."""
    (chunk,) = ask(saying(3, 4, one_step=True, tells_reason=False))
    assert (chunk.token_ids, chunk.final, chunk.finish_reason) == ((3,), True, None)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"max_tokens": 0}, InvalidRequest),
        ({"input_ids": ()}, InvalidRequest),
        ({"input_ids": (50,)}, InvalidRequest),
        ({"input_ids": (1,) * 30}, InvalidRequest),
        ({"draft": Draft(token_ids=())}, InvalidRequest),
        ({"draft": Draft(token_ids=(1, 2, 3))}, InvalidRequest),
        ({"draft": Draft(token_ids=(1,), logits=np.zeros((2, 50)))}, InvalidRequest),
        ({"sampling": Sampling(beam_width=2)}, Unsupported),
    ],
)
def test_what_it_cannot_do_it_refuses(change: dict[str, object], error: type[Exception]) -> None:
    """Before the first chunk, and nothing is left running."""
    engine = saying(3, max_draft_tokens=2, max_sequence_tokens=30)
    with pytest.raises(error):
        ask(engine, replace(ASK, **change))  # type: ignore[arg-type]
    assert engine.live == 0


async def test_a_fault_comes_after_its_requests_and_tokens() -> None:
    """The first request is answered, the second breaks after one token."""
    engine = saying(3, 4)
    engine.fault = Fault(error=EngineError("broken"), after_requests=1, after_tokens=1)
    assert ids(await read(engine, ASK)) == [3, 4]
    received = []
    with pytest.raises(EngineError, match="broken"):
        async for chunk in engine.generate(ASK):
            received.append(chunk.token_ids)
    assert received == [(3,)]
    assert (engine.live, engine.cancelled) == (0, [])


async def test_leaving_a_stream_ends_its_work() -> None:
    """Closed after a chunk, or cancelled while the engine is silent: nothing lives on."""
    engine = saying(3, 4)
    async with aclosing(engine.generate(ASK)) as stream:
        await stream.wait()
        assert engine.live == 1
    engine.fault = Fault()
    reader = asyncio.create_task(read(engine, replace(ASK, request_id="silent")))
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait({reader})
    assert (engine.live, engine.cancelled) == (0, ["r", "silent"])


def test_limits_are_told_unless_their_fault_is_on() -> None:
    """The fault of the limits is its own switch."""
    engine = saying(3, max_draft_tokens=4)
    assert run_async(engine.capacity()).max_draft_tokens == 4
    engine.fault = Fault(error=EngineUnavailable("gone"), capacity=True)
    with pytest.raises(EngineUnavailable):
        run_async(engine.capacity())


def test_a_closed_engine_answers_no_more() -> None:
    """Neither new requests nor running ones."""
    engine = saying(3)
    run_async(engine.close())
    with pytest.raises(EngineUnavailable):
        ask(engine)


def test_an_agreeing_draft_agrees_as_often_as_told() -> None:
    """Of many contexts the draft guesses the target's token in the given share."""
    target = hashed(100)
    draft = agreeing(target, 0.8, 100)
    contexts = [(n, n * 7 % 100, 3) for n in range(4000)]
    share = sum(draft(context) == target(context) for context in contexts) / 4000
    assert abs(share - 0.8) < 0.02
