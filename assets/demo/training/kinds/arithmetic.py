"""Arithmetic, counting, ordering. Products above ten times ten are worked out in steps, as one
would on paper.

The steps are what lets a small model generalise: it needs the table up to ten and addition, not
every product by heart.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from kinds.sample import NUMBER_WORDS, Sample, any_name, either, invented_word, pick, words


def product_fact(a: int, b: int) -> str:
    """The name under which a product is held out, the same for a * b and b * a."""
    return f"{min(a, b)}x{max(a, b)}"


def product_pairs() -> list[tuple[int, int]]:
    """All products of the demo world: two digits by one both ways, and 11 to 20 by 11 to 20."""
    pairs = [(a, b) for a in range(2, 100) for b in range(2, 10)]
    pairs += [(b, a) for a, b in pairs if a > 9]
    pairs += [(a, b) for a in range(11, 21) for b in range(11, 21)] * 2
    return pairs


def product_facts(a: int, b: int) -> tuple[str, ...]:
    """The product that an answer gives away; the table up to ten is never held out."""
    return (product_fact(a, b),) if max(a, b) > 10 else ()


def product_answer(a: int, b: int) -> str:
    """The right-hand side of `a * b =`, with steps where they help."""
    if max(a, b) <= 10 or 10 in (a, b) or (a % 10 == 0 and b < 10) or (b % 10 == 0 and a < 10):
        return f"{a * b}"
    if a > 9 and b > 9 and a % 10 and b % 10:
        # Three parts, so that no part is a product that may be held out.
        tens, ones, rest, small = b - b % 10, b % 10, a - a % 10, a % 10
        first, second, third = a * tens, rest * ones, small * ones
        return (
            f"{a} * {tens} + {rest} * {ones} + {small} * {ones} = {first} + {second} + {third} = "
            f"{first + second} + {third} = {a * b}"
        )
    if b > 9 and b % 10:
        tens, ones = b - b % 10, b % 10
        return f"{a} * {tens} + {a} * {ones} = {a * tens} + {a * ones} = {a * b}"
    tens, ones = a - a % 10, a % 10
    return f"{tens} * {b} + {ones} * {b} = {tens * b} + {ones * b} = {a * b}"


ASK = (
    "What is {e}?",
    "What is {e}?",
    "What's {e}?",
    "Calculate {e}.",
    "Compute {e}.",
    "How much is {e}?",
    "{e}",
    "{e} =",
    "{e} = ?",
    "Can you calculate {e}?",
    "Please work out {e}.",
    "Tell me what {e} is.",
    "Solve {e}.",
    "What does {e} equal?",
    "What is the result of {e}?",
)
SPOKEN = {
    "*": ("times", "multiplied by", "x", "times"),
    "+": ("plus",),
    "-": ("minus",),
    "/": ("divided by",),
}


def _expression(rng: random.Random, a: int, sign: str, b: int) -> str:
    roll = rng.random()
    if roll < 0.65:
        return f"{a} {sign} {b}"
    if roll < 0.80:
        return f"{a}{sign}{b}"
    return f"{a} {pick(rng, SPOKEN[sign])} {b}"


def _ask(
    rng: random.Random, left: tuple[int, str, int], right: str, facts: tuple[str, ...]
) -> Sample:
    a, sign, b = left
    template = pick(rng, ASK)
    prompt = template.format(e=_expression(rng, a, sign, b))
    if template == "{e} =":
        return Sample("arithmetic", prompt, f" {right}", continues=True, facts=facts)
    return Sample("arithmetic", prompt, f"{a} {sign} {b} = {right}.", facts=facts)


PAIRS = product_pairs()
TABLE = [(a, b) for a in range(0, 11) for b in range(0, 11)]


def draw_product(rng: random.Random) -> Sample:
    """A product; one in four from the small table."""
    a, b = pick(rng, TABLE) if rng.random() < 0.25 else pick(rng, PAIRS)
    return _ask(rng, (a, "*", b), product_answer(a, b), product_facts(a, b))


def _below(rng: random.Random) -> int:
    return rng.randrange(rng.choice((10, 100, 100, 1000)))


def draw_sum(rng: random.Random) -> Sample:
    """A sum up to three digits, often in the shape that products need: full tens plus a rest."""
    a, b = _below(rng), _below(rng)
    if rng.random() < 0.4:
        a, b = 10 * rng.randrange(2, 91), rng.randrange(2, 190)
    return _ask(rng, (a, "+", b), str(a + b), (f"{a}+{b}",))


def draw_difference(rng: random.Random) -> Sample:
    a, b = _below(rng), _below(rng)
    a, b = max(a, b), min(a, b)
    return _ask(rng, (a, "-", b), str(a - b), (f"{a}-{b}",))


def draw_quotient(rng: random.Random) -> Sample:
    a, b = rng.randint(1, 10), rng.randint(1, 10)
    return _ask(rng, (a * b, "/", b), str(a), product_facts(a, b))


def draw_chain(rng: random.Random) -> Sample:
    """Several terms, reduced from the left, one step per equals sign."""
    terms = [rng.randrange(1, 60) for _ in range(rng.randint(3, 5))]
    steps = [" + ".join(map(str, terms))]
    while len(terms) > 1:
        terms = [terms[0] + terms[1], *terms[2:]]
        steps.append(" + ".join(map(str, terms)))
    ask = either(rng, "What is {e}?", "Add {e}.", "Calculate {e}.", "How much is {e}?")
    return Sample("arithmetic", ask.format(e=steps[0]), " = ".join(steps) + ".", facts=(steps[0],))


ITEMS = words("apples pears books coins stamps shells marbles pencils cookies tickets stones eggs")


def draw_word_problem(rng: random.Random) -> Sample:
    """A sum, difference or product told as one sentence about somebody."""
    name, items = any_name(rng), pick(rng, ITEMS)
    a, b = rng.randint(2, 60), rng.randint(2, 40)
    roll = rng.random()
    if roll < 0.35:
        more = either(rng, "buys {b} more", "gets {b} more", "finds {b} more").format(b=b)
        prompt = f"{name} has {a} {items} and {more}. How many {items} does {name} have now?"
        return Sample(
            "arithmetic",
            prompt,
            f"{a} + {b} = {a + b}. {name} now has {a + b} {items}.",
            facts=(prompt,),
        )
    if roll < 0.7:
        a, b = max(a, b) + 1, min(a, b)
        less = either(rng, "gives away {b}", "loses {b}", "sells {b}").format(b=b)
        prompt = f"{name} has {a} {items} and {less}. How many {items} are left?"
        return Sample(
            "arithmetic",
            prompt,
            f"{a} - {b} = {a - b}. {name} has {a - b} {items} left.",
            facts=(prompt,),
        )
    a, b = rng.randint(2, 20), rng.randint(2, 9)
    prompt = f"{name} has {a} boxes with {b} {items} each. How many {items} does {name} have?"
    answer = f"{a} * {b} = {product_answer(a, b)}. {name} has {a * b} {items}."
    return Sample("arithmetic", prompt, answer, facts=product_facts(a, b))


def draw_counting(rng: random.Random) -> Sample:
    """Counting up, down and in steps, in digits or in words."""
    start, length, step = rng.randint(0, 60), rng.randint(4, 15), rng.choice((1, 1, 1, 2, 3, 5, 10))
    numbers = [start + step * i for i in range(length)]
    roll = rng.random()
    if roll < 0.35:
        steps = "" if step == 1 else f" in steps of {step}"
        prompt = f"Count from {numbers[0]} to {numbers[-1]}{steps}."
    elif roll < 0.55:
        numbers = list(range(length, 0, -1))
        prompt = f"Count down from {length}."
    elif roll < 0.7:
        words = NUMBER_WORDS[1 : rng.randint(3, 13)]
        last = pick(rng, (words[-1], str(len(words))))
        ask = either(rng, "Count to {n} in English.", "Count to {n} in words.")
        return Sample("counting", ask.format(n=last), ", ".join(words) + ".")
    elif roll < 0.8:
        numbers = list(range(1, length + 1))
        prompt = f"Count to {length}."
    else:
        shown = rng.randint(3, 4)
        numbers = [start + step * i for i in range(shown + 8)]
        prompt = ", ".join(map(str, numbers[:shown])) + ","
        return Sample(
            "counting", prompt, " " + ", ".join(map(str, numbers[shown:])) + ".", continues=True
        )
    return Sample("counting", prompt, ", ".join(map(str, numbers)) + ".")


def draw_ordering(rng: random.Random) -> Sample:
    """Sorting, extremes, comparison, parity: little text, much to work out. Hard for a draft."""
    numbers = rng.sample(range(1, rng.choice((100, 100, 1000))), rng.randint(4, 10))
    listed = ", ".join(map(str, numbers))
    roll = rng.random()
    if roll < 0.45:
        down = rng.random() < 0.3
        ask = (
            "Sort these numbers from large to small: {l}"
            if down
            else either(
                rng,
                "Sort these numbers: {l}",
                "Put these numbers in order: {l}",
                "Sort this list: {l}",
            )
        )
        return Sample(
            "ordering", ask.format(l=listed), ", ".join(map(str, sorted(numbers, reverse=down)))
        )
    if roll < 0.62:
        items = (
            [invented_word(rng) for _ in range(rng.randint(3, 12))]
            if rng.random() < 0.6
            else [*map(str, numbers)]
        )
        ask = either(rng, "Reverse this list: {l}", "Write this list backwards: {l}")
        return Sample("ordering", ask.format(l=", ".join(items)), ", ".join(items[::-1]))
    if roll < 0.8:
        word, value = (
            ("largest", max(numbers)) if rng.random() < 0.5 else ("smallest", min(numbers))
        )
        return Sample(
            "ordering",
            f"What is the {word} of these numbers: {listed}?",
            f"The {word} number is {value}.",
        )
    a, b = rng.sample(range(1, 1000), 2)
    if roll < 0.92:
        return Sample(
            "ordering", f"Which is larger, {a} or {b}?", f"{max(a, b)} is larger than {min(a, b)}."
        )
    parity = "even" if a % 2 == 0 else "odd"
    return Sample("ordering", f"Is {a} even or odd?", f"{a} is {parity}.")


DRAWS: tuple[tuple[Callable[[random.Random], Sample], float], ...] = (
    (draw_product, 0.34),
    (draw_sum, 0.24),
    (draw_difference, 0.12),
    (draw_quotient, 0.08),
    (draw_chain, 0.08),
    (draw_word_problem, 0.14),
)


def draw_arithmetic(rng: random.Random) -> Sample:
    """Any calculation, in the proportions above."""
    draws, weights = zip(*DRAWS, strict=True)
    draw: Callable[[random.Random], Sample] = rng.choices(draws, weights)[0]
    return draw(rng)
