"""Stop sequences, forbidden sequences and embedding bias, all by token id."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conformance.deployment import Deployment
from tests.conformance.engine_client import Engine, Ids
from tests.conformance.prompts import LENGTH, Story, words
from tests.conformance.test_tokens import BOTH

LARGE = 1000.0  # far above any difference of logits, and within FP16


def never(story: Story, count: int) -> Ids:
    """Ids that are not in the story's answer."""
    return [token for token in story.prompt if token not in story.tokens][:count]


@BOTH
@pytest.mark.parametrize("at", [0, 3])
def test_a_stop_token_ends_the_answer(
    engine: Engine, story: Story, at: int, streaming: bool
) -> None:
    """It ends with the stop token, which belongs to the answer."""
    stop = words([story.tokens[at]])
    answer = engine.ask(story.prompt, LENGTH, stop_words_list=stop, streaming=streaming)
    assert answer.ids == story.tokens[: at + 1]


@BOTH
def test_a_stop_sequence_must_appear_whole(engine: Engine, story: Story, streaming: bool) -> None:
    """Its tokens in another order, or only the first of them, end nothing."""
    one, two, three = story.tokens[2:5]
    (unused,) = never(story, 1)
    stops = words([two, one], [one, unused], [one, two, three])
    answer = engine.ask(story.prompt, LENGTH, stop_words_list=stops, streaming=streaming)
    assert answer.ids == story.tokens[:5]


def test_of_several_stops_the_first_to_appear_ends_it(engine: Engine, story: Story) -> None:
    """Their order in the list means nothing."""
    stops = words([story.tokens[5]], story.tokens[1:3], [story.tokens[4]])
    assert engine.ask(story.prompt, LENGTH, stop_words_list=stops).ids == story.tokens[:3]


def test_ids_after_the_last_offset_are_ignored(engine: Engine, story: Story) -> None:
    """Padding: offsets are -1 from some column on, and the ids there mean nothing."""
    stops = words([story.tokens[4]], columns=6)
    stops[0][1:] = [story.tokens[1]] * 5
    assert engine.ask(story.prompt, LENGTH, stop_words_list=stops).ids == story.tokens[:5]


@pytest.mark.parametrize("name", ["stop_words_list", "bad_words_list"])
def test_a_list_of_no_words_changes_nothing(engine: Engine, story: Story, name: str) -> None:
    """The form of "only empty strings": one column, no offset."""
    assert engine.ask(story.prompt, LENGTH, **{name: [[0], [-1]]}).ids == story.tokens


def test_a_bad_token_never_appears(engine: Engine, story: Story) -> None:
    """The answer goes on without it."""
    bad = story.tokens[2]
    answer = engine.ask(story.prompt, LENGTH, bad_words_list=words([bad]))
    assert answer.ids[:2] == story.tokens[:2]
    assert bad not in answer.ids
    assert len(answer.ids) == LENGTH


def test_a_bad_sequence_never_appears_whole(engine: Engine, story: Story) -> None:
    """Only its last token is barred, and only after the others."""
    bad = story.tokens[1:4]
    ids = engine.ask(story.prompt, LENGTH, bad_words_list=words(bad)).ids
    assert ids[:3] == story.tokens[:3]
    assert bad not in [ids[at : at + 3] for at in range(LENGTH)]
    elsewhere = words([*never(story, 1), story.tokens[2]])
    assert engine.ask(story.prompt, LENGTH, bad_words_list=elsewhere).ids == story.tokens


def test_a_large_bias_forces_a_token(engine: Engine, deployment: Deployment, story: Story) -> None:
    """It is added to the logits of every step."""
    (forced,) = never(story, 1)
    bias = np.zeros(deployment.vocab_size)
    bias[forced] = LARGE
    assert engine.ask(story.prompt, 4, embedding_bias=bias).ids == [forced] * 4


def test_a_large_negative_bias_forbids_a_token(
    engine: Engine, deployment: Deployment, story: Story
) -> None:
    """Here the token that would have come first."""
    bias = np.zeros(deployment.vocab_size)
    bias[story.tokens[0]] = -LARGE
    ids = engine.ask(story.prompt, LENGTH, embedding_bias=bias).ids
    assert story.tokens[0] not in ids
    assert len(ids) == LENGTH


def test_a_bias_of_zeros_changes_nothing(
    engine: Engine, deployment: Deployment, story: Story
) -> None:
    """Nor does a row of no length."""
    for bias in (np.zeros(deployment.vocab_size), np.zeros(0)):
        assert engine.ask(story.prompt, 4, embedding_bias=bias).ids == story.tokens[:4]


def test_the_end_token_waits_for_min_tokens(engine: Engine, story: Story) -> None:
    """Before, it cannot be chosen at all, so another token is in its place."""
    least = engine.spelling("min_tokens", "min_length")
    end = story.tokens[2]
    ids = engine.ask(story.prompt, LENGTH, end_id=end, **{least: 6}).ids
    assert ids[:2] == story.tokens[:2]
    assert 6 <= len(ids) <= LENGTH
    assert end not in ids
