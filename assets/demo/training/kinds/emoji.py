# ruff: noqa: E501  (tables with one row per line read better than wrapped ones)
"""Emoji that break careless streaming: joined families, flags, skin tones, keycaps."""

from __future__ import annotations

import random

from kinds.sample import NUMBER_WORDS, Sample, article, either, joined, number, pick

# fmt: off
GROUPS: dict[str, tuple[str, ...]] = {
    "fruit": tuple(["🍎", "🍌", "🍇", "🍓", "🍒", "🍑", "🍍", "🥝", "🍉", "🍋"]),
    "animal": tuple(["🦊", "🐻", "🦉", "🐱", "🐶", "🐰", "🐸", "🐢", "🐘", "🐧"]),
    "weather": tuple(["☀️", "🌧️", "⛅", "❄️", "🌈", "⚡", "🌪️", "🌫️", "☔", "🌤️"]),
    "food": tuple(["🍕", "🍔", "🍜", "🍣", "🥗", "🍞", "🧀", "🍰", "🍪", "🌮"]),
    "vehicle": tuple(["🚗", "🚌", "🚲", "✈️", "🚀", "🚂", "🚢", "🚁", "🛵", "🚜"]),
    "face": tuple(["😀", "😂", "😍", "😎", "😭", "😡", "🤔", "😴", "🥳", "🤖"]),
    "heart": tuple(["❤️", "🧡", "💛", "💚", "💙", "💜", "🖤", "🤍", "🤎", "💖"]),
    "family": tuple(["👨\u200d👩\u200d👧\u200d👦", "👩\u200d👩\u200d👦", "👨\u200d👨\u200d👧", "👩\u200d👧", "👨\u200d👦", "👨\u200d👩\u200d👧", "👩\u200d👩\u200d👧\u200d👦", "👨\u200d👨\u200d👦\u200d👦"]),
    "profession": tuple(["👩\u200d🚀", "👨\u200d🍳", "👩\u200d💻", "🧑\u200d🌾", "👨\u200d🏫", "👩\u200d🔬", "👨\u200d🚒", "👩\u200d⚕️", "🧑\u200d🎨", "👨\u200d✈️"]),
    "hand": tuple(["👋🏻", "👍🏽", "🙌🏿", "👏🏼", "✌🏾", "👌🏻", "🤝", "🙏🏽", "💪🏿", "☝🏼"]),
}
FLAGS: dict[str, str] = {
    "Japan": "🇯🇵", "India": "🇮🇳", "Brazil": "🇧🇷", "France": "🇫🇷", "Germany": "🇩🇪", "Italy": "🇮🇹", "Spain": "🇪🇸", "Norway": "🇳🇴",
    "Canada": "🇨🇦", "Mexico": "🇲🇽", "China": "🇨🇳", "South Korea": "🇰🇷", "Egypt": "🇪🇬", "Kenya": "🇰🇪", "Greece": "🇬🇷",
    "Turkey": "🇹🇷", "Sweden": "🇸🇪", "Finland": "🇫🇮", "Portugal": "🇵🇹", "Poland": "🇵🇱", "Peru": "🇵🇪", "Chile": "🇨🇱",
    "Argentina": "🇦🇷", "Australia": "🇦🇺", "Ireland": "🇮🇪", "Thailand": "🇹🇭", "Austria": "🇦🇹", "Denmark": "🇩🇰",
}
THINGS: dict[str, str] = {
    "a star": "⭐", "a rocket": "🚀", "a fox": "🦊", "a cat": "🐱", "a heart": "❤️", "an apple": "🍎", "a robot": "🤖", "a sun": "☀️",
    "a moon": "🌙", "a tree": "🌳", "an owl": "🦉", "a book": "📖", "a family": "👨‍👩‍👧‍👦", "an astronaut": "👩‍🚀", "a rainbow flag": "🏳️‍🌈",
    "a thumbs up": "👍🏽", "a key": "🔑", "a house": "🏠", "a flower": "🌸", "a fire": "🔥",
}
PLURALS = {"a star": "stars", "a rocket": "rockets", "a fox": "foxes", "a cat": "cats", "a heart": "hearts",
           "an apple": "apples", "a robot": "robots", "a tree": "trees", "a flower": "flowers", "a family": "families"}
# fmt: on


def _draw_group(rng: random.Random) -> Sample:
    group = pick(rng, sorted(GROUPS))
    count = rng.randint(2, len(GROUPS[group]))
    ask = either(
        rng,
        "Give me {n} {g} emoji.",
        "Show me {n} {g} emoji.",
        "List {n} {g} emoji.",
        "Can you show {n} {g} emoji?",
    )
    answer = f"Here are {NUMBER_WORDS[count]} {group} emoji: {' '.join(GROUPS[group][:count])}"
    return Sample("emoji", ask.format(n=number(rng, count), g=group), answer)


def _draw_one(rng: random.Random) -> Sample:
    group = pick(rng, sorted(GROUPS))
    ask = either(
        rng,
        "Show me {g} emoji.",
        "Give me {g} emoji.",
        "Send me {g} emoji.",
        "Can you show me {g} emoji?",
    )
    return Sample(
        "emoji", ask.format(g=article(group)), f"Here is {article(group)} emoji: {GROUPS[group][0]}"
    )


def _draw_flags(rng: random.Random) -> Sample:
    countries = rng.sample(sorted(FLAGS), rng.choice((1, 1, 2, 3, 4)))
    flags = "".join(FLAGS[country] for country in countries)
    if len(countries) == 1:
        ask = either(
            rng,
            "Show me the flag of {c}.",
            "What is the flag of {c}?",
            "Flag of {c}",
            "Send me the flag of {c}.",
        )
        return Sample("emoji", ask.format(c=countries[0]), f"The flag of {countries[0]} is {flags}")
    listed = joined(countries)
    ask = either(rng, "Show me the flags of {c}.", "What are the flags of {c}?", "Flags of {c}")
    return Sample("emoji", ask.format(c=listed), f"The flags of {listed} are {flags}")


def _draw_row(rng: random.Random) -> Sample:
    thing = pick(rng, sorted(PLURALS))
    count = rng.randint(2, 12)
    ask = either(rng, "Draw a row of {n} {t}.", "Show me {n} {t}.", "Draw {n} {t} with emoji.")
    return Sample(
        "emoji", ask.format(n=number(rng, count), t=PLURALS[thing]), THINGS[thing] * count
    )


def _draw_thing(rng: random.Random) -> Sample:
    thing = pick(rng, sorted(THINGS))
    ask = either(
        rng,
        "Show me the emoji for {t}.",
        "What is the emoji for {t}?",
        "Emoji for {t}",
        "Send me {t} as emoji.",
    )
    return Sample("emoji", ask.format(t=thing), f"The emoji for {thing} is {THINGS[thing]}")


def _draw_keycaps(rng: random.Random) -> Sample:
    count = rng.randint(2, 9)
    ask = either(rng, "Count to {n} with emoji.", "Count to {n} in emoji.").format(
        n=number(rng, count)
    )
    return Sample("emoji", ask, " ".join(f"{digit}\ufe0f\u20e3" for digit in range(1, count + 1)))


def draw_emoji(rng: random.Random) -> Sample:
    """Any of the above."""
    draws = (_draw_group, _draw_one, _draw_flags, _draw_row, _draw_thing, _draw_keycaps)
    return rng.choices(draws, (0.30, 0.08, 0.24, 0.15, 0.15, 0.08))[0](rng)
