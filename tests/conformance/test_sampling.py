"""Sampling options. What is drawn cannot be foretold, so these are rules about draws.

A draw is asked for by temperature 1 together with top-p 1: with temperature alone some releases
stay greedy.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.conformance.deployment import Deployment
from tests.conformance.engine_client import Engine, Ids
from tests.conformance.prompts import LENGTH, Story, scattered

DRAW: dict[str, Any] = {"temperature": 1.0, "runtime_top_p": 1.0}


def drawn(engine: Engine, prompt: Ids, seed: int, **options: Any) -> Ids:
    """What that seed draws."""
    name = engine.spelling("seed", "random_seed")
    return engine.ask(prompt, LENGTH, **{**DRAW, name: seed, **options}).ids


def test_a_seed_repeats_its_answer(engine: Engine, deployment: Deployment) -> None:
    """Streaming or not; seeds use the whole 64 bits."""
    prompt = scattered(deployment.vocab_size, 50)
    for seed, streaming in ((1, False), (2**63 + 5, True)):
        once = drawn(engine, prompt, seed)
        assert drawn(engine, prompt, seed, streaming=streaming) == once


def test_seeds_differ(engine: Engine, deployment: Deployment) -> None:
    """Of four seeds at temperature 1 not all draw the same."""
    prompt = scattered(deployment.vocab_size, 51)
    assert len({tuple(drawn(engine, prompt, seed)) for seed in range(1, 5)}) > 1


@pytest.mark.parametrize(
    "options",
    [
        {"runtime_top_k": 1},
        {"runtime_top_k": 1, "temperature": 1.5},
        {"runtime_top_k": 50, "runtime_top_p": 1e-6, "temperature": 1.0},
        {"runtime_top_p": 1e-6, "temperature": 1.0},
        {"runtime_top_k": 50, "temperature": 0.001},
        {"runtime_top_p": 0.0},
        {"runtime_top_k": 0},
    ],
    ids=str,
)
def test_options_that_leave_one_token_are_greedy(
    engine: Engine, story: Story, options: dict[str, Any]
) -> None:
    """Top-k 1, the smallest top-p, the lowest temperature, and values that mean "not set"."""
    name = engine.spelling("seed", "random_seed")
    assert engine.ask(story.prompt, LENGTH, **options, **{name: 3}).ids == story.tokens


def test_top_k_limits_what_can_be_drawn(
    engine: Engine, deployment: Deployment, logits: None
) -> None:
    """Every token drawn with top-k 2 is one of its position's two best."""
    prompt = scattered(deployment.vocab_size, 52)
    name = engine.spelling("seed", "random_seed")
    answer = engine.ask(
        prompt,
        LENGTH,
        runtime_top_k=2,
        temperature=5.0,
        return_generation_logits=True,
        **{name: 7},
    )
    rows = answer.last.outputs["generation_logits"][0, 0, :LENGTH, : deployment.vocab_size]
    places = [int((row > row[token]).sum()) for row, token in zip(rows, answer.ids, strict=True)]
    assert set(places) <= {0, 1}


def test_min_p_leaves_the_likeliest(engine: Engine, story: Story, deployment: Deployment) -> None:
    """At 1 it leaves nothing else; at 0, everything."""
    engine.needs("min_p")
    name = engine.spelling("seed", "random_seed")
    rules = {"runtime_top_p": 1.0, "temperature": 5.0, name: 3}
    assert engine.ask(story.prompt, LENGTH, **rules, min_p=1.0).ids == story.tokens
    assert engine.ask(story.prompt, LENGTH, **rules, min_p=0.0).ids != story.tokens


def test_no_ngram_comes_twice(engine: Engine, deployment: Deployment) -> None:
    """Neither in the answer nor in prompt and answer together."""
    engine.needs("no_repeat_ngram_size")
    text = scattered(deployment.vocab_size, 53, 6)
    text += engine.ask(text, LENGTH, no_repeat_ngram_size=2).ids
    pairs = list(pairwise(text))
    assert len(set(pairs)) == len(pairs)


def test_repetition_penalty_changes_an_answer_that_repeats(
    engine: Engine, deployment: Deployment
) -> None:
    """A prompt that repeats itself is continued otherwise."""
    prompt = scattered(deployment.vocab_size, 53, 6) * 4
    plain = engine.ask(prompt, LENGTH).ids
    assert engine.ask(prompt, LENGTH, repetition_penalty=20.0).ids != plain
    assert engine.ask(prompt, LENGTH, repetition_penalty=1.0).ids == plain


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_a_large_penalty_forbids_repeating(
    engine: Engine, deployment: Deployment, name: str
) -> None:
    """No generated token comes twice."""
    prompt = scattered(deployment.vocab_size, 53, 6) * 4
    ids = engine.ask(prompt, LENGTH, **{name: 1000.0}).ids
    assert len(set(ids)) == len(ids) == LENGTH
