"""Which ids come back, in which responses, and where they end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.conformance.deployment import Deployment
from tests.conformance.engine_client import Engine
from tests.conformance.prompts import LENGTH, Story, scattered
from tests.helpers.waiting import in_pieces

BOTH = pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "whole"])


def test_streaming_gives_the_same_ids_in_pieces(engine: Engine, story: Story) -> None:
    """Streamed responses hold only what is new; without streaming there is one response."""

    def pieces() -> Sequence[Any]:
        answer = engine.ask(story.prompt, LENGTH, streaming=True)
        assert answer.ids == story.tokens
        return answer.responses

    in_pieces(pieces, 1)
    whole = engine.ask(story.prompt, LENGTH, streaming=False)
    assert whole.ids == story.tokens
    assert len(whole.responses) == 1


@BOTH
def test_the_last_response_and_no_other_is_final(
    engine: Engine, story: Story, streaming: bool
) -> None:
    """The final flag is on a response with ids (maybe none new); nothing follows it."""
    responses = engine.ask(story.prompt, 3, streaming=streaming).responses
    assert [response.final for response in responses] == [False] * (len(responses) - 1) + [True]
    assert all("output_ids" in response.outputs for response in responses)


@BOTH
@pytest.mark.parametrize("max_tokens", [1, 2, LENGTH])
def test_request_output_len_is_met_exactly(
    engine: Engine, story: Story, max_tokens: int, streaming: bool
) -> None:
    """With nothing to end it earlier, an answer has as many tokens as were asked for."""
    answer = engine.ask(story.prompt, max_tokens, streaming=streaming)
    assert answer.ids == story.tokens[:max_tokens]


def test_a_whole_answer_may_start_with_the_prompt(engine: Engine, story: Story) -> None:
    """exclude_input_in_output decides per request; sequence_length counts what is there."""
    engine.needs("exclude_input_in_output")
    for exclude, before in ((True, []), (False, story.prompt)):
        (response,) = engine.ask(story.prompt, 3, exclude_input_in_output=exclude).responses
        assert response.ids == before + story.tokens[:3]


def test_the_parameter_decides_where_the_request_does_not(engine: Engine, story: Story) -> None:
    """The model's parameter exclude_input_in_output is the input's default; unset means false."""
    (response,) = engine.ask(story.prompt, 3, exclude_input_in_output=None).responses
    before = [] if engine.excludes_input else story.prompt
    assert response.ids == before + story.tokens[:3]


def test_streaming_never_repeats_the_prompt(engine: Engine, story: Story) -> None:
    """Excluded or not, streamed responses hold generated ids only."""
    engine.needs("exclude_input_in_output")
    answer = engine.ask(story.prompt, 3, streaming=True, exclude_input_in_output=False)
    assert answer.ids == story.tokens[:3]


@BOTH
@pytest.mark.parametrize("length", [0, 1, 4])
def test_the_end_token_ends_and_is_not_emitted(
    engine: Engine, story: Story, length: int, streaming: bool
) -> None:
    """Neither in the ids nor in the count; a last response without new ids is as good as any."""
    answer = engine.ask(story.prompt, LENGTH, end_id=story.tokens[length], streaming=streaming)
    assert answer.ids == story.tokens[:length]
    assert answer.last.final


def test_end_id_minus_one_never_ends(engine: Engine, story: Story) -> None:
    """-1 means that no token ends the answer."""
    assert engine.ask(story.prompt, LENGTH, end_id=-1).ids == story.tokens


def test_greedy_is_the_default_and_repeatable(engine: Engine, stories: list[Story]) -> None:
    """Without sampling options the same prompt has the same answer, time after time."""
    for story in stories[1:]:
        assert engine.ask(story.prompt, LENGTH).ids == story.tokens


def test_batch_mates_change_nothing(
    engine: Engine, deployment: Deployment, stories: list[Story]
) -> None:
    """An answer does not depend on what else runs: others start before, with and after it."""
    noise = [scattered(deployment.vocab_size, 100 + seed, 5 + 7 * seed) for seed in range(6)]
    before = [engine.start(prompt, 2 * LENGTH, streaming=True) for prompt in noise[:3]]
    mine = [engine.start(story.prompt, LENGTH, streaming=True) for story in stories]
    after = [engine.start(prompt, 5) for prompt in noise[3:]]
    assert [stream.answer().ids for stream in mine] == [story.tokens for story in stories]
    assert [len(stream.answer().ids) for stream in before + after] == [2 * LENGTH] * 3 + [5] * 3


def test_an_answer_can_be_taken_up_where_it_was_left(engine: Engine, story: Story) -> None:
    """Prompt and half an answer as a new prompt give the other half (KV reuse or not)."""
    half = LENGTH // 2
    rest = engine.ask(story.prompt + story.tokens[:half], LENGTH - half)
    assert rest.ids == story.tokens[half:]


def test_an_answer_too_long_for_the_engine_is_cut(engine: Engine, deployment: Deployment) -> None:
    """Prompt and answer together stay within the engine's longest sequence; that is no error."""
    if not deployment.max_sequence:
        pytest.skip("no longest sequence: --conformance-max-sequence N runs it")
    prompt = (scattered(deployment.vocab_size, 7, 64) * deployment.max_sequence)[
        : deployment.max_sequence - 4
    ]
    assert 1 <= len(engine.ask(prompt, 50).ids) < 50


def test_only_requested_outputs_are_sent(engine: Engine, story: Story) -> None:
    """Naming outputs leaves out all others, also those that a flag asks for."""
    answer = engine.ask(
        story.prompt,
        3,
        outputs=("output_ids", "sequence_length"),
        runtime_top_k=1,
        return_log_probs=True,
        streaming=True,
    )
    assert answer.ids == story.tokens[:3]
    assert {name for r in answer.responses for name in r.outputs} == {
        "output_ids",
        "sequence_length",
    }


@pytest.mark.parametrize("left_out", ["output_ids", "sequence_length"])
def test_the_two_main_outputs_must_be_requested(
    engine: Engine, story: Story, left_out: str
) -> None:
    """Ids without their count, or the count alone, cannot be had."""
    (only,) = {"output_ids", "sequence_length"} - {left_out}
    answer = engine.ask(story.prompt, 1, outputs=(only,))
    assert answer.error
    assert not any(response.outputs for response in answer.responses)


@BOTH
def test_nothing_optional_comes_unasked(engine: Engine, story: Story, streaming: bool) -> None:
    """With no flag set, and all outputs requested, there are the ids and their count alone, and
    what was cached if this package's model exposes it."""
    engine.needs("num_return_sequences")  # releases before 0.14 send placeholders
    answer = engine.ask(story.prompt, 3, streaming=streaming)
    told = {frozenset(response.outputs) - {"cached_tokens"} for response in answer.responses}
    assert told == {frozenset({"output_ids", "sequence_length"})}


@BOTH
def test_token_counts_come_when_asked_for(engine: Engine, story: Story, streaming: bool) -> None:
    """Whole answers tell their total, streamed responses what is new in them."""
    engine.needs("return_num_input_tokens", "return_num_output_tokens")
    answer = engine.ask(
        story.prompt,
        5,
        streaming=streaming,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    )
    told = [r for r in answer.responses if "num_output_tokens" in r.outputs]
    assert sum(response.number("num_output_tokens") for response in told) == 5
    assert {response.number("num_input_tokens") for response in told} == {len(story.prompt)}


def test_performance_figures_come_when_asked_for(engine: Engine, story: Story) -> None:
    """Times in their order, counts of blocks; each of shape [1, 1] and of its own type."""
    engine.needs("return_perf_metrics")
    last = engine.ask(story.prompt, 5, return_perf_metrics=True).last
    kinds = ("arrival", "first_scheduled", "first_token", "last_token")
    times = [last.number(f"{kind}_time_ns") for kind in kinds]
    assert times == sorted(times)
    assert {value.dtype for value in times} == {np.dtype(np.int64)}
    kinds = ("alloc_new", "reused", "alloc_total")
    new, reused, total = (last.number(f"kv_cache_{kind}_blocks") for kind in kinds)
    assert total >= new >= 0 <= reused
