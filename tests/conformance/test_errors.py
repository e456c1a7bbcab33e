"""What is wrong with a request is said in one error response, and the server goes on.

The texts differ from engine to engine; that there is one, and nothing else, does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conformance.deployment import Deployment
from tests.conformance.engine_client import Answer, Engine
from tests.conformance.prompts import Story, scattered

# What is sent instead of, or beside, a request that would be right; None leaves an input out.
WRONG: list[dict[str, Any]] = [
    {"request_output_len": 0},
    {"request_output_len": -1},
    {"input_ids": [], "input_lengths": 0},
    {"runtime_top_p": 1.5},
    {"runtime_top_k": -1},
    {"temperature": -1.0},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": -1.0},
    {"runtime_top_p_decay": 0.0, "runtime_top_p": 0.9},
    {"runtime_top_p_decay": 1.5, "runtime_top_p": 0.9},
    {"beam_width": 0},
    {"beam_width": 1000},
    {"num_return_sequences": 0},
    {"end_id": -2},
    {"lora_task_id": 987654321},
    {"lookahead_window_size": 4},
    {"retention_token_range_starts": [0]},
    {"retention_token_range_starts": [0, 1], "retention_token_range_ends": [1]},
]
MISSHAPEN: list[dict[str, Any]] = [
    {"input_ids": None},
    {"request_output_len": None},
    {"temperature": [0.5, 0.5]},
    {"stop_words_list": [[5, 6], [1, 2], [0, 0]]},
]
BROKEN_LISTS = {
    "not rising": [[5, 6], [1, 1]],
    "falling": [[5, 6], [2, 1]],
    "beyond the ids": [[5, 6], [3, -1]],
    "an offset of zero": [[5, 6], [0, 2]],
    "negative": [[5, 6], [-2, -1]],
    "after the padding": [[5, 6], [-1, 2]],
    "one row": [5, 1],
}


def refused(answer: Answer) -> bool:
    """One error, no outputs, end of stream."""
    (response,) = answer.responses
    return bool(response.error) and not response.outputs


def goes_on(engine: Engine, story: Story) -> bool:
    """The next request has its answer."""
    return engine.ask(story.prompt, 1).ids == story.tokens[:1]


@pytest.mark.parametrize("inputs", WRONG, ids=str)
@pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "whole"])
def test_a_value_out_of_range_is_refused(
    engine: Engine, story: Story, inputs: dict[str, Any], streaming: bool
) -> None:
    """By the model itself, with the final flag on the error."""
    engine.needs(*inputs)
    row = {"request_output_len": 2, "streaming": streaming, **inputs}
    answer = engine.ask(story.prompt, 2, **row)
    assert refused(answer)
    assert answer.responses[0].final
    assert goes_on(engine, story)


@pytest.mark.parametrize("inputs", MISSHAPEN, ids=str)
def test_a_missing_or_misshapen_input_is_refused(
    engine: Engine, story: Story, inputs: dict[str, Any]
) -> None:
    """By Triton or by the model; the caller need not know which."""
    engine.needs(*inputs)
    assert refused(engine.ask(story.prompt, 2, **inputs))
    assert goes_on(engine, story)


@pytest.mark.parametrize("name", ["stop_words_list", "bad_words_list"])
@pytest.mark.parametrize("layout", BROKEN_LISTS.values(), ids=BROKEN_LISTS)
def test_a_malformed_word_list_is_refused(
    engine: Engine, story: Story, name: str, layout: list[Any]
) -> None:
    """End offsets rise strictly, stay within the ids, and after the first -1 only -1 follows."""
    assert refused(engine.ask(story.prompt, 2, **{name: layout}))
    assert goes_on(engine, story)


def test_an_end_id_outside_the_vocabulary_is_refused(
    engine: Engine, deployment: Deployment, story: Story
) -> None:
    """-1 to the vocabulary's last is what there is (far above it, for it may be padded)."""
    assert refused(engine.ask(story.prompt, 2, end_id=2 * deployment.vocab_size))
    assert goes_on(engine, story)


@pytest.mark.parametrize("more", [0, 100])
def test_a_prompt_that_leaves_no_room_is_refused(
    engine: Engine, deployment: Deployment, story: Story, more: int
) -> None:
    """A prompt as long as the longest sequence, or longer."""
    if not deployment.max_sequence:
        pytest.skip("no longest sequence: --conformance-max-sequence N runs it")
    length = deployment.max_sequence + more
    prompt = (scattered(deployment.vocab_size, 90) * length)[:length]
    assert refused(engine.ask(prompt, 2))
    assert goes_on(engine, story)


def test_draft_logits_without_drafts_are_refused(
    engine: Engine, verifier: Engine, deployment: Deployment, story: Story
) -> None:
    """Logits say nothing without the tokens they belong to."""
    verifier.needs("draft_logits")
    rows = np.zeros((2, deployment.vocab_size))
    assert refused(verifier.ask(story.prompt, 3, draft_logits=rows))
    assert goes_on(engine, story)


def test_a_draft_outside_the_vocabulary_is_refused(
    engine: Engine, verifier: Engine, deployment: Deployment, story: Story
) -> None:
    """Drafts are looked at before they are computed."""
    draft = [story.tokens[0], 2 * deployment.vocab_size]
    assert refused(verifier.ask(story.prompt, 3, draft_input_ids=draft))
    assert goes_on(engine, story)


def test_drafts_and_beams_do_not_go_together(
    engine: Engine, verifier: Engine, story: Story
) -> None:
    """Beam search has no one text that a draft could continue."""
    draft = story.tokens[:1]
    assert refused(verifier.ask(story.prompt, 2, draft_input_ids=draft, beam_width=2))
    assert goes_on(engine, story)
