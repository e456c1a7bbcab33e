"""Many requests of every kind at once, each answered as if it were alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.conformance.engine_client import Answer, Engine, Ids
from tests.conformance.prompts import LENGTH, Story, words

Check = Callable[[Answer], bool]


def kinds(engine: Engine, story: Story) -> list[tuple[int, dict[str, Any], Check]]:
    """Length, options, and what is right, for each kind of request."""

    def exactly(ids: Ids) -> Check:
        return lambda answer: answer.ids == ids

    tokens = story.tokens
    draw = {"temperature": 1.0, "runtime_top_p": 0.9, engine.spelling("seed", "random_seed"): 5}
    return [
        (LENGTH, {}, exactly(tokens)),
        (LENGTH, {"streaming": True}, exactly(tokens)),
        (1, {"streaming": True}, exactly(tokens[:1])),
        (LENGTH, {"end_id": tokens[3], "streaming": True}, exactly(tokens[:3])),
        (LENGTH, {"stop_words_list": words(tokens[1:3])}, exactly(tokens[:3])),
        (5, {"return_log_probs": True, "runtime_top_k": 1}, exactly(tokens[:5])),
        (LENGTH, draw, lambda answer: len(answer.ids) == LENGTH),
        (LENGTH, {"runtime_top_p": 1.5}, lambda answer: bool(answer.error)),
    ]


def test_64_mixed_requests_at_once(engine: Engine, stories: list[Story]) -> None:
    """Twice the kinds for each of four stories, in any order; one's error is nobody else's."""
    requests = 2 * [(story, *kind) for story in stories for kind in kinds(engine, story)]
    random.Random(3).shuffle(requests)
    under_way = [
        (engine.start(story.prompt, length, **options), right)
        for story, length, options, right in requests
    ]
    assert len(under_way) == 64
    assert [right(stream.answer()) for stream, right in under_way] == [True] * 64
