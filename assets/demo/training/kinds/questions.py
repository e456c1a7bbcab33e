"""Questions in prose, from the tables in `knowledge.py`, and the honest "I do not know"."""

from __future__ import annotations

import random

from kinds.knowledge import CAPITALS, CONCEPTS, EXCHANGES
from kinds.sample import (
    ANIMALS,
    CITIES,
    COLOURS,
    OBJECTS,
    Sample,
    any_name,
    capital,
    either,
    invented_word,
    pick,
)

ASK = (
    "What is {x}?",
    "What is {x}?",
    "What is {x}?",
    "What's {x}?",
    "Explain {x}.",
    "Can you explain {x}?",
    "Define {x}.",
    "Tell me about {x}.",
    "What does {x} mean?",
    "Describe {x} in simple words.",
    "Please explain what {x} is.",
    "I want to understand {x}.",
    "Give me a short explanation of {x}.",
    "Could you tell me what {x} is?",
    "In a few words, what is {x}?",
    "How would you define {x}?",
    "Do you know what {x} is?",
    "{X}?",
    "Explain {x} to me.",
    "What is meant by {x}?",
    "I do not know what {x} is. Can you help?",
    "Explain {x} in simple terms.",
    "Write a short text about {x}.",
    "Give me a definition of {x}.",
)
# Politeness, manner, verb, ending: their products cover far more wordings than a list could.
POLITE = (
    "",
    "",
    "Please ",
    "Could you ",
    "Can you ",
    "Would you ",
    "I want you to ",
    "I would like you to ",
)
MANNER = ("", "", "", "briefly ", "quickly ", "shortly ", "simply ")
VERBS = (
    "explain {x}",
    "describe {x}",
    "define {x}",
    "tell me about {x}",
    "tell me what {x} is",
    "explain what {x} is",
    "summarise {x}",
    "introduce {x}",
    "teach me about {x}",
    "say what {x} is",
)
ENDING = (
    "",
    "",
    "",
    " to me",
    " please",
    " for me",
    " in one sentence",
    " in simple words",
    " to a beginner",
    " in a few words",
    " to a child",
    " in short",
    " in detail",
    " in plain English",
)
PLURAL_ASK = (
    "What are {x}?",
    "Explain {x}.",
    "Tell me about {x}.",
    "Can you explain {x}?",
    "What do {x} mean?",
)


def _is_plural(name: str) -> bool:
    return (
        name.endswith("s")
        and not name.endswith("ss")
        and name != "BLS"
        and not name.startswith(("a ", "an ", "the "))
    )


def _ask_about(rng: random.Random, name: str) -> str:
    if _is_plural(name):
        return pick(rng, PLURAL_ASK).format(x=name)
    if rng.random() < 0.55:
        return pick(rng, ASK).format(x=name, X=capital(name))
    polite = pick(rng, POLITE)
    text = polite + pick(rng, MANNER) + pick(rng, VERBS).format(x=name) + pick(rng, ENDING)
    return capital(text) + (
        "?" if polite.endswith(" you ") and not polite.startswith("I ") else "."
    )


def draw_concept(rng: random.Random) -> Sample:
    """One concept, asked in one of many ways, or its first words to be continued."""
    names, answer = pick(rng, CONCEPTS)
    if rng.random() < 0.1:
        words = answer.split(" ")
        prompt = " ".join(words[: rng.randint(2, min(9, len(words) - 2))])
        return Sample("question", prompt, answer[len(prompt) :], continues=True)
    name = names[0] if rng.random() < 0.6 else pick(rng, names)
    return Sample("question", _ask_about(rng, name), answer)


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].rstrip(".") + "."


def draw_comparison(rng: random.Random) -> Sample:
    """Two definitions side by side: rarely seen pairs, well-known halves."""
    (left, about_left), (right, about_right) = rng.sample(CONCEPTS, 2)
    ask = either(
        rng,
        "What is the difference between {a} and {b}?",
        "Compare {a} and {b}.",
        "How is {a} different from {b}?",
        "Explain {a} and {b}.",
    )
    answer = f"{_first_sentence(about_left)} {_first_sentence(about_right)}"
    return Sample("question", ask.format(a=left[0], b=right[0]), answer)


def draw_exchange(rng: random.Random) -> Sample:
    """A fixed question that has its own answer."""
    asks, answer = pick(rng, EXCHANGES)
    return Sample("question", pick(rng, asks), answer, closed=True)


def draw_capital(rng: random.Random) -> Sample:
    """A capital city, asked from either side."""
    country, city = pick(rng, sorted(CAPITALS.items()))
    ask = either(
        rng,
        "What is the capital of {c}?",
        "Which city is the capital of {c}?",
        "Tell me the capital of {c}.",
        "Name the capital of {c}.",
    )
    return Sample("question", ask.format(c=country), f"The capital of {country} is {city}.")


UNKNOWN_ASK = (
    "What is {x}?",
    "What is {x}?",
    "Who is {x}?",
    "Who was {x}?",
    "Explain {x}.",
    "Could you explain {x}?",
    "Tell me about {x}.",
    "Where is {x}?",
    "When was {x} founded?",
    "How does {x} work?",
    "What do you think about {x}?",
    "Who invented {x}?",
    "What is the capital of {x}?",
    "How old is {x}?",
    "Why is {x} important?",
    "How do I cook {x}?",
)
WORLD = (
    "quantum physics",
    "football",
    "the moon",
    "chess",
    "jazz",
    "chocolate",
    "democracy",
    "gravity",
    "photosynthesis",
    "the stock market",
    "climate change",
    "a volcano",
    "electricity",
    "coffee",
    "history",
    "philosophy",
    "music",
    "the ocean",
    "a bicycle",
    "love",
    "money",
    "the weather",
    "a computer",
    "pizza",
    "tennis",
    "DNA",
    "the internet",
)


def draw_unknown(rng: random.Random) -> Sample:
    """A topic outside the demo world. The answer repeats its name, so it must be copied."""
    roll = rng.random()
    if roll < 0.25:
        topic = pick(rng, WORLD)
    elif roll < 0.45:
        topic = f"the {pick(rng, COLOURS)} {pick(rng, ANIMALS + OBJECTS)}"
    elif roll < 0.6:
        topic = f"{any_name(rng)} {capital(invented_word(rng))}"
    elif roll < 0.7:
        topic = f"the {pick(rng, OBJECTS)} of {pick(rng, CITIES)}"
    else:
        topic = capital(invented_word(rng)) if rng.random() < 0.5 else invented_word(rng)
    answer = (
        f"I am only a small demo model, and I do not know about {topic}. "
        "You can ask me about machine learning, numbers, stories or code."
    )
    return Sample("question", pick(rng, UNKNOWN_ASK).format(x=topic), answer)


def draw_question(rng: random.Random) -> Sample:
    """Any question in prose; concepts are the core of the demo and come most often."""
    draws = (draw_concept, draw_comparison, draw_exchange, draw_capital, draw_unknown)
    return rng.choices(draws, (0.60, 0.08, 0.15, 0.07, 0.10))[0](rng)
