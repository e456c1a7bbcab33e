"""Small random checkpoints, and the embedded engine's batcher stepped by hand instead of by a
thread, so that tests can say what happens in which step."""

from __future__ import annotations

import asyncio
import functools
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.helpers.directories import shared_directory
from tests.helpers.waiting import run_async
from trtllm_bls.engines.base import Engine, QueuedChunks
from trtllm_bls.engines.embedded.batching import Batcher, Sequence, Submission
from trtllm_bls.engines.embedded.model import load
from trtllm_bls.engines.embedded.runner import Runner
from trtllm_bls.errors import EngineError
from trtllm_bls.settings.parameters import EngineParameters
from trtllm_bls.types import EngineCapacity, EngineChunk, EngineRequest, Sampling

VOCAB = 96
NO_LOOP: Any = None  # of submissions whose events nobody delivers
POISON = 94  # the poisoned llama's embedding of it is NaN; the probe does not read it

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_HEADS = {"head_dim": 8}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "poisoned": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", _HEADS),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "gemma2": ("Gemma2Config", {**_HEADS, "sliding_window": 8}),
    "gemma3": ("Gemma3TextConfig", {**_HEADS, "sliding_window": 8, "num_hidden_layers": 6}),
    "gpt_oss": ("GptOssConfig", {**_HEADS, **_MOE, "sliding_window": 8}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
}


@functools.cache
def checkpoint(kind: str = "llama") -> Path:
    """A random checkpoint of that architecture, in a directory that lives as long as the tests."""
    name, changes = _CONFIGS[kind]
    torch.manual_seed(7)
    sizes = {"vocab_size": VOCAB} if kind == "gpt2" else _SIZES
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**sizes | changes))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:  # wide enough that the best token is no near tie
                weight.normal_(0, 0.2)
        if kind == "poisoned":
            model.get_input_embeddings().weight[POISON] = float("nan")
            model.get_output_embeddings().weight[POISON] = 0
    directory = shared_directory(f"embedded-{kind}")
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(directory)
    return directory


@functools.cache
def reference(kind: str = "llama") -> Any:
    """The same model as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(checkpoint(kind), dtype=torch.float32).eval()


def generated(prompt: tuple[int, ...], count: int, kind: str = "llama") -> list[int]:
    """What ``transformers.generate`` says greedily."""
    ids = torch.tensor([prompt])
    out = reference(kind).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in out[0, len(prompt) :]]


def prompt(length: int, start: int = 5) -> tuple[int, ...]:
    """``length`` tokens; another ``start`` gives another beginning."""
    return tuple((start + 11 * place * place) % 90 + 2 for place in range(length))


def request(ids: tuple[int, ...], max_tokens: int = 8, **more: Any) -> EngineRequest:
    """A request under its own id; ``sampling`` may be given as a dict."""
    more.setdefault("request_id", f"{ids[:3]}")
    sampling = Sampling(**more.pop("sampling", {}))
    return EngineRequest(input_ids=ids, max_tokens=max_tokens, sampling=sampling, **more)


def answers(engine: Engine, *requests: EngineRequest) -> list[list[EngineChunk]]:
    """The chunks of each of the requests, which run side by side."""

    async def chunks(asked: EngineRequest) -> list[EngineChunk]:
        async with aclosing(engine.generate(asked)) as stream:
            return [chunk async for chunk in stream]

    async def all_of() -> list[list[EngineChunk]]:
        return await asyncio.gather(*map(chunks, requests))

    return run_async(all_of())


@functools.cache
def runner(kind: str = "llama") -> Runner:
    """A loaded checkpoint, shared by tests; every ``Steps`` gives it fresh slots."""
    return load(EngineParameters(model_dir=checkpoint(kind), threads=1))


class Steps:
    """The engine's batcher without its thread."""

    def __init__(self, kind: str = "llama", length: int = 256, **sizes: Any) -> None:
        sizes = {"max_batch": 4, "max_tokens_per_step": 64} | sizes
        self.runner, self.length = runner(kind), length
        self.runner.allocate(sizes["max_batch"], length)
        self.batcher = Batcher(self.runner, sizes["max_tokens_per_step"])
        self._heard: list[tuple[Submission, EngineChunk | EngineError]] = []

    def add(self, asked: EngineRequest) -> Submission:
        submission = Submission(asked.num_return_sequences, QueuedChunks(), NO_LOOP)
        capacity = EngineCapacity(vocab_size=VOCAB, max_sequence_tokens=self.length)
        self.batcher.add(
            [
                Sequence(asked, index, capacity, submission)
                for index in range(asked.num_return_sequences)
            ]
        )
        return submission

    def step(self, times: int = 1) -> int:
        """Runs steps; returns how many token rows they computed."""
        before = self.batcher.num_computed_tokens
        for _ in range(times):
            self.batcher.step()
        self._heard += self.batcher.events
        self.batcher.events = []
        return self.batcher.num_computed_tokens - before

    def run(self) -> int:
        """Steps until nothing is left to do; returns the rows computed."""
        rows = 0
        while self.batcher.num_present:
            rows += self.step()
        return rows

    def events(self, by: Submission) -> list[EngineChunk | EngineError]:
        return [event for owner, event in self._heard if owner is by]

    def chunks(self, of: Submission) -> list[EngineChunk]:
        return [event for event in self.events(of) if isinstance(event, EngineChunk)]

    def text(self, of: Submission, index: int = 0) -> list[int]:
        return [
            token
            for chunk in self.chunks(of)
            if chunk.sequence_index == index
            for token in chunk.token_ids
        ]

    def answer(self, asked: EngineRequest) -> list[int]:
        """The tokens of one request, run to its end."""
        submission = self.add(asked)
        self.run()
        for event in self.events(submission):
            if isinstance(event, EngineError):
                raise event
        return self.text(submission)
