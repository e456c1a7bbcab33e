# ruff: noqa: E501  (tables with one row per line read better than wrapped ones)
"""Small Python functions and classes, every body spelled out line by line."""

from __future__ import annotations

import random

from kinds.sample import Sample, either, invented_word, pick, words

# name, parameters, ways to say what it does, docstring, body lines. {k} is a number, where a row
# uses one.
Row = tuple[str, str, tuple[str, ...], str, tuple[str, ...]]
# fmt: off
FUNCTIONS: tuple[Row, ...] = (
    ("add", "a, b", ("adds two numbers", "returns the sum of two numbers"), "Return the sum of a and b.", ("return a + b",)),
    ("subtract", "a, b", ("subtracts two numbers", "returns the difference of two numbers"), "Return a minus b.", ("return a - b",)),
    ("multiply", "a, b", ("multiplies two numbers", "returns the product of two numbers"), "Return the product of a and b.", ("return a * b",)),
    ("divide", "a, b", ("divides two numbers", "divides a by b"), "Return a divided by b.", ("if b == 0:", "    raise ValueError(\"b must not be zero\")", "return a / b")),
    ("square", "x", ("squares a number", "returns the square of a number"), "Return x squared.", ("return x * x",)),
    ("is_even", "n", ("checks whether a number is even", "tests if a number is even"), "Return True if n is even.", ("return n % 2 == 0",)),
    ("is_odd", "n", ("checks whether a number is odd", "tests if a number is odd"), "Return True if n is odd.", ("return n % 2 == 1",)),
    ("is_prime", "n", ("checks whether a number is prime", "tests if a number is prime"), "Return True if n is a prime number.", ("if n < 2:", "    return False", "for i in range(2, int(n ** 0.5) + 1):", "    if n % i == 0:", "        return False", "return True")),
    ("factorial", "n", ("computes the factorial of a number", "returns the factorial of n"), "Return the factorial of n.", ("result = 1", "for i in range(2, n + 1):", "    result *= i", "return result")),
    ("fibonacci", "n", ("returns the nth Fibonacci number", "computes Fibonacci numbers"), "Return the nth Fibonacci number.", ("a, b = 0, 1", "for _ in range(n):", "    a, b = b, a + b", "return a")),
    ("maximum", "values", ("finds the largest number in a list", "returns the maximum of a list"), "Return the largest value.", ("best = values[0]", "for value in values:", "    if value > best:", "        best = value", "return best")),
    ("minimum", "values", ("finds the smallest number in a list", "returns the minimum of a list"), "Return the smallest value.", ("best = values[0]", "for value in values:", "    if value < best:", "        best = value", "return best")),
    ("total", "values", ("sums the numbers in a list", "returns the sum of a list"), "Return the sum of all values.", ("result = 0", "for value in values:", "    result += value", "return result")),
    ("average", "values", ("computes the average of a list", "returns the mean of a list of numbers"), "Return the mean of the values.", ("return sum(values) / len(values)",)),
    ("reverse", "text", ("reverses a string", "returns a string backwards"), "Return the text backwards.", ("return text[::-1]",)),
    ("is_palindrome", "text", ("checks whether a string is a palindrome", "tests if a word is a palindrome"), "Return True if the text reads the same backwards.", ("text = text.lower()", "return text == text[::-1]")),
    ("count_words", "text", ("counts the words in a text", "returns the number of words in a string"), "Return the number of words.", ("return len(text.split())",)),
    ("count_vowels", "text", ("counts the vowels in a string", "counts vowels"), "Return the number of vowels.", ("count = 0", "for letter in text.lower():", "    if letter in \"aeiou\":", "        count += 1", "return count")),
    ("greet", "name", ("greets a person by name", "says hello to a person"), "Return a greeting.", ("return f\"Hello, {name}!\"",)),
    ("clamp", "x, low, high", ("limits a number to a range", "clamps a number between two bounds"), "Return x, but not below low or above high.", ("return max(low, min(x, high))",)),
    ("unique", "items", ("removes duplicates from a list", "returns the unique items of a list"), "Return the items without duplicates, in order.", ("seen = set()", "result = []", "for item in items:", "    if item not in seen:", "        seen.add(item)", "        result.append(item)", "return result")),
    ("flatten", "lists", ("flattens a list of lists", "joins a list of lists into one list"), "Return all items of all lists.", ("return [item for part in lists for item in part]",)),
    ("read_lines", "path", ("reads a file into a list of lines", "reads the lines of a file"), "Return the lines of a file.", ("with open(path, encoding=\"utf-8\") as file:", "    return file.read().splitlines()")),
    ("to_celsius", "fahrenheit", ("converts Fahrenheit to Celsius",), "Return the temperature in Celsius.", ("return (fahrenheit - 32) * 5 / 9",)),
    ("to_fahrenheit", "celsius", ("converts Celsius to Fahrenheit",), "Return the temperature in Fahrenheit.", ("return celsius * 9 / 5 + 32",)),
    ("gcd", "a, b", ("computes the greatest common divisor of two numbers", "finds the greatest common divisor"), "Return the greatest common divisor.", ("while b:", "    a, b = b, a % b", "return a")),
    ("sort_list", "items", ("sorts a list", "returns a sorted copy of a list"), "Return a sorted copy of the items.", ("return sorted(items)",)),
    ("count_letters", "text", ("counts how often each letter occurs", "counts the letters in a string"), "Return how often each letter occurs.", ("counts = {}", "for letter in text:", "    counts[letter] = counts.get(letter, 0) + 1", "return counts")),
    ("binary_search", "items, wanted", ("does a binary search in a sorted list", "searches a sorted list"), "Return the index of the wanted item, or None.", ("low, high = 0, len(items) - 1", "while low <= high:", "    middle = (low + high) // 2", "    if items[middle] == wanted:", "        return middle", "    if items[middle] < wanted:", "        low = middle + 1", "    else:", "        high = middle - 1", "return None")),
    ("bubble_sort", "items", ("sorts a list with bubble sort", "implements bubble sort"), "Sort the items in place.", ("for i in range(len(items)):", "    for j in range(len(items) - 1 - i):", "        if items[j] > items[j + 1]:", "            items[j], items[j + 1] = items[j + 1], items[j]", "return items")),
    ("fizzbuzz", "n", ("prints fizzbuzz", "solves the fizzbuzz problem"), "Print the numbers from 1 to n, with fizz and buzz.", ("for i in range(1, n + 1):", "    if i % 15 == 0:", "        print(\"fizzbuzz\")", "    elif i % 3 == 0:", "        print(\"fizz\")", "    elif i % 5 == 0:", "        print(\"buzz\")", "    else:", "        print(i)")),
    ("hello", "", ("prints hello world", "says hello to the world"), "Print a greeting to the world.", ("print(\"Hello, world!\")",)),
    ("split_evenly", "items, size", ("splits a list into chunks", "cuts a list into parts of equal size"), "Return the items in chunks of the given size.", ("return [items[i:i + size] for i in range(0, len(items), size)]",)),
    ("sum_of_squares", "values", ("computes the sum of squares", "adds the squares of a list of numbers"), "Return the sum of the squares.", ("return sum(value * value for value in values)",)),
    ("dot", "a, b", ("computes the dot product of two vectors", "returns the dot product of two lists"), "Return the dot product of a and b.", ("return sum(x * y for x, y in zip(a, b))",)),
    ("absolute", "x", ("returns the absolute value of a number", "computes the absolute value"), "Return x without its sign.", ("if x < 0:", "    return -x", "return x")),
    ("power", "base, exponent", ("raises a number to a power", "computes powers"), "Return the base to the power of the exponent.", ("return base ** exponent",)),
    ("swap", "pair", ("swaps the two items of a pair", "swaps a pair"), "Return the pair the other way round.", ("first, second = pair", "return second, first")),
    ("add_k", "x", ("adds {k} to a number",), "Return x plus {k}.", ("return x + {k}",)),
    ("times_k", "x", ("multiplies a number by {k}",), "Return {k} times x.", ("return {k} * x",)),
    ("above_k", "x", ("checks whether a number is greater than {k}",), "Return True if x is greater than {k}.", ("return x > {k}",)),
    ("first_k", "items", ("returns the first {k} items of a list",), "Return the first {k} items.", ("return items[:{k}]",)),
    ("repeat_k", "text", ("repeats a text {k} times",), "Return the text {k} times.", ("return text * {k}",)),
    ("range_k", "", ("prints the numbers from 1 to {k}",), "Print the numbers from 1 to {k}.", ("for i in range(1, {k} + 1):", "    print(i)")),
)
# fmt: on
ASK = (
    "Write a Python function that {d}.",
    "Write a Python function that {d}.",
    "Write a function that {d}.",
    "Can you write a Python function that {d}?",
    "Please write a Python function that {d}.",
    "I need a Python function that {d}.",
    "Show me a Python function that {d}.",
    "Give me Python code that {d}.",
    "How do I write a Python function that {d}?",
    "Python function that {d}",
    "Create a Python function that {d}.",
    "Implement a function in Python that {d}.",
    "Write code that {d}.",
)


def _filled(text: str, number: int) -> str:
    # Not str.format: code is full of braces.
    return text.replace("{k}", str(number))


def render(row: Row, name: str, number: int) -> str:
    """The source of one function, under the given name."""
    lines = [f"def {name}({row[1]}):", f'    """{_filled(row[3], number)}"""']
    lines += [f"    {_filled(line, number)}" for line in row[4]]
    return "\n".join(lines)


def draw_source(rng: random.Random) -> tuple[str, str]:
    """A function and its name, for the kinds that edit code."""
    row, number = pick(rng, FUNCTIONS), rng.randint(2, 99)
    name = row[0].replace("_k", f"_{number}")
    return render(row, name, number), name


IRREGULAR = {"multiplies": "multiply", "does": "do", "searches": "search"}


def _infinitive(does: str) -> str:
    """`adds two numbers` as `add two numbers`."""
    verb, _, rest = does.partition(" ")
    return f"{IRREGULAR.get(verb, verb[:-1])} {rest}".strip()


def _function_name(rng: random.Random) -> str:
    return pick(rng, (invented_word(rng), f"{invented_word(rng)}_{invented_word(rng)}"))


FIELDS = {
    "name": "str",
    "age": "int",
    "city": "str",
    "price": "float",
    "title": "str",
    "colour": "str",
    "size": "int",
    "weight": "float",
    "email": "str",
    "active": "bool",
    "count": "int",
    "score": "float",
}
CLASSES = words(
    """
    User Book Car Animal Person Order Product Point Message Ticket Player City Server Request
    Model
    """
)


def _draw_dataclass(rng: random.Random) -> Sample:
    name, fields = pick(rng, CLASSES), rng.sample(sorted(FIELDS), rng.randint(2, 4))
    listed = ", ".join(fields[:-1]) + f" and {fields[-1]}"
    ask = either(
        rng,
        "Write a Python dataclass {n} with the fields {f}.",
        "Write a dataclass called {n} with {f}.",
        "Create a Python dataclass named {n} with the fields {f}.",
    )
    lines = ["from dataclasses import dataclass", "", "", "@dataclass", f"class {name}:"]
    lines += [f"    {field}: {FIELDS[field]}" for field in fields]
    return Sample("code", ask.format(n=name, f=listed), "\n".join(lines))


def draw_program(rng: random.Random) -> Sample:
    """A function by description, by name and description, or by its first line."""
    if rng.random() < 0.12:
        return _draw_dataclass(rng)
    row, number = pick(rng, FUNCTIONS), rng.randint(2, 99)
    name = row[0].replace("_k", f"_{number}")
    does = _filled(pick(rng, row[2]), number)
    roll = rng.random()
    if roll < 0.15:
        source = render(row, name, number)
        head = source.split("\n")[0]
        cut = len(head) + (1 if rng.random() < 0.5 else 0)
        return Sample("code", source[:cut], source[cut:], continues=True)
    ask = pick(rng, ASK)
    if roll < 0.4 and "function" in ask and "in Python" not in ask:
        name = _function_name(rng)
        ask = ask.replace(
            "function", either(rng, f"function called {name}", f"function named {name}")
        )
    if "that {d}" in ask and rng.random() < 0.25:
        ask, does = ask.replace("that {d}", "to {d}"), _infinitive(does)
    return Sample("code", ask.format(d=does), render(row, name, number))
