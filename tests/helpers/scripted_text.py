"""A real tokenizer and a scripted engine that says a given text: words in, words out."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from doubles.scripted import Script, ScriptedEngine
from doubles.scripted_tokens import reciting
from tests.helpers.directories import shared_directory
from tests.helpers.small_tokenizers import directory
from tests.helpers.waiting import run_async
from trtllm_bls.engines.base import Engine
from trtllm_bls.engines.routing import RoutingEngine
from trtllm_bls.orchestrator.orchestrator import Defaults, Orchestrator
from trtllm_bls.speculative.learned import SpeculationShared
from trtllm_bls.speculative.options import SpeculationOptions
from trtllm_bls.text.tokenizer import Tokenizer, load_tokenizer
from trtllm_bls.types import TextChunk, TextRequest

PROMPT = "The quick"


@functools.cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(directory("byte-level"))


@functools.cache
def tokenizer_of_two_ends() -> Tokenizer:
    """The same, of a model that ends with ``<|user|>`` too, as Llama 3 does."""
    extra = tokenizer().encode_word("<|user|>")
    path = shared_directory("two-ends")
    shutil.copytree(directory("byte-level"), path, dirs_exist_ok=True)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(extra)}))
    return load_tokenizer(path)


@functools.cache
def tokenizer_with_tools() -> Tokenizer:
    """The same; its chat template shows tools and their calls, one in a line."""
    found = load_tokenizer(directory("byte-level"))
    found.hf.chat_template = (
        "{% for t in tools or [] %}{{ t.function | tojson }}\n{% endfor %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}\n{% endfor %}{% endfor %}"
    )
    return found


@functools.cache
def padded_model() -> Path:
    """The same tokenizer, of a model that has 64 logits more than the tokenizer has tokens."""
    path = shared_directory("padded")
    shutil.copytree(directory("byte-level"), path, dirs_exist_ok=True)
    config = {"model_type": "llama", "vocab_size": tokenizer().vocab_size + 64}
    (path / "config.json").write_text(json.dumps(config))
    return path


@functools.cache
def tokenizer_of_padded_model() -> Tokenizer:
    return load_tokenizer(padded_model())


@functools.cache
def tokenizer_with_a_prompt_table() -> Tokenizer:
    """The same, of a model that has fewer embeddings: ``<|user|>`` and the next are a table's."""
    (first,) = tokenizer().encode_word("<|user|>")
    path = shared_directory("table")
    shutil.copytree(directory("byte-level"), path, dirs_exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": first}))
    return load_tokenizer(path)


def prompt_ids(text: str = PROMPT) -> tuple[int, ...]:
    return tokenizer().encode(text, add_special_tokens=True)


def saying(text: str, prompt: str = PROMPT, **script: Any) -> ScriptedEngine:
    """An engine that says ``text`` after any prompt of as many tokens as ``prompt``, and ends."""
    return reciting_ids(tokenizer().encode_word(text), prompt, **script)


def reciting_ids(ids: tuple[int, ...], prompt: str = PROMPT, **script: Any) -> ScriptedEngine:
    assert tokenizer().eos_id is not None
    rule = reciting(ids, len(prompt_ids(prompt)), then=tokenizer().eos_id)
    return ScriptedEngine(rule, Script(vocab_size=tokenizer().vocab_size, **script))


def drafted(target: Engine, draft: Engine, num_draft_tokens: int = 3) -> RoutingEngine:
    """An engine that speculates in every request, with drafts of so many tokens."""
    options = SpeculationOptions(num_draft_tokens=num_draft_tokens)
    return RoutingEngine(target, draft, options, by_default=True, shared=SpeculationShared())


class Collected:
    """A sink that is always ready and keeps what it is sent; ``on_send`` is told of each chunk."""

    def __init__(self, on_send: Callable[[TextChunk], object] | None = None) -> None:
        self.chunks: list[TextChunk] = []
        self._on_send = on_send

    async def ready(self) -> None:
        pass

    def send(self, chunk: TextChunk) -> None:
        self.chunks.append(chunk)
        if self._on_send is not None:
            self._on_send(chunk)


def orchestrator(
    engine: Engine, defaults: Defaults | None = None, other: Tokenizer | None = None
) -> Orchestrator:
    return Orchestrator(other or tokenizer(), engine, defaults or Defaults())


def asking(text: str | None = PROMPT, **more: Any) -> TextRequest:
    return TextRequest(**{"request_id": "r", "text": text, "max_tokens": 100, **more})


async def read(engine: Engine, request: TextRequest, **more: Any) -> list[TextChunk]:
    sink = Collected()
    await orchestrator(engine, **more).run(request, sink)
    return sink.chunks


def ask(engine: Engine, request: TextRequest | None = None, **more: Any) -> list[TextChunk]:
    return run_async(read(engine, request or asking(), **more))


def text_of(chunks: list[TextChunk], index: int = 0) -> str:
    return "".join(chunk.text for chunk in chunks if chunk.sequence_index == index)


def ending(chunks: list[TextChunk]) -> tuple[Any, Any, int]:
    """Of the one sequence: why, at which stop string, after how many tokens."""
    (found,) = [chunk.ending for chunk in chunks if chunk.ending is not None]
    return found.finish_reason, found.stop_reason, found.completion_tokens
