"""Requests of several rows (batch dimension above 1) or several sequences of one row."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.deployment import Deployment
from tests.conformance.engine_client import Engine
from tests.conformance.prompts import LENGTH, Story, scattered, words
from tests.conformance.test_sampling import DRAW
from tests.conformance.test_tokens import BOTH


def padded_rows(stories: list[Story], **more: Any) -> list[dict[str, Any]]:
    """One row per story with prompts of different lengths, the shorter ones padded with 0."""
    widest = max(len(story.prompt) for story in stories)
    return [
        {
            "input_ids": story.prompt + [0] * (widest - len(story.prompt)),
            "input_lengths": len(story.prompt),
            "request_output_len": LENGTH,
            "exclude_input_in_output": True,
            **more,
        }
        for story in stories
    ]


def uneven(stories: list[Story]) -> list[Story]:
    """Three stories; the last begins later, within the answer it had, so its prompt is longer."""
    one, two, three = stories[:3]
    return [one, two, Story(three.prompt + three.tokens[:4], three.tokens[4:])]


@BOTH
def test_rows_are_answered_each(engine: Engine, stories: list[Story], streaming: bool) -> None:
    """Padding is cut off, batch_index tells the row, and only the very last response is final."""
    engine.needs("batch_index", "exclude_input_in_output")
    stories = uneven(stories)
    rows = padded_rows(stories, streaming=streaming)
    for row, story in zip(rows, stories, strict=True):
        row["request_output_len"] = len(story.tokens)
    answer = engine.send(engine.batch(rows)).answer()
    for index, story in enumerate(stories):
        assert answer.of("batch_index", index).ids == story.tokens
    finals = [response.final for response in answer.responses]
    assert finals == [False] * (len(finals) - 1) + [True]


def test_rows_have_their_own_options(engine: Engine, stories: list[Story]) -> None:
    """Length, end token and stop words (padded to one width) are each row's own."""
    engine.needs("batch_index", "exclude_input_in_output")
    one, two, three = stories[:3]
    rows = padded_rows([one, two, three])
    own = (
        (3, -1, words(columns=2)),
        (LENGTH, two.tokens[4], words(columns=2)),
        (LENGTH, -1, words(three.tokens[1:3])),
    )
    for row, (length, end, stop) in zip(rows, own, strict=True):
        row |= {"request_output_len": length, "end_id": end, "stop_words_list": stop}
    answer = engine.send(engine.batch(rows)).answer()
    expected = [one.tokens[:3], two.tokens[:4], three.tokens[:3]]
    assert [answer.of("batch_index", row).ids for row in range(3)] == expected


def test_one_wrong_row_refuses_all(engine: Engine, stories: list[Story]) -> None:
    """One error and nothing else, also for the rows that are right."""
    engine.needs("batch_index", "exclude_input_in_output")
    rows = padded_rows(stories[:2], streaming=True)
    rows[1]["request_output_len"] = 0
    (response,) = engine.send(engine.batch(rows)).answer().responses
    assert response.error
    assert not response.outputs


@BOTH
def test_several_sequences_of_one_prompt(
    engine: Engine, deployment: Deployment, streaming: bool
) -> None:
    """sequence_index tells them apart; with one seed they still are draws of their own."""
    engine.needs("num_return_sequences", "sequence_index")
    seed = engine.spelling("seed", "random_seed")
    answer = engine.ask(
        scattered(deployment.vocab_size, 60),
        LENGTH,
        num_return_sequences=3,
        streaming=streaming,
        **{**DRAW, seed: 11},
    )
    drawn = [answer.of("sequence_index", index).ids for index in range(3)]
    assert [len(ids) for ids in drawn] == [LENGTH] * 3
    assert len(set(map(tuple, drawn))) > 1
    finals = [response.final for response in answer.responses]
    assert finals == [False] * (len(finals) - 1) + [True]
    if not streaming:
        assert len(finals) == 3


def test_several_sequences_of_several_rows(engine: Engine, stories: list[Story]) -> None:
    """Both indices are on every response."""
    engine.needs("num_return_sequences", "sequence_index", "exclude_input_in_output")
    rows = padded_rows(stories[:2], num_return_sequences=2)
    answer = engine.send(engine.batch(rows)).answer()
    for row, story in enumerate(stories[:2]):
        for index in range(2):
            assert answer.of("batch_index", row).of("sequence_index", index).ids == story.tokens


@pytest.mark.parametrize("rows", [1, 2])
def test_indices_come_only_where_there_is_something_to_tell(
    engine: Engine, stories: list[Story], rows: int
) -> None:
    """batch_index with more than one row, sequence_index with more than one sequence."""
    engine.needs("num_return_sequences", "exclude_input_in_output")  # releases from 0.14
    answer = engine.send(engine.batch(padded_rows(stories[:rows]))).answer()
    told = {
        tuple(name in response.outputs for name in ("batch_index", "sequence_index"))
        for response in answer.responses
    }
    assert told == {(rows > 1, False)}
