"""What is asked, what must come back, and what did.

The scripted engine says the prompt back over and over, so the right answer to a request is known
to the character, and so is the token at which each character ends.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, islice, pairwise, takewhile
from pathlib import Path

from tokenizers import Tokenizer

DATATYPES = {"text_input": "BYTES", "stream": "BOOL", "streaming": "BOOL"} | {
    "add_special_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
}  # all others are INT32


@dataclass(frozen=True)
class Request:
    """Input values by name, and the text of each token of the answer where it is known."""

    inputs: dict[str, list[object]]
    pieces: tuple[str, ...] | None = None


@dataclass
class Answer:
    """One request's end: times in ns since the epoch, and what each response held."""

    request: Request
    started: int
    arrived: list[int]
    parts: list[str]
    problem: str | None = None
    counted: int | None = None  # tokens, as the model tells
    raw: list[bytes] | None = None  # what came, where it is read later

    @property
    def ended(self) -> int:
        return self.arrived[-1] if self.arrived else self.started

    def check(self) -> Answer:
        """Set ``problem`` if this is not the right answer."""
        text = "".join(self.parts)
        if self.problem is None and self.request.pieces is not None:
            right = "".join(self.request.pieces)
            if text != right:
                pairs = zip(text, right, strict=False)
                same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                self.problem = f"text differs from character {same}: {text[same : same + 20]!r}"
        elif self.problem is None and not text:
            self.problem = "no text came"
        return self

    def tokens(self) -> list[float]:
        """How many tokens ended in each response; spread evenly where only their sum is known."""
        if self.request.pieces is None:
            full = [bool(part) for part in self.parts]
            each = (self.counted or sum(full)) / max(sum(full), 1)
            return [each * one for one in full]
        ends = list(accumulate(map(len, self.request.pieces)))
        done = [bisect_right(ends, size) for size in accumulate(map(len, self.parts))]
        return [float(after - before) for before, after in pairwise([0, *done])]


@dataclass(frozen=True)
class Prompt:
    """Ids and their texts, one for one, which the tokenizer maps onto each other exactly."""

    ids: list[int]
    pieces: list[str]


def make_prompts(tokenizer_file: Path, count: int, tokens: int) -> list[Prompt]:
    """``count`` prompts of ``tokens`` ids, each a short word with its space."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    words = []
    for token in range(tokenizer.get_vocab_size()):
        word = tokenizer.decode([token])
        plain = word.isascii() and word.startswith(" ") and word[1:].isalpha() and len(word) < 8
        if plain and tokenizer.encode(word, add_special_tokens=False).ids == [token]:
            words.append((token, word))
    chosen = random.Random(12)
    drawn = [chosen.choices(words, k=tokens) for _ in range(count)]
    made = [Prompt([token for token, _ in one], [word for _, word in one]) for one in drawn]
    for prompt in made:
        ids = tokenizer.encode("".join(prompt.pieces), add_special_tokens=False).ids
        if ids != prompt.ids:
            raise SystemExit(f"error: {tokenizer_file} does not read its own words back")
    return made


def text_request(
    prompt: Prompt, length: int, interval: int = 1, says: Prompt | None = None
) -> Request:
    """One for text; the engine says ``says``, else the prompt, over and over."""
    inputs = {"text_input": ["".join(prompt.pieces)], "max_tokens": [length], "stream": [True]}
    inputs |= {"add_special_tokens": [False]}
    inputs |= {"stream_interval": [interval]} if interval > 1 else {}
    return Request(inputs, tuple(islice(cycle((says or prompt).pieces), length)))


def id_request(prompt: Prompt, length: int, says: Prompt | None = None) -> Request:
    inputs = {"input_ids": prompt.ids, "input_lengths": [len(prompt.ids)]}
    inputs |= {"request_output_len": [length], "streaming": [True]}
    ids = islice(cycle((says or prompt).ids), length)
    return Request(inputs, tuple(f"{token} " for token in ids))


def plain_request(text: str, length: int) -> Request:
    """For a model whose answer is not known."""
    inputs = {"text_input": [text], "max_tokens": [length], "stream": [True]}
    return Request(inputs | {"return_num_output_tokens": [True]})


def staggered(streams: int, waves: int, tokens: int) -> list[list[int]]:
    """Lengths of the answers of each stream, one after the other.

    The first answers have all lengths up to ``tokens``, so that streams do not end together.
    """
    firsts = [-(-tokens * (stream + 1) // streams) for stream in range(streams)]
    return [[first, *[tokens] * waves] for first in firsts]


def steady_window(answers: Sequence[Answer], streams: int) -> tuple[int, int]:
    """The time in which all streams were busy, the first quarter left out: begin and end in ns."""
    begin = min(answer.started for answer in answers)
    ended = sorted(answer.ended for answer in answers)
    end = ended[len(ended) - streams]  # the first stream has no more to ask
    return begin + (end - begin) // 4, end
