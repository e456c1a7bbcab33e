"""From samples to documents: the mix of kinds, what is held out, how an exchange is written.

A document is a list of segments that are tokenised one by one, exactly as a server would see them:
a prompt ends where the user stopped typing, and the model goes on from there. Otherwise the
tokenizer would join `?` and a newline at the border, and the model would never have seen the
prompt that it gets.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from kinds.arithmetic import draw_arithmetic, draw_counting, draw_ordering
from kinds.copying import draw_copy, draw_reading
from kinds.emoji import draw_emoji
from kinds.languages import draw_language
from kinds.programs import draw_program
from kinds.questions import draw_question
from kinds.sample import Sample, either, pick
from kinds.stories import draw_story
from kinds.structured import draw_structured

PAD, BEGIN, END, USER, ASSISTANT, SYSTEM = (
    "<|pad|>",
    "<|begin|>",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
)
SPECIALS = (PAD, BEGIN, END, USER, ASSISTANT, SYSTEM)

# Mirrors `render_chat` below; `tests/models/test_demo_assets.py` renders it.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + (message['content'] | trim) }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

HELD_OUT_PRODUCTS = 0.15
HELD_OUT_OTHERS = 0.05

Draw = Callable[[random.Random], Sample]
MIX: tuple[tuple[Draw, float], ...] = (
    (draw_question, 0.18),
    (draw_story, 0.14),
    (draw_arithmetic, 0.17),
    (draw_counting, 0.04),
    (draw_ordering, 0.05),
    (draw_program, 0.08),
    (draw_structured, 0.06),
    (draw_language, 0.09),
    (draw_emoji, 0.04),
    (draw_copy, 0.12),
    (draw_reading, 0.03),
)
# Kinds whose answer depends on every character of the prompt: no changes to it.
EXACT_KINDS = frozenset({"copy", "lookup", "json", "ordering"})
# Shown in the README and in the demo, so they are trained on even where their hash says otherwise.
SHOWN = frozenset(
    {
        "what is machine learning",
        "tell me a story about a fox",
        "how do i count to nine in hindi",
        "write a python function that adds two numbers",
        "what is speculative decoding",
    }
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer in a few words.",
    "You are a small demo model.",
    "Be kind and clear.",
    "You are a friendly teacher.",
    "Help the user.",
)


@dataclass(frozen=True)
class Segment:
    """A stretch of text; only `answer` segments carry training loss."""

    text: str
    answer: bool


Document = tuple[Segment, ...]


def normalised(prompt: str) -> str:
    """The prompt without what a user may or may not type."""
    return prompt.strip().rstrip("?.! ").lower()


def is_held_out(sample: Sample) -> bool:
    """True for samples that training never sees: a hash decides, so no list has to be kept."""
    if sample.closed or normalised(sample.prompt) in SHOWN:
        return False
    for fact in sample.facts or (normalised(sample.prompt),):
        share = (
            HELD_OUT_PRODUCTS
            if "x" in fact and fact.replace("x", "").isdigit()
            else HELD_OUT_OTHERS
        )
        digest = hashlib.blake2s(fact.encode(), digest_size=4).digest()
        if int.from_bytes(digest, "big") < share * 2**32:
            return True
    return False


def draw(rng: random.Random, held_out: bool = False) -> Sample:
    """A sample of the mix, from the one or the other side of the split."""
    draws, weights = zip(*MIX, strict=True)
    while True:
        sample: Sample = rng.choices(draws, weights)[0](rng)
        if is_held_out(sample) == held_out:
            return sample


def _as_typed(rng: random.Random, sample: Sample) -> str:
    """The prompt with small faults: no question mark, lower case, blanks around it."""
    text = sample.prompt
    if sample.kind in EXACT_KINDS:
        return text
    if rng.random() < 0.12:
        text = text.rstrip("?.!")
    if rng.random() < 0.08:
        text = text[:1].lower() + text[1:]
    if rng.random() < 0.03:
        text = text.lower() if "called" not in text and "named" not in text else text
    if rng.random() < 0.05:
        text = either(rng, " ", "  ", "\n") + text
    if rng.random() < 0.07:
        text += either(rng, " ", " ", "  ")
    return text


def render_raw(rng: random.Random, sample: Sample) -> Document:
    """Plain completion: the prompt as typed, a newline, the answer."""
    if sample.continues:
        prompt, answer = sample.prompt, sample.answer
        if answer.startswith(" ") and rng.random() < 0.1:
            prompt, answer = f"{prompt} ", answer[1:]
        return (Segment(BEGIN + prompt, False), Segment(answer + END, True))
    prompt = _as_typed(rng, sample)
    roll = rng.random()
    if roll < 0.12:
        return (
            Segment(f"{BEGIN}Q: {prompt.strip()}\nA:", False),
            Segment(f" {sample.answer}{END}", True),
        )
    if roll < 0.30:
        newlines = "\n" if rng.random() < 0.7 else "\n\n"
        return (Segment(BEGIN + prompt + newlines, False), Segment(sample.answer + END, True))
    return (Segment(BEGIN + prompt, False), Segment(f"\n{sample.answer}{END}", True))


def render_chat(rng: random.Random, samples: list[Sample]) -> Document:
    """A conversation in the form of `CHAT_TEMPLATE`."""
    segments = []
    head = BEGIN
    if rng.random() < 0.15:
        head += f"{SYSTEM}\n{pick(rng, SYSTEM_PROMPTS)}"
    for sample in samples:
        prompt = _as_typed(rng, sample).strip()
        segments.append(Segment(f"{head}{USER}\n{prompt}{ASSISTANT}\n", False))
        segments.append(Segment(sample.answer + END, True))
        head = ""
    return tuple(segments)


def render(rng: random.Random, sample: Sample, raw: float) -> Document:
    """As plain text, for so large a share of the samples and where it must be, or as a chat."""
    plain = sample.continues or rng.random() < raw
    return render_raw(rng, sample) if plain else render_chat(rng, [sample])


def draw_document(rng: random.Random) -> Document:
    """One training document: plain, or a chat of one or more turns."""
    if rng.random() < 0.06:
        turns = [draw(rng) for _ in range(rng.choice((2, 2, 3, 4, 6, 10)))]
        return render_chat(
            rng, [turn for turn in turns if not turn.continues] or [draw_question(rng)]
        )
    return render(rng, draw(rng), 0.55)
