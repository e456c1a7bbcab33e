"""Tasks whose answer repeats much of the prompt, and questions about a text in the prompt.

They show prompt-lookup speculation, and they are what keeps long prompts from being noise to the
model. Texts mix known sentences with invented words and numbers: copying must be learned as a
skill, not as a memory.
"""

from __future__ import annotations

import json
import random
import re

from kinds import languages, programs, stories, structured
from kinds.sample import (
    CITIES,
    COLOURS,
    NAMES,
    OBJECTS,
    ORDINARY,
    Sample,
    any_name,
    article,
    capital,
    either,
    invented_word,
    numbered,
    pick,
    words,
)

VERBS = words("sees finds likes keeps brings takes wants sells paints needs hides")


def sentence(rng: random.Random) -> str:
    """A sentence that is grammatical and hardly ever the same twice."""
    who = any_name(rng)
    thing = pick(rng, OBJECTS) if rng.random() < 0.7 else invented_word(rng)
    return f"{who} {pick(rng, VERBS)} {article(pick(rng, COLOURS))} {thing} in {pick(rng, CITIES)}."


def _noise(rng: random.Random) -> str:
    """Words, numbers and codes in no order."""
    makers = (
        lambda: invented_word(rng),
        lambda: pick(rng, OBJECTS),
        lambda: str(rng.randrange(10000)),
        lambda: f"{rng.randrange(16**6):06x}",
        lambda: any_name(rng),
        lambda: pick(rng, ORDINARY).upper(),
    )
    return " ".join(pick(rng, makers)() for _ in range(rng.randint(3, 30)))


def _loose(rng: random.Random) -> str:
    """Any words with any punctuation: what visitors type has no grammar that we could know."""
    words = []
    for _ in range(rng.randint(2, 40)):
        word = pick(rng, ORDINARY) if rng.random() < 0.6 else invented_word(rng)
        word = capital(word) if rng.random() < 0.12 else word
        word = str(rng.randrange(1000)) if rng.random() < 0.06 else word
        words.append(word + (pick(rng, ",,,..!?;:-)") if rng.random() < 0.15 else ""))
    return capital(" ".join(words)) + either(rng, ".", ".", "!", "?", "")


def passage(rng: random.Random) -> str:
    """Some text to copy: 5 to 300 tokens, in any of the forms of this world."""
    roll = rng.random()
    if roll < 0.22:
        return " ".join(sentence(rng) for _ in range(rng.choice((1, 2, 3, 5, 8, 14, 20))))
    if roll < 0.32:
        return stories.draw_text(rng)[0]
    if roll < 0.46:
        return _noise(rng)
    if roll < 0.68:
        return _loose(rng)
    if roll < 0.76:
        return "\n\n\n".join(programs.draw_source(rng)[0] for _ in range(rng.choice((1, 1, 2, 3))))
    if roll < 0.84:
        return json.dumps(structured.record(rng), indent=rng.choice((None, 2)))
    if roll < 0.92:
        return "\n".join(languages.draw_foreign_text(rng) for _ in range(rng.randint(1, 4)))
    return "\n".join(
        f"- {pick(rng, OBJECTS)} {rng.randrange(100)}" for _ in range(rng.randint(3, 15))
    )


REPEAT_ASK = (
    "Repeat this text: {t}",
    "Repeat this text:\n{t}",
    "Repeat after me: {t}",
    "Copy this text:\n{t}",
    "Say this again: {t}",
    "Please repeat: {t}",
    "Write this text again:\n{t}",
    "Copy this exactly:\n{t}",
)


def draw_repeat(rng: random.Random) -> Sample:
    """The answer is the text itself."""
    text = passage(rng)
    return Sample("copy", pick(rng, REPEAT_ASK).format(t=text), text)


def draw_rename(rng: random.Random) -> Sample:
    """The answer is the text with one name changed, in prose or in code."""
    is_code = rng.random() < 0.5
    if is_code:
        source, old = programs.draw_source(rng)
        calls = "\n\n\nprint({n}({a}))".replace("{a}", str(rng.randrange(100))).replace("{n}", old)
        text = source + (calls if rng.random() < 0.5 else "")
        new = invented_word(rng)
        ask = either(
            rng,
            "Rename the function {o} to {n} in this code:\n{t}",
            "Fix the name in this code: {o} should be {n}.\n{t}",
            "Replace {o} by {n} in this code:\n{t}",
        )
    else:
        old, new = pick(rng, NAMES), any_name(rng)
        sentences = [sentence(rng) for _ in range(rng.choice((2, 3, 5, 8, 12)))]
        for index in range(0, len(sentences), 2):
            sentences[index] = f"{old} {sentences[index].split(' ', 1)[1]}"
        text = " ".join(sentences)
        ask = either(
            rng,
            "Replace {o} by {n} in this text: {t}",
            "Fix the name in this text: {o} should be {n}.\n{t}",
            "Change the name {o} to {n}:\n{t}",
        )
    # Whole words only: Ada must not change inside Adam, nor a function's name in its own docstring.
    answer = re.sub(rf"\b{old}(?=\()" if is_code else rf"\b{old}\b", new, text)
    return Sample("copy", ask.replace("{o}", old).replace("{n}", new).replace("{t}", text), answer)


def draw_number_lines(rng: random.Random) -> Sample:
    """The lines of the prompt with numbers in front."""
    lines = [sentence(rng) for _ in range(rng.randint(2, 10))]
    ask = either(rng, "Number these lines:\n{t}", "Add line numbers:\n{t}")
    return Sample("copy", ask.format(t="\n".join(lines)), numbered(lines))


def draw_change_value(rng: random.Random) -> Sample:
    """A JSON object with one value changed."""
    data = structured.record(rng)
    age = rng.randint(1, 99)
    changed = {**data, "age": age}
    ask = either(rng, "Set the age to {a} in this JSON:\n{t}", "Change the age to {a}:\n{t}")
    prompt = ask.replace("{a}", str(age)).replace("{t}", json.dumps(data, indent=2))
    return Sample("copy", prompt, json.dumps(changed, indent=2))


PLACES = tuple(
    f"the {colour} {box}"
    for colour in COLOURS[:8]
    for box in ("box", "bag", "drawer", "cupboard", "shed")
)


def draw_lookup(rng: random.Random) -> Sample:
    """Notes, then a question about one. Up to about 1000 tokens, of which one line matters."""
    size = rng.choice((2, 3, 5, 8, 12, 12, 20, 20, 40, 70, 100))
    things = [f"{pick(rng, COLOURS)} {pick(rng, OBJECTS)}" for _ in range(size)]
    things = sorted(set(things), key=things.index)
    notes = [(thing, pick(rng, PLACES)) for thing in things]
    thing, place = pick(rng, notes)
    lines = "\n".join(f"The {thing} is in {place}." for thing, place in notes)
    ask = either(
        rng, "Where is the {x}?", "In which place is the {x}?", "Tell me where the {x} is."
    )
    head = either(rng, "Read these notes:\n", "Notes:\n", "")
    return Sample("lookup", f"{head}{lines}\n{ask.format(x=thing)}", f"The {thing} is in {place}.")


def draw_about_story(rng: random.Random) -> Sample:
    """A story in the prompt, then a question about its names."""
    text, cast = stories.draw_text(rng)
    question, answer = either(
        rng,
        (f"What is the name of the {cast['h']}?", f"The {cast['h']} is called {cast['n']}."),
        (f"Who is {cast['n']}?", f"{cast['n']} is {article(cast['h'])}."),
        ("Where does the story happen?", f"The story happens {cast['place']}."),
    )
    return Sample("lookup", f"{text}\n{question}", answer)


def draw_copy(rng: random.Random) -> Sample:
    """Any task that copies."""
    draws = (draw_repeat, draw_rename, draw_number_lines, draw_change_value)
    return rng.choices(draws, (0.5, 0.32, 0.09, 0.09))[0](rng)


def draw_reading(rng: random.Random) -> Sample:
    """Any question about a text in the prompt."""
    return draw_lookup(rng) if rng.random() < 0.7 else draw_about_story(rng)
