# ruff: noqa: E501  (tables with one row per line read better than wrapped ones)
"""Lists and JSON: fixed lists in a fixed order, and objects whose values come from the prompt."""

from __future__ import annotations

import json
import random

from kinds.sample import CITIES, COLOURS, OBJECTS, Sample, any_name, either, number, numbered, pick

# fmt: off
LISTS: dict[str, tuple[str, ...]] = {
    "animals": ("fox", "owl", "bear", "rabbit", "wolf", "deer", "otter", "badger", "turtle", "crow"),
    "colours": ("red", "blue", "green", "yellow", "orange", "purple", "white", "black", "brown", "grey"),
    "fruits": ("apple", "banana", "cherry", "grape", "lemon", "mango", "orange", "peach", "pear", "plum"),
    "vegetables": ("carrot", "potato", "tomato", "onion", "pea", "bean", "spinach", "cabbage", "leek", "pumpkin"),
    "planets": ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"),
    "days of the week": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "months": ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
               "November", "December"),
    "programming languages": ("Python", "C", "Java", "Rust", "Go", "Ruby", "Swift", "Kotlin", "Haskell", "Perl"),
    "musical instruments": ("piano", "violin", "flute", "guitar", "drum", "trumpet", "harp", "cello", "oboe", "organ"),
    "cities": ("Paris", "Tokyo", "Cairo", "Lima", "Oslo", "Berlin", "Rome", "Madrid", "Vienna", "Seoul"),
    "sports": ("football", "tennis", "swimming", "running", "chess", "rowing", "hockey", "boxing", "skiing", "golf"),
    "steps to train a model": ("collect data", "clean the data", "choose a model", "train the model", "test the model",
                               "deploy the model", "watch the results"),
    "ways to make a model faster": ("use a smaller model", "quantize the weights", "batch the requests",
                                    "cache common prefixes", "use speculative decoding", "use a faster GPU"),
    "parts of a model server": ("a queue", "a scheduler", "a tokenizer", "a model", "a cache", "a health check"),
}
# fmt: on


WHOLE = ("planets", "days of the week", "months")


def _draw_whole_list(rng: random.Random) -> Sample:
    """Lists that have an end: all of them, when no number is asked for."""
    topic = pick(rng, WHOLE)
    ask = either(
        rng,
        "List the {t}.",
        "Name the {t}.",
        "Name all {t}.",
        "List all {t}.",
        "What are the {t}?",
        "Tell me the {t}.",
    )
    return Sample("list", ask.format(t=topic), numbered(LISTS[topic]))


def _draw_list(rng: random.Random) -> Sample:
    topic = pick(rng, sorted(LISTS))
    count = rng.randint(2, len(LISTS[topic]))
    asked = number(rng, count)
    items = LISTS[topic][:count]
    form = rng.choice(("plain", "plain", "json", "bullets", "comma"))
    ask = either(
        rng,
        "List {n} {t}",
        "Name {n} {t}",
        "Give me a list of {n} {t}",
        "Write down {n} {t}",
        "Tell me {n} {t}",
    )
    prompt = ask.format(n=asked, t=topic)
    if form == "json":
        return Sample("list", f"{prompt} as JSON.", json.dumps(list(items)))
    if form == "bullets":
        return Sample(
            "list", f"{prompt} with bullet points.", "\n".join(f"- {item}" for item in items)
        )
    if form == "comma":
        return Sample("list", f"{prompt} in one line.", ", ".join(items))
    return Sample("list", f"{prompt}.", numbered(items))


def record(rng: random.Random) -> dict[str, str | int | bool | list[str]]:
    """A flat record with values of several types."""
    fields: dict[str, str | int | bool | list[str]] = {
        "name": any_name(rng),
        "age": rng.randint(18, 99),
        "city": pick(rng, CITIES),
        "active": rng.random() < 0.5,
        "colour": pick(rng, COLOURS),
        "items": rng.sample(OBJECTS, rng.randint(1, 3)),
        "score": rng.randint(0, 100),
    }
    names = ["name", *rng.sample(sorted(set(fields) - {"name"}), rng.randint(1, 4))]
    return {name: fields[name] for name in names}


def _said(value: str | int | bool | list[str]) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(value) if isinstance(value, list) else str(value)


def _draw_object(rng: random.Random) -> Sample:
    data = record(rng)
    listed = "; ".join(f"{key}: {_said(value)}" for key, value in data.items())
    ask = either(
        rng,
        "Write this as JSON: {l}",
        "Convert this to JSON: {l}",
        "Make a JSON object with {l}",
        "Turn this into JSON: {l}",
    )
    return Sample("json", ask.format(l=listed), json.dumps(data, indent=2))


def _draw_person(rng: random.Random) -> Sample:
    name, age, city = any_name(rng), rng.randint(18, 99), pick(rng, CITIES)
    prompt = either(
        rng,
        "{n} is {a} years old and lives in {c}. Write this as JSON.",
        "Write a JSON object for {n}, {a} years old, from {c}.",
        "Make JSON for a user named {n}, age {a}, city {c}.",
        "Give me a JSON object for {n}, age {a}, from {c}.",
    ).format(n=name, a=age, c=city)
    return Sample("json", prompt, json.dumps({"name": name, "age": age, "city": city}, indent=2))


def draw_structured(rng: random.Random) -> Sample:
    """A list or an object."""
    draws = (_draw_list, _draw_whole_list, _draw_object, _draw_person)
    return rng.choices(draws, (0.5, 0.06, 0.24, 0.20))[0](rng)
