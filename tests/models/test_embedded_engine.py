"""The embedded engine as its callers meet it: what it answers, what it refuses, how it ends."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.embedded_steps import (
    VOCAB,
    answers,
    checkpoint,
    generated,
    prompt,
    reference,
    request,
)
from tests.helpers.waiting import join
from trtllm_bls.engines.base import Engine, QueuedChunks
from trtllm_bls.engines.embedded import EmbeddedEngine
from trtllm_bls.engines.embedded.batching import Sequence, Submission
from trtllm_bls.errors import (
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    Unsupported,
)
from trtllm_bls.settings.parameters import EngineParameters
from trtllm_bls.types import Adapter, Draft, EngineChunk, EngineRequest, FinishReason, Wants

TRUTH = generated(IDS := prompt(14), 20)


def open_engine(**sizes: Any) -> EmbeddedEngine:
    settings = {"max_batch": 4, "max_tokens_per_step": 64, "max_sequence_tokens": 128, "threads": 1}
    return EmbeddedEngine(EngineParameters(model_dir=checkpoint(), **settings | sizes))


@pytest.fixture(scope="module", params=[False, True], ids=["in turns", "beside readers"])
def engine(request: pytest.FixtureRequest) -> Iterator[EmbeddedEngine]:
    """Hands tokens over after the step that made them, or beside the next one as on a GPU."""
    with open_engine() as opened:
        opened._runner.is_async = request.param
        yield opened


def read(engine: EmbeddedEngine, asked: EngineRequest) -> tuple[list[int], EngineChunk]:
    """All tokens, and the last chunk."""
    (chunks,) = answers(engine, asked)
    return [token for chunk in chunks for token in chunk.token_ids], chunks[-1]


# --- the answer -------------------------------------------------------------------------------


def test_an_answer_comes_token_by_token(engine: EmbeddedEngine) -> None:
    """Chunks come as tokens do, the last one says that it is the last and why."""
    (chunks,) = answers(engine, request(IDS, 6))
    assert [token for chunk in chunks for token in chunk.token_ids] == TRUTH[:6]
    assert [chunk.final for chunk in chunks] == [False] * 5 + [True]
    assert chunks[-1].finish_reason is FinishReason.LENGTH


def test_an_end_token_ends_without_being_said(engine: EmbeddedEngine) -> None:
    """The last chunk has no token, and the reason."""
    text, last = read(engine, request(IDS, 9, end_id=TRUTH[3]))
    assert (text, last.token_ids) == (TRUTH[:3], ())
    assert last.finish_reason is FinishReason.END_ID


def test_end_id_minus_one_never_ends(engine: EmbeddedEngine) -> None:
    """As the contract has it, -1 means that no token ends the text."""
    text, last = read(engine, request(IDS, 9, end_id=-1))
    assert (text, last.finish_reason) == (TRUTH[:9], FinishReason.LENGTH)


def test_a_stop_sequence_stays_in_the_text(engine: EmbeddedEngine) -> None:
    """The tokens of the stop word are in the output, nothing after them is."""
    text, last = read(engine, request(IDS, 9, stop_sequences=((1, 1, 1), tuple(TRUTH[2:4]))))
    assert (text, last.finish_reason) == (TRUTH[:4], FinishReason.STOP)


def test_a_stop_sequence_never_begins_in_the_prompt(engine: EmbeddedEngine) -> None:
    """Only generated tokens can complete it."""
    stop = (IDS[-1], TRUTH[0])
    assert read(engine, request(IDS, 3, stop_sequences=(stop,)))[0] == TRUTH[:3]


def test_a_stop_sequence_counts_from_min_tokens_on(engine: EmbeddedEngine) -> None:
    """An earlier occurrence is passed over."""
    asked = request(IDS, 6, stop_sequences=((TRUTH[1],),), sampling={"min_tokens": 3})
    assert len(read(engine, asked)[0]) > 2


def test_a_text_too_long_for_the_engine_is_cut_with_a_warning(
    engine: EmbeddedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """The output is shortened, the request succeeds, the log says so."""
    ids = prompt(120)
    text, last = read(engine, request(ids, 50))
    assert text == generated(ids, 8)
    assert last.finish_reason is FinishReason.LENGTH
    assert "170 tokens are cut to 128" in caplog.text


async def test_a_full_queue_refuses_at_once() -> None:
    """Slots and queue taken: the next request is told so in the words tools look for."""
    with open_engine(max_batch=1, max_queue_size=2) as small:
        kept = [small.generate(request(IDS, 100)) for _ in range(3)]
        await kept[0].wait()
        with pytest.raises(Overloaded, match="Maximum queue size of 2"):
            await small.generate(request(IDS, 1)).wait()
        for stream in kept:
            assert [chunk async for chunk in stream][-1].final
        assert [chunk.final async for chunk in small.generate(request(IDS, 2))] == [False, True]


async def test_closing_ends_what_runs_and_refuses_the_rest() -> None:
    """Readers get an error instead of waiting for ever, and closing twice is harmless."""
    opened = open_engine()
    stream = opened.generate(request(IDS, 100))
    await stream.wait()
    await opened.close()
    opened.shutdown()
    with pytest.raises(EngineError, match="closed"):
        async for _ in stream:
            pass
    with pytest.raises(EngineUnavailable, match="closed"):
        await opened.generate(request(IDS, 1)).wait()


# --- what may be asked for beside tokens --------------------------------------------------------


@functools.cache
def model_logits(ids: tuple[int, ...]) -> Any:
    with torch.no_grad():
        return reference()(torch.tensor([ids])).logits[0].numpy()


def test_logits_and_log_probs_are_the_models_own(engine: EmbeddedEngine) -> None:
    """Raw logits of prompt and completion, and log-probabilities of what was said."""
    wants = Wants(log_probs=True, context_logits=True, generation_logits=True)
    asked = request(IDS, 4, wants=wants, sampling={"repetition_penalty": 1.1})
    (chunks,) = answers(engine, asked)
    said = tuple(token for chunk in chunks for token in chunk.token_ids)
    exact = model_logits((*IDS, *said))
    assert chunks[0].context_logits is not None
    np.testing.assert_allclose(chunks[0].context_logits, exact[: len(IDS)], atol=1e-4)
    total = 0.0
    for place, (chunk, token) in enumerate(zip(chunks, said, strict=True)):
        row = exact[len(IDS) - 1 + place]
        assert chunk.generation_logits is not None and chunk.log_probs is not None
        np.testing.assert_allclose(chunk.generation_logits, row[None], atol=1e-4)
        total += float(row[token] - np.log(np.exp(row).sum()))
        assert chunk.cum_log_prob == pytest.approx(total, abs=1e-3)
    assert sum(score for c in chunks for score in c.log_probs or ()) == pytest.approx(
        total, abs=1e-3
    )


def test_logits_of_a_draft_belong_to_the_tokens_that_came(engine: EmbeddedEngine) -> None:
    """Two accepted tokens and the correction: three rows."""
    draft = Draft(token_ids=(*TRUTH[:2], (TRUTH[2] + 1) % 90))
    asked = request(IDS, 4, draft=draft, wants=Wants(generation_logits=True), streaming=False)
    ((chunk,),) = answers(engine, asked)
    assert chunk.token_ids == tuple(TRUTH[:3])
    exact = model_logits((*IDS, *TRUTH[:3]))[len(IDS) - 1 : -1]
    np.testing.assert_allclose(chunk.generation_logits, exact, atol=1e-4)


def test_nothing_comes_that_was_not_asked_for(engine: EmbeddedEngine) -> None:
    """Chunks of a plain request hold tokens and the end; the first one tells what was cached."""
    first, *rest = answers(engine, request(IDS, 3))[0]
    for chunk in (replace(first, cached_tokens=None), *rest):
        assert replace(chunk, token_ids=(), final=False, finish_reason=None) == EngineChunk(
            token_ids=()
        )


def test_an_ending_without_tokens_still_has_its_shapes(engine: EmbeddedEngine) -> None:
    """An end token said first: empty scores, not missing ones."""
    wants = Wants(log_probs=True, generation_logits=True, context_logits=True)
    ((chunk,),) = answers(engine, request(IDS, 3, end_id=TRUTH[0], wants=wants))
    assert chunk.generation_logits is not None and chunk.context_logits is not None
    assert chunk.generation_logits.shape == (0, VOCAB)
    assert chunk.context_logits.shape == (len(IDS), VOCAB)
    assert (chunk.log_probs, chunk.cum_log_prob) == ((), 0.0)


def test_metrics_tell_times_in_order_and_tokens_reused(engine: EmbeddedEngine) -> None:
    """A block of this engine is one token; a prompt that was just seen is reused but for one."""
    asked = request(prompt(30, start=8), 5, wants=Wants(perf_metrics=True))
    read(engine, asked)
    metrics = read(engine, asked)[1].metrics
    assert metrics is not None
    times = (
        metrics.arrival_time_ns,
        metrics.first_scheduled_time_ns,
        metrics.first_token_time_ns,
        metrics.last_token_time_ns,
    )
    assert list(times) == sorted(t for t in times if t is not None)
    assert len(set(times)) == 4
    assert (metrics.kv_cache_reused_blocks, metrics.kv_cache_alloc_new_blocks) == (29, 5)
    assert metrics.kv_cache_alloc_total_blocks == 34
    (chunks,) = answers(engine, asked)
    assert [chunk.cached_tokens for chunk in chunks] == [29, None, None, None, None]


# --- many at once, and those who leave ----------------------------------------------------------


async def test_the_seam_streams_many_requests_at_once(engine: EmbeddedEngine) -> None:
    """More requests than slots on one loop: every text is the one it would be alone."""
    seam: Engine = engine

    async def text(start: int) -> list[int]:
        ids = prompt(10 + start, start=start)
        asked = request(ids, 8, streaming=start % 2 == 0)
        async with aclosing(seam.generate(asked)) as chunks:
            return [token async for chunk in chunks for token in chunk.token_ids]

    texts = await asyncio.gather(*(text(n) for n in range(10)))
    assert texts == [generated(prompt(10 + n, start=n), 8) for n in range(10)]
    limits = await seam.capacity()
    assert (limits.vocab_size, limits.max_sequence_tokens) == (VOCAB, 128)
    assert limits.max_draft_tokens == EngineParameters.max_draft_len


@pytest.mark.parametrize("how", ["closed", "cancelled"])
async def test_leaving_a_stream_frees_its_slot(how: str) -> None:
    """Three more steps, and the next in line is served: the step under way, and its own two."""
    steps = threading.Semaphore(1)
    with open_engine(max_batch=1) as small:
        forward = small._runner.forward

        def permitted(segments: Any) -> torch.Tensor:
            steps.acquire()
            return forward(segments)

        small._runner.forward = permitted  # type: ignore[method-assign]
        try:
            stream = small.generate(request(IDS, 110))
            await stream.wait()
            assert len(stream.take()) == 1
            if how == "cancelled":
                reader = asyncio.ensure_future(stream.wait())
                await asyncio.sleep(0)  # lets the reader begin to wait
                reader.cancel()
            await stream.aclose()
            following = small.generate(request(prompt(5, start=3), 2))
            chunks = aiter(following)
            waiting = asyncio.ensure_future(anext(chunks))
            await asyncio.sleep(0)  # lets it be submitted
            steps.release(3)
            assert not (await waiting).final
            assert (await anext(chunks)).final
        finally:
            steps.release(1000)


def test_a_reader_whose_loop_is_gone_does_not_hold_the_engine() -> None:
    """Chunks that cannot be delivered end their request at once."""
    gone = asyncio.new_event_loop()
    gone.close()
    abandoned = Submission(1, QueuedChunks(), gone)
    with open_engine(max_batch=1) as small:
        small._add([Sequence(request(IDS, 110), 0, small._capacity, abandoned)])
        assert read(small, request(IDS, 2))[0] == TRUTH[:2]
        assert abandoned.cancelled
        assert small._batcher.num_computed_tokens < 20  # one step of it, two of the other


def test_requests_from_many_threads_meet_in_one_batch(engine: EmbeddedEngine) -> None:
    """``generate`` may be called on several event loops, each in a thread of its own."""
    texts: dict[int, list[int]] = {}

    def ask(start: int) -> None:
        texts[start] = read(engine, request(prompt(9, start=start), 6))[0]

    threads = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    assert texts == {n: generated(prompt(9, start=n), 6) for n in range(6)}


# --- what is refused ----------------------------------------------------------------------------

NAN, INFINITE = float("nan"), float("inf")
LOGITS = np.zeros((2, VOCAB), dtype=np.float32)

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("input_ids", {"input_ids": ()}),
    ("input_ids", {"input_ids": (1, VOCAB)}),
    ("input_ids", {"input_ids": (1, -1)}),
    ("input_ids", {"input_ids": prompt(128)}),
    ("request_output_len", {"max_tokens": 0}),
    ("num_return_sequences", {"num_return_sequences": 0}),
    ("end_id", {"end_id": VOCAB}),
    ("end_id", {"end_id": -2}),
    ("stop_words_list", {"stop_sequences": ((1,), (VOCAB,))}),
    ("stop_words_list", {"stop_sequences": ((),)}),
    ("bad_words_list", {"bad_sequences": ((1, -5),)}),
    ("embedding_bias", {"embedding_bias": ((VOCAB, 1.0),)}),
    ("embedding_bias", {"embedding_bias": ((1, NAN),)}),
    ("embedding_bias", {"embedding_bias": ((1, INFINITE),)}),
    ("draft_input_ids", {"draft": Draft(token_ids=(1,) * 33)}),
    ("draft_input_ids", {"draft": Draft(token_ids=(VOCAB,))}),
    ("draft_logits", {"draft": Draft(token_ids=(1,), logits=LOGITS)}),
    ("draft_logits", {"draft": Draft(token_ids=(1, 2), logits=LOGITS * NAN)}),
    ("draft_logits", {"draft": Draft(token_ids=(1, 2), logits=LOGITS + INFINITE)}),
    (
        "draft_acceptance_threshold",
        {"draft": Draft(token_ids=(1, 2), logits=LOGITS, acceptance_threshold=0.0)},
    ),
    *(
        (name, {"sampling": {field: value}})
        for name, field, values in [
            ("temperature", "temperature", (-0.1, NAN, INFINITE)),
            ("runtime_top_k", "top_k", (-1,)),
            ("runtime_top_p", "top_p", (1.1, NAN)),
            ("runtime_top_p_min", "top_p_min", (0.0, 1.5)),
            ("runtime_top_p_decay", "top_p_decay", (0.0, 1.5)),
            ("runtime_top_p_reset_ids", "top_p_reset_id", (VOCAB,)),
            ("repetition_penalty", "repetition_penalty", (0.0, NAN)),
            ("presence_penalty", "presence_penalty", (NAN, INFINITE)),
            ("frequency_penalty", "frequency_penalty", (NAN, -INFINITE)),
            ("min_tokens", "min_tokens", (-1,)),
            ("seed", "seed", (-1, 2**64)),
            ("beam_width", "beam_width", (0,)),
        ]
        for value in values
    ),
]


@pytest.mark.parametrize(("field", "change"), REFUSED)
def test_a_wrong_value_is_refused_by_its_wire_name(
    engine: EmbeddedEngine, field: str, change: dict[str, Any]
) -> None:
    """Before any work, with one line that names the field."""
    ids = change.get("input_ids", IDS)
    rest = {name: value for name, value in change.items() if name != "input_ids"}
    asked = request(ids, **{"max_tokens": 5, **rest})
    with pytest.raises(InvalidRequest, match=field) as caught:
        answers(engine, asked)
    assert caught.value.field == field
    assert not isinstance(caught.value, Unsupported)


def test_a_draft_too_long_names_its_length_and_the_limit(engine: EmbeddedEngine) -> None:
    """Whoever tunes speculation reads the limit in the error."""
    with pytest.raises(InvalidRequest, match="draft_input_ids: 33 tokens; at most 32"):
        answers(engine, request(IDS, 34, draft=Draft(token_ids=(1,) * 33)))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("beam_width", {"sampling": {"beam_width": 2}}),
        ("lora_task_id", {"adapter": Adapter(task_id=1)}),
        ("lookahead_window_size", {"extras": {"lookahead_window_size": np.array([4], np.int32)}}),
    ],
)
def test_what_cannot_be_honoured_is_refused_not_ignored(
    engine: EmbeddedEngine, field: str, change: dict[str, Any]
) -> None:
    """Known tensors without a meaning here are named."""
    with pytest.raises(Unsupported, match=field):
        answers(engine, request(IDS, 5, **change))


def test_an_empty_extra_is_as_good_as_absent(engine: EmbeddedEngine) -> None:
    """Zero elements ask for nothing."""
    extras = {"lora_weights": np.zeros((0, 0), dtype=np.float16)}
    assert read(engine, request(IDS, 3, extras=extras))[0] == TRUTH[:3]
