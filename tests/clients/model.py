"""A model that does what the last instruction in its prompt says, one step for each answer.

An instruction stands in double brackets in a user's message; each further one is the next step,
which it does once the tools have returned. Parts of a step are separated by ``||``::

    [[think I have to look. || say I look. || call read {"path": "a"}]] [[say It is empty.]]
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from doubles.scripted import Script
from doubles.speaking import SpeakingEngine
from tests.helpers.openai_server import RunningApi, ScriptedBackend, serving
from tests.helpers.small_tokenizers import directory
from trtllm_bls.openai import generating
from trtllm_bls.text.tokenizer import load_tokenizer

MODEL = "obedient"
_STEP = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)
_CALL = re.compile(r"call (\S+) (\{.*\})", re.DOTALL)
_TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function | tojson }}\n{% endfor %}"
    "{% for m in messages %}⟪{{ m.role }}⟫{{ m.content }}"
    "{% for c in m.tool_calls or [] %}⟪call⟫{{ c.function | tojson }}{% endfor %}{% endfor %}"
    "⟪assistant⟫"
)


def answer(prompt: str) -> str:
    """What the model says next."""
    for turn in reversed(prompt.split("⟪user⟫")[1:]):
        asked, *results = turn.split("⟪tool⟫")
        if steps := _STEP.findall(asked.partition("⟪")[0]):
            # Results that came after another message of the user count, too. smolagents sends
            # them as messages of the user.
            after = prompt.rpartition(turn)[2]
            done = after.count("⟪tool⟫") + after.count("Observation:") + len(results)
            return "".join(map(_said, steps[min(done, len(steps) - 1)].split("||")))
    return "I was not told what to do."


def _said(part: str) -> str:
    part = part.strip()
    if '{\\"' in part:  # opencode escapes what it is asked
        part = part.replace('\\"', '"')
    if call := _CALL.fullmatch(part):
        return f'<tool_call>\n{{"name": "{call[1]}", "arguments": {call[2]}}}\n</tool_call>'
    if part.startswith("think "):
        return f"<think>\n{part.removeprefix('think ')}\n</think>\n\n"
    return part.removeprefix("say ")


@contextmanager
def obedient_server() -> Iterator[RunningApi]:
    """The API over such a model, so slow that its streams get keep-alives all the time."""
    tokenizer = load_tokenizer(directory("byte-level"))
    tokenizer.hf.chat_template = _TEMPLATE
    script = Script(vocab_size=tokenizer.model_vocab_size, step_seconds=0.006)
    engine = SpeakingEngine(tokenizer, answer, script)
    usual, generating._PING_S = generating._PING_S, 0.004
    formats = {"tool_parser": "hermes", "reasoning_parser": "think"}
    backend = ScriptedBackend(engine, tokenizer)
    try:
        with serving(engine, backend, model_names=(MODEL,), **formats) as api:
            yield api
    finally:
        generating._PING_S = usual
